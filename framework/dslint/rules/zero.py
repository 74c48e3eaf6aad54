"""ZeRO: what its stages allow, refuse, and silently leave alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.rules.base import divisor_below, error, holds, warning
from framework.errors import Problem

_ZERO: Final = "zero_optimization"
# Read at stage 3 only (deepspeed/runtime/engine.py `_configure_zero_optimizer`).
_STAGE_3_KEYS: Final = (
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zero_hpz_partition_size",
    "save_muon_momentum_buffer_in_memory",
    "pipeline_loading_checkpoint",
    "leaf_module",
    "log_trace_cache_warnings",
)
# Read at stages 1 and 2 only.
_STAGE_12_KEYS: Final = (
    "allgather_bucket_size",
    "round_robin_gradients",
    "ignore_unused_parameters",
    "use_multi_rank_bucket_allreduce",
    "parameter_alignment",
)
_NO_BUFFER: Final = 2**61  # elements of four bytes: more than an address
_DEFAULTS: Final = {"zero_hpz_partition_size": 1, "ignore_unused_parameters": True}


def stage_left_out(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/config.py `DeepSpeedZeroConfig`: the stage is 0 unless given, and 0 means no ZeRO."""
    names = [name for name, value in facts.section(_ZERO).items() if name != "stage" and value is not None]
    if names and not facts.given(f"{_ZERO}.stage"):
        yield warning(
            facts,
            "zero-stage-left-out",
            f"{_ZERO}.stage",
            f"left out it is 0: ZeRO is off, and {names[0]} does nothing",
            f"set {_ZERO}.stage: 2",
        )


