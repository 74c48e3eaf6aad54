"""Questions about a run's model that take torch: a child process answers them, on processors; nothing trains, and no
device is touched.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from framework.plan.plan import Plan


class NoAnswerError(Exception):
    """Reason why a child process has no answer."""


def ask_child(module: str, plan: Plan, *, longest_seconds: float, needs: tuple[str, ...], **further: Any) -> Any:
    """Answer of ``python -m framework.setup.<module>`` to a question about a plan.

    Args:
        module: that writes its answer to stdout, as `framework.setup.stages.answer` does.
        plan: whose config and cluster it gets.
        longest_seconds: after which it is ended.
        needs: packages that it takes.
        further: what else it gets, as plain values.

    Raises:
        NoAnswerError: there is none.
    """
    for name in needs:
        if importlib.util.find_spec(name) is None:
            raise NoAnswerError(f"it takes {name}, which is not installed")
    question: Mapping[str, Any] = {"config": plan.config.to_dict(), "cluster": asdict(plan.cluster), **further}
    words, environment = ["-m", f"framework.setup.{module}"], {"DS_ACCELERATOR": "cpu", **os.environ}
    done = run_child(words, environment, longest_seconds=longest_seconds, text=json.dumps(question))
    try:
        return json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        reason = f"looking at the model ended with code {done.returncode}{last and f': {last}'}"
        raise NoAnswerError(reason) from None


def run_child(
    words: Sequence[str], environment: Mapping[str, str], *, longest_seconds: float, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words and wait; `text` is its stdin.

    Raises:
        NoAnswerError: it cannot be started, or takes longer.
    """
    command = [sys.executable, *words]
    try:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=longest_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"it took more than {longest_seconds:g} s") from None
    except OSError as error:
        raise NoAnswerError(f"{sys.executable} cannot be started: {error.strerror}") from error


def failure_of(stderr: str) -> str:
    """Return the reason of a process that failed: a rank's own error, which has a kind in brackets, or the last line
    before torchrun's summary.
    """
    own = stderr.partition("torch.distributed.elastic.multiprocessing")[0].strip() or stderr.strip()
    lines = own.splitlines() or ["it printed nothing"]
    return next((line for line in lines if line.endswith("]") and "[" in line), lines[-1])[-300:]
