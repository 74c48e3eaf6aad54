"""``plan CONFIG --explain-oom LOG``: what an out-of-memory message and its traceback say beside the
plan's estimate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from framework.errors import EXIT_OK, UsageError
from framework.plan.alternatives import size_text
from framework.plan.out_of_memory import IN_WORDS, Explanation, advice, explain, read_shortage
from framework.plan.plan import Plan
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
    """Print what a text says of memory that was not there, and what would have taken less; returns
    the exit code.

    Args:
        log: path of the text, or ``-`` for stdin.
        plan: of the run that printed it.
        work: of its model, where that is the user's own.
        as_json: for tools.

    Raises:
        UsageError: it cannot be read, or holds no such message.
    """
    shortage = read_shortage(_read(log))
    if shortage is None:
        raise UsageError(
            f"--explain-oom {log}: holds no message of memory that is not there; give the rank's "
            "whole log"
        )
    found = explain(shortage, plan, work=work)
    if as_json:
        fixes = [
            {"settings": dict(each.settings), "less_bytes": found.gain(each)}
            for each in found.fixes
        ]
        estimate = {
            "is_estimate": True,
            "moment": found.at,
            "bytes": dict(found.components),
            "unknown": found.unknown,
        }
        section = {
            "shortage": asdict(shortage),
            "estimate": estimate,
            "fixes": fixes,
            "advice": list(advice(shortage, plan)),
        }
        print(json.dumps(section, indent=2))
    else:
        print(*_lines(found, plan), sep="\n")
    return EXIT_OK


def _read(log: str) -> str:
    try:
        with sys.stdin.buffer if log == "-" else Path(log).open("rb") as file:
            return file.read(_LONGEST_LOG).decode("utf-8", errors="replace")
    except OSError as error:
        raise UsageError(
            f"--explain-oom {log}: cannot be read: {error.strerror or error}"
        ) from error


def _lines(found: Explanation, plan: Plan) -> Iterator[str]:
    shortage = found.shortage
    if shortage.moment:
        where = f", {IN_WORDS[shortage.moment]} ({shortage.place})"
    else:
        where = ""
    yield f"lacking   {_LACKS[shortage.kind]}{where}"
    if shortage.sizes:
        stated = (
            f"{size_text(shortage.sizes[name])} {words}"
            for name, words in _OF_SIZE.items()
            if name in shortage.sizes
        )
        yield f"          {', '.join(stated)}"
    if shortage.component:
        yield f"asked by  {shortage.component}"
    if found.memory is None:
        yield f"estimate  none: {found.unknown}"
    elif found.components:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in found.components)
        if found.on_host:
            moment = "on the host"
        else:
            moment = IN_WORDS.get(found.at, "between steps")
        yield f"estimate  {size_text(found.total)} {moment}: {parts}"
    for label, other in zip(["fixes", *[""] * len(found.fixes)], found.fixes, strict=False):
        if found.is_enough(other):
            enough = ", enough"
        else:
            enough = ""
        if found.on_host:
            device = f", and {size_text(other.peak_bytes)} at most on the device"
        else:
            device = ""
        yield (
            f"{label:<10}{other}: {size_text(found.gain(other))} less{enough}{device}, by estimate"
        )
    if not found.fixes:
        if shortage.kind == "device":
            more = "more devices at zero.stage: 3"
        else:
            more = "fewer ranks on this host"
        yield f"fixes     none of these settings takes less then: a smaller model, or {more}"
    if found.beyond_bytes:
        yield (
            f"also      torch held {size_text(found.beyond_bytes)} more than this estimate has "
            "at that moment"
        )
    if shortage.is_stage_3 and (stage := plan.config.zero.stage) < 3:
        yield (
            f"also      the traceback is of zero.stage: 3, and the config has {stage}: name the "
            "settings of the run"
        )
    yield from (f"also      {line}" for line in advice(shortage, plan))