def zero_as_switch(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/config.py `read_zero_config_deprecated`: true is the old way to write stage 1."""
    if facts.values.get(_ZERO) is True:
        yield warning(facts, "zero-as-switch", _ZERO, "true means stage 1", f'set {_ZERO}: {{"stage": 1}}')


def bucket_too_large(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage_1_and_2.py `reduce_bucket_size` and stage3.py `reduce_bucket_size`: a buffer of that
    size.
    """
    key = f"{_ZERO}.reduce_bucket_size"
    size, is_one_buffer = facts.whole(key), facts.stage == 3 or facts.flag(f"{_ZERO}.contiguous_gradients", True)
    if (
        size is not None
        and size >= _NO_BUFFER
        and facts.stage in (1, 2, 3)
        and is_one_buffer
        and not facts.uses_bf16_optimizer
    ):
        yield error(
            facts, "bucket-too-large", key, "no device has a buffer of so many elements", f"set {key}: 500000000"
        )


def inert_at_stage(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_configure_zero_optimizer`: each stage's optimizer is handed its own keys only."""
    if facts.stage not in (1, 2, 3):
        return  # at stage 0 somebody turned ZeRO off, or `stage_left_out` speaks
    names, needed = (_STAGE_12_KEYS, "2") if facts.stage == 3 else (_STAGE_3_KEYS, "3")
    for name in names:
        key = f"{_ZERO}.{name}"
        value = facts.get(key)
        if value is not None and value is not False and value != _DEFAULTS.get(name):
            yield warning(
                facts,
                "inert-at-stage",
                key,
                f"it does nothing at stage {facts.stage}",
                f"remove {facts.written(key)} or set {_ZERO}.stage: {needed}",
            )


def legacy_stage1(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_configure_zero_optimizer`: asks `zero_legacy_stage1` at every stage above 0."""
    if facts.stage in (1, 2, 3) and facts.flag(f"{_ZERO}.legacy_stage1", False):
        yield error(
            facts,
            "legacy-stage1",
            f"{_ZERO}.legacy_stage1",
            "the first form of stage 1 is gone",
            f"set {_ZERO}.legacy_stage1: false",
        )


def odd_allgather_bucket(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage_1_and_2.py `nccl_start_alignment_factor`: "allgather_bucket_size must be a multiple
    of".
    """
    size = facts.whole(f"{_ZERO}.allgather_bucket_size")
    if facts.stage in (1, 2) and not facts.uses_bf16_optimizer and size and size > 0 and size % 2:
        yield error(
            facts,
            "odd-allgather-bucket",
            f"{_ZERO}.allgather_bucket_size",
            "stages 1 and 2 want an even number",
            f"set {_ZERO}.allgather_bucket_size: {size + 1}",
        )


@holds(since="0.19.7")
def compute_grad_norm_stage(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/config.py `compute_grad_norm_valid`: "supported only with ZeRO Stage 1 or 2"."""
    if facts.flag(f"{_ZERO}.compute_grad_norm", True) is False and facts.stage in (0, 3):
        yield error(
            facts,
            "grad-norm-off-at-stage",
            f"{_ZERO}.compute_grad_norm",
            f"stage {facts.stage} always computes it",
            f"set {_ZERO}.compute_grad_norm: true",
        )


@holds(since="0.19.7")
def compute_grad_norm_for_clipping(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage_1_and_2.py `compute_grad_norm`: "requires gradient_clipping=0", which is 1.0 if left
    out.
    """
    clipping = facts.number("gradient_clipping", 1.0)
    if facts.flag(f"{_ZERO}.compute_grad_norm", True) is not False or facts.stage not in (1, 2) or not clipping:
        return
    if not facts.uses_bf16_optimizer and clipping > 0:
        left_out = "" if facts.given("gradient_clipping") else ", the value when left out,"
        yield error(
            facts,
            "grad-norm-off-with-clipping",
            "gradient_clipping",
            f"clipping at {clipping:g}{left_out} needs the norm that compute_grad_norm: false leaves out",
            f"set gradient_clipping: 0.0 or {_ZERO}.compute_grad_norm: true",
        )


@holds(since="0.19.7")
def compute_grad_norm_elsewhere(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage_1_and_2.py `compute_grad_norm`, engine.py `_do_optimizer_sanity_check`: three
    refusals.
    """
    if facts.flag(f"{_ZERO}.compute_grad_norm", True) is not False or facts.stage not in (1, 2):
        return
    reason = (
        "bf16 with fp32 accumulation at stage 1"
        if facts.uses_bf16_optimizer
        else "ZenFlow"
        if facts.given(f"{_ZERO}.zenflow")
        else "an offloaded optimizer"
        if facts.offloads_optimizer
        else ""
    )
    if reason:
        yield error(
            facts,
            "grad-norm-needed",
            f"{_ZERO}.compute_grad_norm",
            f"{reason} needs the gradient norm",
            f"set {_ZERO}.compute_grad_norm: true",
        )


def prescale_with_reduce_scatter(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage_1_and_2.py `gradient_predivide_factor`, runtime/zero/stage3.py
    `postscale_gradients`.

    At stage 2 a sum instead of a mean is not asked (since 0.19.6).
    """
    sums = facts.since("0.19.6") and str(facts.get("gradient_allreduce_op", "mean")).lower() == "sum"
    if facts.stage not in (2, 3) or not facts.flag(f"{_ZERO}.reduce_scatter", True) or (facts.stage == 2 and sums):
        return
    prescale, factor = facts.flag("prescale_gradients", False), facts.number("gradient_predivide_factor", 1.0)
    for key, wrong, right in (
        ("prescale_gradients", bool(prescale), "false"),
        ("gradient_predivide_factor", factor is not None and factor != 1.0, "1.0"),
    ):
        if wrong:
            yield error(
                facts,
                "prescale-with-reduce-scatter",
                key,
                f"stage {facts.stage} with reduce-scatter cannot do it",
                f"set {_ZERO}.reduce_scatter: false or {key}: {right}",
            )


@holds(since="0.19.4")
def unmanaged_with_overlap(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "supports ZeRO overlap_comm only with ZeRO stage 2"."""
    if facts.flag("managed_gradient_accumulation", True) is not False or facts.stage not in (0, 1):
        return
    if facts.flag(f"{_ZERO}.overlap_comm", False):
        yield error(
            facts,
            "unmanaged-with-overlap",
            f"{_ZERO}.overlap_comm",
            f"stage {facts.stage} cannot overlap communication when the code decides where a batch ends",
            f"set {_ZERO}.overlap_comm: false or managed_gradient_accumulation: true",
        )


@holds(since="0.19.4")
def unmanaged_with_deepcompile(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "managed_gradient_accumulation=False is not supported with
    DeepCompile".
    """
    if facts.flag("managed_gradient_accumulation", True) is False and facts.flag("compile.deepcompile", False):
        yield error(
            facts,
            "unmanaged-with-deepcompile",
            "managed_gradient_accumulation",
            "DeepCompile has to know where a batch ends",
            "set managed_gradient_accumulation: true or compile.deepcompile: false",
        )


@holds(since="0.19.6")
def sum_of_gradients(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `_do_error_check`: 'sum' is not for stage 3, ZenFlow or DeepCompile."""
    if str(facts.get("gradient_allreduce_op", "mean")).lower() != "sum":
        return
    against = [
        ("ZeRO stage 3", facts.stage == 3),
        ("ZenFlow", facts.given(f"{_ZERO}.zenflow")),
        ("DeepCompile", bool(facts.flag("compile.deepcompile", False))),
    ]
    for what, found in against:
        if found:
            yield error(
                facts,
                "sum-of-gradients",
                "gradient_allreduce_op",
                f"{what} averages gradients only",
                'set gradient_allreduce_op: "mean"',
            )


def quantized_gradients_need_reduce_scatter(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage3.py `all2all_process_group`: "reduce_scatter should also be enabled"."""
    quantized = facts.flag(f"{_ZERO}.zero_quantized_gradients", False)
    scatters = facts.flag(f"{_ZERO}.reduce_scatter", True)
    if facts.stage == 3 and quantized and scatters is False and facts.optimizer != "muon":
        yield error(
            facts,
            "quantized-gradients-need-reduce-scatter",
            f"{_ZERO}.reduce_scatter",
            "quantized gradients travel by reduce-scatter",
            f"set {_ZERO}.reduce_scatter: true or {_ZERO}.zero_quantized_gradients: false",
        )


def hpz_divides(facts: Facts) -> Iterator[Problem]:
    """deepspeed/utils/groups.py `_create_zero_param_parallel_group`: the world divides into groups of this size."""
    size, world = facts.whole(f"{_ZERO}.zero_hpz_partition_size", 1), facts.topology.world_size
    if facts.stage == 3 and size and world and 1 < size <= world and world % size:
        fitting = divisor_below(world, size)
        yield error(
            facts,
            "hpz-does-not-divide",
            f"{_ZERO}.zero_hpz_partition_size",
            f"{world} ranks do not divide into groups of {size}",
            f"set {_ZERO}.zero_hpz_partition_size: {fitting}",
        )


def hpz_clamped(facts: Facts) -> Iterator[Problem]:
    """deepspeed/utils/groups.py `_create_zero_param_parallel_group`: `min(group_size, world_size)`."""
    size, world = facts.whole(f"{_ZERO}.zero_hpz_partition_size", 1), facts.topology.world_size
    if facts.stage == 3 and size and world and size > world:
        yield warning(
            facts,
            "hpz-larger-than-world",
            f"{_ZERO}.zero_hpz_partition_size",
            f"there are {world} ranks, and DeepSpeed takes that number without a word",
            f"set {_ZERO}.zero_hpz_partition_size: {world}",
        )


def elastic_checkpoint(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_get_all_zero_checkpoint_state_dicts`: another number of ranks is refused all the
    same.
    """
    if facts.flag(f"{_ZERO}.elastic_checkpoint", False):
        yield warning(
            facts,
            "elastic-checkpoint",
            f"{_ZERO}.elastic_checkpoint",
            "checkpoints still load on the same number of data-parallel ranks only",
            f"set {_ZERO}.elastic_checkpoint: false and convert checkpoints with ds_to_universal",
        )


def deprecated_with_its_heir(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config_utils.py `_process_deprecated_field`: "Cannot provide deprecated parameter"."""
    section = facts.section(_ZERO)
    heirs = {
        "cpu_offload": "offload_optimizer",
        "cpu_offload_param": "offload_param",
        "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
    }
    for old, new in heirs.items():
        if old in section and (new in section or f"stage3_{new}" in section):
            yield error(
                facts, "deprecated-with-its-heir", f"{_ZERO}.{old}", f"{new} is given as well", f"remove {_ZERO}.{old}"
            )
