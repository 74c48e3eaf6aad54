"""ZeRO: what its stages allow, refuse, and silently leave alone; offload to host memory or NVMe,
and ZenFlow, which builds on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deepspeed_lint.facts import Facts
from deepspeed_lint.key_files import NAMES
from deepspeed_lint.keys import load_table
from deepspeed_lint.rules.base import Found, divisor_below, rule

_ZERO: Final = "zero_optimization"
_STAGE: Final = f"{_ZERO}.stage"
_NORM: Final = f"{_ZERO}.compute_grad_norm"
_SCATTER: Final = f"{_ZERO}.reduce_scatter"
_HPZ: Final = f"{_ZERO}.zero_hpz_partition_size"
# Read at stage 3 only (deepspeed/runtime/engine.py `_configure_zero_optimizer`), as all keys named
# stage3_...
_STAGE_3_KEYS: Final = NAMES["stage_3"]
# Read at stages 1 and 2 only.
_STAGE_12_KEYS: Final = NAMES["stages_1_and_2"]
_DEFAULTS: Final = {"zero_hpz_partition_size": 1, "ignore_unused_parameters": True}
_HEIRS: Final = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
}


@rule("warning")
def zero_stage_left_out(facts: Facts) -> Found:
    """deepspeed/runtime/zero/config.py `DeepSpeedZeroConfig`: the stage is 0 unless given, and 0
    means no ZeRO.
    """
    names = [
        name
        for name, value in facts.section(_ZERO).items()
        if name != "stage" and value is not None
    ]
    if names and not facts.given(_STAGE):
        yield (
            _STAGE,
            f"left out it is 0: ZeRO is off, and {names[0]} does nothing",
            f"set {_STAGE}: 2",
        )


@rule("warning")
def zero_as_switch(facts: Facts) -> Found:
    """deepspeed/runtime/zero/config.py `read_zero_config_deprecated`: true is the old way to write
    stage 1.
    """
    if facts.values.get(_ZERO) is True:
        yield _ZERO, "true means stage 1", f'set {_ZERO}: {{"stage": 1}}'


@rule("warning")
def inert_at_stage(facts: Facts) -> Found:
    """deepspeed/runtime/engine.py `_configure_zero_optimizer`: each stage's optimizer is handed its
    own keys only.
    """
    if not facts.stage:
        return  # ZeRO was turned off, or `zero_stage_left_out` speaks
    needed = 2 if facts.stage == 3 else 3
    for key in _keys_of_stage(needed):
        if _asks_for_something(facts, key):
            fix = f"remove {facts.written(key)} or set {_STAGE}: {needed}"
            yield key, f"it does nothing at stage {facts.stage}", fix


def _asks_for_something(facts: Facts, key: str) -> bool:
    """Check whether a key is given, and neither false nor at its default."""
    value = facts.get(key)
    return value is not None and value is not False and value != _DEFAULTS.get(_name(key))


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _keys_of_stage(stage: int) -> list[str]:
    """Return the keys that are read at stage 3 only, or at stages 1 and 2 only."""
    if stage != 3:
        return [f"{_ZERO}.{name}" for name in _STAGE_12_KEYS]
    prefix = f"{_ZERO}.stage3_"
    keys = [key for key in load_table().children(_ZERO) if key.startswith(prefix)]
    return keys + [f"{_ZERO}.{name}" for name in _STAGE_3_KEYS]


@rule()
def odd_allgather_bucket(facts: Facts) -> Found:
    """deepspeed/runtime/zero/stage_1_and_2.py `nccl_start_alignment_factor`: "allgather_bucket_size
    must be a".
    """
    key = f"{_ZERO}.allgather_bucket_size"
    size = facts.whole(key) or 0
    if _uses_stages_1_and_2(facts) and size > 0 and size % 2:
        yield key, "stages 1 and 2 want an even number", f"set {key}: {size + 1}"


def _uses_stages_1_and_2(facts: Facts) -> bool:
    """Check whether the optimizer of stage_1_and_2.py takes the step."""
    return facts.stage in (1, 2) and not facts.uses_bf16_optimizer


@rule(since="0.19.7")
def grad_norm_off_with_clipping(facts: Facts) -> Found:
    """deepspeed/runtime/zero/stage_1_and_2.py `compute_grad_norm`: "requires gradient_clipping=0";
    left out it is 1.
    """
    key = "gradient_clipping"
    clipping = facts.number(key, 1.0) or 0
    if clipping > 0 and facts.flag(_NORM, True) is False and _uses_stages_1_and_2(facts):
        left_out = "" if facts.given(key) else ", the value when left out,"
        reason = (
            f"clipping at {clipping:g}{left_out} needs the norm that compute_grad_norm: "
            "false leaves out"
        )
        yield key, reason, f"set {key}: 0.0 or {_NORM}: true"


@rule()
def prescale_with_reduce_scatter(facts: Facts) -> Found:
    """deepspeed/runtime/zero/stage_1_and_2.py `gradient_predivide_factor` and stage3.py
    `postscale_gradients`.
    """
    if not _checks_scaling(facts) or not facts.flag(_SCATTER, True):
        return
    reason = f"stage {facts.stage} with reduce-scatter cannot do it"
    key = "prescale_gradients"
    if facts.flag(key):
        yield key, reason, f"set {_SCATTER}: false or {key}: false"
    key = "gradient_predivide_factor"
    if facts.number(key, 1.0) not in (None, 1.0):
        yield key, reason, f"set {_SCATTER}: false or {key}: 1.0"


def _checks_scaling(facts: Facts) -> bool:
    """Check whether DeepSpeed looks at the scaling of gradients. At stage 2 a sum instead of a mean
    is not checked (since 0.19.6).
    """
    if facts.stage == 2:
        return not (facts.since("0.19.6") and facts.sums_gradients)
    return facts.stage == 3


@rule()
def hpz_does_not_divide(facts: Facts) -> Found:
    """deepspeed/utils/groups.py `_create_zero_param_parallel_group`: the world divides into groups
    of this size.
    """
    size = _hpz_size(facts)
    world = facts.world_size or 0
    if 1 < size <= world and world % size:
        reason = f"{world} ranks do not divide into groups of {size}"
        yield _HPZ, reason, f"set {_HPZ}: {divisor_below(world, size)}"


def _hpz_size(facts: Facts) -> int:
    """Return the size of secondary partitions, which stage 3 has; 0 for none."""
    if facts.stage == 3:
        return facts.whole(_HPZ, 1) or 0
    return 0


@rule("warning")
def hpz_larger_than_world(facts: Facts) -> Found:
    """deepspeed/utils/groups.py `_create_zero_param_parallel_group`: `min(group_size,
    world_size)`.
    """
    world = facts.world_size
    if world and _hpz_size(facts) > world:
        reason = f"there are {world} ranks, and DeepSpeed takes that number without a word"
        yield _HPZ, reason, f"set {_HPZ}: {world}"


@rule()
def deprecated_with_its_heir(facts: Facts) -> Found:
    """deepspeed/runtime/config_utils.py `_process_deprecated_field`: "Cannot provide deprecated
    parameter".
    """
    section = facts.section(_ZERO)
    for old, new in _HEIRS.items():
        if old in section and not section.keys().isdisjoint({new, f"stage3_{new}"}):
            yield f"{_ZERO}.{old}", f"{new} is given as well", f"remove {_ZERO}.{old}"


_OPTIMIZER: Final = "zero_optimization.offload_optimizer"
_ZENFLOW: Final = "zero_optimization.zenflow"
_SELECT: Final = f"{_ZENFLOW}.select_interval"
_UPDATE: Final = f"{_ZENFLOW}.update_interval"
_TORCH_ADAMW: Final = NAMES["torch_adamw"]


def _is_partial(facts: Facts) -> bool:
    ratio = facts.number(f"{_OPTIMIZER}.ratio", 1.0)
    return ratio is not None and ratio < 1


@rule()
def partial_offload_needs_cpu_adam(facts: Facts) -> Found:
    """deepspeed/runtime/zero/stage3.py `backup_optimizer`: "Hybrid Optimizer Only Supports
    DeepSpeedCPUAdam".
    """
    if facts.stage != 3 or not facts.offloads_optimizer:
        return
    if _is_partial(facts) and facts.uses_cpu_adam is False:
        reason = "a ratio below 1 works with DeepSpeed's own CPU Adam only"
        yield f"{_OPTIMIZER}.ratio", reason, cpu_adam_or(facts, f"{_OPTIMIZER}.ratio: 1.0")


def cpu_adam_or(facts: Facts, otherwise: str) -> str:
    """Return the fix that makes the file's optimizer DeepSpeed's CPU Adam, where settings can, or
    another one.
    """
    needed = list(_needed_for_cpu_adam(facts))
    if needed and not facts.given(_ZENFLOW):
        return f"set {' and '.join(needed)} or {otherwise}"
    return f"set {otherwise}"


def _needed_for_cpu_adam(facts: Facts) -> Iterator[str]:
    """Yield the settings that are missing for DeepSpeed's CPU Adam."""
    if not facts.offloads_optimizer:
        yield f'{_OPTIMIZER}.device: "cpu"'
    if facts.uses_cpu_adam is False and facts.optimizer not in ("adam", "adamw"):
        yield 'optimizer.type: "AdamW"'
    if facts.flag("optimizer.params.torch_adam"):
        yield "optimizer.params.torch_adam: false"


