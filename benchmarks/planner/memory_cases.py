"""Published points with a printed memory, as plans of ours, and what the planner estimates of each."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace

from benchmarks.planner.cases import (
    DEVICES,
    Point,
    config_of,
    first_reason,
    left_out,
    parallelism_of,
    work_of,
)
from benchmarks.planner.published import read_points
from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.device_overhead import beside_tensors
from framework.plan.memory import estimate
from framework.plan.plan import Plan, make_plan
from framework.plan.work import LayerWork, ModelWork


def memory_left_out(point: Point) -> str | None:
    """Return why a point's memory is not compared, or None; its fields decide. Nothing was fitted
    for memory.
    """
    size = (point["num_gpus"], point["micro_batch"], point["sequence"])
    peak_of_start = "the peak is that of the initialization"
    reasons = {
        "no memory printed": point["memory_gib"] is None,
        "not DeepSpeed, which the estimate is of": "DeepSpeed" not in point["source"]["framework"],
        "micro-batch or length not printed": None in size,
        "the largest at its start, not in a step": peak_of_start in (point["note"] or ""),
        "selective recomputation": point["recompute"] == "selective",
    }
    reason = first_reason(reasons)
    if reason is not None:
        return reason
    reason = left_out(point)
    if reason == "no throughput printed":
        reason = left_out(point | {"tokens_per_second_per_gpu": 1.0})
    return reason


def plan_of(point: Point) -> Plan:
    """Return the point as a plan of ours, without tensor parallelism: one rank stands for each
    tensor group.
    """
    parallelism = parallelism_of(point)
    precision = point["precision"]
    model = config_of(point)
    sums = "fp32" if parallelism.gradient_bytes == 4 else precision
    values = {
        "model": {"kind": "gpt"} | model.model_dump(exclude_unset=True),
        "data": {"kind": "text", "sequence_length": point["sequence"]},
        "task": {"kind": "causal_lm"},
        "batch": {
            "micro_size": parallelism.micro_size,
            "accumulation_steps": parallelism.accumulation,
        },
        "precision": {"dtype": precision, "grad_accumulation": sums, "grad_reduction": sums},
        "zero": {
            "stage": parallelism.zero_stage,
            "reduce_bucket_size": parallelism.bucket,
            "allgather_bucket_size": parallelism.bucket,
        },
        "parallel": {"pipe": parallelism.pipe},
        "optimizer": {"kind": "adamw", "implementation": "deepspeed"},
        "training": {"max_steps": 10, "recompute_every": int(parallelism.recomputed)},
    }
    cluster = Cluster(parallelism.data * parallelism.pipe, 1, "cuda")
    return make_plan(config_from_values(values), cluster)


def of_one_rank(work: ModelWork, tensor: int) -> ModelWork:
    """Return the work of one tensor-parallel rank: its share of the matrices, and of the
    activations that Megatron splits.
    """

    def split(part: LayerWork) -> LayerWork:
        is_last = part.name in ("head", "loss")
        split_share = 1.0 if is_last else part.split_bytes / max(part.saved_bytes, 1)
        factor = 1 - split_share + split_share / tensor
        return replace(
            part,
            num_params=part.num_params // tensor,
            output_bytes=part.output_bytes // tensor if is_last else part.output_bytes,
            saved_bytes=round(part.saved_bytes * factor),
            peak_bytes=round(part.peak_bytes * factor),
            backward_bytes=round(part.backward_bytes * factor),
            passing_bytes=round(part.passing_bytes * factor),
        )

    weights = {}
    for name, shape in work.weights.items():
        if len(shape) > 1:
            shape = (shape[0] // tensor, *shape[1:])
        weights[name] = shape
    return replace(work, weights=weights, parts=tuple(map(split, work.parts)))


def memory_of(point: Point) -> float:
    """Return the estimated GiB of the fullest rank at its fullest moment.

    Raises:
        NotEstimatedError: the estimate lacks something that the point has.
    """
    parallelism = parallelism_of(point)
    work = work_of(point, micro_size=parallelism.micro_size)
    memory = estimate(plan_of(point), work=of_one_rank(work, parallelism.tensor))
    moment = "between" if point["memory_kind"] == "live_allocated" else memory.peak
    size_by_name = beside_tensors(memory, plan_of(point), DEVICES[point["device"]])
    # nvidia-smi counts all memory beside tensors, torch's figure of reserved memory only the unused
    # pieces.
    beside = 0
    for name, size in size_by_name.items():
        is_reserved = name == "fragmentation" and point["memory_kind"] == "peak_reserved"
        if is_reserved or point["memory_kind"] == "nvidia_smi":
            beside += size
    return (memory.total(moment) + beside) / 2**30


def unused_share() -> float:
    """Fit the `unused_share` of devices.json: the memory that torch reserves beyond its tensors, as
    a share of the memory that grows with the micro-batch. Fitted on the points of the fit half that
    print both for DeepSpeed.
    """
    pairs = []
    for point in read_points("fit"):
        printed = re.search(r"DeepSpeed;.* ([\d.]+) GiB reserved", point["note"] or "")
        if printed and point["memory_kind"] == "peak_allocated":
            pairs.append((point["micro_batch"], point["memory_gib"], float(printed[1])))
    micro_sizes = [micro for micro, _, _ in pairs]
    allocated_gib = [allocated for _, allocated, _ in pairs]
    slope = statistics.linear_regression(micro_sizes, allocated_gib).slope
    return statistics.median(
        (reserved - allocated) / (slope * micro) for micro, allocated, reserved in pairs
    )
