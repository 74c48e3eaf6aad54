"""State on NVMe is resumed where it was by DeepSpeed's own copies of its files, and moved into
other layouts and out of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.resumable import check_movable, describe_resharding, needs_resharding
from framework.config.load import config_from_values

NVME = {"device": "nvme", "nvme_path": "/local"}
CPU = {"device": "cpu"}


def description(*, ranks: int = 2, **zero: Any) -> dict[str, Any]:
    config = config_from_values({"run": {"name": "x"}, "zero": {"stage": 3, **zero}}).to_dict()
    return {"layout": {"world_size": ranks, "pipe_size": 1, "global_size": 8}, "config": config}


def checkpoint(stated: dict[str, Any]) -> SavedCheckpoint:
    return SavedCheckpoint(Path("run/checkpoints"), "global_step4", {"step": 4, **stated})


@pytest.mark.parametrize("offload", [{"offload_optimizer": NVME}, {"offload_param": NVME}])
@pytest.mark.parametrize("other", [{"ranks": 4}, {"offload_optimizer": CPU, "offload_param": CPU}])
def test_nvme_is_moved(offload: dict[str, Any], other: dict[str, Any]) -> None:
    there, here = (
        description(**offload),
        description(**({**offload, **other} if "ranks" in other else other)),
    )
    for source, target in ((there, here), (here, there)):
        assert needs_resharding(checkpoint(source), description=target)
        check_movable(checkpoint(source), description=target)


@pytest.mark.parametrize("offload", [{"offload_optimizer": NVME}, {"offload_param": NVME}])
def test_nvme_is_resumed_where_it_was(offload: dict[str, Any]) -> None:
    stated = description(**offload)
    assert not needs_resharding(checkpoint(stated), description=stated)
    check_movable(checkpoint(stated), description=stated)


def test_nvme_is_resumed_on_another_drive_and_with_other_buffers() -> None:
    """DeepSpeed copies a rank's files from the checkpoint to wherever the run has its drive."""
    there = description(offload_optimizer=NVME)
    elsewhere = {**NVME, "nvme_path": "/scratch/nvme0", "pipeline_read": True, "pin_memory": False}
    here = description(offload_optimizer=elsewhere, reduce_bucket_size=1000)
    assert not needs_resharding(checkpoint(there), description=here)
    check_movable(checkpoint(there), description=here)
    other = description(offload_optimizer=NVME, sub_group_size=5)
    moved = describe_resharding(checkpoint(there), description=other)
    assert moved == "zero.sub_group_size: 1000000000 -> 5"


def test_host_memory_is_moved() -> None:
    source, target = description(offload_optimizer=CPU), description(ranks=4)
    assert needs_resharding(checkpoint(source), description=target)
    check_movable(checkpoint(source), description=target)
