"""Tensor, pipeline and expert parallelism, as far as the JSON holds them.

A `pipeline` section only hints that the model is a PipelineModule. If it is not, the section does nothing, so what
follows from the hint is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.rules.base import divisor_below, error, holds, note, warning
from framework.errors import Problem
from framework.text.typos import nearest

_EP: Final = "expert_parallel"
TP_PRESETS: Final = ("bloom", "chatglm", "deepseek_v2", "llama", "mixtral", "phi3", "qwen2")


def tensor_parallel_fits(facts: Facts) -> Iterator[Problem]:
    """deepspeed/utils/groups.py `_init_tp_mesh_device`: the world divides into groups of this size, or no word is
    said.
    """
    size, world = facts.whole("tensor_parallel.autotp_size", 0), facts.topology.world_size
    if size and size > 0 and world and world % size:
        yield error(
            facts,
            "tensor-parallel-does-not-fit",
            "tensor_parallel.autotp_size",
            f"{world} ranks do not divide into groups of {size}",
            f"set tensor_parallel.autotp_size: {divisor_below(world, size)}",
        )


def tensor_parallel_below_0(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `autotp_size`: whatever is not above 1 is off."""
    size = facts.whole("tensor_parallel.autotp_size", 0)
    if size is not None and size < 0:
        yield warning(
            facts,
            "tensor-parallel-below-0",
            "tensor_parallel.autotp_size",
            "a size below 0 is off, without a word",
            "set tensor_parallel.autotp_size: 0",
        )


