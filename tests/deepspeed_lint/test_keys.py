"""The key tables hold what DeepSpeed reads: complete, explained, quick to load, with the right
guesses and dates.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed_lint.errors import MISSING, UsageError
from deepspeed_lint.key_files import TABLES, load_entries, sentence_entry, states_of
from deepspeed_lint.keys import Key, history, known_releases, load_table
from framework.config.deepspeed_words import OWNED, PASSED_THROUGH
from framework.plan.rules.passthrough import REMOVED
from tests.places import ROOT
from tests.warm_ranks import WarmRanks

TABLE = load_table()
# Modules of constants: NAME = "key" beside NAME_DEFAULT = value.
CONSTANTS = (
    "runtime/constants.py",
    "runtime/data_pipeline/constants.py",
    "runtime/swap_tensor/constants.py",
    "runtime/model_checkpointing/constants.py",
    "runtime/activation_checkpointing/config.py",
    "profiling/constants.py",
    "autotuning/constants.py",
    "comm/constants.py",
)
# Read by 0.19.8, found by reading its source and not by the program that builds the tables.
BY_HAND = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "steps_per_print",
    "gradient_clipping",
    "communication_data_type",
    "sequence_parallel_size",
    "data_parallel_size",
    "allgather_size",
    "vocabulary_size",
    "log_level",
    "bfloat16",
    "datastates_ckpt",
    "optimizer.type",
    "optimizer.legacy_fusion",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.offload_optimizer.super_offload",
    "zero_optimization.zenflow.topk_ratio",
    "zero_optimization.leaf_module.name_suffixes",
    "fp16.loss_scale_window",
    "bf16.bf16_optimizer_states",
    "torch_autocast.lower_precision_safe_modules",
    "data_types.keep_in_fp32_modules",
    "pipeline.use_reentrant",
    "pipeline.activation_checkpoint_interval",
    "tensor_parallel.tp.tp_grain_size",
    "tensor_parallel.partition_config.layer_specs.*.partition_type",
    "expert_parallel.comm_max_tokens_per_rank",
    "expert_parallel.load_balance_coeff",
    "compile.offload_activation_pin_memory",
    "csv_monitor.job_name",
    "comet.experiment_key",
    "comms_logger.prof_ops",
    "timers.throughput.synchronized",
    "flops_profiler.top_modules",
    "activation_checkpointing.cpu_checkpointing",
    "aio.use_gds",
    "checkpoint.parallel_write.pipeline_stage",
    "checkpoint.writer.io_multiplier",
    "autotuning.model_info.num_params",
    "autotuning.arg_mappings",
    "hybrid_engine.max_out_tokens",
    "weight_quantization.post_init_quant",
    "data_efficiency.seed",
    "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.index_to_sample_path",
    "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config.root_degree",
    "data_efficiency.data_sampling.dynamic_batching.metrics_path",
    "data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config.seq_per_step",
    "optimizer.params[AdamW].torch_adam",
    "optimizer.params[Adam].adam_w_mode",
    "optimizer.params[Muon].ns_method",
    "optimizer.params[Muon].per_head_muon",
    "optimizer.params[Lamb].max_coeff",
    "optimizer.params[Lion].betas",
    "scheduler.params[WarmupLR].warmup_type",
    "scheduler.params[OneCycle].cycle_second_stair_count",
    "scheduler.params[WarmupCosineLR].cos_min_ratio",
    "scheduler.params[LRRangeTest].lr_range_test_staircase",
)
# Left out means None, and a null is an error all the same: `for name in None`.
NONE_BUT_NOT_NULL = {"torch_autocast.dtype", "torch_autocast.lower_precision_safe_modules"}


def key(path: str, **options: Any) -> Key:
    found = TABLE.get(path, **options)
    assert found is not None, path
    return found


def test_the_releases() -> None:
    known = known_releases()
    assert {"0.16.9", "0.17.6", "0.18.9", *(f"0.19.{patch}" for patch in range(9))} <= set(known)
    assert list(known) == sorted(known, key=lambda name: [int(part) for part in name.split(".")])
    assert load_table().release == known[-1]
    assert load_table("0.19") is load_table(max(name for name in known if name.startswith("0.19.")))
    assert load_table("0.18.9+cu126").release == "0.18.9"
    assert load_table("v0.18").release == "0.18.9"


@pytest.mark.parametrize("release", ["0.15.4", "0.19.99", "", "newest", "0.1"])
def test_an_unknown_release_names_the_known_ones(release: str) -> None:
    with pytest.raises(UsageError, match=r"known are 0\.16\.9, .*0\.19\.8"):
        load_table(release)


@pytest.mark.parametrize("release", known_releases())
def test_every_key_has_a_sentence_and_a_type(release: str) -> None:
    table = load_table(release)
    for path in table:
        found = table.get(path)
        assert found is not None
        assert re.fullmatch(r"[A-Z0-9].*\.", found.sentence), path
        assert (
            found.types != ("any",) or found.status == "refused" or found.from_python or found.enum
        ), path
        assert "object" in found.types or found.unknown is None, path


@pytest.mark.parametrize("release", known_releases())
def test_defaults_and_limits_fit_the_types(release: str) -> None:
    json_types = {
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "string": str,
        "array": list,
        "object": dict,
    }
    table = load_table(release)
    for path in table:
        found = table.get(path)
        assert found is not None
        default = found.default
        if default is MISSING or found.from_python:
            continue
        if default is None:
            assert found.nullable or path in NONE_BUT_NOT_NULL, path
            continue
        assert any(isinstance(default, json_types[name]) for name in found.types), path
        if found.enum:
            assert default in found.enum, path
        if isinstance(default, (int, float)):
            assert found.minimum is None or default >= found.minimum, path
            assert found.maximum is None or default <= found.maximum, path


def test_no_sentence_is_left_over() -> None:
    paths = {path for release in known_releases() for path in load_table(release)}
    used = [sentence_entry(path) for path in paths]
    written = json.loads((TABLES / "sentences.json").read_text(encoding="utf-8"))
    idle = {
        path
        for path, words in written.items()
        if words not in used and {"sentence": words} not in used
    }
    assert not idle


@pytest.mark.parametrize("path", BY_HAND)
def test_keys_found_by_hand(path: str) -> None:
    assert key(path).path == path


def test_keys_that_run_configs_own() -> None:
    assert not [name for name in OWNED if TABLE.get(name) is None]


@pytest.mark.parametrize("file", CONSTANTS)
def test_every_constant_with_a_default_is_a_key(file: str) -> None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("deepspeed is not installed")
    body = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8")).body
    values = {
        node.targets[0].id: node.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    named = [
        value.value
        for name, value in values.items()
        if f"{name}_DEFAULT" in values and isinstance(value, ast.Constant)
    ]
    table = load_table(importlib.metadata.version("deepspeed"))
    last_parts = {path.rpartition(".")[2] for path in table}
    assert [name for name in named if name not in last_parts] == []
    assert named


@pytest.mark.slow
def test_the_table_is_what_the_installed_deepspeed_reads(warm: WarmRanks, tmp_path: Path) -> None:
    """A change of DeepSpeed or a hand-made change of the table shows here; tools/build_key_table.py
    documents how to rebuild.
    """
    job = warm.start(
        ["--check"], num_ranks=1, folder=tmp_path, script=ROOT / "tools/build_key_table.py"
    )
    assert job.wait(300) == [0], job.stated()


def test_what_a_key_knows() -> None:
    stage = key("zero_optimization.stage")
    assert (stage.types, stage.enum, stage.default, stage.reader) == (
        ("integer",),
        (0, 1, 2, 3),
        0,
        "pydantic",
    )
    assert stage.source == "runtime/zero/config.py:DeepSpeedZeroConfig.stage"
    ratio = key("zero_optimization.offload_optimizer.ratio")
    assert (ratio.minimum, ratio.maximum, ratio.default) == (0.0, 1.0, 1.0)
    topk = key("zero_optimization.zenflow.topk_ratio")
    assert (topk.exclusive_minimum, topk.exclusive_maximum) == (0.0, 1.0)
    assert key("zero_optimization.zenflow.select_interval").types == ("string", "integer")
    assert key("zero_optimization.stage3_model_persistence_threshold").default == sys.maxsize
    assert key("zero_optimization.stage3_max_live_parameters").aliases == ("max_live_parameters",)
    assert key("gradient_clipping").default == 1.0
    assert key("tensor_parallel.dtype").from_python
    assert key("scheduler.params[WarmupDecayLR].total_num_steps").required
    assert key("optimizer.params[AdamW].set_grad_none").taken_by == ("FusedAdam",)
    assert key("optimizer.params[Lamb].max_grad_norm").status == "refused"


def test_unknown_keys_by_section() -> None:
    treatment = {
        path: key(path).unknown
        for path in ("zero_optimization", "fp16", "aio", "pipeline", "autotuning.arg_mappings")
    }
    assert treatment == {
        "zero_optimization": "error",
        "fp16": "error",
        "aio": "ignored",
        "pipeline": "ignored",
        "autotuning.arg_mappings": "free",
    }
    old = load_table("0.16.9").get("fp16")
    assert old is not None
    assert old.unknown == "ignored"


def test_finding_keys() -> None:
    assert (
        key("zero_optimization.prefetch_bucket_size").path
        == "zero_optimization.stage3_prefetch_bucket_size"
    )
    assert key("bfloat16.enabled").path == "bf16.enabled"
    assert key("optimizer.params.lr", variant="adagrad").default == 0.01
    assert key("optimizer.params.nesterov").path == "optimizer.params[MuSGD].nesterov"
    specs = "tensor_parallel.partition_config.layer_specs"
    assert key(f"{specs}.0.patterns").path == f"{specs}.*.patterns"
    metrics = [
        "data_efficiency",
        "data_sampling",
        "curriculum_learning",
        "curriculum_metrics",
        "my.metric",
        "schedule_type",
    ]
    found = TABLE.get(metrics)
    assert found is not None
    assert found.name == "schedule_type"
    assert TABLE.get("zero_optimisation.stage") is None
    assert TABLE.get("optimizer.params.ns_method", variant="AdamW") is None
    assert "timers.throughput" in TABLE.children("timers")
    assert "optimizer" in TABLE.children()
    assert "AdamW" in TABLE.variants("optimizer.params")
    assert "OneBitAdam" not in TABLE.variants("optimizer.params")
    assert "OneBitAdam" in load_table("0.18").variants("optimizer.params")


NEAREST = {
    "gradient_cliping": ["gradient_clipping"],
    "bf16.loss_scale": ["fp16.loss_scale"],
    "fp16.check_grad_overflow": ["bf16.check_grad_overflow"],
    "zero_optimization.prefetch_bucket_size": ["zero_optimization.stage3_prefetch_bucket_size"],
    "zero_optimization.stage3_prefetch_buket_size": [
        "zero_optimization.stage3_prefetch_bucket_size"
    ],
    "zero_optimisation.stage": ["zero_optimization.stage"],
    "zero_optimization.offload_optimiser.devise": ["zero_optimization.offload_optimizer.device"],
    "zero_optimization.gradient_clipping": ["gradient_clipping"],
    "micro_batch_size": ["train_micro_batch_size_per_gpu"],
    "optimizer.lr": ["optimizer.params.lr"],
    "optimizer.params.learning_rate": ["optimizer.params.lr"],
    "activation_checkpointing.partitioned_activations": [
        "activation_checkpointing.partition_activations"
    ],
    "loss_scale": ["fp16.loss_scale"],
    "tensorboard.enable": ["tensorboard.enabled"],
    "wandb.entity": ["wandb.team"],
    "amp": ["bf16", "fp16", "torch_autocast"],
    "zero_optimization.mics_shard_size": ["zero_optimization.zero_hpz_partition_size"],
    "enabled": [],
    "xyzzy": [],
    "": [],
    "..": [],
}


@pytest.mark.parametrize("path", NEAREST)
def test_nearest(path: str) -> None:
    assert TABLE.nearest(path) == NEAREST[path]


# Path and type of the section -> all guesses, best first.
GUESSES: list[tuple[str, str | None, list[str]]] = [
    ("scheduler.params.max_lr", "WarmupLR", ["scheduler.params.warmup_max_lr"]),
    ("scheduler.params.min_lr", "WarmupDecayLR", ["scheduler.params.warmup_min_lr"]),
    ("scheduler.params.max_lr", "OneCycle", ["scheduler.params.cycle_max_lr"]),
    ("scheduler.params.min_lr", "LRRangeTest", ["scheduler.params.lr_range_test_min_lr"]),
    (
        "scheduler.params.max_lr",
        None,
        ["scheduler.params.warmup_max_lr", "scheduler.params.cycle_max_lr"],
    ),
    ("scheduler.params.warmup_max_lr", "OneCycle", []),
    ("scheduler.params.warmup_steps", "WarmupCosineLR", ["scheduler.params.warmup_num_steps"]),
    ("per_device_train_batch_size", None, ["train_micro_batch_size_per_gpu"]),
    ("train_micro_batch_size", None, ["train_micro_batch_size_per_gpu"]),
    ("optimizer.name", None, ["optimizer.type"]),
    ("scheduler.name", None, ["scheduler.type"]),
    ("tensor_parallel.size", None, ["tensor_parallel.autotp_size"]),
]


@pytest.mark.parametrize(("path", "variant", "guesses"), GUESSES)
def test_another_tools_name_means_what_the_section_has_under_it(
    path: str, variant: str | None, guesses: list[str]
) -> None:
    assert TABLE.nearest(path, variant) == guesses


@pytest.mark.parametrize("path", ["name", "size"])
def test_an_ambiguous_name_is_no_parameter_outside_its_section(path: str) -> None:
    assert not {"optimizer.type", "tensor_parallel.autotp_size"} & set(TABLE.nearest(path))


def test_nearest_names_every_home() -> None:
    homes = TABLE.nearest("tensor_parallel.tp_size")
    assert homes[:2] == ["tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"]


def test_nearest_of_a_long_name_is_quick() -> None:
    assert TABLE.nearest("x" * 1_000_000) == []


# path -> added, removed, refused, what takes its place
HISTORIES: dict[str, tuple[str | None, str | None, bool, tuple[str, ...]]] = {
    "amp": (None, "0.19.8", True, ("bf16", "fp16", "torch_autocast")),
    "elasticity": (
        None,
        "0.19.8",
        True,
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    ),
    "curriculum_learning": (
        None,
        "0.19.8",
        True,
        ("data_efficiency.data_sampling.curriculum_learning",),
    ),
    "sparse_gradients": (None, "0.19.8", True, ()),
    "compression_training": (None, "0.19.7", True, ()),
    "nebula": (None, "0.19.7", True, ("checkpoint.writer",)),
    "zero_optimization.mics_shard_size": (
        None,
        "0.19.7",
        True,
        ("zero_optimization.zero_hpz_partition_size",),
    ),
    "zero_optimization.mics_hierarchical_params_gather": (
        None,
        "0.19.7",
        True,
        ("zero_optimization.zero_hpz_partition_size",),
    ),
    "zero_optimization.zeropp_loco_param": (
        None,
        "0.19.8",
        True,
        ("zero_optimization.zero_quantized_gradients",),
    ),
    "optimizer.params[OneBitAdam]": (None, "0.19.7", True, ("optimizer.params[AdamW]",)),
    "elasticity.min_gpus": (None, "0.19.8", False, ()),
    "zero_optimization.zenflow": ("0.17.6", None, False, ()),
    "expert_parallel.enabled": ("0.19.2", None, False, ()),
    "zero_optimization.stage": (None, None, False, ()),
    "never.heard.of": (None, None, False, ()),
}


@pytest.mark.parametrize("path", HISTORIES)
def test_history(path: str) -> None:
    found = history(path)
    newest = TABLE.exact(path)
    is_refused = newest is not None and newest.status == "refused"
    assert (found.added, found.removed, is_refused, found.replaced_by) == HISTORIES[path]


def test_history_of_a_default() -> None:
    newest_first = [
        entry["default"] for _, entry in states_of("gradient_clipping") if entry is not None
    ]
    assert newest_first == sorted(newest_first, reverse=True)
    assert set(newest_first) == {0.0, 1.0}
    assert key("gradient_clipping") == load_table("0.19.3").get("gradient_clipping")
    assert load_table("0.19.2").get("gradient_clipping") == Key(
        **{**vars(key("gradient_clipping")), "default": 0.0}
    )


def test_refused_keys_name_the_fix() -> None:
    for path in TABLE:
        found = TABLE.get(path)
        if found is not None and found.status in ("refused", "deprecated"):
            assert found.replaced_by or found.instead, path
            assert all(TABLE.get(place) is not None for place in found.replaced_by), path


def test_tables_are_small_and_whole() -> None:
    files = sorted(TABLES.glob("*.json"))
    assert sum(file.stat().st_size for file in files) < 600_000
    assert len(load_entries("0.16.9")) > 550
    assert all(len(load_table(release)) > 500 for release in known_releases())


def test_a_plan_and_the_tables_have_the_same_top_level_keys() -> None:
    """The plan cannot import the tables, and has lists of its own."""
    refused = {}
    for path in TABLE.children():
        since = [
            release
            for release, entry in states_of(path)
            if entry and entry.get("status") == "refused"
        ]
        if since:
            refused[path] = since[-1]  # the newest release comes first
    assert {key: release for key, (release, _) in REMOVED.items()} == refused
    assert {path for path in PASSED_THROUGH if path not in TABLE.children()} == set()


@pytest.mark.parametrize("release", ["0.16.9", "0.19.8"])
def test_mup_wants_a_learning_rate(release: str) -> None:
    """mup/optim.py `process_param_groups` reads kwargs["lr"], and 0 where no weight decay is given,
    for AdamW as well.
    """
    for kind in ("MuAdam", "MuAdamW", "MuSGD"):
        assert load_table(release).required(f"optimizer.params[{kind}]") == ("lr",)
        decay = load_table(release).get("optimizer.params.weight_decay", kind)
        assert decay is not None
        assert decay.default == 0.0