@rule(since="0.17.5")
def zenflow_intervals(facts: Facts) -> Found:
    """deepspeed/runtime/zenflow/engine.py `configure_zenflow`: strategy and intervals have to fit.

    zenflow_config.py `validate_fields`: "If select_interval is a string, it must be".
    """
    if not facts.given(_ZENFLOW):
        return
    strategy = facts.text(f"{_ZENFLOW}.select_strategy", "auto")
    select = facts.get(_SELECT, "auto")
    update = facts.get(_UPDATE, "auto")
    number = max(update, 1) if isinstance(update, int) else 1
    reason = "a number or auto belongs here"
    if _is_other_text(select):
        right = '"auto"' if strategy == "auto" else number
        yield _SELECT, reason, f"set {_SELECT}: {right}"
    if _is_other_text(update):
        yield _UPDATE, reason, f'set {_UPDATE}: "auto"'
    if strategy == "auto" and isinstance(select, int):
        fix = f'remove {_SELECT} or set {_ZENFLOW}.select_strategy: "step"'
        yield _SELECT, "the automatic strategy chooses it", fix
    elif strategy in ("step", "epoch") and select == "auto":
        yield _SELECT, f"the strategy {strategy} needs a number", f"set {_SELECT}: {number}"
    elif strategy == "step" and _is_smaller(select, update):
        reason = f"it must not be smaller than update_interval {update}"
        yield _SELECT, reason, f"set {_SELECT}: {update}"


