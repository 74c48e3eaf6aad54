"""Keys under `deepspeed:` that DeepSpeed reads, and that have no effect in a run.

What is not listed here and not refused has an effect: `tests/plan/rules/test_passed_keys.py` trains
with each of them and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.compiling import uses_deepcompile
from framework.plan.rules.base import Found, is_on, rule
from framework.plan.rules.passthrough import TABLE, not_in_a_run, paths_of, refusal_of
from framework.plan.zero_plus_plus import passed_zero


@rule("inert-in-a-run", "note")
def passed_without_effect(config: RunConfig, cluster: Cluster) -> Found:
    """Find keys that DeepSpeed reads, and that have no effect in this run."""
    # beside profile.communication it is a clash, which rules/schedule.py `profile_steps` finds
    is_profiled = config.profile is not None and config.profile.communication
    may_be_printed = bool(config.callbacks) or is_profiled
    if not may_be_printed and _counts_silently(config.deepspeed.get("comms_logger")):
        reason = "it counts, and nothing prints the counts"
        instead = "write profile: {steps: 10-11, communication: true} in its place"
        fix = f"{instead}, or call deepspeed.comm.log_summary() in a callback"
        key = "deepspeed.comms_logger.enabled"
        yield Problem("inert-in-a-run", reason, fix, key, True, severity="note")
    has_zero = config.zero.stage > 0  # `_of_zero_at_stage_0` has a note for each of its keys else
    if has_zero:
        yield from _quantized_within_host(passed_zero(config), cluster)
    for row in TABLE["inert"]:
        is_met = _NEEDS[row["needs"]] if "needs" in row else _never
        if not is_met(config):
            yield from _inert_of_row(config, row, has_zero=has_zero)
    yield from _of_zero_at_stage_0(config)


def _inert_of_row(config: RunConfig, row: Mapping[str, Any], *, has_zero: bool) -> Found:
    """Find the keys of a row of the table that the config has."""
    for key in row["keys"]:
        if key.startswith("zero_optimization.") and not has_zero:
            continue
        value = _given(config, key)
        if _asks_for_something(key, value):
            yield _inert(key, value, row["reason"], row.get("fix", "remove it"))


def _given(config: RunConfig, key: str) -> Any:
    """Return what stands under `deepspeed:` at a dotted key, or None."""
    value: Any = config.deepspeed
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def _inert(key: str, value: Any, reason: str, fix: str) -> Problem:
    return Problem("inert-in-a-run", reason, fix, f"deepspeed.{key}", value, severity="note")


def _asks_for_something(key: str, value: Any) -> bool:
    """Check whether a key is given, and not only to switch its own section off.

    A section with a key that is refused has its error already.
    """
    if not isinstance(value, dict):
        return value not in (None, "auto")
    paths = list(paths_of(value, key))
    if any(not_in_a_run(path, one) for path, one in paths):
        return False
    return not all(_is_switched_off(path, one) for path, one in paths)


def _is_switched_off(path: str, value: Any) -> bool:
    if path.endswith(".enabled") and value is False:
        return True
    return path in TABLE["not_in_a_run"] or value == "auto"


def _never(config: RunConfig) -> bool:
    return False


def _has_nvme(config: RunConfig) -> bool:
    return "nvme" in (config.zero.offload_optimizer.device, config.zero.offload_param.device)


def _sums_by_all_reduce(config: RunConfig) -> bool:
    return config.zero.stage != 1 or not config.zero.reduce_scatter


def _recomputes_stages(config: RunConfig) -> bool:
    return config.parallel.pipe > 1 and config.training.recompute_every > 0


def _casts_buffers(config: RunConfig) -> bool:
    types = config.deepspeed.get("data_types")
    return isinstance(types, dict) and "buffer_dtype" in types


# What a key of the table needs to have an effect -> whether a run has it.
_NEEDS: Final[Mapping[str, Callable[[RunConfig], bool]]] = {
    "offload to NVMe": _has_nvme,
    "weights on NVMe": lambda config: config.zero.offload_param.device == "nvme",
    "the profiler of operations": lambda config: is_on(_given(config, "flops_profiler"), "enabled"),
    "the log of collectives": lambda config: is_on(_given(config, "comms_logger"), "enabled"),
    "the throughput timer": lambda config: is_on(_given(config, "timers.throughput"), "enabled"),
    "a pipeline": lambda config: config.parallel.pipe > 1,
    "recomputed stages": _recomputes_stages,
    "gradients by all-reduce": _sums_by_all_reduce,
    "another type of buffers": _casts_buffers,
    "DeepCompile": lambda config: uses_deepcompile(config),
    "stage 3": lambda config: config.zero.stage == 3,
    "stage 1 or 2": lambda config: config.zero.stage in (1, 2),
}


def _of_zero_at_stage_0(config: RunConfig) -> Iterator[Problem]:
    """Find keys of ZeRO in a run without it: DeepSpeed hands none of them to stage 0."""
    zero = config.deepspeed.get("zero_optimization")
    if config.zero.stage != 0 or not isinstance(zero, dict):
        return
    for path, value in paths_of(zero, "zero_optimization"):
        # stages that compute_grad_norm can't have are an error of their own
        if refusal_of(path, value) is None and not path.endswith(".compute_grad_norm"):
            yield _inert(path, value, "zero.stage is 0", "set zero.stage, or remove it")


def _counts_silently(comms: Any) -> bool:
    return is_on(comms, "enabled") and not comms.get("verbose")


def _quantized_within_host(zero: Any, cluster: Cluster) -> Iterator[Problem]:
    """Find gradients that are quantized, and never go from host to host."""
    quantized = "zero_quantized_gradients"
    if is_on(zero, quantized) and cluster.num_hosts == 1 and cluster.device != "cpu":
        reason = "gradients are quantized on the way between hosts, and the run has one"
        fix = "start it on several hosts, or remove it"
        yield _inert(f"zero_optimization.{quantized}", True, reason, fix)
