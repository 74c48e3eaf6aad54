"""Offload of optimizer and parameters to host memory or NVMe, and ZenFlow, which builds on it."""

from __future__ import annotations

from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.key_files import NAMES
from framework.dslint.rules.base import Found, rule

_STAGE: Final = "zero_optimization.stage"
_OPTIMIZER: Final = "zero_optimization.offload_optimizer"
_ZENFLOW: Final = "zero_optimization.zenflow"
_SUPER: Final = f"{_OPTIMIZER}.super_offload"
_CORES: Final = f"{_OPTIMIZER}.cpuadam_cores_perc"
_TORCH_ADAMW: Final = NAMES["torch_adamw"]


def _is_partial(facts: Facts) -> bool:
    ratio = facts.number(f"{_OPTIMIZER}.ratio", 1.0)
    return ratio is not None and ratio < 1


@rule()
def partial_offload_needs_cpu_adam(facts: Facts) -> Found:
    """deepspeed/runtime/zero/stage3.py `backup_optimizer`: "Hybrid Optimizer Only Supports DeepSpeedCPUAdam"."""
    if facts.stage == 3 and _is_partial(facts) and facts.offloads_optimizer and facts.uses_cpu_adam is False:
        reason = "a ratio below 1 works with DeepSpeed's own CPU Adam only"
        yield f"{_OPTIMIZER}.ratio", reason, cpu_adam_or(facts, f"{_OPTIMIZER}.ratio: 1.0")


def cpu_adam_or(facts: Facts, otherwise: str) -> str:
    """Return the fix that makes the file's optimizer DeepSpeed's CPU Adam, where settings can, or another one."""
    needed = [] if facts.offloads_optimizer else [f'{_OPTIMIZER}.device: "cpu"']
    if facts.uses_cpu_adam is False and facts.optimizer not in ("adam", "adamw"):
        needed.append('optimizer.type: "AdamW"')
    if facts.flag("optimizer.params.torch_adam"):
        needed.append("optimizer.params.torch_adam: false")
    return f"set {' and '.join(needed)} or {otherwise}" if needed and not facts.given(_ZENFLOW) else f"set {otherwise}"


@rule(since="0.17.5")
def zenflow_intervals(facts: Facts) -> Found:
    """deepspeed/runtime/zenflow/engine.py `configure_zenflow`: strategy and intervals have to fit.

    zenflow_config.py `validate_fields`: "If select_interval is a string, it must be".
    """
    if not facts.given(_ZENFLOW):
        return
    strategy, key = facts.text(f"{_ZENFLOW}.select_strategy", "auto"), f"{_ZENFLOW}.select_interval"
    select, update = facts.get(key, "auto"), facts.get(f"{_ZENFLOW}.update_interval", "auto")
    number = max(update, 1) if isinstance(update, int) else 1
    for name, value in (("select_interval", select), ("update_interval", update)):
        if isinstance(value, str) and value != "auto":
            right = '"auto"' if name == "update_interval" or strategy == "auto" else number
            yield f"{_ZENFLOW}.{name}", "a number or auto belongs here", f"set {_ZENFLOW}.{name}: {right}"
    if strategy == "auto" and isinstance(select, int):
        fix = f'remove {key} or set {_ZENFLOW}.select_strategy: "step"'
        yield key, "the automatic strategy chooses it", fix
    elif strategy in ("step", "epoch") and select == "auto":
        yield key, f"the strategy {strategy} needs a number", f"set {key}: {number}"
    elif strategy == "step" and isinstance(select, int) and isinstance(update, int) and 0 < select < update:
        yield key, f"it must not be smaller than update_interval {update}", f"set {key}: {update}"


@rule(since="0.17.5")
def zenflow_params(facts: Facts) -> Found:
    """deepspeed/runtime/zenflow/zenflow_stage_1_and_2.py `selective_optimizer`: torch's AdamW with all parameters."""
    if not facts.given(_ZENFLOW) or facts.stage not in (1, 2) or not facts.offloads_optimizer:
        return
    if facts.given("optimizer.type") and not facts.given("optimizer.params"):
        reason = "ZenFlow builds a second optimizer from them"
        yield "optimizer.params", reason, "set optimizer.params.lr: 0.001"
    for name in facts.section("optimizer.params"):
        if name not in _TORCH_ADAMW:
            reason = "ZenFlow hands all parameters to an AdamW that does not know it"
            yield f"optimizer.params.{name}", reason, f"remove optimizer.params.{name} or remove {_ZENFLOW}"


@rule("warning", since="0.17.5")
def zenflow_replaces_accumulation(facts: Facts) -> Found:
    """deepspeed/runtime/zenflow/engine.py `configure_zenflow` writes update_interval over the accumulation steps."""
    steps = facts.whole("gradient_accumulation_steps")
    update = facts.get(f"{_ZENFLOW}.update_interval", "auto")
    if facts.given(_ZENFLOW) and steps not in (None, update) and (isinstance(update, int) or update == "auto"):
        yield (
            "gradient_accumulation_steps",
            f"ZenFlow overwrites it with its update_interval, {update}",
            f"set {_ZENFLOW}.update_interval: {steps} or remove gradient_accumulation_steps",
        )
