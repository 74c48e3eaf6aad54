"""Arguments of Hugging Face's Trainer, accelerate's config and Lightning's CLI config become run
configs, and nothing that a file says is dropped in silence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.cli import main
from framework.config.load import config_from_values
from framework.dslint.import_run import Imported, run_config_text
from framework.dslint.import_trainers import import_arguments
from framework.errors import ConfigError
from framework.text.document import Document, parse_document


def imported(values: dict[str, Any]) -> Imported:
    found = import_arguments(Document("args.json", values))
    text = run_config_text(found, name="args.json")
    assert parse_document(text, name="run.yaml").value == found.values, (
        "the text says what the values say"
    )
    return found


def hugging_face(**values: Any) -> Any:
    return config_from_values(
        imported({"output_dir": "out/run1", "learning_rate": 1e-4} | values).values
    )


def test_the_trainers_arguments_with_its_defaults() -> None:
    config = hugging_face()
    assert (str(config.run.folder), config.run.seed) == ("out/run1", 42)
    assert (config.optimizer.kind, config.optimizer.lr, config.optimizer.weight_decay) == (
        "adamw",
        1e-4,
        0.0,
    )
    assert (config.scheduler.kind, config.training.max_epochs, config.batch.micro_size) == (
        "polynomial",
        3,
        8,
    )
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


def test_compiling_is_taken_over() -> None:
    asked = hugging_face(torch_compile=True).training.compile
    assert (asked.backend, asked.mode, asked.per) == ("inductor", None, "model")
    asked = hugging_face(
        torch_compile_backend="aot_eager", torch_compile_mode="max-autotune"
    ).training.compile
    assert (asked.backend, asked.mode) == ("aot_eager", "max-autotune"), (
        "one of them turns it on there"
    )
    assert hugging_face(torch_compile=False).training.compile is None
    dynamo = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False}
    accelerate = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
    }
    found = imported(
        accelerate | {"dynamo_config": dynamo | {"dynamo_use_regional_compilation": True}}
    )
    assert found.values["training"]["compile"] == {
        "backend": "inductor",
        "mode": "default",
        "per": "block",
    }
    old = imported(accelerate | {"dynamo_backend": "NO", "mixed_precision": "bf16"})
    assert "compile" not in old.values.get("training", {})
    assert not [line for line in found.left_out + old.left_out if "dynamo" in line]


def test_nothing_that_differs_is_dropped_in_silence() -> None:
    found = imported(
        {
            "output_dir": "o",
            "learning_rate": 1,
            "push_to_hub": True,
            "half_precision_backend": "auto",
            "fp16": False,
        }
    )
    names = [line.partition(":")[0] for line in found.left_out]
    assert {"push_to_hub", "half_precision_backend"} <= set(names)
    assert "fp16" not in names, "as there by itself"


@pytest.mark.slow
def test_a_file_that_transformers_writes_says_only_what_was_set(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers comes with the dev extra"
    )
    arguments = transformers.TrainingArguments(output_dir="o", learning_rate=3e-4, use_cpu=True)
    found = imported(json.loads(arguments.to_json_string()))
    assert sorted(line.partition(":")[0] for line in found.left_out) == [
        "save_total_limit",
        "use_cpu",
    ]
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


ACCELERATE = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {gradient_accumulation_steps: 4, gradient_clipping: 0.5, offload_optimizer_device: cpu, zero_stage: 2}
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""


def test_accelerates_file() -> None:
    found = imported(yaml.safe_load(ACCELERATE))
    config = config_from_values(found.values)
    assert (config.zero.stage, config.zero.offload_optimizer.device, config.precision.dtype) == (
        2,
        "cpu",
        "bf16",
    )
    assert (config.batch.accumulation_steps, config.training.clip_grad_norm) == (4, 0.5)
    assert [line.partition(":")[0] for line in found.left_out] == ["num_processes"]
    fsdp = {
        "distributed_type": "FSDP",
        "compute_environment": "x",
        "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
    }
    assert imported(fsdp).values["zero"] == {"stage": 2}


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
    assert {"devices", "max_time"} <= {line.partition(":")[0] for line in found.left_out}


def test_lightnings_defaults_where_ours_differ() -> None:
    config = config_from_values(imported({"trainer": {"max_steps": 10}}).values)
    assert (
        config.training.clip_grad_norm,
        config.training.log_every,
        config.checkpoint.every_epochs,
    ) == (0, 50, 1)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"per_device_train_batch_size": "many"}, "per_device_train_batch_size"),
        ({"max_grad_norm": -1}, "max_grad_norm"),
    ],
)
def test_a_wrong_value_is_named_as_the_file_has_it(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        imported({"output_dir": "o", "learning_rate": 1e-4} | values)
    assert [problem.key for problem in caught.value.problems] == [key]


@pytest.mark.parametrize(
    "values",
    [{"num_train_epochs": "x"}, {"warmup_steps": []}, {"deepspeed": "none.json"}, {"optim": 3}],
)
def test_nonsense_ends_in_words(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"output_dir": "o", "learning_rate": 1e-4} | values))
    code = main(["import", str(path)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert (code == 78 and str(next(iter(values.values()))) in said.err) or (
        code == 0 and "optim: 3" in said.out
    )


@pytest.mark.slow
def test_defaults_are_those_of_the_installed_packages() -> None:
    for package in ("transformers", "pytorch_lightning"):
        pytest.importorskip(package, reason=f"{package} comes with the dev extra")
    from tools.trainer_defaults import OUT, defaults

    assert json.loads(OUT.read_text(encoding="utf-8")) == defaults(), (
        "run python -m tools.trainer_defaults"
    )


def test_lengths_in_other_units_and_what_other_tools_leave_out() -> None:
    trainer = {
        "max_epochs": 3,
        "max_steps": 10,
        "accumulate_grad_batches": 4,
        "val_check_interval": 100,
    }
    found = imported({"seed_everything": 1, "trainer": trainer})
    assert found.values["evaluation"]["every_steps"] == 25, "batches there"
    assert found.left_out == (
        "max_epochs: 3 (max_steps is the length here; the first to come is there)",
    )
    each = imported({"seed_everything": 1, "trainer": trainer | {"val_check_interval": 1}})
    assert each.values["evaluation"]["every_steps"] == 1
    assert hugging_face(lr_scheduler_type="constant", warmup_steps=100).scheduler.warmup_steps == 0
    assert (
        hugging_face(
            lr_scheduler_type="constant_with_warmup", warmup_steps=100
        ).scheduler.warmup_steps
        == 100
    )


def refused(values: dict[str, Any]) -> list[tuple[str, Any]]:
    with pytest.raises(ConfigError) as caught:
        imported(values)
    assert {problem.kind for problem in caught.value.problems} == {"sources-disagree"}
    return [(problem.key, problem.value) for problem in caught.value.problems]


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
    names = [line.partition(":")[0] for line in found.left_out]
    assert {"lr_scheduler_type", "max_grad_norm"} <= set(names)


def test_accelerate_takes_no_keys_of_its_own_beside_a_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(
        json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 3}})
    )
    inner = {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}
    outer = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": inner,
    }
    assert imported(outer).values["zero"]["stage"] == 3
    more = inner | {"zero_stage": 2, "gradient_clipping": 1.0}
    found = refused(outer | {"mixed_precision": "bf16", "deepspeed_config": more})
    assert found == [
        ("deepspeed_config.gradient_clipping", 1.0),
        ("deepspeed_config.zero_stage", 2),
        ("mixed_precision", "bf16"),
    ]


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
    names = {line.partition(":")[0] for line in found.left_out}
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
    assert refused(values) == [("accumulate_grad_batches", 4), ("precision", "16-mixed")]


def test_keys_of_nested_sections_that_nothing_reads_are_named() -> None:
    inner = {
        "gradient_clip": 1.0,
        "train_micro_batch_size_per_gpu": 2,
        "zero_stage": 3,
        "zero3_save_16bit_model": True,
        "deepspeed_inclusion_filter": "a@b:0",
        "deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock",
        "list": [1],
        "nothing": None,
    }
    outer = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "fp8_config": {"backend": "TE"},
    }
    found = imported(
        outer | {"deepspeed_config": inner, "dynamo_config": {"dynamo_mod": "default"}}
    )
    assert found.values["zero"] == {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    names = {line.partition(":")[0] for line in found.left_out}
    misspelt = {"deepspeed_config.gradient_clip", "deepspeed_config.train_micro_batch_size_per_gpu"}
    further = {
        "deepspeed_config.deepspeed_inclusion_filter",
        "deepspeed_config.deepspeed_moe_layer_cls_names",
    }
    assert names == misspelt | further | {
        "deepspeed_config.list",
        "fp8_config",
        "dynamo_config.dynamo_mod",
    }
    fsdp = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_parms": True}
    lines = imported(
        {"compute_environment": "x", "distributed_type": "FSDP", "fsdp_config": fsdp}
    ).left_out
    assert [line.partition(":")[0] for line in lines] == ["fsdp_config.fsdp_offload_parms"]


def test_truth_values_that_are_text() -> None:
    assert hugging_face(bf16="true", fp16="false").precision.compute_dtype == "bf16"
    with pytest.raises(ConfigError, match=r"bf16 = maybe: neither true nor false"):
        hugging_face(bf16="maybe")


def test_what_is_left_to_write_stands_below_and_is_a_run_config() -> None:
    text = run_config_text(imported({"output_dir": "o", "learning_rate": 1e-4}), name="args.json")
    stubs = text.partition("Yours to write")[2].splitlines()[1:]
    whole = text + "\n".join(line.removeprefix("# ") for line in stubs) + "\n"
    values = parse_document(whole, name="run.yaml").value
    assert {"run", "model", "data", "task", "training"} <= values.keys()
    assert config_from_values(values).training.max_epochs == 3
