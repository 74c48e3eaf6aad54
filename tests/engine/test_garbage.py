"""No collection of garbage in a step but at logged points; Python's own again afterwards, and in
forked workers.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from framework.engine.garbage import Garbage


class Stepping(SimpleNamespace):
    """Takes steps that leave more objects behind than the threshold of a collection."""

    def __init__(self) -> None:
        super().__init__(global_steps=0, kept=[])

    def _take_model_step(self, lr_kwargs: Any = None) -> None:
        self.kept = [[number] for number in range(3000)]
        self.global_steps += 1


def begun(log_every: int) -> tuple[Stepping, Garbage]:
    """Return an engine after its tenth step."""
    engine = Stepping()
    garbage = Garbage(engine, log_every=log_every)
    for _ in range(10):
        assert gc.isenabled()
        engine._take_model_step()
    return engine, garbage


class Cyclic:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _freezes_the_tests_again() -> Iterator[None]:
    """Leave out of collections, after each test, the thousands of tests that were collected."""
    yield
    gc.freeze()


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that were collected."""
    assert gc.isenabled()
    seen = list[int]()

    def note(phase: str, details: dict[str, int]) -> None:
        if phase == "start":
            seen.append(details["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    assert gc.isenabled()


def steps_with_collection(engine: Stepping, seen: list[int], num_steps: int) -> list[int]:
    steps = []
    for _ in range(num_steps):
        before = len(seen)
        engine._take_model_step()
        if len(seen) > before:
            steps.append(engine.global_steps)
    return steps


def test_steps_collect_by_themselves_without_it(collections: list[int]) -> None:
    assert steps_with_collection(Stepping(), collections, 5) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("log_every", "at"), [(5, [15, 20, 25]), (1000, [50, 100])])
def test_garbage_is_collected_at_logged_points_and_every_fifty_steps(
    collections: list[int], log_every: int, at: list[int]
) -> None:
    engine, garbage = begun(log_every)
    assert steps_with_collection(engine, collections, at[-1] - 7) == at
    assert gc.get_freeze_count() > 0
    assert not gc.isenabled()
    garbage.close()
    garbage.close()
    assert gc.get_freeze_count() == 0


def test_what_a_step_leaves_in_a_cycle_goes_at_the_next_collection() -> None:
    engine, garbage = begun(log_every=5)
    lost = weakref.ref(Cyclic())
    for _ in range(4):
        engine._take_model_step()
    assert lost() is not None
    engine._take_model_step()
    assert lost() is None
    garbage.close()


def test_what_outlived_a_logged_point_is_looked_at_every_thousand_steps(
    collections: list[int],
) -> None:
    """Packages that are imported after the first steps make many objects, and no garbage."""
    engine, garbage = begun(log_every=10)
    old = Cyclic()
    lost = weakref.ref(old)
    for _ in range(10):
        engine._take_model_step()
    del old
    collections.clear()
    for _ in range(980):
        engine._take_model_step()
    assert collections == [1] * 98
    assert lost() is not None
    for _ in range(10):
        engine._take_model_step()
    assert collections[98:] == [2]
    assert lost() is None
    garbage.close()


def test_the_last_of_several_engines_puts_it_back() -> None:
    engine, garbage = begun(log_every=5)
    other = Garbage(engine, log_every=5)
    for _ in range(10):
        engine._take_model_step()
    garbage.close()
    assert not gc.isenabled()
    other.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_code_that_collects_by_itself_is_left_alone(collections: list[int]) -> None:
    gc.disable()
    engine = Stepping()
    garbage = Garbage(engine, log_every=2)
    assert steps_with_collection(engine, collections, 15) == []
    garbage.close()
    assert not gc.isenabled()
    gc.enable()


def test_a_forked_worker_collects_by_itself() -> None:
    _, garbage = begun(log_every=5)
    child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    garbage.close()
