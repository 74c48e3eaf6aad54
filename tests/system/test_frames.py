"""Frames of threads are taken without collecting garbage: its finalizers would wait under the
interpreter's lock.
"""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from framework.engine import rank_states
from framework.system.frames import current_frames, is_at_prompt


def test_nothing_is_collected_while_frames_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    collects: list[bool] = []
    take = sys._current_frames

    def watched() -> object:
        collects.append(gc.isenabled())
        return take()

    monkeypatch.setattr(sys, "_current_frames", watched)
    assert threading.get_ident() in current_frames()
    is_at_prompt(threading.get_ident())
    rank_states.is_compiling()
    assert collects == [False, False, False]
    assert gc.isenabled()


def test_collecting_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()
