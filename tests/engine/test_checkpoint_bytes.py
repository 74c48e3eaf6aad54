"""What DeepSpeed does past the files we give it, without an engine of its own: a copy that
fails.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from framework.checkpoint.state.checkpoint_engine import AtomicCheckpointEngine
from framework.engine.checkpoint_bytes import save_bytes
from framework.system.files import FileRecord, hash_file


@pytest.fixture
def _one_rank() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


class Copying:
    """Saves as DeepSpeed's engine does where the optimizer's state lies on NVMe, and meets the
    other ranks at the end.
    """

    optimizer = None

    def __init__(self, swapped: Path) -> None:
        self.swapped, self.has_met_the_others = swapped, False

    def zero_optimization_stage(self) -> int:
        return 3

    def save_checkpoint(self, folder: str, *, tag: str, **_: Any) -> None:
        from shutil import copytree

        copytree(self.swapped, Path(folder, tag, "offloaded_tensors/rank0"), dirs_exist_ok=False)
        self.has_met_the_others = True


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    ("why", "stated"),
    [
        ("missing", "No such file or directory"),
        ("in the way", "File exists"),
        ("one is gone", "No such file or directory"),
        ("", ""),
    ],
)
def test_a_copy_that_fails_waits_until_all_ranks_have_met(
    why: str, stated: str, tmp_path: Path
) -> None:
    swapped, copied = (
        tmp_path / "swapped",
        tmp_path / "checkpoints/global_step1/offloaded_tensors/rank0",
    )
    if why != "missing":
        swapped.mkdir()
        (swapped / "0.tensor.swp").write_bytes(b"abc")
    if why == "in the way":
        copied.mkdir(parents=True)
    if why == "one is gone":
        (swapped / "1.tensor.swp").symlink_to("nowhere")
    engine, copytree = Copying(swapped), shutil.copytree

    def save() -> Mapping[str, FileRecord]:
        return save_bytes(
            engine, AtomicCheckpointEngine(), tmp_path / "checkpoints", "global_step1", {}, names={}
        )  # type: ignore[arg-type]

    if why:
        with pytest.raises(OSError, match=stated) as caught:
            save()
        assert stated in caught.value.strerror
    else:
        assert save() == {
            "offloaded_tensors/rank0/0.tensor.swp": hash_file(swapped / "0.tensor.swp")
        }
        assert (copied / "0.tensor.swp").read_bytes() == b"abc"
    assert engine.has_met_the_others
    assert shutil.copytree is copytree
