"""Rules between the number format and the other sections."""

from __future__ import annotations

from collections.abc import Iterator

from framework.config.model_kind import ModelKind
from framework.config.precision import Autocast
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster


def autocast_fp16_needs_plain_ranks(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/zero/stage_1_and_2.py and stage3.py `step`: after an overflow the step is skipped before the
    GradScaler is told, so that its scale is never lowered and no step is ever taken again; without clipping, and in a
    pipeline, every rank lowers its own scale by what it sees of the gradients."""
    precision, stage, pipe = config.precision, config.zero.stage, config.parallel.pipe
    if isinstance(precision, Autocast) and precision.compute_dtype == "fp16" and (stage or pipe > 1):
        where = f"ZeRO stage {stage}" if stage else f"a pipeline of {pipe} stages"
        yield Problem(
            kind="autocast-fp16-not-scaled",
            key="precision.compute_dtype",
            value="fp16",
            reason=f"with {where} DeepSpeed does not lower its loss scale after an overflow, and training stands still",
            fix="set precision.compute_dtype: bf16, or take dtype: fp16",
        )


def batch_norm_in_half_precision(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """DeepSpeed 0.19.8 casts weights and leaves buffers in fp32: torch refuses the mix in batch norm."""
    halves = ("fp16", "bf16")
    if config.precision.dtype in halves and isinstance(config.model, ModelKind) and config.model.has_batch_norm:
        yield Problem(
            kind="batch-norm-in-half-precision",
            key="precision.dtype",
            value=config.precision.dtype,
            reason="the model has batch norm, whose fp32 running statistics do not go with half-precision weights",
            fix="use autocast: {dtype: autocast} keeps weights in fp32 and computes in bf16",
        )
