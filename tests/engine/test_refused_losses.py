"""Losses without a graph or summed, and models without a weight to train, end in one line that
names them; a loss whose ignored label is known, and keys of DeepSpeed's that pass, train as plain
PyTorch does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.data.order import epoch_order
from tests.jobs.loss_parts import OwnLoss, Padded, Points, net
from tests.launched import series, train_cases

pytestmark = pytest.mark.slow

STEPS, SIZE = 5, 8
PARTS = "tests.jobs.loss_parts:"
# Name -> what is not as usual, and the kind that ends it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"graphless-{stage}": ({"task": "errors", "zero": {"stage": stage}}, "loss-without-graph")
        for stage in (0, 3)
    },
    "detached": ({"model": "Detached", "zero": {"stage": 2}}, "loss-without-graph"),
    **{
        f"frozen-{stage}": ({"model": "frozen", "zero": {"stage": stage}}, "nothing-to-train")
        for stage in range(4)
    },
    "frozen-own": (
        {"model": "frozen", "optimizer": {"target": "torch.optim:SGD"}},
        "nothing-to-train",
    ),
    **{
        f"summed-{stage}": ({"task": "summed", "zero": {"stage": stage}}, "task-loss-result")
        for stage in (0, 2)
    },
}
ZERO: dict[str, Any] = {
    "allgather_partitions": False,
    "ignore_unused_parameters": False,
    "use_multi_rank_bucket_allreduce": False,
    "legacy_stage1": False,
}
ZERO_3: dict[str, Any] = {
    "memory_efficient_linear": False,
    "stage3_use_all_reduce_for_fetch_params": True,
}
# Keys under `deepspeed:` that pass, by ZeRO stage.
PASSED: dict[int, dict[str, Any]] = {
    0: {
        "prescale_gradients": True,
        "gradient_predivide_factor": 4.0,
        "communication_data_type": "fp32",
    },
    1: {
        "gradient_predivide_factor": 4.0,
        "zero_optimization": ZERO,
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    2: {
        "zero_optimization": ZERO,
        "disable_python_gc": True,
        "dump_state": True,
        "gradient_allreduce_op": "mean",
    },
    3: {"zero_optimization": ZERO_3 | {"zero_hpz_partition_size": 2}},
}


def case(name: str, folder: Path, **values: Any) -> dict[str, Any]:
    values = {
        "model": "net",
        "data": "Points",
        "task": "torch.nn.functional:cross_entropy",
    } | values
    for key in ("model", "data", "task"):
        if isinstance(values[key], str):
            values[key] = {"target": values[key] if ":" in values[key] else PARTS + values[key]}
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "batch": {"global_size": SIZE, "accumulation_steps": 2},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "training": {"max_steps": STEPS, "log_every": 1, "clip_grad_norm": 0},
        "checkpoint": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        **values,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    task = {"kind": "model_loss", "mean_over": "labels", "ignore_index": 0}
    cases = [case(name, folder, **values) for name, (values, _) in REFUSED.items()]
    cases += [
        case(
            f"padded-{stage}",
            folder,
            model="OwnLoss",
            data="Padded",
            task=task,
            zero={"stage": stage},
        )
        for stage in (0, 2, 3)
    ]
    cases += [
        case(f"passed-{stage}", folder, deepspeed=keys, zero={"stage": stage})
        for stage, keys in PASSED.items()
    ]
    train_cases(cases, num_ranks=2, folder=folder)
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_named(runs: Path, name: str) -> None:
    text = (runs / f"{name}.error").read_text(encoding="utf-8")
    assert text.endswith(f"[{REFUSED[name][1]}]"), text
    assert "\n" not in text


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_ignored_label_is_not_counted(runs: Path, stage: int) -> None:
    model, rows = OwnLoss(), Padded()
    expected = plain_losses(model, rows, lambda batch: model(**batch)["loss"])
    assert series(runs / f"padded-{stage}", "train/loss") == expected


@pytest.mark.parametrize("stage", PASSED)
def test_keys_that_pass_change_nothing(runs: Path, stage: int) -> None:
    model = net()
    expected = plain_losses(
        model, Points(), lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
    )
    assert series(runs / f"passed-{stage}", "train/loss") == expected


def plain_losses(model: nn.Module, rows: Any, loss_of: Any) -> dict[int, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = {}
    for step in range(STEPS):
        order = epoch_order(len(rows), seed=0, epoch=0, shuffle=True)[
            step * SIZE : (step + 1) * SIZE
        ]
        loss = loss_of(torch.utils.data.default_collate([rows[index] for index in order.tolist()]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected[step + 1] = pytest.approx(loss.item(), abs=1e-6)
    return expected
