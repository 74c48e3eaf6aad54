"""Rules inside `zero`: what DeepSpeed does nothing with at the stage that was asked for."""

from __future__ import annotations

from collections.abc import Iterator

from framework.config.run_config import RunConfig
from framework.config.zero import NEEDED_STAGE, STAGE3_KEYS
from framework.errors import Problem
from framework.plan.cluster import Cluster


def offload_needs_stage(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Below these stages DeepSpeed drops the setting without a word, and the memory that was counted on is not
    freed.
    """
    zero, offload = config.zero, config.zero.offload_optimizer
    for name, needed in NEEDED_STAGE.items():
        device = getattr(zero, name).device
        if zero.stage < needed.get(device, 0):
            yield Problem(
                kind="offload-needs-stage",
                key=f"zero.{name}.device",
                value=device,
                reason=f"DeepSpeed ignores it at stage {zero.stage}",
                fix=f"set zero.stage: {needed[device]}",
            )
    if offload.device == "cpu" and offload.ratio < 1 and zero.stage != 3:
        yield Problem(
            kind="offload-needs-stage",
            key="zero.offload_optimizer.ratio",
            value=offload.ratio,
            reason="a ratio below 1 needs stage 3",
            fix="set zero.stage: 3 or ratio: 1.0",
        )


def inert_stage3_keys(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Stage-3 settings that were written down for another stage do nothing."""
    if config.zero.stage == 3:
        return
    for key in STAGE3_KEYS:
        if key in config.zero.model_fields_set:
            yield Problem(
                kind="inert-at-stage",
                key=f"zero.{key}",
                value=getattr(config.zero, key),
                severity="warning",
                reason=f"it does nothing at stage {config.zero.stage}",
                fix="remove it or set zero.stage: 3",
            )
