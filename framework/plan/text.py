"""A plan in words: the rows that `plan` prints, and the line of a run that `check` finds fine."""

from __future__ import annotations

from framework.errors import counted
from framework.plan.plan import Plan


def one_line(plan: Plan) -> str:
    """Summarise a plan without problems: how a step is made and how long it takes to the end."""
    known = plan.length.total_steps is not None
    return f"fine on {plan.cluster}: {plan.layout}, {'' if known else 'length '}{_length(plan)}"


def rows(plan: Plan) -> dict[str, str]:
    """Label -> what is planned."""
    return {
        "run": plan.config.run.name,
        "cluster": f"{plan.cluster} = {counted(plan.cluster.world_size, 'rank')}",
        "batch": str(plan.layout),
        "length": _length(plan),
        "precision": plan.config.precision.dtype,
        "ZeRO": _zero(plan),
    }


def _length(plan: Plan) -> str:
    length = plan.length
    if length.total_steps is None:
        return "known when the data is read"
    steps = counted(length.total_steps, "step")
    if length.steps_per_epoch is None:
        return steps
    left = f", {length.unused_samples_per_epoch} samples left out of each" if length.unused_samples_per_epoch else ""
    return f"{steps} = {_epochs(length.total_steps / length.steps_per_epoch)} of {length.steps_per_epoch}{left}"


def _epochs(epochs: float) -> str:
    """Two digits behind the point are enough to see what is meant."""
    if epochs < 0.01:
        return "less than 0.01 epochs"
    return counted(int(epochs), "epoch") if epochs.is_integer() else f"{epochs:.2f} epochs"


def _zero(plan: Plan) -> str:
    spread = (
        "nothing is spread",
        "optimizer state is spread",
        "optimizer state and gradients are spread",
        "optimizer state, gradients and weights are spread",
    )
    zero = plan.config.zero
    over = f" over {counted(plan.layout.data_parallel_size, 'rank')}" if zero.stage else ""
    offloads = [
        f"{what} on {device}"
        for what, device in (("optimizer", zero.offload_optimizer.device), ("weights", zero.offload_param.device))
        if device != "none"
    ]
    return ", ".join([f"stage {zero.stage}: {spread[zero.stage]}{over}", *offloads])
