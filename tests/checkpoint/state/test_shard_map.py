"""Every number of a checkpoint is found where it lies: held against what the living engines said
they held, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from framework.checkpoint.state.reader import StoredState
from framework.checkpoint.state.shard_map import ShardMap, map_checkpoint
from tests.engine.saved_runs import RUNS, saved, truth

pytestmark = pytest.mark.slow


@pytest.fixture(params=RUNS, ids="-".join)
def run(request: pytest.FixtureRequest) -> Path:
    fixture, name = request.param
    folder: Path = request.getfixturevalue(fixture)
    return folder / name


def whole(found: ShardMap, name: str, *, state: str = "") -> torch.Tensor:
    return torch.cat(
        [found.files.numbers(piece, state=state) for piece in found.stored[name].pieces()]
    )


def test_all_weights_are_found(run: Path) -> None:
    found, expected = map_checkpoint(saved(run)), truth(run)
    assert found.stored.keys() | found.ties.keys() == expected.keys()
    for name, tensor in expected.items():
        own = found.ties.get(name, name)
        assert (found.stored[own].shape, found.stored[own].dtype) == (tensor.shape, tensor.dtype), (
            name
        )
        assert torch.equal(whole(found, own).view(tensor.shape), tensor), name


def test_a_weight_of_two_names_is_stored_once(run: Path) -> None:
    found = map_checkpoint(saved(run))
    assert found.ties == ({"there.weight": "here.weight"} if run.name.startswith("tied") else {})
    assert not found.ties.keys() & found.stored.keys()


@pytest.mark.parametrize("name", ["gpt-fp32-z0", "llama-fp32-z3"])
def test_every_rank_of_tensor_groups_finds_its_random_state(name: str, divided_runs: Path) -> None:
    """At stage 3 in a file of its own; the ranks of a group draw alike, and groups do not."""
    stored = StoredState(saved(divided_runs / name))
    first, second, *other = (stored.random_state(rank) for rank in range(4))
    assert torch.equal(first, second)
    assert torch.equal(*other)
    assert not torch.equal(first, other[0])
