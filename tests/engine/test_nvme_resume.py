"""State on NVMe, resumed in fresh processes where it was: the run is the unbroken one to the bit,
small groups included.
"""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_resume import METRICS, bits
from tests.launched import read_metrics, train_cases

TOTAL, STOP = 8, 4


def config(name: str, folder: Path, **sections: Any) -> dict[str, Any]:
    """Biases are a group of their own, which is too small to be swapped."""
    swapped = {"device": "nvme", "nvme_path": str(folder / f"swap-{name}")}
    base: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder), "seed": 3},
        "model": {"kind": "mlp", "hidden_sizes": [1024, 1024], "dropout": 0.1},
        "batch": {"global_size": 32},
        "zero": {"stage": 3, "offload_optimizer": swapped},
        "optimizer": {"kind": "adamw", "lr": 1e-3, "weight_decay_on": "matrices"},
        "scheduler": {"kind": "warmup_cosine", "warmup_steps": 2, "total_steps": TOTAL},
        "training": {"max_steps": TOTAL, "log_every": 1},
        "monitors": {"tensorboard": False, "progress": "off"},
    }
    (folder / f"swap-{name}").mkdir(exist_ok=True)
    return base | {name: base.get(name, {}) | section for name, section in sections.items()}


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path, exhaustive: bool) -> None:
    if not exhaustive:
        pytest.skip(
            "--exhaustive: the first use of DeepSpeed's async_io op compiles it for four minutes, and needs libaio"
        )
    train_cases(
        [config("whole", tmp_path), config("broken", tmp_path, training={"max_steps": STOP})],
        num_ranks=2,
        folder=tmp_path,
    )
    train_cases(
        [config("broken", tmp_path, checkpoint={"resume": "auto"})], num_ranks=2, folder=tmp_path
    )
    whole, broken = (
        {
            int(row["step"]): [row.get(name) for name in METRICS[:3]]
            for row in read_metrics(tmp_path / run)
        }
        for run in ("whole", "broken")
    )
    assert whole == broken
    left, right = bits(tmp_path / "whole", TOTAL), bits(tmp_path / "broken", TOTAL)
    assert left.keys() == right.keys()
    assert [path for path, tensor in left.items() if not torch.equal(tensor, right[path])] == []
    folder = Path("checkpoints", f"global_step{TOTAL}", "offloaded_tensors")
    names = [
        path.relative_to(tmp_path / "whole")
        for path in (tmp_path / "whole" / folder).rglob("*.swp")
    ]
    assert len(names) == 2 * 3, "weights and two moments of each rank"
    assert [
        name
        for name in names
        if not filecmp.cmp(tmp_path / "whole" / name, tmp_path / "broken" / name, shallow=False)
    ] == []
