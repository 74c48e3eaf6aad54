"""The counters in a file of DeepSpeed's own, which nothing vouches for: any number costs neither
memory nor time.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.state.deepspeed_format import describe_raw
from framework.config.load import config_from_values
from framework.data.splits import Splits
from framework.errors import ConfigError, StorageError
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.setup import start_point
from framework.setup.prepare_run import Prepared
from framework.train.run_folder import RunFolder

HUGE = 10**15


def raw(folder: Path, *, ranks: int = 0, **counters: Any) -> Path:
    """Stage 0, or stage 1 with the files of several ranks."""
    folder.mkdir()
    content: dict[str, Any] = {
        "global_steps": 3,
        "global_samples": 24,
        "skipped_steps": 0,
        "dp_world_size": max(ranks, 1),
    }
    content |= {"ds_config": {}, "ds_version": "0.19.8", "module": {}}
    torch.save(content | counters, folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        torch.save(
            {"optimizer_state_dict": {"zero_stage": 1}},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return folder


def described(folder: Path) -> SavedCheckpoint:
    return describe_raw(SavedCheckpoint(folder.parent, folder.name, {}, verified=False))


@pytest.mark.parametrize(
    ("written", "stated"),
    [
        (HUGE, f"{HUGE} ranks wrote it, and there is no optimizer file of rank 2"),
        (1, "1 ranks wrote it, and there are 2 optimizer"),
        (2, ""),
    ],
)
def test_ranks_are_not_counted_up_to_what_a_file_states(
    written: int, stated: str, tmp_path: Path
) -> None:
    folder = raw(tmp_path / "tag", ranks=2, dp_world_size=written)
    if not stated:
        assert described(folder).manifest["layout"]["world_size"] == written
        return
    with pytest.raises(StorageError, match=rf"{stated}.*\[checkpoint-unverified\]"):
        described(folder)


def test_a_schedule_is_not_taken_beyond_the_runs_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is brought to the checkpoint's step one by one."""
    folder = raw(tmp_path / "tag", global_steps=HUGE, global_samples=8 * HUGE)
    config = config_from_values(
        {
            "run": {"output_dir": str(tmp_path), "name": "run"},
            "batch": {"global_size": 8},
            "training": {"max_steps": 30},
            "checkpoint": {"resume": str(folder), "allow_unverified": True},
        }
    )
    place = RunFolder(tmp_path / "run")
    splits = Splits([0], None)
    prepared = Prepared(make_plan(config, Cluster()), {}, parts=SimpleNamespace(splits=splits))  # type: ignore[arg-type]
    start = start_point.choose_start(place, config)
    with pytest.raises(
        ConfigError,
        match=r"training.max_steps = 30: .* stands at step 1,000,000,.*\[resume-beyond-end\]",
    ):
        start_point._open_folder(place, prepared, start)
    assert not place.path.exists()


@pytest.mark.parametrize(
    ("section", "states"),
    [
        ({}, "fp32"),
        ({"bf16": {"enabled": True}}, "fp32"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_weights"),
        (
            {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            "bf16",
        ),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16_weights"),
        ({"bf16": True}, "fp32"),
    ],
)
def test_states_are_those_of_the_files(
    section: dict[str, Any], states: str, tmp_path: Path
) -> None:
    folder = raw(tmp_path / "global_step3", ranks=2, dp_world_size=2, ds_config=section)
    assert described(folder).manifest["config"]["precision"]["states"] == states