def _is_smaller(select: object, update: object) -> bool:
    """Check whether both intervals are numbers, and the first one is positive and smaller."""
    return isinstance(select, int) and isinstance(update, int) and 0 < select < update


def _is_other_text(value: object) -> bool:
    return isinstance(value, str) and value != "auto"


@rule(since="0.17.5")
def zenflow_params(facts: Facts) -> Found:
    """deepspeed/runtime/zenflow/zenflow_stage_1_and_2.py `selective_optimizer`: torch's AdamW with
    all parameters.
    """
    if not _has_selective_optimizer(facts):
        return
    if facts.given("optimizer.type") and not facts.given("optimizer.params"):
        reason = "ZenFlow builds a second optimizer from them"
        yield "optimizer.params", reason, "set optimizer.params.lr: 0.001"
    for name in facts.section("optimizer.params"):
        if name not in _TORCH_ADAMW:
            reason = "ZenFlow hands all parameters to an AdamW that does not know it"
            yield (
                f"optimizer.params.{name}",
                reason,
                f"remove optimizer.params.{name} or remove {_ZENFLOW}",
            )


def _has_selective_optimizer(facts: Facts) -> bool:
    return facts.given(_ZENFLOW) and facts.stage in (1, 2) and facts.offloads_optimizer


@rule("warning", since="0.17.5")
def zenflow_replaces_accumulation(facts: Facts) -> Found:
    """deepspeed/runtime/zenflow/engine.py `configure_zenflow` writes update_interval over the
    accumulation steps.
    """
    steps = facts.whole("gradient_accumulation_steps")
    update = facts.get(_UPDATE, "auto")
    is_valid = isinstance(update, int) or update == "auto"
    if facts.given(_ZENFLOW) and is_valid and steps not in (None, update):
        yield (
            "gradient_accumulation_steps",
            f"ZenFlow overwrites it with its update_interval, {update}",
            f"set {_UPDATE}: {steps} or remove gradient_accumulation_steps",
        )
