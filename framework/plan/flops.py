"""Floating-point operations of a step, as metrics."""

from __future__ import annotations

from collections.abc import Mapping

from framework.plan.parallelism import Parallelism
from framework.plan.plan import Plan
from framework.plan.work import ModelWork


def flops_per_step(
    plan: Plan, work: ModelWork | None, peaks: Mapping[str, float]
) -> dict[str, float]:
    """Return the floating-point operations of one step, on one device on average, by the metric
    that is their rate.

    Model operations: matrix products, convolutions and attention in the forward pass, and twice as
    many in the backward pass (Chowdhery et al. 2022, PaLM, appendix B), less the gradients of
    frozen weights; what is computed again is not counted; a multiplication with an addition is two.
    Utilisation is their share of the device's peak; with what is computed again it is the
    utilisation of the hardware.

    Args:
        plan: of the run.
        work: of its model on one micro-batch; None if it is not known.
        peaks: of the device, type of numbers -> operations per second; empty if it is not known.

    Returns:
        ``throughput/tflops`` if the work is known; ``throughput/mfu`` if the peak is known as well;
        with recomputation ``throughput/hfu``. None of them is guessed.
    """
    if work is None or not work.flops:
        return {}
    by = Parallelism.from_plan(plan)
    passes = by.accumulation * by.data / by.num_devices
    trained = work.trained_flops * passes
    amounts = {"throughput/tflops": trained / 1e12}
    peak = peaks.get(by.dtype)
    if peak:
        amounts["throughput/mfu"] = trained / peak
        if by.products_again:  # the loss belongs to no layer, and is kept
            again = by.products_again * (1 - work.parts[-1].flops / work.flops)
            amounts["throughput/hfu"] = (trained + again * work.flops * passes) / peak
    return amounts
