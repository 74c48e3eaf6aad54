"""Random states: what is captured and put back draws the same numbers."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from framework.engine import random_state


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    before = random_state.capture()
    yield
    random_state.restore(before)


def draw() -> list[float]:
    """From every generator, twice the normal one of Python and numpy: they keep a second value
    back.
    """
    values = [random.random(), random.gauss(0, 1), random.random()]
    values += [*np.random.rand(3), np.random.randn(), float(torch.randn(())), float(torch.rand(()))]
    return [float(value) for value in values] + torch.randperm(50).tolist()


@pytest.mark.parametrize("warm_up", [0, 1, 700])
def test_a_restored_state_draws_the_same(warm_up: int) -> None:
    random_state.seed_everything(3)
    for _ in range(warm_up):
        draw()
    np.random.randn()  # one of a pair: the other one waits
    state = random_state.capture()
    expected = draw() + draw()
    random_state.restore(state)
    assert draw() + draw() == expected


def test_it_survives_a_checkpoint_file() -> None:
    random_state.seed_everything(4)
    draw()
    file = io.BytesIO()
    torch.save(random_state.capture(), file)
    expected = draw()
    file.seek(0)
    random_state.restore(torch.load(file, weights_only=True))
    assert draw() == expected


def test_capturing_draws_nothing() -> None:
    random_state.seed_everything(5)
    expected = draw()
    random_state.seed_everything(5)
    random_state.capture()
    assert draw() == expected


def test_seeds_differ_and_repeat() -> None:
    drawn = []
    for seed in (0, 1, 0, 2**31, 2**32, 2**31):
        random_state.seed_everything(seed)
        drawn.append(draw())
    assert drawn[0] == drawn[2]
    assert drawn[3] == drawn[5]
    assert drawn[0] != drawn[1]
    assert drawn[0] != drawn[4], "numpy takes 32 bits only; the others still differ"


def test_every_rank_and_every_step_has_a_seed_of_its_own() -> None:
    places = [
        (seed, rank, step) for seed in (0, 1, 2) for rank in (0, 1, 2) for step in (0, 1, 7, 10**6)
    ]
    seeds = [random_state.seed_of(seed, rank=rank, step=step) for seed, rank, step in places]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [
        random_state.seed_of(seed, rank=rank, step=step) for seed, rank, step in places
    ]
    random_state.seed_everything(max(seeds))  # torch takes all of it


def test_states_of_older_checkpoints_are_put_back() -> None:
    random_state.seed_everything(6)
    draw()
    name, keys, *rest = np.random.get_state()
    old = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    expected = draw()
    random_state.restore(old)
    assert draw() == expected


def test_a_thousand_ranks_states_are_small() -> None:
    assert random_state.capture().dtype == torch.uint8
    assert len(random_state.capture()) < 11_000
