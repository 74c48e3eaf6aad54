"""When something is due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from framework.train.trainer import Every


def due(cadence: Every, *, total_steps: int) -> list[int]:
    return [step for step in range(1, total_steps + 1) if cadence.is_due(step, total_steps=total_steps)]


def test_every_so_many_steps_counted_from_one() -> None:
    assert due(Every(3), total_steps=10) == [3, 6, 9]
    assert due(Every(1), total_steps=3) == [1, 2, 3]


def test_the_last_step_is_due_once() -> None:
    assert due(Every(3, at_end=True), total_steps=10) == [3, 6, 9, 10]
    assert due(Every(5, at_end=True), total_steps=10) == [5, 10]
    assert due(Every(at_end=True), total_steps=4) == [4]


def test_never() -> None:
    assert due(Every(), total_steps=5) == []


def test_steps_win_over_epochs() -> None:
    section = {"at_end": False, "steps_per_epoch": 11}
    assert Every.of(every_steps=4, every_epochs=2, **section) == Every(4)
    assert Every.of(every_steps=None, every_epochs=2, **section) == Every(22)
    assert Every.of(every_steps=None, every_epochs=None, **section) == Every(0)


@given(every=st.integers(0, 50), at_end=st.booleans(), total=st.integers(1, 200))
def test_what_is_due_does_not_depend_on_where_a_run_was_resumed(every: int, at_end: bool, total: int) -> None:
    steps = due(Every(every, at_end), total_steps=total)
    assert len(steps) == (total // every if every else 0) + (at_end and (not every or total % every > 0))
    assert steps == sorted(set(steps))
