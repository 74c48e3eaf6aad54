"""Children of commands without a cold start: answers about a model, given in this process, and runs
on forked ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from framework.plan.plan import Plan
from tests.launched import TIMEOUT_SECONDS
from tests.warm_ranks import session_ranks


def answer_here(
    module: str, plan: Plan, *, longest_seconds: float, needs: object, **further: Any
) -> Any:
    """As `ask_child`, whose child keeps what user code prints from its answer."""
    question = {"config": plan.config.to_dict(), "cluster": asdict(plan.cluster), **further}
    with contextlib.redirect_stdout(io.StringIO()):
        found = importlib.import_module(f"framework.setup.{module}").describe(question)
    return json.loads(json.dumps(found))


@contextlib.contextmanager
def answering_here(asker: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a module that asks a child get its answers here, also on the module ``own`` in a
    folder.
    """
    monkeypatch.setattr(asker, "ask_child", answer_here)
    monkeypatch.syspath_prepend(folder)
    try:
        yield
    finally:
        sys.modules.pop("own", None)  # the next test has another


def fork_launched(
    words: Sequence[str],
    *_: object,
    longest_seconds: float | None,
    folder: Path,
    num_ranks: int = 2,
) -> subprocess.CompletedProcess[str]:
    """As `run_child` of ``-m framework launch CONFIG --num_gpus N``; what the ranks print goes to
    the folder.
    """
    assert [*words[:3], *words[4:]] == ["-m", "framework", "launch", "--num_gpus", str(num_ranks)]
    job = session_ranks().start(["--config", words[3]], num_ranks=num_ranks, folder=folder)
    return subprocess.CompletedProcess(
        [*words], max(job.wait(longest_seconds or TIMEOUT_SECONDS)), "", job.stated()
    )
