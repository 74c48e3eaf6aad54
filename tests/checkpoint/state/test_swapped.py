"""Numbers of DeepSpeed's NVMe swapper in a checkpoint are read from its files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import STATE_KEY, SWAPPED
from framework.checkpoint.state.shard_map import map_checkpoint
from framework.checkpoint.state.swapped import (
    SWAPPED_KEY,
    SwappedFiles,
    noted_groups,
    swapped_groups,
)


def write(path: Path, values: list[float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # the swapper fills its files up
    torch.tensor([*values, 0.0, 0.0]).numpy().tofile(path)


def content() -> dict[str, Any]:
    """A rank's optimizer file of two groups, of which the first was swapped."""
    states = {
        0: {"step": torch.tensor(3.0), "exp_avg": torch.empty(0)},
        1: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)},
    }
    flats = [torch.empty(0), torch.zeros(2)]
    optimizer = {"fp32_flat_groups": flats, "optimizer_state_dict": {"state": states}}
    return {"optimizer_state_dict": optimizer}


@pytest.mark.parametrize(
    ("file", "rank"),
    [
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "rank02"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "rank01"),
    ],
)
def test_swapped_groups_get_the_numbers_of_their_files(
    file: str, rank: str, tmp_path: Path
) -> None:
    folder = tmp_path / SWAPPED / rank
    write(folder / "0_4.tensor.swp", [1.0, 2.0, 3.0])
    write(folder / "exp_avg-0_4.tensor.swp", [4.0, 5.0, 6.0])
    found = content()
    SwappedFiles(tmp_path, {0: ("0_4", 3)}, tensor_size=2).complete(file, found)
    optimizer = found["optimizer_state_dict"]
    state = optimizer["optimizer_state_dict"]["state"]
    assert [flat.tolist() for flat in optimizer["fp32_flat_groups"]] == [[1, 2, 3], [0, 0]]
    assert [state[number]["exp_avg"].tolist() for number in (0, 1)] == [[4, 5, 6], [1, 1]]
    assert state[0]["step"] == 3


@pytest.mark.parametrize("values", [None, [1.0]])
def test_a_file_that_is_not_there_or_too_short_is_an_error(
    values: list[float] | None, tmp_path: Path
) -> None:
    if values:
        write(tmp_path / SWAPPED / "rank00" / "0_4.tensor.swp", values)
    files = SwappedFiles(tmp_path, {0: ("0_4", 9)}, tensor_size=1)
    with pytest.raises(RuntimeError, match="0_4"):
        files.complete("zero_pp_rank_0_mp_rank_00_optim_states.pt", content())


def test_groups_are_noted_by_name_and_size() -> None:
    optimizer = SimpleNamespace(
        swap_optimizer=True,
        fp32_partitioned_groups_flat=[SimpleNamespace(ds_id="0_4"), SimpleNamespace(ds_id="1_5")],
        fp16_partitioned_groups_flat_numel=[300_000, 5],
        _swappable_optimizer_subgroup=lambda number: number == 0,
    )
    assert swapped_groups(optimizer) == {0: ("0_4", 300_000)}
    assert swapped_groups(SimpleNamespace()) == {}


def test_files_of_a_release_that_noted_nothing_are_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "global_step4" / SWAPPED).mkdir(parents=True)
    model = tmp_path / "global_step4" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({STATE_KEY: {"state": {}}}, model)
    manifest = {"step": 4, "layout": {"world_size": 1}, "config": {"zero": {"stage": 3}}}
    with pytest.raises(ValueError, match="did not note what they hold"):
        map_checkpoint(SavedCheckpoint(tmp_path, "global_step4", manifest))


@pytest.mark.parametrize("name", ["../../0_4", "/tmp/0_4", "0_4\n", ""])
def test_a_name_that_leads_to_another_folder_is_refused(name: str) -> None:
    assert noted_groups({SWAPPED_KEY: {0: ("0_4", 300_000)}}) == {0: ("0_4", 300_000)}
    with pytest.raises(ValueError, match="is no name of a group"):
        noted_groups({SWAPPED_KEY: {0: ("0_4", 300_000), 1: (name, 5)}})
