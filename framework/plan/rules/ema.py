"""Rules about the moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.config.optimizer import Lamb
from framework.config.run_config import RunConfig
from framework.config.zero import OptimizerToCPU
from framework.errors import Problem
from framework.plan.cluster import Cluster

# More of the first weights than this, and the average tells how the run began rather than how it went.
_LARGEST_REST: Final = 0.5


def ema_measured_and_not_kept(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """There is nothing to measure."""
    if config.evaluation.weights == "ema" and config.training.ema is None:
        yield Problem(
            kind="ema-not-kept",
            key="evaluation.weights",
            value="ema",
            reason="no moving average is kept",
            fix="set training.ema: {decay: 0.999}, or evaluation.weights: trained",
        )


def ema_beside_its_weights(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """The average is one more state of the optimizer, which must be in memory, in one place, when a step ends."""
    offload = config.zero.offload_optimizer
    if config.training.ema is None:
        return
    if offload.device == "nvme":
        yield Problem(
            kind="ema-with-offload",
            key="zero.offload_optimizer.device",
            value="nvme",
            reason="DeepSpeed's files on the drive have no place for a moving average of the weights",
            fix="set zero.offload_optimizer: {device: cpu}, or leave training.ema out",
        )
    if isinstance(offload, OptimizerToCPU) and offload.ratio < 1:
        yield Problem(
            kind="ema-with-offload",
            key="zero.offload_optimizer.ratio",
            value=offload.ratio,
            reason="a second optimizer then steps the rest, and keeps no moving average of the weights",
            fix="set zero.offload_optimizer: {device: cpu, ratio: 1.0}, or leave training.ema out",
        )


def ema_with_lamb(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/fp16/unfused_optimizer.py `step_fused_lamb`: the step is given its gradients from outside, and
    no weight shows that it was stepped."""
    is_half = config.precision.dtype in ("fp16", "bf16")
    if config.training.ema is not None and isinstance(config.optimizer, Lamb) and is_half and config.zero.stage == 0:
        yield Problem(
            kind="ema-with-lamb",
            key="optimizer.kind",
            value="lamb",
            reason=f"in {config.precision.dtype} at ZeRO stage 0 DeepSpeed steps LAMB past the moving average of the "
            "weights, which would never begin",
            fix="use adamw, or leave training.ema out",
        )


def length_for_ema(config: RunConfig, total_steps: int | None) -> Iterator[Problem]:
    """An average that reaches back further than the run is mostly what the run began with."""
    ema = config.training.ema
    if ema is None or total_steps is None:
        return
    if ema.start_step >= total_steps:
        yield Problem(
            kind="ema-never-starts",
            key="training.ema.start_step",
            value=ema.start_step,
            severity="warning",
            reason=f"the run has {total_steps} steps, and the average stays what the weights are",
            fix=f"set it below {total_steps}, or leave training.ema out",
        )
        return
    updates = (total_steps - ema.start_step) // ema.every_steps
    rest = ema.decay**updates
    if rest > _LARGEST_REST:
        yield Problem(
            kind="ema-longer-than-run",
            key="training.ema.decay",
            value=ema.decay,
            severity="warning",
            reason=f"after {updates:,} update{'' if updates == 1 else 's'} {rest:.0%} of the average is still what "
            "it began with",
            fix=_shorter(updates),
        )


def _shorter(updates: int) -> str:
    """A decay that reaches back over about a tenth of the run."""
    decay = 1 - 10 / updates if updates > 20 else 0.5
    return f"set training.ema.decay: {decay:.3g}, or begin later with training.ema.start_step"
