"""A pipeline that is stopped and resumed in fresh processes is the unbroken one, bit for bit,
dropout included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_resume import bits
from tests.launched import read_metrics, train_cases

pytestmark = pytest.mark.slow

# Last step, and where it stops. 5 steps make an epoch of the digits: that stop is in the middle of
# the second.
ENDS = {"mlp": (12, 7), "gpt": (6, 4)}
METRICS = ("train/loss", "train/lr", "train/grad_norm", "eval/loss", "eval/accuracy")

MLP: dict[str, Any] = {
    "model": {"kind": "mlp", "hidden_sizes": [64, 64], "dropout": 0.3},
    "batch": {"global_size": 240, "micro_size": 60},
}
GPT: dict[str, Any] = {
    "model": {
        "kind": "gpt",
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 2,
        "max_positions": 32,
        "dropout": 0.2,
    },
    "data": {"kind": "text", "sequence_length": 32},
    "task": {"kind": "causal_lm"},
    "batch": {"global_size": 16, "micro_size": 4},
}
CASES: dict[str, dict[str, Any]] = {
    "mlp-fp32-z0": MLP,
    "mlp-bf16-z1": MLP | {"zero": {"stage": 1}, "precision": {"dtype": "bf16"}},
    "gpt-fp32-z1": GPT | {"zero": {"stage": 1}},
    "gpt-recompute": GPT | {"training": {"recompute_every": 2}},
}


def ends_of(case: str) -> tuple[int, int]:
    return ENDS[case.partition("-")[0]]


def config(name: str, case: str, folder: Path, **training: Any) -> dict[str, Any]:
    sections, (total, _) = CASES[case], ends_of(case)
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "parallel": {"pipe": 2},
        "scheduler": {"kind": "warmup_cosine", "warmup_steps": 5, "total_steps": total},
        "evaluation": {"every_steps": 5, "batch_size": 64} if "mlp" in case else {"at_end": False},
        "monitors": {"tensorboard": False, "progress": "off"},
        **sections,
        "training": {
            "max_steps": total,
            "log_every": 1,
            **sections.get("training", {}),
            **training,
        },
        "checkpoint": {"resume": "auto"},
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline-resume")
    whole = [config(f"{case}-whole", case, folder) for case in CASES]
    first = [config(f"{case}-broken", case, folder, max_steps=ends_of(case)[1]) for case in CASES]
    train_cases([*whole, *first], num_ranks=2, folder=folder)
    train_cases(
        [config(f"{case}-broken", case, folder) for case in CASES], num_ranks=2, folder=folder
    )
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_pipeline_is_the_unbroken_one(runs: Path, case: str) -> None:
    total, stop = ends_of(case)
    whole, broken = (
        [
            {name: row.get(name) for name in ("step", *METRICS)}
            for row in read_metrics(runs / f"{case}-{kind}")
            if row["step"] != stop
        ]
        for kind in ("whole", "broken")
    )
    assert [row["step"] for row in whole if row["train/loss"]] == [
        step for step in range(1, total + 1) if step != stop
    ]
    assert broken == whole
    left, right = bits(runs / f"{case}-whole", total), bits(runs / f"{case}-broken", total)
    assert left.keys() == right.keys()
    assert len(left) > 10
    assert not [path for path, tensor in left.items() if not torch.equal(tensor, right[path])]
