"""What `training.compile` comes to on a kind of device, as far as the config shows it.

Whether a model has blocks, how much they compute and whether torch compiles them right is known
when it is built (`engine/compile_probe.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from framework.config.precision import Autocast
from framework.config.run_config import AUTO, RunConfig
from framework.config.training import Compile
from framework.plan.cluster import Device


class CompileChoice(NamedTuple):
    """How a model is compiled.

    Attributes:
        section: what torch.compile is given; None: nothing is compiled.
        is_auto: whether the run goes on as written where it cannot be compiled.
        reason: why ``auto`` compiles nothing on a device where it usually does.
    """

    section: Compile | None
    is_auto: bool = False
    reason: str = ""


OF_BLOCKS: Final = Compile(per="block")
"""What ``auto`` compiles where it compiles anything."""


DEEPCOMPILE: Final = "deepcompile"
"""The backend that DeepSpeed's engine puts into a model (deepspeed/runtime/engine.py
`compile`).
"""
BY_INDUCTOR: Final = ("inductor", DEEPCOMPILE)
"""The backends that need a compiler on the host."""


def compile_choice(
    config: RunConfig, device: Device, environment: Mapping[str, str] | None = None
) -> CompileChoice:
    """Choose what is compiled, from the config and the kind of device.

    `environment`: leads to the compilers of this host, for a reason why ``auto`` compiles nothing.
    A rank leaves it out: its peers may have others, and the probe asks all of them.
    """
    asked = config.training.compile
    if asked != AUTO:
        return CompileChoice(asked)
    # Gains were measured on CUDA devices alone. On processors a graph takes a C++ compiler for
    # longer than most runs there last.
    if device != "cuda":
        return CompileChoice(None, is_auto=True)
    reason = _reason_against(config)
    if not reason and environment is not None:
        from framework.plan.compiled_ops import missing_compiler

        problem = missing_compiler(device, environment)
        if problem is not None:
            reason = problem.reason
    if reason:
        return CompileChoice(None, is_auto=True, reason=reason)
    return CompileChoice(OF_BLOCKS, is_auto=True)


def uses_deepcompile(config: RunConfig) -> bool:
    """Check whether DeepSpeed compiles the model, through its engine."""
    return getattr(config.training.compile, "backend", "") == DEEPCOMPILE


def _reason_against(config: RunConfig) -> str:
    """Return which other setting leaves nothing to compile, or an empty string."""
    if config.parallel.pipe > 1:
        return "stages of a pipeline are not compiled"
    if config.zero.zenflow is not None:
        return "ZenFlow writes weights within the backward pass"
    if config.zero.stage == 3:
        return (
            "at zero.stage 3 DeepSpeed gathers weights inside of every block, which no graph holds"
        )
    is_half = config.precision.dtype in ("bf16", "fp16") or isinstance(config.precision, Autocast)
    if getattr(config.data, "packing", False) and not is_half:
        return "packed rows in fp32 are computed text by text, which no graph holds"
    if config.training.detect_anomaly:
        return "training.detect_anomaly names operations, and a graph is one of them"
    if config.profile is not None and config.profile.modules:
        return "profile.modules measures modules, and no graph shows its own"
    return ""
