"""``plan CONFIG --explain-oom LOG``: an out-of-memory message and its traceback beside the plan's
estimate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from framework.errors import EXIT_OK, UsageError
from framework.plan.alternatives import Alternative, size_text
from framework.plan.out_of_memory import Explanation, advice, explain
from framework.plan.plan import Plan
from framework.plan.shortage import IN_WORDS, Shortage, read_shortage
from framework.plan.work import ModelWork

_LACKS = {
    "device": "a device has no memory left",
    "pinned": "the host has no memory left that a device could read (pinned)",
    "shared": "the host has no shared memory left",
    "host": "the host has no memory left",
    "killed": "a process was killed (SIGKILL), and lack of host memory is the usual reason",
}
_OF_SIZE = {
    "asked": "asked for",
    "free": "free",
    "capacity": "on the device",
    "allocated": "allocated by torch",
    "unused": "held by torch unused",
    "others": "held by other processes",
}
_LONGEST_LOG = 64 * 2**20


def explain_oom(log: str, plan: Plan, *, work: ModelWork | None, as_json: bool) -> int:
    """Print the shortage of memory that a log reports, and settings that take less; returns the
    exit code.

    Args:
        log: path of the log, or ``-`` for stdin.
        plan: of the run that wrote it.
        work: of its model, if that is the user's own.
        as_json: for tools.

    Raises:
        UsageError: the log cannot be read, or holds no such message.
    """
    shortage = read_shortage(_read(log))
    if shortage is None:
        raise UsageError(
            f"--explain-oom {log}: holds no message of memory that is not there; give the rank's "
            "whole log"
        )
    explanation = explain(shortage, plan, work=work)
    if as_json:
        print(json.dumps(_section(explanation, plan), indent=2))
    else:
        for line in _lines(explanation, plan):
            print(line)
    return EXIT_OK


def _read(log: str) -> str:
    """Return the first `_LONGEST_LOG` bytes of a log, or of stdin for ``-``, as text. UsageError if
    it cannot be read.
    """
    try:
        if log == "-":
            content = sys.stdin.buffer.read(_LONGEST_LOG)
        else:
            with Path(log).open("rb") as file:
                content = file.read(_LONGEST_LOG)
    except OSError as error:
        raise UsageError(
            f"--explain-oom {log}: cannot be read: {error.strerror or error}"
        ) from error
    return content.decode("utf-8", errors="replace")


def _section(explanation: Explanation, plan: Plan) -> dict[str, Any]:
    """Return the explanation as plain values for JSON."""
    fixes = []
    for fix in explanation.fixes:
        fixes.append({"settings": dict(fix.settings), "less_bytes": explanation.gain(fix)})
    estimate = {
        "is_estimate": True,
        "moment": explanation.at,
        "bytes": dict(explanation.components),
        "unknown": explanation.unknown,
    }
    return {
        "shortage": asdict(explanation.shortage),
        "estimate": estimate,
        "fixes": fixes,
        "advice": list(advice(explanation.shortage, plan)),
    }


def _lines(explanation: Explanation, plan: Plan) -> Iterator[str]:
    """Yield the explanation as lines to print."""
    yield from _shortage_lines(explanation.shortage)
    yield from _estimate_lines(explanation)
    yield from _fix_lines(explanation)
    if explanation.beyond_bytes:
        yield (
            f"also      torch held {size_text(explanation.beyond_bytes)} more than this estimate "
            "has at that moment"
        )
    stage = plan.config.zero.stage
    if explanation.shortage.is_stage_3 and stage < 3:
        yield (
            f"also      the traceback is of zero.stage: 3, and the config has {stage}: name the "
            "settings of the run"
        )
    for line in advice(explanation.shortage, plan):
        yield f"also      {line}"


def _shortage_lines(shortage: Shortage) -> Iterator[str]:
    line = f"lacking   {_LACKS[shortage.kind]}"
    if shortage.moment:
        line += f", {IN_WORDS[shortage.moment]} ({shortage.place})"
    yield line
    if shortage.sizes:
        yield f"          {_sizes_text(shortage.sizes)}"
    if shortage.component:
        yield f"asked by  {shortage.component}"


def _estimate_lines(explanation: Explanation) -> Iterator[str]:
    if explanation.memory is None:
        yield f"estimate  none: {explanation.unknown}"
    elif explanation.components:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in explanation.components)
        if explanation.on_host:
            moment = "on the host"
        else:
            moment = IN_WORDS.get(explanation.at, "between steps")
        yield f"estimate  {size_text(explanation.total)} {moment}: {parts}"


def _sizes_text(sizes: Mapping[str, int]) -> str:
    texts = [
        f"{size_text(sizes[name])} {words}" for name, words in _OF_SIZE.items() if name in sizes
    ]
    return ", ".join(texts)


def _fix_text(explanation: Explanation, fix: Alternative) -> str:
    text = f"{fix}: {size_text(explanation.gain(fix))} less"
    if explanation.is_enough(fix):
        text += ", enough"
    if explanation.on_host:
        text += f", and {size_text(fix.peak_bytes)} at most on the device"
    return text


def _fix_lines(explanation: Explanation) -> Iterator[str]:
    label = "fixes"
    for fix in explanation.fixes:
        yield f"{label:<10}{_fix_text(explanation, fix)}, by estimate"
        label = ""
    if not explanation.fixes:
        if explanation.shortage.kind == "device":
            more = "more devices at zero.stage: 3"
        else:
            more = "fewer ranks on this host"
        yield f"fixes     none of these settings takes less then: a smaller model, or {more}"
