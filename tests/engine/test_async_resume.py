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

TOTAL, STOP, EVERY = 10, 6, 3
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
        "checkpoint": {"mode": mode, "every_steps": EVERY, "keep_last": 2, "resume": "auto"},
        "monitors": {"tensorboard": False, "progress": "off"},
    }
    return base | {name: base.get(name, {}) | section for name, section in sections.items()}


@pytest.fixture(scope="module")
def runs(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("async")

    def all_of(cases: dict[str, dict[str, Any]]) -> None:
        """Engines of one kind live in one process."""
        whole = [
            config(f"{case}-{mode}", folder, mode=mode, **cases[case])
            for case in cases
            for mode in ("sync", "async")
        ]
        broken = [
            config(
                f"{case}-broken", folder, mode="async", **cases[case], training={"max_steps": STOP}
            )
            for case in cases
        ]
        resumed = [config(f"{case}-broken", folder, mode="async", **cases[case]) for case in cases]
        train_cases([*whole, *broken, *resumed], num_ranks=2, folder=folder)

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
    assert [checkpoint.step for checkpoint in checkpoints["async"]] == [9, TOTAL]


@pytest.mark.parametrize("case", [*CASES, *rarely(RARE)])
def test_a_resumed_run_is_the_unbroken_one(runs: Path, case: str) -> None:
    whole, broken = read_metrics(runs / f"{case}-sync"), read_metrics(runs / f"{case}-broken")
    expected = [
        {name: row.get(name) for name in ("step", *METRICS)} for row in whole if row["step"] != STOP
    ]
    assert [
        {name: row.get(name) for name in ("step", *METRICS)}
        for row in broken
        if row["step"] != STOP
    ] == expected
    left, right = bits(runs / f"{case}-sync", TOTAL), bits(runs / f"{case}-broken", TOTAL)
    assert left.keys() == right.keys()
    assert not [path for path, tensor in left.items() if not torch.equal(tensor, right[path])]


def test_nothing_is_left_beside_them(runs: Path) -> None:
    for case in CASES:
        assert not list((runs / f"{case}-async" / "checkpoints").glob(".*"))
