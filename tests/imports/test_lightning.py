"""Lightning's CLI config becomes a run config, with its own defaults."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from framework.config.load import config_from_values
from tests.imports.trainer_files import disagreements, imported

LIGHTNING = """
seed_everything: 7
trainer:
  {devices: 4, strategy: STRATEGY, precision: bf16-mixed, max_epochs: 5, gradient_clip_val: 0.5, max_time: "00:01"}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.002}}
lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 3}}
model: {class_path: my.Lit}
"""


@pytest.mark.parametrize(
    "strategy",
    [
        "deepspeed_stage_3_offload",
        "{class_path: DeepSpeedStrategy, init_args: {stage: 3, offload_optimizer: true, offload_parameters: true}}",
    ],
)
def test_lightnings_file(strategy: str) -> None:
    found = imported(yaml.safe_load(LIGHTNING.replace("STRATEGY", strategy)))
    config = config_from_values(found.values)
    assert (
        config.zero.stage,
        config.zero.offload_param.device,
        config.zero.offload_optimizer.device,
    ) == (
        3,
        "cpu",
        "cpu",
    )
    assert (config.zero.reduce_bucket_size, config.precision.dtype) == (200_000_000, "bf16")
    assert (config.run.seed, config.optimizer.lr, config.training.max_epochs) == (7, 0.002, 5)
    assert config.scheduler.target == "torch.optim.lr_scheduler:StepLR"
    assert {"devices", "max_time"} <= {omission.key for omission in found.left_out}


def test_lightnings_defaults_where_ours_differ() -> None:
    config = config_from_values(imported({"trainer": {"max_steps": 10}}).values)
    assert (
        config.training.clip_grad_norm,
        config.training.log_every,
        config.checkpoint.every_epochs,
    ) == (0, 50, 1)


@pytest.mark.parametrize("steps", [True, 7])
def test_a_dry_run_is_the_only_length(steps: bool | int) -> None:
    found = imported({"trainer": {"fast_dev_run": steps, "max_epochs": 5, "max_steps": 90}})
    training = config_from_values(found.values).training
    assert (training.max_steps, training.max_epochs) == (int(steps), None)
    assert {"max_epochs", "max_steps"} <= {omission.key for omission in found.left_out}


def test_lightnings_strategy_config_wins_and_is_refused_where_lightning_does() -> None:
    config = {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
    }
    options: dict[str, Any] = {"stage": 2, "offload_optimizer": True, "config": config}
    trainer = {
        "max_steps": 5,
        "precision": "bf16-mixed",
        "gradient_clip_val": 0.5,
        "accumulate_grad_batches": 4,
    }
    strategy = {
        "class_path": "pytorch_lightning.strategies.DeepSpeedStrategy",
        "init_args": options,
    }
    found = imported({"trainer": trainer | {"strategy": strategy}, "ckpt_path": "last"})
    read = config_from_values(found.values)
    assert (read.zero.stage, read.zero.offload_optimizer.device, read.training.clip_grad_norm) == (
        3,
        "none",
        1.0,
    )
    assert read.batch.accumulation_steps == 4
    names = {omission.key for omission in found.left_out}
    assert {
        "strategy.stage",
        "strategy.offload_optimizer",
        "gradient_clip_val",
        "ckpt_path",
    } <= names
    options["config"] = {"zero_optimization": {"stage": 3}}
    left = imported({"trainer": trainer | {"strategy": strategy}})
    assert left.values["training"]["clip_grad_norm"] == 0.5, "Lightning writes it into the JSON"
    options["config"] = config | {"gradient_accumulation_steps": 4}
    values = {"trainer": trainer | {"strategy": strategy, "precision": "16-mixed"}}
    both = disagreements(values)
    assert [(each.key, each.value) for each in both] == [
        ("accumulate_grad_batches", 4),
        ("precision", "16-mixed"),
    ]
    # refused where it has the argument's own value as well
    assert both[0].fix == "remove it from the JSON"
    assert both[1].fix == "remove bf16 from the JSON, or change precision"
