"""A rank that takes its part of a checkpoint of many ranks opens the files that hold it, and no
others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.state.reader import StoredState
from framework.errors import StorageError
from tests.checkpoint.state.simulated import shapes_of, simulate, values_of

RANKS = 40
SHAPES = shapes_of(9, numel=500)


def whole(checkpoint: SavedCheckpoint) -> list[torch.Tensor]:
    stored = StoredState(checkpoint)
    return [stored.weight(name, shape) for name, shape in SHAPES.items()]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("next_ranks", [30, 64])
def test_a_part_is_read_from_the_files_that_hold_it(
    tmp_path: Path, stage: int, next_ranks: int
) -> None:
    checkpoint = simulate(tmp_path, stage=stage, num_ranks=RANKS, shapes=SHAPES)
    total = sum(shape.numel() for shape in SHAPES.values())
    part = -(-total // next_ranks)
    for rank in (0, 7, next_ranks - 1):
        stored, offset = StoredState(checkpoint), 0
        assert stored.keys == ["exp_avg"]
        assert {stored.step_of(name) for name in SHAPES} == {1.0}
        for number, (name, shape) in enumerate(SHAPES.items()):
            if stage == 3:  # as the stage that reads cuts as well: each parameter by itself
                size = -(-shape.numel() // next_ranks)
                start, stop = min(rank * size, shape.numel()), min((rank + 1) * size, shape.numel())
            else:
                start, stop = (
                    max(rank * part - offset, 0),
                    min((rank + 1) * part - offset, shape.numel()),
                )
            offset += shape.numel()
            if start < stop:
                expected = values_of(number, start, stop - start)
                assert torch.equal(stored.read(name, "fp32", start, stop - start), expected)
                assert torch.equal(stored.read(name, "exp_avg", start, stop - start), -expected)
        # The first rank's two, and at 40 files of 30 ranks two or three (in stage 3 each parameter
        # ends elsewhere).
        assert len(stored._files._open) <= 6


def test_every_number_is_found(tmp_path: Path) -> None:
    for stage in (2, 3):
        found = whole(simulate(tmp_path / str(stage), stage=stage, num_ranks=RANKS, shapes=SHAPES))
        for number, tensor in enumerate(found):
            assert torch.equal(tensor, values_of(number, 0, tensor.numel()))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_file_that_is_laid_out_otherwise_is_refused(tmp_path: Path, stage: int) -> None:
    checkpoint = simulate(tmp_path, stage=stage, num_ranks=RANKS, shapes=SHAPES)
    for rank in (0, 21):
        file = checkpoint.path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        content = torch.load(file, weights_only=False)
        held = content["optimizer_state_dict"]
        if stage == 2:
            (notes,) = held["param_slice_mappings"]
            notes["another"] = notes.pop(next(iter(notes)))
        else:
            held["fp32_flat_groups"] = [held["fp32_flat_groups"][0][:-1]]
        torch.save(content, file)
        with pytest.raises(StorageError, match="than"):
            whole(checkpoint)
