"""Offload of optimizer and parameters to host memory or NVMe, and ZenFlow, which builds on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.rules.base import error, holds, warning
from framework.errors import Problem

_ZERO: Final = "zero_optimization"
_OPTIMIZER: Final = "zero_optimization.offload_optimizer"
_PARAM: Final = "zero_optimization.offload_param"
_ZENFLOW: Final = "zero_optimization.zenflow"
_CORES: Final = "zero_optimization.offload_optimizer.cpuadam_cores_perc"
# torch's Adam is in those of mup.
_ADAMS: Final = frozenset({"adam", "adamw", "muadam", "muadamw"})
_TORCH_ADAMW: Final = frozenset(
    {
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "foreach",
        "maximize",
        "capturable",
        "differentiable",
        "fused",
    }
)


def optimizer_offload_without_zero(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `zero_use_cpu_optimizer` picks the CPU optimizer at stage 0 too; the weights stay
    put.

    On GPUs the CPU kernel then meets GPU tensors in the first step; on CPU machines nothing is offloaded.
    """
    if facts.stage == 0 and facts.offloads_optimizer:
        report = warning if facts.topology.device == "cpu" else error
        yield report(
            facts,
            "offload-without-zero",
            f"{_OPTIMIZER}.device",
            "at stage 0 nothing is offloaded: the CPU optimizer is handed the device's weights",
            f'set {_ZERO}.stage: 2 or {_OPTIMIZER}.device: "none"',
        )


def lamb_stays_on_the_device(facts: Facts) -> Iterator[Problem]:
    """deepspeed/ops/lamb/fused_lamb.py `FusedLamb`: "Currently GPU-only"; it is built whatever the offload.

    Its kernel asserts that the weights are on the GPU, in the first step, and those that it is handed are on the host.
    """
    if (
        facts.optimizer == "lamb"
        and facts.offloads_optimizer
        and facts.stage in (1, 2, 3)
        and not facts.uses_bf16_optimizer
    ):
        yield error(
            facts,
            "lamb-with-offload",
            "optimizer.type",
            "DeepSpeed's Lamb has no form for the host, where its states are",
            f'set optimizer.type: "AdamW" or {_OPTIMIZER}.device: "none"',
        )