@holds(since="0.18.6")
def tensor_parallel_sizes_agree(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_apply_autotp_partitioning`: "does not match tensor_parallel.autotp_size"."""
    size, other = facts.whole("tensor_parallel.autotp_size", 0), facts.whole("tensor_parallel.tp.tp_size", 1)
    if size and size > 1 and other is not None and other not in (1, size):
        yield error(
            facts,
            "tensor-parallel-sizes",
            "tensor_parallel.tp.tp_size",
            f"autotp_size says {size}",
            f"set tensor_parallel.tp.tp_size: {size} or tensor_parallel.autotp_size: {other}",
        )


def tensor_parallel_preset(facts: Facts) -> Iterator[Problem]:
    """deepspeed/module_inject/autotp_config.py `get_preset`: an unknown name is None, and nobody hears of it."""
    name = facts.text("tensor_parallel.preset_model")
    if name and name.lower() not in TP_PRESETS:
        key, guess = "tensor_parallel.preset_model", nearest(name, TP_PRESETS) or "llama"
        yield warning(
            facts,
            "tensor-parallel-preset",
            key,
            "there is no such preset, and DeepSpeed goes on without one",
            f'set {key}: "{guess}" or remove {key}',
        )


def pipeline_with_zero(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/pipe/engine.py `PipelineEngine`: "ZeRO-2 and ZeRO-3 are incompatible with pipeline
    parallelism".
    """
    if facts.given("pipeline") and facts.stage in (2, 3):
        yield warning(
            facts,
            "pipeline-with-zero",
            "zero_optimization.stage",
            f"a PipelineModule refuses stage {facts.stage}, and other models do not read the pipeline section",
            "set zero_optimization.stage: 1 or remove pipeline",
        )


def pipeline_with_tensor_parallel(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/pipe/engine.py `dp_world_size`: the two disagree about the data-parallel ranks, or hang
    later.
    """
    size = facts.whole("tensor_parallel.autotp_size", 0)
    if facts.given("pipeline") and size and size > 1:
        yield warning(
            facts,
            "pipeline-with-tensor-parallel",
            "tensor_parallel.autotp_size",
            "a PipelineModule with AutoTP stops at start, or hangs in its first batch",
            "set tensor_parallel.autotp_size: 0 or remove pipeline",
        )


def pipeline_needs_steps_per_print(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/pipe/engine.py `_exec_optimizer_step`: `global_steps % self.steps_per_print()` with None."""
    timed = facts.flag("wall_clock_breakdown", False) or facts.flag("flops_profiler.enabled", False)
    if facts.given("pipeline") and timed and not facts.given("steps_per_print"):
        yield warning(
            facts,
            "pipeline-needs-steps-per-print",
            "steps_per_print",
            "a PipelineModule that is timed divides by it in its first step, and it has no default",
            "set steps_per_print: 10",
        )


@holds(since="0.19.4")
def pipeline_unmanaged(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "is not supported with pipeline parallelism"."""
    if facts.given("pipeline") and facts.flag("managed_gradient_accumulation", True) is False:
        yield warning(
            facts,
            "pipeline-unmanaged",
            "managed_gradient_accumulation",
            "a PipelineModule decides itself where a batch ends",
            "set managed_gradient_accumulation: true or remove pipeline",
        )


def pipeline_overlap(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_configure_zero_optimizer`: "does not support overlapped communication"."""
    if facts.given("pipeline") and facts.stage == 1 and facts.flag("zero_optimization.overlap_comm", False):
        yield warning(
            facts,
            "pipeline-overlap",
            "zero_optimization.overlap_comm",
            "a PipelineModule turns it off",
            "set zero_optimization.overlap_comm: false",
        )


def pipeline_bf16_checkpoint(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/bf16_optimizer.py `load_state_dict`: KeyError '0' for what a pipeline saved without ZeRO."""
    if facts.given("pipeline") and facts.model_dtype == "bf16" and facts.stage == 0:
        yield warning(
            facts,
            "pipeline-bf16-checkpoint",
            "zero_optimization.stage",
            "checkpoints of a PipelineModule in bf16 without ZeRO are written and cannot be loaded",
            "set zero_optimization.stage: 1",
        )


@holds(since="0.19.2")
def expert_parallel_fits(facts: Facts) -> Iterator[Problem]:
    """deepspeed/module_inject/auto_ep_folding.py `build_folding_spec`: both widths divide the world."""
    if not facts.flag(f"{_EP}.enabled", False) or not facts.topology.world_size:
        return
    size, experts, world = facts.whole(f"{_EP}.autoep_size", 1), _etp(facts), facts.topology.world_size
    if size and experts and size > 0 and experts > 0 and world % (size * experts):
        yield error(
            facts,
            "expert-parallel-does-not-fit",
            f"{_EP}.autoep_size",
            f"{world} ranks do not divide into groups of {size * experts}",
            f"set {_EP}.autoep_size: {divisor_below(world, size + 1)}",
        )


def _etp(facts: Facts) -> int | None:
    return facts.whole(f"{_EP}.expert_tensor_parallel_size", 1)


@holds(since="0.19.2")
def expert_tensor_parallel(facts: Facts) -> Iterator[Problem]:
    """deepspeed/module_inject/auto_ep_folding.py `validate_folding_global`: "is reserved for expert-internal"."""
    size = _etp(facts)
    if facts.flag(f"{_EP}.enabled", False) and size is not None and size > 1:
        yield error(
            facts,
            "expert-tensor-parallel",
            f"{_EP}.expert_tensor_parallel_size",
            "it is not built yet",
            f"set {_EP}.expert_tensor_parallel_size: 1",
        )


@holds(since="0.19.3")
def expert_with_tensor_parallel(facts: Facts) -> Iterator[Problem]:
    """deepspeed/module_inject/auto_ep_folding.py `validate_folding_global`: what AutoEP and AutoTP do not do
    together.
    """
    size = facts.whole("tensor_parallel.autotp_size", 0)
    if not facts.flag(f"{_EP}.enabled", False) or not size or size < 2:
        return
    sequence = facts.whole("sequence_parallel_size", 1)
    offloaded = [part for part in ("offload_optimizer", "offload_param") if facts.given(f"zero_optimization.{part}")]
    refused = {
        "compile.deepcompile": ("false", facts.flag("compile.deepcompile", False)),
        "sequence_parallel_size": ("1", sequence and sequence > 1 and facts.given("data_parallel_size")),
        f"{_EP}.autoep_size": (str(size), facts.whole(f"{_EP}.autoep_size", 1) == 1),
        "use_data_before_expert_parallelism": ("false", facts.flag("use_data_before_expert_parallelism", False)),
        f"{_EP}.async_split_plan": (
            "false",
            facts.flag(f"{_EP}.async_split_plan", False) and facts.whole(f"{_EP}.autoep_size", 1) != 1,
        ),
        f"{_EP}.combine_impl": ('"auto"', facts.text(f"{_EP}.combine_impl") == "fused_weighted_sum"),
    }
    for key, (right, found) in refused.items():
        if found:
            yield error(
                facts,
                "expert-with-tensor-parallel",
                key,
                f"AutoEP with AutoTP (autotp_size {size}) does not do it",
                f"set {key}: {right} or tensor_parallel.autotp_size: 1",
            )
    for part in offloaded:
        yield error(
            facts,
            "expert-with-tensor-parallel",
            f"zero_optimization.{part}",
            f"AutoEP with AutoTP (autotp_size {size}) refuses offload, the mere section",
            f"remove zero_optimization.{part} or set tensor_parallel.autotp_size: 1",
        )


@holds(since="0.19.3")
def presets_agree(facts: Facts) -> Iterator[Problem]:
    """deepspeed/module_inject/auto_ep_folding.py `validate_folding_global`: "must match when both are set"."""
    tensor, expert = facts.text("tensor_parallel.preset_model"), facts.text(f"{_EP}.preset_model")
    if facts.flag(f"{_EP}.enabled", False) and tensor and expert and tensor != expert:
        yield error(
            facts,
            "presets-differ",
            f"{_EP}.preset_model",
            f"tensor_parallel.preset_model is {tensor}",
            f"remove tensor_parallel.preset_model or remove {_EP}.preset_model",
        )


@holds(since="0.19.2")
def expert_parallel_at_stage_3(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_validate_zero3_moe_compatibility`: asked when a layer of the model matches."""
    if not facts.flag(f"{_EP}.enabled", False) or facts.stage != 3:
        return
    hpz, sequence = (
        facts.whole("zero_optimization.zero_hpz_partition_size", 1),
        facts.whole("sequence_parallel_size", 1),
    )
    refused = {
        "zero_optimization.zero_quantized_gradients": (
            "false",
            facts.flag("zero_optimization.zero_quantized_gradients", False),
        ),
        "zero_optimization.zero_hpz_partition_size": ("1", hpz is not None and hpz > 1),
        "sequence_parallel_size": ("1", sequence and sequence > 1 and facts.given("data_parallel_size")),
    }
    for key, (right, found) in refused.items():
        if found:
            yield note(
                facts,
                "expert-parallel-at-stage-3",
                key,
                "AutoEP at stage 3 refuses it once it finds an expert layer",
                f"set {key}: {right}",
            )


@holds(since="0.19.8")
def expert_options(facts: Facts) -> Iterator[Problem]:
    """deepspeed/module_inject/auto_ep_config.py `validate_autoep_config`: options that need or exclude each other."""
    if not facts.flag(f"{_EP}.enabled", False):
        return
    backend, size = facts.text(f"{_EP}.comm_backend", "comm"), facts.whole(f"{_EP}.autoep_size", 1)
    tokens = facts.whole(f"{_EP}.comm_max_tokens_per_rank", 0)
    groups, limited = facts.whole(f"{_EP}.num_expert_groups"), facts.whole(f"{_EP}.num_limited_groups")
    found: list[tuple[str, str, str]] = []
    if facts.text(f"{_EP}.gate_up_impl") == "fused" and facts.flag(f"{_EP}.use_grouped_mm", True) is False:
        found.append(
            (
                "gate_up_impl",
                "fused projections need use_grouped_mm",
                f'set {_EP}.use_grouped_mm: true or {_EP}.gate_up_impl: "separate"',
            )
        )
    if facts.text(f"{_EP}.row_weighting_impl") == "fused" and (backend == "comm" or size == 1):
        found.append(
            (
                "row_weighting_impl",
                "it is fused in DeepEP's route only, over more than one rank",
                f'set {_EP}.row_weighting_impl: "auto"',
            )
        )
    if backend == "deepep" and tokens == 0:
        found.append(
            (
                "comm_max_tokens_per_rank",
                "DeepEP needs to know the most tokens of one rank",
                f"set {_EP}.comm_max_tokens_per_rank: 8192",
            )
        )
    if backend == "deepep" and size and size > 1 and facts.text(f"{_EP}.combine_impl") == "fused_weighted_sum":
        found.append(("combine_impl", "DeepEP already sums the rows", f'set {_EP}.combine_impl: "auto"'))
    if groups and limited and groups > 0 and limited > groups:
        found.append(("num_limited_groups", f"there are {groups} groups", f"set {_EP}.num_limited_groups: {groups}"))
    for name, reason, fix in found:
        yield error(facts, "expert-options", f"{_EP}.{name}", reason, fix)
