"""A plan in words: rows of a table, and one line."""

from __future__ import annotations

from framework.config.precision import fp8_of
from framework.config.run_config import RunConfig
from framework.config.training import MEASURED
from framework.errors import counted
from framework.plan.flat_sums import coalesces
from framework.plan.plan import Plan, describe_packed_rows, loss_tile, ring_size


def one_line(plan: Plan, *, fits: bool = True) -> str:
    """Summarise a plan without errors: how a step is made and how long it takes to the end; `fits`:
    the devices are not known to be too small for it.
    """
    length = str(plan.length)
    if plan.length.total_steps is None:
        length = f"length {length}"
    verdict = "fine on" if fits else "too large for"
    return f"{verdict} {plan.cluster}: {_batch(plan)}, {length}"


def _batch(plan: Plan) -> str:
    text = str(plan.layout)
    if plan.config.batch.micro_size == MEASURED:
        text += " or fewer steps of larger micro-batches, as measured at the start"
    return text


def rows(plan: Plan) -> dict[str, str]:
    """Map labels to what is planned, in words, in the order of a table."""
    planned = {
        "run": plan.config.run.name,
        "cluster": f"{plan.cluster} = {counted(plan.cluster.world_size, 'rank')}",
        "batch": _batch(plan),
        "length": str(plan.length),
        "precision": _precision(plan.config),
        "ZeRO": _zero(plan),
    }
    places = plan.layout.places()
    if places:
        planned["ranks"] = places
    packed = describe_packed_rows(plan)
    if packed:
        planned["rows"] = packed
    ring = ring_size(plan)
    if ring > 1:
        teams = f"teams of {counted(plan.layout.sequence_size // ring, 'rank')} share heads"
        planned["attention"] = f"around a ring: {teams}, keys and values go around {ring} teams"
    tile = loss_tile(plan.config, plan.layout.micro_size)
    if tile:
        planned["loss"] = f"tile by tile, the logits of {counted(tile, 'position')} at once"
    return planned


def _precision(config: RunConfig) -> str:
    """Describe the type of weights, of what the optimizer keeps of them where that is not fp32,
    and of products in fp8.
    """
    text: str = config.precision.dtype
    states = getattr(config.precision, "states", "fp32")
    if states != "fp32":
        text += f", optimizer's states {states}"
    section = fp8_of(config.precision)
    if section is not None:
        text += f", linear layers of blocks in fp8, scaled {section.scaling}"
        if section.emulate:
            text += ", emulated"
    return text


def _zero(plan: Plan) -> str:
    zero = plan.config.zero
    spread = (
        "nothing is spread",
        "optimizer state is spread",
        "optimizer state and gradients are spread",
        "optimizer state, gradients and weights are spread",
    )
    text = f"stage {zero.stage}: {spread[zero.stage]}"
    if zero.stage:
        text += f" over {counted(plan.layout.num_replicas, 'rank')}"
    if coalesces(plan.config, plan.layout):
        steps = plan.layout.accumulation_steps
        text += f"; gradients of {steps} micro-batches stay whole, and are summed once (coalesce)"
    if zero.offload_optimizer.device != "none":
        text += f", optimizer on {zero.offload_optimizer.device}"
    if zero.offload_param.device != "none":
        text += f", weights on {zero.offload_param.device}"
    return text
