"""The parts of a weight are together the weight, and every number of either is found in the
other.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework.checkpoint.state.reader import MergedWeights, StoredState
from framework.checkpoint.state.tensor_split import RankPart, Split
from framework.checkpoint.state.weight_parts import splits_of
from framework.errors import StorageError
from tests.checkpoint.state.simulated import simulate, values_of


@st.composite
def divided(draw: st.DrawFn) -> tuple[Split, torch.Tensor, int]:
    """A split, a weight of it whose numbers are all different, and a number of ranks: also more
    than there are rows.
    """
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    sections = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    shape[dim] = sum(sections)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    return Split(dim, tuple(sections)), whole, draw(st.integers(1, 5))


@given(divided())
def test_parts_make_the_whole_again(case: tuple[Split, torch.Tensor, int]) -> None:
    split, whole, size = case
    parts = [split.part(whole, rank, size) for rank in range(size)]
    assert torch.equal(split.whole(parts), whole)
    for rank, part in enumerate(parts):
        assert part.shape == split.part_shape(whole.shape, rank, size)
        assert split.whole_shape(part.shape) == whole.shape
    for section in range(len(split.sections)):
        shares = [
            end - begin
            for begin, end in (list(split.bounds(rank, size))[section] for rank in range(size))
        ]
        assert max(shares) - min(shares) <= 1


@given(divided(), st.data())
def test_every_number_of_a_part_lies_where_it_is_looked_for(
    case: tuple[Split, torch.Tensor, int], data: st.DataObject
) -> None:
    split, whole, size = case
    flat, parts = whole.flatten(), [split.part(whole, rank, size).flatten() for rank in range(size)]
    for rank, part in enumerate(parts):
        start = data.draw(st.integers(0, part.numel()))
        stop = data.draw(st.integers(start, part.numel()))
        stretches = split.to_whole(whole.shape, rank, size, start, stop)
        found = [flat[first : first + num] for first, num in stretches]
        assert torch.equal(torch.cat([flat[:0], *found]), part[start:stop])
    start = data.draw(st.integers(0, flat.numel()))
    stop = data.draw(st.integers(start, flat.numel()))
    found = [
        parts[rank][first : first + num]
        for rank, first, num in split.to_parts(whole.shape, size, start, stop)
    ]
    assert torch.equal(torch.cat([flat[:0], *found]), flat[start:stop])


def test_a_tensor_without_the_attribute_is_not_split() -> None:
    split, other = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    vars(split)["split"] = Split(0, (8,))
    assert splits_of({split: "a", other: "b"}) == {"a": Split(0, (8,))}


SHAPES = {
    "columns": torch.Size([11, 6]),
    "norm": torch.Size([9]),
    "rows": torch.Size([5, 10]),
    "fused": torch.Size([13, 4]),
    "bias": torch.Size([13]),
}
SPLITS = {
    "columns": Split(0, (11,)),
    "rows": Split(1, (10,)),
    "fused": Split(0, (6, 4, 3)),
    "bias": Split(0, (6, 4, 3)),
}
# Another release may cut a weight the other way.
OTHER = {"columns": Split(1, (6,)), "fused": Split(0, (13,)), "rows": Split(1, (10,))}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("splits", "size"),
    [({}, 1), (SPLITS, 2), (SPLITS, 3), (OTHER, 3)],
    ids=["one", "fewer", "same", "otherwise"],
)
def test_a_part_is_read_from_the_parts_of_another_run(
    stage: int, splits: dict[str, Split], size: int, tmp_path: Path
) -> None:
    """Three tensor ranks times two data-parallel ones wrote it; whatever the run that goes on
    splits, it is found.
    """
    checkpoint = simulate(
        tmp_path, stage=stage, num_ranks=2, shapes=SHAPES, splits=SPLITS, tensor_size=3
    )
    for rank in range(size):
        parts = {name: RankPart(split, rank, size) for name, split in splits.items()}
        stored = StoredState(checkpoint, parts=parts)
        assert stored.keys == ["exp_avg"]
        assert {stored.step_of(name) for name in SHAPES} == {1.0}
        for number, (name, shape) in enumerate(SHAPES.items()):
            expected = values_of(number, 0, shape.numel()).view(shape)
            if name in splits:
                expected = splits[name].part(expected, rank, size)
            assert torch.equal(stored.weight(name, expected.shape), expected)
            count = expected.numel()
            for start, stop in ((0, count), (count // 3, count // 2), (count - 1, count)):
                assert torch.equal(
                    stored.read(name, "fp32", start, stop - start), expected.flatten()[start:stop]
                )
                assert torch.equal(
                    stored.read(name, "exp_avg", start, stop - start),
                    -expected.flatten()[start:stop],
                )


@pytest.mark.parametrize("average", [False, True])
def test_weights_alone_are_whole(average: bool, tmp_path: Path) -> None:
    checkpoint = simulate(
        tmp_path,
        stage=3,
        num_ranks=2,
        shapes=SHAPES,
        splits=SPLITS,
        tensor_size=2,
        averages=average,
    )
    found = MergedWeights(checkpoint, average=average, damage=[])
    assert {name: stored.shape for name, stored in found.stored.items()} == SHAPES
    for number, (name, shape) in enumerate(SHAPES.items()):
        assert torch.equal(
            found[name], (1 + average) * values_of(number, 0, shape.numel()).view(shape)
        )


def test_files_that_are_split_otherwise_than_the_manifest_states_are_refused(
    tmp_path: Path,
) -> None:
    checkpoint = simulate(
        tmp_path, stage=2, num_ranks=1, shapes=SHAPES, splits=SPLITS, tensor_size=2
    )
    checkpoint.manifest["tensor"]["fused"] = [0, [7, 3, 3]]  # type: ignore[index]
    with pytest.raises(
        StorageError, match="tensor rank 0 has another part of fused than the manifest says"
    ):
        StoredState(checkpoint)
