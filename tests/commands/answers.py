"""Answers of the child that `plan` asks about a model, given in this process: nothing starts."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from framework.plan.plan import Plan


def answer_here(module: str, plan: Plan, *, longest_seconds: float, needs: object, **further: Any) -> Any:
    """As `ask_child`, whose child keeps what user code prints from its answer."""
    question = {"config": plan.config.to_dict(), "cluster": asdict(plan.cluster), **further}
    with contextlib.redirect_stdout(io.StringIO()):
        found = importlib.import_module(f"framework.setup.{module}").describe(question)
    return json.loads(json.dumps(found))


@contextlib.contextmanager
def answering_here(asker: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a module that asks a child get its answers here, also on the module ``own`` in a folder."""
    monkeypatch.setattr(asker, "ask_child", answer_here)
    monkeypatch.syspath_prepend(folder)
    try:
        yield
    finally:
        sys.modules.pop("own", None)  # the next test has another
