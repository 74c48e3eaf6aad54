"""The reason of a wait at a start is printed, on one rank of a host, by the innermost wait; a short
wait prints nothing.
"""

from __future__ import annotations

import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.ops.op_builder.builder import OpBuilder

from framework.engine.extensions import announcing_compilers
from framework.system import waiting as module
from framework.system.waiting import waiting
from tests.until import until


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def printed(capfd: pytest.CaptureFixture[str], num_lines: int) -> list[str]:
    """Wait for lines, however late a busy machine prints them."""
    text = ""
    deadline = time.monotonic() + 60
    while text.count("\n") < num_lines:
        assert time.monotonic() < deadline, text
        time.sleep(0.01)
        text += capfd.readouterr().err
    return text.splitlines()


class Counting(threading.Event):
    """Counts the waits for it, which begin once both blocks of the test are entered."""

    both_are_open = threading.Event()
    num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert self.both_are_open.wait(60)
        self.num_waits += 1
        return super().wait(timeout)


def until_threads_end() -> None:
    """Wait until no thread can print any more for a wait that is over."""
    for thread in threading.enumerate():
        if thread.name == "waiting":
            thread.join(60)
            assert not thread.is_alive()


def test_what_since_when_and_until_when(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting("the others", usually="a second", limit_seconds=600):
        lines = printed(capfd, 2)
    moment = r"\d\d:\d\d:\d\d"
    expected = rf"waiting for the others since {moment}, \d+ s \(usually a second\), until {moment}"
    for line in lines:
        assert re.fullmatch(expected, line)
    until_threads_end()
    capfd.readouterr()
    monkeypatch.setattr(
        module, "threading", SimpleNamespace(**vars(threading) | {"Event": Counting})
    )
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 3600.0)
    with waiting("a long one"), waiting("the compiler"):
        Counting.both_are_open.set()
        lines = printed(capfd, 1)
        (outer, _) = module._open
        assert isinstance(outer, Counting)
        until(lambda: outer.num_waits >= 2)  # it has looked, and has nothing to add
    until_threads_end()
    assert [line.partition(" since ")[0] for line in lines] == ["waiting for the compiler"]
    monkeypatch.setattr(module, "_FIRST_SECONDS", 30.0)
    with waiting("a moment"):
        pass
    assert capfd.readouterr().err == ""


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
    lines: list[str] = []

    class Slow(OpBuilder):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("cpu_adam")

        def absolute_name(self) -> str:
            return "cpu_adam"

        def sources(self) -> list[str]:
            return []

        def is_compatible(self, verbose: bool = False) -> bool:
            lines.extend(printed(capfd, 1))
            return False

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/cache/ops")
    before: Any = OpBuilder.jit_load
    with announcing_compilers(), pytest.raises(RuntimeError, match="cpu_adam"):
        Slow().jit_load()
    assert OpBuilder.jit_load is before
    stated = (
        "waiting for DeepSpeed's op cpu_adam, which is compiled once per machine into /cache/ops"
    )
    assert lines[0].startswith(f"{stated} since ")