def nvme_optimizer_needs_stage_3(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage_1_and_2.py `DeepSpeedZeroOptimizer`: any device but none means host memory."""
    if facts.optimizer_device == "nvme" and facts.stage in (1, 2):
        yield warning(
            facts,
            "nvme-optimizer-in-memory",
            f"{_OPTIMIZER}.device",
            f"stage {facts.stage} keeps the states in host memory instead",
            f'set {_OPTIMIZER}.device: "cpu" or {_ZERO}.stage: 3',
        )


def param_offload_needs_stage_3(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_configure_zero_optimizer`: only stage 3 is handed `offload_param_config`."""
    if facts.param_device in ("cpu", "nvme") and facts.stage in (0, 1, 2):
        yield warning(
            facts,
            "param-offload-ignored",
            f"{_PARAM}.device",
            f"stage {facts.stage} keeps parameters on the device",
            f"set {_ZERO}.stage: 3 or remove {facts.written(_PARAM)}",
        )


def nvme_path(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage3.py `_configure_tensor_swapping`, partition_parameters.py: the path has no
    default.
    """
    for section, device in ((_OPTIMIZER, facts.optimizer_device), (_PARAM, facts.param_device)):
        if facts.stage == 3 and device == "nvme" and not facts.given(f"{section}.nvme_path"):
            yield error(
                facts,
                "nvme-path-missing",
                f"{section}.nvme_path",
                "offload to nvme needs a folder on it",
                f'set {section}.nvme_path: "/local_nvme"',
            )


def partial_offload_needs_stage_3(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/config.py `offload_ratio_check`: "Partial offloading only supported for ZeRO Stage 3."."""
    ratio = facts.number(f"{_OPTIMIZER}.ratio", 1.0)
    if ratio is not None and ratio < 1 and facts.stage in (0, 1, 2):
        yield error(
            facts,
            "partial-offload-needs-stage-3",
            f"{_OPTIMIZER}.ratio",
            f"stage {facts.stage} offloads all or nothing",
            f"set {_OPTIMIZER}.ratio: 1.0 or {_ZERO}.stage: 3",
        )


def partial_offload_needs_cpu_adam(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage3.py `backup_optimizer`: "Hybrid Optimizer Only Supports DeepSpeedCPUAdam"."""
    ratio = facts.number(f"{_OPTIMIZER}.ratio", 1.0)
    if (
        facts.stage != 3
        or ratio is None
        or ratio >= 1
        or not facts.offloads_optimizer
        or facts.uses_cpu_adam is not False
    ):
        return
    needed = [] if facts.optimizer in ("adam", "adamw") else ['optimizer.type: "AdamW"']
    needed += ["optimizer.params.torch_adam: false"] if facts.flag("optimizer.params.torch_adam", False) else []
    setting = f"{' and '.join(needed)} or " if needed and not facts.given(_ZENFLOW) else ""
    yield error(
        facts,
        "partial-offload-needs-cpu-adam",
        f"{_OPTIMIZER}.ratio",
        "a ratio below 1 works with DeepSpeed's own CPU Adam only",
        f"set {setting}{_OPTIMIZER}.ratio: 1.0",
    )


@holds(since="0.18.0")
def super_offload_needs_stage_3(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `super_offload` is asked at stage 3 only."""
    if facts.flag(f"{_OPTIMIZER}.super_offload", False) and facts.stage in (1, 2):
        yield warning(
            facts,
            "super-offload-ignored",
            f"{_OPTIMIZER}.super_offload",
            f"it does nothing at stage {facts.stage}",
            f"set {_OPTIMIZER}.super_offload: false or {_ZERO}.stage: 3",
        )


@holds(since="0.18.0")
def super_offload_needs_adam(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/superoffload/superoffload_stage3.py `optimizer_configs`: read from Adam's groups, `amsgrad`
    among them.

    Any other optimizer of a JSON ends in a KeyError there. Without a device to offload to, the fused Adam does as well,
    and torch's in the first step, which looks for `subgroup_to_device`.
    """
    if facts.stage != 3 or not facts.flag(f"{_OPTIMIZER}.super_offload", False):
        return
    off = f"{_OPTIMIZER}.super_offload: false"
    if facts.optimizer_device == "none":
        yield error(
            facts,
            "super-offload-needs-adam",
            f"{_OPTIMIZER}.super_offload",
            "nothing is offloaded",
            f'set {_OPTIMIZER}.device: "cpu" or {off}',
        )
    elif facts.optimizer and facts.optimizer not in _ADAMS:
        yield error(
            facts,
            "super-offload-needs-adam",
            "optimizer.type",
            "SuperOffload works with Adam only",
            f'set optimizer.type: "AdamW" or {off}',
        )


@holds(since="0.18.0")
def super_offload_needs_cores(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/superoffload/superoffload_utils.py `cpuadam_cores_perc`: "must be between 0 and 1"; 0 is
    refused.
    """
    if facts.stage == 3 and facts.flag(f"{_OPTIMIZER}.super_offload", False) and facts.number(_CORES) == 0:
        yield error(
            facts,
            "super-offload-needs-cores",
            _CORES,
            "Adam on the host needs a share of the cores",
            f"set {_CORES}: 0.8",
        )


def contiguous_gradients_forced(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage_1_and_2.py `contiguous_gradients`: "CPU-Offload requires contiguous gradients"."""
    off = facts.flag(f"{_ZERO}.contiguous_gradients", True) is False
    if off and facts.stage in (1, 2) and facts.offloads_optimizer and not facts.uses_bf16_optimizer:
        yield warning(
            facts,
            "contiguous-gradients-forced",
            f"{_ZERO}.contiguous_gradients",
            "with an offloaded optimizer they are contiguous whatever it says",
            f"set {_ZERO}.contiguous_gradients: true",
        )


@holds(since="0.17.5")
def zenflow_needs_offload(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zenflow/zenflow_stage_1_and_2.py `_configure_zenflow`: "Zenflow must be used with cpu
    offload".
    """
    if facts.given(_ZENFLOW) and not (facts.stage in (1, 2, 3) and facts.offloads_optimizer):
        stage = "" if facts.stage in (1, 2, 3) else f"{_ZERO}.stage: 2 and "
        device = "" if facts.offloads_optimizer else f'{_OPTIMIZER}.device: "cpu"'
        yield error(
            facts,
            "zenflow-needs-offload",
            _ZENFLOW,
            "ZenFlow splits the step between device and host",
            f"set {(stage + device).removesuffix(' and ')} or remove {_ZENFLOW}",
        )


@holds(since="0.17.5")
def zenflow_intervals(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zenflow/engine.py `configure_zenflow`: strategy and intervals have to fit.

    zenflow_config.py `validate_fields`: "If select_interval is a string, it must be".
    """
    if not facts.section(_ZENFLOW) and not facts.given(_ZENFLOW):
        return
    strategy = facts.text(f"{_ZENFLOW}.select_strategy", "auto")
    select, update = facts.get(f"{_ZENFLOW}.select_interval", "auto"), facts.get(f"{_ZENFLOW}.update_interval", "auto")
    for name, value in (("select_interval", select), ("update_interval", update)):
        if isinstance(value, str) and value != "auto":
            number = max(update, 1) if isinstance(update, int) else 1
            right = '"auto"' if name == "update_interval" or strategy == "auto" else number
            yield error(
                facts,
                "zenflow-intervals",
                f"{_ZENFLOW}.{name}",
                "a number or auto belongs here",
                f"set {_ZENFLOW}.{name}: {right}",
            )
    key = f"{_ZENFLOW}.select_interval"
    if strategy == "auto" and isinstance(select, int):
        yield error(
            facts,
            "zenflow-intervals",
            key,
            "the automatic strategy chooses it",
            f'remove {key} or set {_ZENFLOW}.select_strategy: "step"',
        )
    elif strategy in ("step", "epoch") and select == "auto":
        yield error(
            facts,
            "zenflow-intervals",
            key,
            f"the strategy {strategy} needs a number",
            f"set {key}: {max(update, 1) if isinstance(update, int) else 1}",
        )
    elif strategy == "step" and isinstance(select, int) and isinstance(update, int) and 0 < select < update:
        yield error(
            facts,
            "zenflow-intervals",
            key,
            f"it must not be smaller than update_interval {update}",
            f"set {key}: {update}",
        )


@holds(since="0.17.5")
def zenflow_needs_overlap(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zenflow/zenflow_stage_1_and_2.py `offload_selective_optimizer`: "should be used with
    overlap_comm".
    """
    if not facts.flag(f"{_ZENFLOW}.offload", False) or facts.stage not in (1, 2, 3):
        return
    if facts.flag(f"{_ZERO}.overlap_comm", facts.stage == 3) is False:
        yield error(
            facts,
            "zenflow-needs-overlap",
            f"{_ZERO}.overlap_comm",
            "zenflow.offload needs overlapped communication",
            f"set {_ZERO}.overlap_comm: true or {_ZENFLOW}.offload: false",
        )


@holds(since="0.17.5")
def zenflow_params(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zenflow/zenflow_stage_1_and_2.py `selective_optimizer`: built from torch's AdamW with all
    params.
    """
    if not facts.given(_ZENFLOW) or facts.stage not in (1, 2) or not facts.offloads_optimizer:
        return
    if facts.given("optimizer.type") and not facts.given("optimizer.params"):
        yield error(
            facts,
            "zenflow-params",
            "optimizer.params",
            "ZenFlow builds a second optimizer from them",
            "set optimizer.params.lr: 0.001",
        )
    for name in facts.section("optimizer.params"):
        if name not in _TORCH_ADAMW:
            yield error(
                facts,
                "zenflow-params",
                f"optimizer.params.{name}",
                "ZenFlow hands all parameters to an AdamW that does not know it",
                f"remove optimizer.params.{name} or remove {_ZENFLOW}",
            )


@holds(since="0.17.5")
def zenflow_needs_adam(facts: Facts) -> Iterator[Problem]:
    """deepspeed/ops/adam/zenflow_cpu_adam.py `step_id`: ZenFlow calls `step(step_id=...)`, which only its own Adam
    takes.
    """
    if not facts.given(_ZENFLOW) or facts.stage not in (1, 2, 3) or not facts.optimizer or not facts.offloads_optimizer:
        return
    if facts.optimizer not in ("adam", "adamw"):
        yield error(
            facts,
            "zenflow-needs-adam",
            "optimizer.type",
            "ZenFlow works with DeepSpeed's Adam only",
            f'set optimizer.type: "AdamW" or remove {_ZENFLOW}',
        )
    elif facts.stage == 3 and facts.flag("optimizer.params.torch_adam", False):
        yield error(
            facts,
            "zenflow-needs-adam",
            "optimizer.params.torch_adam",
            "ZenFlow works with DeepSpeed's Adam only",
            f"set optimizer.params.torch_adam: false or remove {_ZENFLOW}",
        )


@holds(since="0.17.5")
def zenflow_replaces_accumulation(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/zenflow/engine.py `configure_zenflow` writes update_interval over the accumulation steps."""
    steps = facts.whole("gradient_accumulation_steps")
    update = facts.get(f"{_ZENFLOW}.update_interval", "auto")
    if (
        facts.given(_ZENFLOW)
        and steps is not None
        and update != steps
        and (isinstance(update, int) or update == "auto")
    ):
        yield warning(
            facts,
            "zenflow-replaces-accumulation",
            "gradient_accumulation_steps",
            f"ZenFlow overwrites it with its update_interval, {update}",
            f"set {_ZENFLOW}.update_interval: {steps} or remove gradient_accumulation_steps",
        )
