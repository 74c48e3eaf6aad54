"""Rules about the optimizer, and inside `zero`.

Rules about the optimizer, by itself and where it is offloaded or scaled.
"""

from __future__ import annotations

from collections.abc import Iterator

from framework.config.base import Target
from framework.config.optimizer import AdamW, Lamb, OptimizerObject
from framework.config.precision import FP16
from framework.config.run_config import RunConfig
from framework.config.zero import NEEDED_STAGE, STAGE3_KEYS
from framework.errors import Problem
from framework.plan.cluster import Cluster


def momentum_order(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """torch.optim.SGD: "Nesterov momentum requires a momentum"."""
    optimizer = config.optimizer
    if getattr(optimizer, "nesterov", False) and not getattr(optimizer, "momentum", 0.0):
        yield Problem(
            kind="nesterov-needs-momentum",
            key="optimizer.nesterov",
            value=True,
            reason="there is no momentum to look ahead along",
            fix="set optimizer.momentum: 0.9",
        )


def decay_on_matrices_of_nothing(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """A choice of weights for weight decay is written down, and there is no decay."""
    optimizer = config.optimizer
    if isinstance(optimizer, (Target, OptimizerObject)):
        return
    if optimizer.weight_decay_on != "all" and not optimizer.weight_decay:
        yield Problem(
            kind="inert-without-decay",
            key="optimizer.weight_decay_on",
            value=optimizer.weight_decay_on,
            severity="warning",
            reason="optimizer.weight_decay is 0",
            fix="set optimizer.weight_decay or remove it",
        )


def lamb_needs_dynamic_scale(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "lamb optimizer requires dynamic loss scaling"."""
    if isinstance(config.optimizer, Lamb) and isinstance(config.precision, FP16) and config.precision.loss_scale:
        yield Problem(
            kind="lamb-with-fixed-loss-scale",
            key="precision.loss_scale",
            value=config.precision.loss_scale,
            reason="DeepSpeed's Lamb needs dynamic loss scaling",
            fix="set precision.loss_scale: 0",
        )


def offload_needs_adam(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_configure_basic_optimizer`: Lamb has no host kernel."""
    if config.zero.offload_optimizer.device != "none" and isinstance(config.optimizer, Lamb):
        yield Problem(
            kind="offload-optimizer-unsupported",
            key="optimizer.kind",
            value="lamb",
            reason="it cannot run on the host",
            fix="use adamw, or zero.offload_optimizer: {device: none}",
        )


def lamb_sees_shards(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Its ratio is one of norms of a weight; ZeRO gives it shares of one flat vector of all weights, and nobody says
    so.
    """
    stage = config.zero.stage
    if (
        isinstance(config.optimizer, Lamb) and stage and config.zero.offload_optimizer.device == "none"
    ):  # else refused above
        yield Problem(
            kind="optimizer-sees-shape",
            key="optimizer.kind",
            value="lamb",
            reason=f"it scales each weight's step by its norm, and at zero.stage {stage} it sees shares of one flat "
            "vector of all weights",
            fix="set zero.stage: 0, or use adamw",
        )


def slow_host_optimizer(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Not wrong, but rarely meant: the step on the host with torch's kernel is several times slower."""
    optimizer = config.optimizer
    torchs = isinstance(optimizer, AdamW) and optimizer.implementation == "torch"
    if config.zero.offload_optimizer.device != "none" and torchs:
        yield Problem(
            kind="slow-host-optimizer",
            key="optimizer.implementation",
            value="torch",
            severity="note",
            reason="the step runs on the host, where DeepSpeed's kernel is several times faster but resumes "
            "with a drift in the last bits",
            fix="set optimizer.implementation: deepspeed for speed",
        )


# Rules inside `zero`: what DeepSpeed does nothing with at the stage that was asked for.


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
