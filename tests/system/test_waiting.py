"""The reason of a wait at a start is printed, on one rank of a host, by the innermost wait; a short
wait prints nothing.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from deepspeed.ops.op_builder.builder import OpBuilder

from framework.engine.extensions import announcing_compilers
from framework.system import waiting as module
from framework.system.waiting import waiting


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def test_what_since_when_and_until_when(capfd: pytest.CaptureFixture[str]) -> None:
    with waiting("the others", usually="a second", limit_seconds=600):
        time.sleep(0.25)
    with waiting("a moment"):
        pass
    with waiting("a long one"), waiting("the compiler"):
        time.sleep(0.15)
    time.sleep(0.15)
    lines = capfd.readouterr().err.splitlines()
    moment = r"\d\d:\d\d:\d\d"
    assert re.fullmatch(
        rf"waiting for the others since {moment}, 0 s \(usually a second\), until {moment}",
        lines[0],
    )
    assert len(lines) == 3
    assert lines[2].startswith("waiting for the compiler since ")


def test_the_first_rank_of_a_host_speaks(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with waiting("the others"):
        time.sleep(0.15)
    assert capfd.readouterr().err == ""


def test_an_op_that_is_compiled_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(OpBuilder):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("cpu_adam")

        def absolute_name(self) -> str:
            return "cpu_adam"

        def sources(self) -> list[str]:
            return []

        def is_compatible(self, verbose: bool = False) -> bool:
            time.sleep(0.15)
            return False

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/cache/ops")
    before: Any = OpBuilder.jit_load
    with announcing_compilers(), pytest.raises(RuntimeError, match="cpu_adam"):
        Slow().jit_load()
    assert OpBuilder.jit_load is before
    assert (
        "waiting for DeepSpeed's op cpu_adam, which is compiled once per machine into /cache/ops since "
        in (capfd.readouterr().err)
    )
