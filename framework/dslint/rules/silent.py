"""Settings that DeepSpeed accepts silently and treats otherwise, and those that only have an effect from code."""

from __future__ import annotations

from collections.abc import Iterator
from json import dumps
from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.readers import FILLED
from framework.dslint.rules.base import error, holds, note, warning
from framework.errors import Problem

# Sections that do nothing unless `enabled` is true, and have it false by default.
_SWITCHED: Final = (
    "fp16",
    "bf16",
    "torch_autocast",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "flops_profiler",
    "comms_logger",
    "autotuning",
    "hybrid_engine",
    "expert_parallel",
)
# Switches inside them that work without `enabled` (deepspeed/runtime/config.py `_do_error_check` asks them anyway).
_UNSWITCHED: Final = frozenset(
    {"fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states"}
)
_RECOMPUTE: Final = "activation_checkpointing"
_CURRICULUM: Final = "data_efficiency.data_sampling.curriculum_learning"
_RANDOM_LTD: Final = "data_efficiency.data_routing.random_ltd"
_RANDOM_LTD_KEYS: Final = {
    "": (
        "total_layer_num",
        "random_ltd_layer_num",
        "random_ltd_layer_id",
        "model_mask_name",
        "model_type",
        "hidden_state_order",
        "random_ltd_schedule",
    ),
    "random_ltd_schedule.": ("min_value", "max_value", "schedule_type", "schedule_config"),
    "random_ltd_schedule.schedule_config.": ("require_steps", "seq_per_step"),
    "layer_token_lr_schedule.": ("enabled",),
}
_DYNAMIC: Final = "data_efficiency.data_sampling.dynamic_batching"


