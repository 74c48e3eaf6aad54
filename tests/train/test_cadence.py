"""When something is due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from framework.system.stopping import GO_ON, Action, Decision
from framework.train.cadence import Every, Minutes


def due(cadence: Every, *, total_steps: int) -> list[int]:
    return [
        step for step in range(1, total_steps + 1) if cadence.is_due(step, total_steps=total_steps)
    ]


def test_every_nth_step_counted_from_one() -> None:
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


def test_a_start_step_delays_what_is_due_in_between_alone() -> None:
    cadence = Every(3, at_end=True, at_start=True, start_step=6)
    assert due(cadence, total_steps=10) == [6, 9, 10]
    assert cadence.is_due(0, total_steps=10)
    assert not Every(3, at_end=True).is_due(0, total_steps=10)


class TestMinutes:
    """Of a clock that the test moves."""

    def test_each_is_due_once_until_it_is_restarted(self) -> None:
        now = [100.0]
        minutes = Minutes({Action.EVALUATE: 1, Action.SAVE: 2.5}, clock=lambda: now[0])
        assert minutes.due() == GO_ON
        now[0] = 160.0
        assert (minutes.due(), minutes.due()) == (Decision(Action.EVALUATE), GO_ON)
        now[0] = 251.0
        assert (minutes.due(), minutes.due()) == (Decision(Action.SAVE), GO_ON)
        minutes.restart(Action.EVALUATE)  # an evaluation counts from its end, however late it came
        now[0] = 310.0
        assert minutes.due() == GO_ON
        now[0] = 311.0
        assert minutes.due() == Decision(Action.EVALUATE)

    def test_the_end_counts_from_the_beginning_of_the_process_and_stays_due(self) -> None:
        now = [100.0]
        minutes = Minutes(most=2, began=40.0, clock=lambda: now[0])
        now[0] = 159.9
        assert minutes.due() == GO_ON
        now[0] = 160.0
        assert minutes.due() == minutes.due() == Decision(Action.STOP, "training.max_minutes")

    def test_nothing_that_was_not_asked_for_begins_by_a_restart(self) -> None:
        minutes = Minutes(clock=lambda: 0.0)
        minutes.restart(Action.SAVE)
        assert minutes.due() == GO_ON


@given(every=st.integers(0, 50), at_end=st.booleans(), total=st.integers(1, 200))
def test_what_is_due_does_not_depend_on_where_a_run_was_resumed(
    every: int, at_end: bool, total: int
) -> None:
    steps = due(Every(every, at_end), total_steps=total)
    assert len(steps) == (total // every if every else 0) + (
        at_end and (not every or total % every > 0)
    )
    assert steps == sorted(set(steps))
