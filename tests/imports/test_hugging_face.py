"""Arguments of Hugging Face's Trainer become a run config that trains as it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from framework.config.load import config_from_values
from framework.errors import ConfigError
from tests.imports.trainer_files import hugging_face, imported, refused


def test_the_trainers_arguments_with_its_defaults() -> None:
    config = hugging_face()
    assert (str(config.run.folder), config.run.seed) == ("out/run1", 42)
    assert (config.optimizer.kind, config.optimizer.lr, config.optimizer.weight_decay) == (
        "adamw",
        1e-4,
        0.0,
    )
    assert (config.scheduler.kind, config.training.max_epochs, config.batch.micro_size) == (
        "linear",
        3,
        8,
    )
    assert config.checkpoint.keep_last == "all"
    assert (config.training.log_every, config.checkpoint.every_steps, config.evaluation.at_end) == (
        500,
        500,
        False,
    )


def test_the_trainers_arguments_one_by_one() -> None:
    config = hugging_face(
        bf16=True,
        evaluation_strategy="steps",
        eval_steps=50,
        save_strategy="epoch",
        save_total_limit=2,
        max_steps=200,
        load_best_model_at_end=True,
        metric_for_best_model="eval_f1",
        lr_scheduler_type="cosine_with_restarts",
        lr_scheduler_kwargs={"num_cycles": 3},
        warmup_ratio=0.1,
        weight_decay=0.1,
        gradient_checkpointing=True,
        report_to=["wandb"],
        optim="sgd",
    )
    assert (config.precision.dtype, config.precision.compute_dtype) == ("autocast", "bf16")
    assert (
        config.evaluation.every_steps,
        config.checkpoint.every_epochs,
        config.checkpoint.keep_last,
    ) == (50, 1, 2)
    assert (config.checkpoint.keep_best, config.checkpoint.best_is) == ("eval/f1", "max")
    assert (config.scheduler.kind, config.scheduler.cycles, config.scheduler.warmup_steps) == (
        "cosine",
        3,
        20,
    )
    assert (config.optimizer.kind, config.optimizer.weight_decay_on) == ("sgd", "matrices")
    assert (
        config.training.recompute_every,
        config.training.max_steps,
        config.training.max_epochs,
    ) == (1, 200, None)
    assert config.monitors.wandb is not None


@pytest.mark.slow
def test_a_file_that_transformers_writes_states_only_what_was_set(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers comes with the dev extra"
    )
    arguments = transformers.TrainingArguments(output_dir="o", learning_rate=3e-4, use_cpu=True)
    found = imported(json.loads(arguments.to_json_string()))
    assert [omission.key for omission in found.left_out] == ["use_cpu"]
    assert config_from_values(found.values).optimizer.lr == 3e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["linear", "cosine", "cosine_with_restarts", "constant_with_warmup"]
)
def test_rates_are_the_trainers(name: str) -> None:
    """Its warm-up begins at zero, ours one step further: from there on all rates are equal."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers comes with the dev extra"
    )
    import torch

    from framework.engine.schedules import factor

    kwargs = {"num_cycles": 3} if name == "cosine_with_restarts" else {}
    config = hugging_face(
        lr_scheduler_type=name, warmup_steps=10, max_steps=100, lr_scheduler_kwargs=kwargs
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = transformers.get_scheduler(
        name, optimizer, 10, 100, scheduler_specific_kwargs=kwargs
    )
    theirs = []
    for _ in range(100):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    ours = [factor(config.scheduler, step, 100) for step in range(100)]  # type: ignore[arg-type]
    assert ours[:9] == pytest.approx(theirs[1:10])
    assert ours[10:] == pytest.approx(theirs[10:], abs=1e-6)


def test_a_deepspeed_json_beside_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    auto = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
    }
    ds = auto | {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 0.3}
    Path("ds.json").write_text(json.dumps(ds))
    for given in ("ds.json", ds):
        config = hugging_face(
            deepspeed=given, bf16=True, gradient_accumulation_steps=4, max_grad_norm=0.3
        )
        assert (config.zero.stage, config.precision.dtype, config.training.clip_grad_norm) == (
            2,
            "bf16",
            0.3,
        )
        assert (config.batch.micro_size, config.batch.accumulation_steps, config.optimizer.lr) == (
            8,
            4,
            1e-4,
        )


ARGUMENTS = {
    "output_dir": "o",
    "learning_rate": 1e-4,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "warmup_steps": 10,
    "lr_scheduler_type": "cosine",
    "max_steps": 500,
    "fp16": True,
}

SCHEDULER = {"warmup_num_steps": 50, "total_num_steps": 1000, "warmup_max_lr": 2e-5}

JSON = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-5, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-6},
    },
    "scheduler": {"type": "WarmupDecayLR", "params": SCHEDULER},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.3,
}


def test_arguments_and_a_json_that_disagree_are_refused_as_the_trainer_does() -> None:
    found = refused(ARGUMENTS | {"deepspeed": JSON})
    assert found == [
        ("per_device_train_batch_size", 8),
        ("gradient_accumulation_steps", 4),
        ("max_grad_norm", 1.0),
        ("learning_rate", 1e-4),
        ("adam_beta1", [0.9, 0.999]),
        ("adam_epsilon", 1e-08),
        ("weight_decay", 0.0),
        ("learning_rate", 1e-4),
        ("bf16", False),
        ("max_steps", 500),
        ("warmup_steps", 10),
    ]
    batch = {"train_batch_size": 16, "zero_optimization": {"stage": 2}}
    arguments = {"output_dir": "o", "learning_rate": 1e-4, "per_device_train_batch_size": 5}
    assert refused(arguments | {"deepspeed": batch}) == [("per_device_train_batch_size", 5)]


@pytest.mark.slow
def test_the_installed_trainer_refuses_the_same() -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers comes with the dev extra"
    )
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = transformers.TrainingArguments(**ARGUMENTS | {"fp16": False}, use_cpu=True)
    theirs = HfTrainerDeepSpeedConfig(json.loads(json.dumps(JSON)))
    theirs.trainer_config_process(arguments)
    with pytest.raises(ValueError, match="Please correct") as caught:
        theirs.trainer_config_finalize(arguments, None, 500)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("- ds ")]
    assert len(lines) == len(refused(ARGUMENTS | {"fp16": False, "deepspeed": JSON}))


def test_auto_is_no_disagreement_and_what_the_trainer_passes_over_is_named() -> None:
    params = {"lr": "auto", "weight_decay": "auto"}
    scheduler = {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"},
    }
    values = {
        "optimizer": {"type": "Adam", "params": params},
        "scheduler": scheduler,
        "zero_optimization": {"stage": 1},
        "fp16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    found = imported(
        ARGUMENTS
        | {"max_grad_norm": 0.5, "lr_scheduler_kwargs": {"num_cycles": 2}, "deepspeed": values}
    )
    config = config_from_values(found.values)
    assert (config.scheduler.kind, config.scheduler.warmup_steps, config.optimizer.lr) == (
        "warmup",
        10,
        1e-4,
    )
    assert (config.batch.micro_size, config.batch.accumulation_steps) == (8, 4)
    assert config.training.clip_grad_norm == 1.0, "DeepSpeed's own, as there"
    names = [omission.key for omission in found.left_out]
    assert {"lr_scheduler_type", "max_grad_norm"} <= set(names)


def test_truth_values_that_are_text() -> None:
    assert hugging_face(bf16="true", fp16="false").precision.compute_dtype == "bf16"
    with pytest.raises(ConfigError, match=r"bf16 = maybe: neither true nor false"):
        hugging_face(bf16="maybe")