@holds(since="0.19.3")
def clipping_left_out(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/constants.py `GRADIENT_CLIPPING_DEFAULT`: 0.0 became 1.0 in 0.19.3."""
    off = facts.flag("zero_optimization.compute_grad_norm", True) is False
    if "gradient_clipping" not in facts.values and not off:
        yield warning(
            facts,
            "clipping-left-out",
            "gradient_clipping",
            "left out it is 1.0 since DeepSpeed 0.19.3, and was off before",
            "set gradient_clipping: 1.0 or gradient_clipping: 0.0",
        )


def section_not_enabled(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/precision_config.py `enabled` and its like: false unless given, whatever else the section
    says.
    """
    for name in _SWITCHED:
        keys = [key for key in facts.section(name) if key not in _UNSWITCHED]
        if keys and "enabled" not in keys:
            yield warning(
                facts,
                "section-not-enabled",
                f"{name}.enabled",
                f"left out it is false, and {name} does nothing",
                f"set {name}.enabled: true or remove {facts.written(name)}",
            )


def two_bf16_sections(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/precision_config.py `get_bfloat16_config`: the old name is read only where the new one is
    not.
    """
    if facts.values.get("bf16") is not None and facts.values.get("bfloat16") is not None:
        yield warning(
            facts, "two-bf16-sections", "bfloat16", "bf16 is given as well, and only that is read", "remove bfloat16"
        )


def monitors_have_no_loss(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `step` writes rate and loss scale; `Train/Samples/train_loss` went with 0.18.3."""
    on = [name for name in ("tensorboard", "csv_monitor", "wandb", "comet") if facts.flag(f"{name}.enabled", False)]
    if on and facts.since("0.18.3") and not facts.given("pipeline"):
        yield note(
            facts,
            "monitor-without-loss",
            f"{on[0]}.enabled",
            "the engine writes the learning rate and no loss",
            "write the loss in code",
        )


def activation_checkpointing_waits_for_code(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/activation_checkpointing/checkpointing.py `configure`: only the code calls it."""
    if any(facts.section("activation_checkpointing").values()):
        yield note(
            facts,
            "activation-checkpointing-waits-for-code",
            "activation_checkpointing",
            "nothing is checkpointed until the code uses deepspeed.checkpointing",
            "call deepspeed.checkpointing.configure and use its checkpoint function",
        )


def contiguous_checkpoints(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/activation_checkpointing/checkpointing.py `configure`: "Must specify the number of layers
    with".
    """
    if facts.get(f"{_RECOMPUTE}.contiguous_memory_optimization") is True:
        for name, value in (("number_checkpoints", 24), ("partition_activations", True)):
            if facts.get(f"{_RECOMPUTE}.{name}") in (None, False):
                key = f"{_RECOMPUTE}.{name}"
                yield error(
                    facts,
                    "contiguous-checkpoints",
                    key,
                    "contiguous_memory_optimization needs it",
                    f"set {key}: {dumps(value)} or {_RECOMPUTE}.contiguous_memory_optimization: false",
                )


def checkpoint_writer_needs_launcher(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/model_checkpointing/utils.py `create_universal_parallel_info` reads CROSS_SIZE and
    CROSS_RANK.
    """
    if facts.given("checkpoint.writer"):
        yield note(
            facts,
            "checkpoint-writer-needs-launcher",
            "checkpoint.writer",
            "it reads CROSS_SIZE, which the deepspeed launcher sets and torchrun does not",
            "start with the deepspeed launcher, or set CROSS_SIZE and CROSS_RANK",
        )


def checkpoint_writer_needs_data_parallel(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/model_checkpointing/data_parallel_writer_factory.py `_get_data_parallel_config`: asks for a
    `dp_rank`.

    What it asks has none without an mpu. Stage 3 does not come that far, and a PipelineModule brings its own.
    """
    reads = facts.given("checkpoint.writer") and facts.stage in (0, 1, 2) and not facts.given("pipeline")
    if reads and not facts.given("checkpoint.writer.data_parallel"):
        yield error(
            facts,
            "checkpoint-writer-data-parallel",
            "checkpoint.writer.data_parallel",
            f"left out, DeepSpeed stops at an AttributeError at stage {facts.stage}",
            'set checkpoint.writer.data_parallel: "REPLICA"',
        )


def curriculum_needs_metrics(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/data_pipeline/config.py `get_curriculum_learning`: asked whatever data_efficiency.enabled
    says.
    """
    if facts.get(f"{_CURRICULUM}.enabled", False) and "curriculum_metrics" not in facts.section(_CURRICULUM):
        yield error(
            facts,
            "curriculum-needs-metrics",
            f"{_CURRICULUM}.curriculum_metrics",
            "curriculum learning is enabled",
            f"add {_CURRICULUM}.curriculum_metrics, or set {_CURRICULUM}.enabled: false",
        )


def curriculum_without_parents(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `curriculum_learning_enabled` asks the inner switch alone, not those around it."""
    inner = {
        f"{_CURRICULUM}.enabled": ("data_efficiency", "data_efficiency.data_sampling"),
        f"{_RANDOM_LTD}.enabled": ("data_efficiency", "data_efficiency.data_routing"),
    }
    for key, parents in inner.items():
        off = [name for name in parents if not facts.get(f"{name}.enabled", False)]
        if facts.get(key, False) and off:
            yield warning(
                facts,
                "data-efficiency-half-enabled",
                key,
                f"it works although {off[0]}.enabled is not true",
                f"set {' and '.join(f'{name}.enabled: true' for name in off)} or {key}: false",
            )


def random_ltd_needs(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/data_pipeline/data_routing/scheduler.py `RandomLTDScheduler`: a KeyError for each that is
    missing.

    So do engine.py `random_ltd_initialize` and basic_layer.py `init_config`, and the schedule's `get_value` at the
    first step.
    """
    if not facts.get(f"{_RANDOM_LTD}.enabled", False):
        return
    missing = [
        f"{section}{key}"
        for section, keys in _RANDOM_LTD_KEYS.items()
        for key in keys
        if (not section or facts.given(f"{_RANDOM_LTD}.{section[:-1]}"))
        and key not in facts.section(f"{_RANDOM_LTD}.{section}".removesuffix("."))
    ]
    for key in missing:
        yield error(
            facts,
            "random-ltd-needs",
            f"{_RANDOM_LTD}.{key}",
            "random layer token dropping is enabled and needs it",
            f"add it, or set {_RANDOM_LTD}.enabled: false",
        )


def dynamic_batching_needs_tokens(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/data_pipeline/config.py `get_dynamic_batching`: "Dynamic batching is enabled, so"."""
    if facts.get(f"{_DYNAMIC}.enabled", False) and "max_tokens" not in facts.section(_DYNAMIC):
        yield error(
            facts,
            "dynamic-batching-needs-tokens",
            f"{_DYNAMIC}.max_tokens",
            "dynamic batching is enabled",
            f"set {_DYNAMIC}.enabled: false or {_DYNAMIC}.max_tokens: 8192",
        )


def dynamic_batching_waits_for_code(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/data_pipeline/data_sampling/variable_batch_size_and_lr.py `batch_by_seqlens`: for code to
    call.
    """
    if facts.get(f"{_DYNAMIC}.enabled", False) and "max_tokens" in facts.section(_DYNAMIC):
        yield note(
            facts,
            "dynamic-batching-waits-for-code",
            f"{_DYNAMIC}.enabled",
            "the engine does not read it",
            "build the loader with DeepSpeed's variable_batch_size_and_lr",
        )


def vocabulary_alignment(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `_do_warning_check`: tensor cores like multiples of 8; nothing else reads the key."""
    size = facts.whole("vocabulary_size")
    if size and size > 0 and size % 8:
        yield note(
            facts,
            "vocabulary-alignment",
            "vocabulary_size",
            "tensor cores work on multiples of 8",
            f"pad the vocabulary and set vocabulary_size: {-(-size // 8) * 8}",
        )


def autotuning_folders(facts: Facts) -> Iterator[Problem]:
    """deepspeed/autotuning/config.py `DeepSpeedAutotuningConfig`: "results_dir cannot be empty", enabled or not."""
    for key, default in (("autotuning.results_dir", "autotuning_results"), ("autotuning.exps_dir", "autotuning_exps")):
        if facts.text(key) == "":
            yield error(facts, "autotuning-folder-empty", key, "a folder has a name", f'set {key}: "{default}"')


def profile_as_deep_as_the_model(facts: Facts) -> Iterator[Problem]:
    """deepspeed/profiling/flops_profiler/profiler.py `print_model_aggregated_profile`: one list per depth, up to that
    one.
    """
    depth = facts.whole("flops_profiler.module_depth", -1)
    if facts.flag("flops_profiler.enabled", False) and depth and depth > 2:
        yield note(
            facts,
            "flops-profiler-depth",
            "flops_profiler.module_depth",
            "a model whose modules are nested less deep stops in a KeyError when it is profiled",
            "set flops_profiler.module_depth: -1 for all depths",
        )


def _pins_memory(facts: Facts) -> bool:
    return (facts.text("checkpoint.writer.type", "FAST") or "").upper() == "FAST"


def needs_cuda(facts: Facts) -> Iterator[Problem]:
    """deepspeed/ops/op_builder/cpu/no_impl.py `NotImplementedBuilder`: "This op had not been implemented on CPU
    backend.".
    """
    if facts.topology.device != "cpu":
        return
    zero = "zero_optimization"
    found = {
        "optimizer.type": (
            '"AdamW"',
            facts.optimizer == "lamb" or (facts.optimizer == "lion" and not facts.offloads_optimizer),
        ),
        f"{zero}.zero_quantized_weights": (
            "false",
            facts.stage == 3 and facts.flag(f"{zero}.zero_quantized_weights", False),
        ),
        "optimizer.params.capturable": ("false", facts.flag("optimizer.params.capturable", False)),
        "checkpoint.writer.type": ('"PYTHON"', facts.given("checkpoint.writer") and _pins_memory(facts)),
        f"{zero}.zero_quantized_nontrainable_weights": (
            "false",
            facts.stage == 3 and facts.flag(f"{zero}.zero_quantized_nontrainable_weights", False),
        ),
        f"{zero}.offload_optimizer.super_offload": (
            "false",
            facts.stage == 3 and facts.flag(f"{zero}.offload_optimizer.super_offload", False),
        ),
        f"{zero}.stage": ("2", facts.stage == 3 and facts.given(f"{zero}.zenflow") and facts.offloads_optimizer),
        "aio.use_gds": ("false", facts.flag("aio.use_gds", False)),
    }
    for key, (right, wrong) in found.items():
        if wrong:
            yield error(facts, "needs-cuda", key, "DeepSpeed has no CPU form of it", f"set {key}: {right}")


# Where "auto" is a value of DeepSpeed's own.
_AUTO_HAS_MEANING: Final = (
    "data_types.keep_in_fp32_modules",
    "pipeline.stages",
    "zero_optimization.zenflow.select_strategy",
    "zero_optimization.zenflow.select_interval",
    "zero_optimization.zenflow.update_interval",
    *(
        f"expert_parallel.{name}"
        for name in (
            "score_func",
            "score_apply",
            "top_k",
            "routed_scaling_factor",
            "combine_impl",
            "row_weighting_impl",
        )
    ),
)
# Read by hand as a truth value: any text is true. `activation_checkpointing` is not read at all without code.
_AUTO_IS_TRUE: Final = (
    "activation_checkpointing.",
    "prescale_gradients",
    "memory_breakdown",
    "dump_state",
    "disable_python_gc",
    "dataloader_drop_last",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "disable_allgather",
    "managed_gradient_accumulation",
    "use_data_before_expert_parallelism",
    "torch_autocast.enabled",
    "optimizer.legacy_fusion",
    "optimizer.params.torch_adam",
    "optimizer.params.adam_w_mode",
    # before 0.17.1, where a model reads them
    "fp16.enabled",
    "fp16.auto_cast",
    "fp16.consecutive_hysteresis",
    "fp16.fp16_master_weights_and_grads",
    "bf16.",
    "bfloat16.",
)
_DEEPEST: Final = 12


def auto_value(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config_utils.py `DeepSpeedConfigModel`: drops "auto"; keys read by hand keep the text."""
    for path in _autos(facts.values, "", 0):
        section = path.partition(".")[0]
        if path in _AUTO_HAS_MEANING:
            continue
        known = path in FILLED
        fix = "write the value; " + (
            "Hugging Face's Trainer and Accelerate fill it in" if known else "Hugging Face does not fill it in either"
        )
        if facts.is_lax(path) and path not in (section, "timers.throughput"):
            yield warning(facts, "auto-value", path, "DeepSpeed drops it and takes its default", fix)
        elif path.startswith(_AUTO_IS_TRUE):
            yield warning(facts, "auto-value", path, "DeepSpeed takes the text for true", fix)
        else:
            yield error(facts, "auto-value", path, "DeepSpeed takes the text itself, and breaks on it", fix)


def _autos(value: object, path: str, depth: int) -> Iterator[str]:
    """Paths of all texts "auto" that stand as values."""
    if isinstance(value, str) and value == "auto":
        yield path
    elif depth > _DEEPEST:
        return
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _autos(item, f"{path}.{name}" if path else str(name), depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _autos(item, f"{path}.{index}", depth + 1)
