"""Checkpoints that were written in the background hold what those written at once hold, and runs
resume from them bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint.manifest import list_checkpoints
from tests.engine.test_resume import METRICS, bits
from tests.launched import rarely, read_metrics, train_cases

pytestmark = pytest.mark.slow

TOTAL, EVERY, LAST = 5, 2, 4  # saved last before the end
# Dropout between the two layers, where each rank draws for its own part.
TENSOR = {"tensor": 2, "tensor_plan": {"fc1": "column", "fc2": "row"}}
PLAIN: dict[str, dict[str, Any]] = {
    **{f"z{stage}": {"zero": {"stage": stage}} for stage in (0, 2)},
    "z3-bf16": {"zero": {"stage": 3}, "precision": {"dtype": "bf16"}},
    "tensor-z0": {"parallel": TENSOR},
    "tensor-z3-bf16": {"zero": {"stage": 3}, "precision": {"dtype": "bf16"}, "parallel": TENSOR},
}
# With --exhaustive: its files are those of stage 2.
RARE = {"z1": {"zero": {"stage": 1}}, "tensor-z2": {"zero": {"stage": 2}, "parallel": TENSOR}}
CASES = {**PLAIN, "pipe2": {"parallel": {"pipe": 2}}}


def config(name: str, folder: Path, *, mode: str, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {"kind": "mlp", "hidden_sizes": [64, 64], "dropout": 0.3},
        "batch": {"global_size": 120},
        "training": {"max_steps": TOTAL, "log_every": 1},
        "checkpoint": {"mode": mode, "every_steps": EVERY, "keep_last": 2},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
    }
    return base | {name: base.get(name, {}) | section for name, section in sections.items()}


@pytest.fixture(scope="module")
def runs(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("async")

    def all_of(cases: dict[str, dict[str, Any]]) -> None:
        """Engines of one kind live in one process."""
        configs = []
        for case, sections in cases.items():
            for mode in ("sync", "async"):
                configs.append(config(f"{case}-{mode}", folder, mode=mode, **sections))
            again = config(f"{case}-again", folder, mode="sync", **sections)
            start = folder / f"{case}-async/checkpoints/global_step{LAST}"
            again["checkpoint"]["resume"] = str(start)
            configs.append(again)
        train_cases(configs, num_ranks=2, folder=folder)

    all_of(PLAIN | (RARE if exhaustive else {}))
    all_of({"pipe2": CASES["pipe2"]})
    return folder


@pytest.mark.parametrize("case", [*CASES, *rarely(RARE)])
def test_they_hold_what_those_written_at_once_hold(runs: Path, case: str) -> None:
    checkpoints = {
        mode: list_checkpoints(runs / f"{case}-{mode}" / "checkpoints")
        for mode in ("sync", "async")
    }
    for sync, found in zip(checkpoints["sync"], checkpoints["async"], strict=True):
        assert found.step == sync.step
        assert found.damage() == []
        others = {"files", "config", "sha256", "metrics", "saved_at"}
        own = {key: value for key, value in found.manifest.items() if key not in others}
        assert own == {key: sync.manifest[key] for key in own}
        assert found.manifest["files"].keys() == sync.manifest["files"].keys()
        left, right = (bits(runs / f"{case}-{mode}", sync.step) for mode in ("sync", "async"))
        assert left.keys() == right.keys()
        assert len(left) > 10
        assert not [path for path, tensor in left.items() if not torch.equal(tensor, right[path])]
    assert [checkpoint.step for checkpoint in checkpoints["async"]] == [LAST, TOTAL]


@pytest.mark.parametrize("case", [*CASES, *rarely(RARE)])
def test_a_resumed_run_is_the_unbroken_one(runs: Path, case: str) -> None:
    whole, again = (
        [
            {name: row.get(name) for name in ("step", *METRICS)}
            for row in read_metrics(runs / f"{case}-{run}")
            if row["step"] > LAST
        ]
        for run in ("sync", "again")
    )
    assert whole
    assert again == whole
    left, right = bits(runs / f"{case}-sync", TOTAL), bits(runs / f"{case}-again", TOTAL)
    assert left.keys() == right.keys()
    assert not [path for path, tensor in left.items() if not torch.equal(tensor, right[path])]


def test_nothing_is_left_beside_them(runs: Path) -> None:
    for case in CASES:
        assert not list((runs / f"{case}-async" / "checkpoints").glob(".*"))
