"""Collections of garbage while a process starts."""

from __future__ import annotations

import gc

from framework.system.garbage import collect_as_usual, collect_seldom


def test_pythons_thresholds_come_back() -> None:
    before = gc.get_threshold()
    try:
        collect_seldom()
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_threshold()[1:] == before[1:]
        collect_as_usual()
        assert gc.get_threshold() == before
        gc.set_threshold(50_000, 20, 20)
        collect_seldom()
        collect_as_usual()
        assert gc.get_threshold() == (50_000, 20, 20), "those of the user's code"
    finally:
        gc.set_threshold(*before)
