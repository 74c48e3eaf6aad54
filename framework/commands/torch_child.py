"""Questions about a run's model that take torch: a child process answers them on processors.
Nothing trains, and no device is touched.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from framework.plan.plan import Plan
from framework.system.json_lines import BadLineError, decode, encode

_LEAVE_SECONDS: Final = 20.0


class NoAnswerError(Exception):
    """Reason why a child process has no answer."""


def ask_child(
    module: str, plan: Plan, *, longest_seconds: float, needs: tuple[str, ...], **further: Any
) -> Any:
    """Ask ``python -m framework.setup.<module>`` a question about a plan, wait, and return its
    answer.

    Args:
        module: writes its answer to stdout, as `framework.setup.pipeline_stages.answer` does.
        plan: the module gets its config and cluster.
        longest_seconds: the child is killed after this time.
        needs: packages that the module imports.
        further: further values of the question, as plain values.

    Raises:
        NoAnswerError: there is no answer.
    """
    for name in needs:
        if importlib.util.find_spec(name) is None:
            raise NoAnswerError(f"it takes {name}, which is not installed")
    question: Mapping[str, Any] = {
        "config": plan.config.to_dict(),
        "cluster": asdict(plan.cluster),
        **further,
    }
    words = ["-m", f"framework.setup.{module}"]
    environment = {"DS_ACCELERATOR": "cpu", **os.environ}
    done = run_child(
        words, environment, longest_seconds=longest_seconds, text=encode(question).decode()
    )
    try:
        return decode(done.stdout.encode())
    except BadLineError:
        last = done.stderr.strip().rpartition("\n")[2]
        reason = f"looking at the model ended with code {done.returncode}"
        if last:
            reason += f": {last}"
        raise NoAnswerError(reason) from None


def run_child(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    longest_seconds: float | None,
    text: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and wait; `text` is its stdin. It may end with any exit code.
    After Ctrl-C it has `_LEAVE_SECONDS` to end by itself.

    Raises:
        NoAnswerError: it cannot be started, or takes longer than `longest_seconds`.
    """
    command = [sys.executable, *words]
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            encoding="utf-8",
            errors="replace",
            env=environment,
        )
    except OSError as error:
        raise NoAnswerError(f"{sys.executable} cannot be started: {error.strerror}") from error
    with child:
        try:
            stdout, stderr = child.communicate(text, timeout=longest_seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            raise NoAnswerError(f"it took more than {longest_seconds:g} s") from None
        except BaseException:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=_LEAVE_SECONDS)
            child.kill()
            raise
    return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)


def failure_of(stderr: str, failures: Path) -> str:
    """Return why a job failed, at most 300 characters: the first error in `failures`, the file that
    its processes record errors in, or the last line of `stderr` before torchrun's summary.
    """
    error = _first_error(failures)
    if error:
        return error[-300:]
    before_summary = stderr.partition("torch.distributed.elastic.multiprocessing")[0].strip()
    text = before_summary or stderr.strip()
    if not text:
        return "it printed nothing"
    return text.splitlines()[-1][-300:]


def _first_error(failures: Path) -> str:
    """Return the first line of the first error that a job has recorded; empty if there is none."""
    try:
        with failures.open("rb") as file:
            return str(decode(file.readline())["error"]).partition("\n")[0]
    except (OSError, BadLineError, KeyError):
        return ""
