"""Compares the planner's estimates with published measurements: ``python -m
benchmarks.planner.validate [--fit | --kept]``.

``--fit`` chooses the constants of `framework/plan/fitted_rates.py` on all sources and prints them.
Without it the constants are chosen once more for each source, on all others, and the errors are
written to `benchmarks/results/planner.json` and to the table in `docs/planner.md`: what a source
whose points are left out of the fit may expect; the form was chosen with all in view. ``--kept``
takes the constants that were written. Which points take part is decided by their fields
(`left_out`).
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from math import exp, log, prod
from typing import Any, Final

from benchmarks.planner.published import read_points, tokens_per_second_per_gpu
from benchmarks.records import RESULTS, ROOT
from framework.config.load import config_from_values
from framework.config.model import ModelSection
from framework.config.training import LoRA
from framework.plan.cluster import Cluster
from framework.plan.device_overhead import beside_tensors
from framework.plan.devices import Machine, find_network
from framework.plan.fitted_rates import RATES, Rates
from framework.plan.memory import NotEstimatedError, estimate
from framework.plan.parallelism import Parallelism
from framework.plan.plan import Plan, make_plan
from framework.plan.time import StepTime, step_time
from framework.plan.work import Arithmetic, LayerWork, ModelWork, model_work
from framework.recipes.image_models.kinds import ResNet50
from framework.recipes.language_models.kinds import BERT, GPT

Point = dict[str, Any]
# A bare name means the most common size; an A100 of 40 GB and a GH200 of 96 are in `device_gb`.
_DEVICES: Final = {
    "A100": "a100-80gb",
    "H100": "h100-80gb",
    "H200": "h200-141gb",
    "B200": "b200-180gb",
    "MI300X": "mi300x-192gb",
    "GH200": "gh200-96gb",
    "A800": "a100-80gb",
    "V100": "v100-32gb",
}
# Unusual networks and hosts of sources (`notes` in points.json; the card of the model that
# bigscience trained names 4 Omni-Path links for 8 GPUs).
# InternLM prints 4 x 100 Gb for 8 GPUs, as AWS has them.
_NETWORKS: Final = {"bigscience-tr11": "omni-path", "internlm": "aws-efa-p4d"}
_DEVICES_PER_HOST: Final = {"lsaie": 4}
# Share of the forward pass that runs again. Selective, of torchtitan: every second matrix product.
# Numbers as products take them, and the type of the products.
_ARITHMETIC: Final[Mapping[str, tuple[Arithmetic, str]]] = {
    "bf16": ("half", "bf16"),
    "fp16": ("half", "fp16"),
    "amp": ("autocast", "fp16"),
    "tf32": ("fp32", "tf32"),
    "fp32": ("fp32", "fp32"),
}
# Modules of a block that get adapters where all linear layers do.
_LINEAR: Final = ["query", "key", "value", "output", "gate", "up", "down"]
_KINDS: Final = ("gpt", "llama", "bert", "resnet50")
_RECOMPUTED: Final = {"none": 0.0, "selective": 0.5, "full": 1.0}


def speed(point: Point) -> float | None:
    """Return the samples per second of one device, or None if they are not known.

    If no batch is printed, a step is one micro-batch, the default of frameworks.
    """
    tokens_per_second = tokens_per_second_per_gpu(point)
    micro_batch = point["micro_batch"]
    sequence = point["sequence"]
    step_seconds = point["step_seconds"]
    if point["samples_per_second"] is not None and point["num_gpus"] is not None:
        return float(point["samples_per_second"] / point["num_gpus"])
    if tokens_per_second is not None and sequence:
        return tokens_per_second / float(sequence)
    if point["global_batch"] or point["accumulation"]:
        return None
    if None in (micro_batch, sequence, step_seconds):
        return None
    if not {point["tensor"], point["pipeline"], point["sequence_parallel"]} <= {None, 1}:
        return None
    return float(micro_batch / step_seconds)


def vocabulary(point: Point) -> int | None:
    """Return the size of the model's vocabulary, or None.

    If it is not printed, it is computed from the printed number of parameters: those outside the
    blocks are two matrices of the vocabulary.
    """
    model = point["model"]
    if model["vocab"] is not None:
        return int(model["vocab"])
    if None in (model["layers"], model["hidden"], point["parameters"]):
        return None
    blocks = 12 * model["layers"] * model["hidden"] ** 2
    return round((point["parameters"] - blocks) / model["hidden"] / 2)


def left_out(point: Point) -> str | None:
    """Return why a point's throughput is not compared, or None; its fields decide."""
    model = point["model"]
    note = point["note"] or ""
    shape = (model["layers"], model["hidden"], model["heads"], vocabulary(point))
    size = (point["num_gpus"], point["micro_batch"], point["sequence"])
    if model["kind"] == "resnet50":  # a name that leaves nothing open
        shape = (50,)
        size = (point["num_gpus"], point["micro_batch"])
    reasons = {
        "no throughput printed": speed(point) is None,
        "no kind of model that is estimated": model["kind"] not in _KINDS,
        "shape of the model not printed": None in shape,
        "precision not modelled or not printed": point["precision"] not in _ARITHMETIC,
        "device not printed or not listed": point["device"] not in _DEVICES,
        "size of the run not printed": None in size,
        "compiled": "compile" in note.lower(),
        "power limited": "power limited" in note,
        "deterministic mode": "deterministic" in note,
        "optimizer state in bf16": "optimizer states" in note,
        "context parallelism, which is not DeepSpeed's": (point["sequence_parallel"] or 1) > 1,
        "offloaded, bandwidth of the host not printed": point["offload"] not in (None, "none"),
    }
    return _first_reason(reasons)


def _first_reason(reasons: Mapping[str, bool]) -> str | None:
    for reason, applies in reasons.items():
        if applies:
            return reason
    return None


def recompute_of(point: Point) -> str:
    """Return the activations that are computed again: none, selective or full.

    If the source leaves it open, its own TFLOP/s decide: Megatron's formula (Narayanan et al. 2021)
    counts 4 passes with recomputation and 3 without. Else it is none, every framework's default.
    """
    printed = re.search(r"([\d.]+) TFLOP/s as printed", point["note"] or "")
    if point["recompute"] != "unknown" or not printed or point["step_seconds"] is None:
        return str(point["recompute"] or "none").replace("unknown", "none")
    model = point["model"]
    length = point["sequence"]
    hidden = model["hidden"]
    layers = model["layers"]
    pass_flops = 24 * point["global_batch"] * length * layers * hidden**2
    pass_flops *= 1 + length / (6 * hidden) + model["vocab"] / (16 * layers * hidden)
    passes = float(printed[1]) * 1e12 * point["step_seconds"] * point["num_gpus"] / pass_flops
    return "full" if passes > 3.5 else "none"


def config_of(point: Point) -> GPT:
    """Return the section of a run config for the point's model."""
    model = point["model"]
    is_llama = model["kind"] == "llama"
    is_mosaic = point["source"]["name"] == "llm-foundry"
    kv_heads = model["kv_heads"] or model["heads"]
    perceptron = model["ffn"] or 4 * model["hidden"]
    if is_llama and model["ffn"] is None:  # the printed number of parameters leaves one width
        attention = 2 * model["hidden"] ** 2 * (1 + kv_heads / model["heads"])
        block = point["parameters"] / model["layers"]
        perceptron = round((block - attention) / 3 / model["hidden"])
    return GPT(
        num_layers=model["layers"],
        hidden_size=model["hidden"],
        num_heads=model["heads"],
        num_kv_heads=kv_heads,
        mlp_size=perceptron,
        vocab_size=vocabulary(point),
        max_positions=point["sequence"],
        dropout=0.0,
        positions="rotary" if is_llama else "learned",
        norm="rmsnorm" if is_llama else "layernorm",
        mlp="swiglu" if is_llama else "gelu",
        bias=not (is_llama or is_mosaic),
        tie_embeddings=not is_llama,
    )


def section_of(point: Point) -> ModelSection:
    """Return the section of a run config for the point's model, of any kind."""
    model = point["model"]
    if model["kind"] == "resnet50":
        return ResNet50(in_channels=3, num_classes=1000)
    if model["kind"] == "bert":
        return BERT(
            num_layers=model["layers"],
            hidden_size=model["hidden"],
            num_heads=model["heads"],
            mlp_size=model["ffn"],
            vocab_size=model["vocab"],
            max_positions=512,
            num_types=2,
        )
    return config_of(point)


def work_of(point: Point, micro_size: int = 1) -> ModelWork:
    """Return the work of the point's model."""
    model = point["model"]
    lora = None
    if model.get("lora_r"):
        lora = LoRA(target_modules=_LINEAR, r=model["lora_r"])
    work = model_work(
        section_of(point),
        micro_size=micro_size,
        sequence_length=point["sequence"],
        image_size=224,
        arithmetic=_ARITHMETIC[point["precision"]][0],
        lora=lora,
    )
    assert work is not None
    if writes_scores(point):
        work = with_scores(work, micro_size * model["heads"] * point["sequence"] ** 2)
    return work


def writes_scores(point: Point) -> bool:
    """Whether attention is computed step by step, all of its scores written to memory, as before
    FlashAttention; our own never is.
    """
    source = point["source"]
    is_old = source["framework"] == "Megatron-DeepSpeed"
    return is_old or source.get("attention") == "written"


def with_scores(work: ModelWork, scores: int) -> ModelWork:
    """Return the work with attention that writes all of its scores to memory, as before
    FlashAttention (Dao et al. 2022): two products, a fused softmax and a dropout read and write
    them in half precision, and three tensors of scores are saved.
    """
    moved_bytes = (2 + 4 + 5 + 2) * scores
    saved_bytes = 5 * scores
    parts = []
    for part in work.parts:
        if part.count > 1:
            part = replace(
                part,
                masked_flops=0,
                score_flops=part.score_flops + part.masked_flops,
                moved_bytes=part.moved_bytes + moved_bytes,
                saved_bytes=part.saved_bytes + saved_bytes,
                split_bytes=part.split_bytes + saved_bytes,
            )
        parts.append(part)
    return replace(work, parts=tuple(parts))


def bucket_of(point: Point) -> int:
    """Return the elements of DeepSpeed's buckets, from the source's notes or else the default."""
    printed = re.search(r"buckets of (\d+e\d+)", point["source"].get("notes", ""))
    if printed:
        return int(float(printed[1]))
    return 500_000_000


def parallelism_of(point: Point) -> Parallelism:
    """Return the distribution of the point's step."""
    tensor = point["tensor"] or 1
    pipe = point["pipeline"] or 1
    data = point["num_gpus"] // tensor // pipe
    stage = 0
    if (point["strategy"] or "ddp") != "ddp":
        stage = int(point["strategy"][-1])
    accumulation = point["accumulation"]
    if accumulation is None:
        accumulation = max((point["global_batch"] or 0) // (point["micro_batch"] * data), 1)
    is_fsdp = "DeepSpeed" not in point["source"]["framework"] and stage > 1
    # llm-foundry's DEFAULT sums in fp32, PURE does not; bigscience does if it trains in bf16
    # (`notes`).
    is_bigscience = point["source"]["name"] == "bigscience-tr11"
    sums_in_fp32 = "DEFAULT" in (point["note"] or "")
    if is_bigscience and point["precision"] == "bf16":
        sums_in_fp32 = True
    is_half = _ARITHMETIC[point["precision"]][0] == "half"
    if not is_half and point["source"]["name"] != "nvidia-bert":  # which sums in fp16 (`notes`)
        sums_in_fp32 = True
    bucket = bucket_of(point)
    prefetch = 50_000_000
    if is_fsdp:  # blocks are summed and gathered
        bucket = prefetch = 12 * point["model"]["hidden"] ** 2
    return Parallelism(
        data=data,
        pipe=pipe,
        tensor=tensor,
        zero_stage=3
        if is_fsdp
        else stage,  # FSDP's SHARD_GRAD_OP is stage 3 that keeps the weights
        accumulation=accumulation,
        micro_size=point["micro_batch"],
        dtype=_ARITHMETIC[point["precision"]][1],
        weight_bytes=2 if is_half else 4,
        gradient_bytes=4 if sums_in_fp32 else 2,
        state_bytes=12 if is_half else 8,
        recomputed=_RECOMPUTED[recompute_of(point)],
        bucket=bucket,
        prefetch=prefetch,
        persistent=0 if is_fsdp else 100_000,
        reuse=10**12 if is_fsdp else 10**9,
        overlaps=is_fsdp or stage in (0, 3) or point["source"].get("overlaps", False),
        scatters=is_fsdp or stage == 3,
        live=0 if stage == 3 else 10**12,
        by_weight=not is_fsdp,
        interleaving=point["virtual_pipeline"] or 1,
        block_sums=(2, 2),
    )


def machine_of(point: Point) -> Machine:
    """Return the machine of the point."""
    name = _DEVICES[point["device"]]
    if point["device_gb"] == 40:
        name = "a100-40gb"
    source = point["source"]["name"]
    if source in _DEVICES_PER_HOST:
        devices_per_host = _DEVICES_PER_HOST[source]
    elif point["nodes"]:
        devices_per_host = point["num_gpus"] // point["nodes"]
    else:
        devices_per_host = 8
    machine = Machine.listed(name, devices_per_host=devices_per_host)
    if source in _NETWORKS:
        machine = replace(machine, network=find_network(_NETWORKS[source]))
    if (point["device"], point["device_gb"]) == ("H100", 96):  # 2.4 TB/s (notes of the source)
        machine = replace(machine, device=replace(machine.device, memory_bytes_per_second=2.4e12))
    if point["device"] == "A800":  # NVLink of 400 GB/s, of 600 of an A100
        links = {"link_bytes_per_second": 2e11, "collective_bytes_per_second": 1.6e11}
        machine = replace(machine, device=replace(machine.device, **links))
    return machine


@dataclass(frozen=True)
class Case:
    """A point that is compared, with `measured` in samples per second of one device."""

    point: Point
    work: ModelWork
    parallelism: Parallelism
    machine: Machine
    measured: float

    def time(self, rates: Rates = RATES) -> StepTime:
        """Return the estimate."""
        return step_time(self.work, self.parallelism, self.machine, rates)

    def ratio(self, rates: Rates = RATES) -> float:
        """Return the estimated throughput divided by the measured one."""
        found = self.time(rates)
        return found.samples_per_second / found.num_devices / self.measured


@cache
def cases(split: str | None = None) -> list[Case]:
    """Return the points of one half that are compared, or all."""
    compared = []
    for point in read_points(split):
        if left_out(point) is None:
            measured = speed(point)
            assert measured is not None
            compared.append(
                Case(
                    point,
                    work_of(point, point["micro_batch"]),
                    parallelism_of(point),
                    machine_of(point),
                    measured,
                )
            )
    return compared


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
    reason = _first_reason(reasons)
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
    size_by_name = beside_tensors(memory, plan_of(point), _DEVICES[point["device"]])
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


# Fitted; other fields of `Rates` have a source of their own.
_FITTED: Final = (
    "plateau",
    "plateau_hopper",
    "attention",
    "attention_hopper",
    "width",
    "memory",
    "network",
    "best_plain",
    "best_tf32",
    "launch_seconds",
    "weight_seconds",
)
# Where the search begins: what was fitted before on llm-foundry's points alone, and guesses.
_START: Final = Rates(
    plateau=0.91,
    plateau_hopper=0.822,
    attention=0.323,
    attention_hopper=0.2,
    width=2270.0,
    memory=0.612,
    network=0.8,
    best_plain=0.9,
    best_tf32=0.8,
    launch_seconds=2e-5,
    weight_seconds=6.6e-4,
)
# DeepSpeed of early 2021: its gathers of stage 3 are not those that are estimated.
_SHOWN_ONLY: Final = ("narayanan-zero3",)
_COMPARED: Final = "all but narayanan-zero3"
_MOST: Final = 24  # points of one source in a fit: the largest has 209
_OUTLIER: Final = 0.3  # log ratios beyond it count less: in proportion, not by their square
_PULL: Final = 0.02  # towards the start, for constants that few points show


def sample(points: Sequence[Case]) -> list[tuple[Case, float]]:
    """Return the points of a fit, evenly taken from each source, with weights: each source counts
    as much as every other.
    """
    by_name: dict[str, list[Case]] = {}
    for case in points:
        if case.point["source"]["name"] in _SHOWN_ONLY:
            continue
        by_name.setdefault(case.point["source"]["name"], []).append(case)
    taken = []
    for group in by_name.values():
        step = max(len(group) / _MOST, 1.0)
        chosen = [group[int(number * step)] for number in range(min(len(group), _MOST))]
        taken += [(case, 1 / len(chosen)) for case in chosen]
    return taken


def fit(points: Sequence[Case], start: Rates = _START) -> Rates:
    """Choose the constants by least squares of log ratios, from steps of Gauss and Newton in the
    logarithms of the constants; ratios far off count in proportion (Huber 1964).
    """
    chosen = sample(points)
    logs = [log(getattr(start, name)) for name in _FITTED]
    origin = list(logs)
    for _ in range(6):
        rates = _rates_of(logs, start)
        errors = [log(case.ratio(rates)) for case, _ in chosen]
        slopes = []
        for number in range(len(_FITTED)):
            moved = list(logs)
            moved[number] -= 0.05
            other = _rates_of(moved, start)
            slopes.append(
                [
                    (error - log(case.ratio(other))) / 0.05
                    for (case, _), error in zip(chosen, errors, strict=True)
                ]
            )
        weights = [
            weight * min(1.0, _OUTLIER / max(abs(error), 1e-9))
            for (_, weight), error in zip(chosen, errors, strict=True)
        ]
        step = _newton_step(
            slopes, errors, weights, [a - b for a, b in zip(logs, origin, strict=True)]
        )
        for number, change in enumerate(step):
            most = log(_most(_FITTED[number]))
            logs[number] = min(logs[number] + max(min(change, 0.5), -0.5), most)
    return _rates_of(logs, start)


def _rates_of(logs: Sequence[float], start: Rates) -> Rates:
    """Return the constants of these logarithms."""
    return replace(start, **dict(zip(_FITTED, map(exp, logs), strict=True)))


def _most(name: str) -> float:
    """Return the most that a constant may be: a share is at most 1."""
    return 1e5 if name == "width" else 1.0


def _newton_step(
    slopes: Sequence[Sequence[float]],
    errors: Sequence[float],
    weights: Sequence[float],
    distance: Sequence[float],
) -> list[float]:
    """Solve the normal equations of weighted least squares with a pull to the start.

    Args:
        slopes: of each constant, the change of every error by it.
        errors: to be made zero.
        weights: of each error.
        distance: of each constant from its start.
    """
    size = len(slopes)
    rows = []
    for one in range(size):
        row = [
            sum(map(prod, zip(slopes[one], slopes[other], weights, strict=True)))
            for other in range(size)
        ]
        row[one] += _PULL
        right = -sum(map(prod, zip(slopes[one], errors, weights, strict=True)))
        rows.append([*row, right - _PULL * distance[one]])
    for pivot in range(size):  # Gauss: the pull keeps every pivot above zero
        for other in range(size):
            if other == pivot:
                continue
            factor = rows[other][pivot] / rows[pivot][pivot]
            rows[other] = [a - factor * b for a, b in zip(rows[other], rows[pivot], strict=True)]
    return [row[-1] / row[number] for number, row in enumerate(rows)]


def left_out_rates() -> dict[str, Rates]:
    """Return the constants that all other sources give, by the source that is left out."""
    names = dict.fromkeys(case.point["source"]["name"] for case in cases())
    return {
        name: fit([case for case in cases() if case.point["source"]["name"] != name])
        for name in names
    }


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation of two rows of figures."""
    return statistics.correlation(ranks(one), ranks(other))


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the errors of pairs of an estimate and a measurement."""
    estimates = [estimated for estimated, _ in pairs]
    measurements = [measured for _, measured in pairs]
    ratios = [estimated / measured for estimated, measured in pairs]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    correlation = None
    if len(pairs) >= 5 and len(set(measurements)) > 1:
        correlation = round(spearman(estimates, measurements), 3)
    return {
        "points": len(pairs),
        "median_error": round(statistics.median(errors), 4),
        "p90_error": round(errors[min(int(0.9 * len(errors)), len(errors) - 1)], 4),
        "median_ratio": round(statistics.median(ratios), 4),
        "spearman": correlation,
    }


def by_source(rows: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """Return the errors of all rows together and by source. A row is the name of a source, an
    estimate and a measurement.
    """
    pairs_by_source: dict[str, list[tuple[float, float]]] = {}
    for source, estimated, measured in rows:
        pairs_by_source.setdefault(source, []).append((estimated, measured))
    if not pairs_by_source:
        return {}
    errors = {"all": summary(list(chain.from_iterable(pairs_by_source.values())))}
    for source, pairs in pairs_by_source.items():
        errors[source] = summary(pairs)
    return errors


def throughput_errors(rates_without: Mapping[str, Rates]) -> dict[str, Any]:
    """Return the errors by source: with the constants that all other sources give, and with the
    constants of the estimate, which all sources gave.

    Args:
        rates_without: constants by the source that they were fitted without.
    """
    left_out = []
    fitted = []
    kinds: dict[str, list[Case]] = {}
    for case in cases():
        name = case.point["source"]["name"]
        kinds.setdefault(name, []).append(case)
        left_out.append((name, case.ratio(rates_without[name]) * case.measured, case.measured))
        fitted.append((name, case.ratio() * case.measured, case.measured))
    errors = {"left out": by_source(left_out), "fitted": by_source(fitted)}
    errors["kinds"] = {name: kinds_of(group) for name, group in kinds.items()}
    for kind, rows in (("left out", left_out), ("fitted", fitted)):
        errors[kind][_COMPARED] = by_source(row for row in rows if row[0] not in _SHOWN_ONLY)["all"]
    medians = [
        row["median_error"]
        for name, row in errors["left out"].items()
        if name not in ("all", _COMPARED, *_SHOWN_ONLY)
    ]
    errors["median_of_sources"] = round(statistics.median(medians), 4)
    return errors


def kinds_of(group: Sequence[Case]) -> str:
    """Return what the points of a source are, in words: devices and how they share the work."""
    words = dict.fromkeys(case.point["device"] for case in group)
    for case in group:
        by = case.parallelism
        strategy = case.point["strategy"] or "ddp"
        words[strategy.replace("zero", "ZeRO ").replace("ddp", "data parallel")] = None
        for size, word in ((by.tensor, "tensor"), (by.pipe, "pipe")):
            if size > 1:
                words[word] = None
        if case.point["model"].get("lora_r"):
            words["LoRA"] = None
        if case.point["model"]["kind"] in ("bert", "resnet50"):
            words[{"bert": "BERT", "resnet50": "ResNet-50"}[case.point["model"]["kind"]]] = None
    return ", ".join(words)


def memory_errors(split: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the errors of one half, and the number of points left out for each reason."""
    rows = []
    reasons = list[str | None]()
    for point in read_points(split):
        reason = memory_left_out(point)
        if reason is None:
            try:
                rows.append((point["source"]["name"], memory_of(point), point["memory_gib"]))
            except NotEstimatedError as error:
                reason = str(error)
        reasons.append(reason)
    return by_source(rows), _counted(reasons)


def _counted(reasons: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(reason for reason in reasons if reason).most_common())


def results(rates: Mapping[str, Rates]) -> dict[str, Any]:
    """Return the results to write: errors and points left out, and the constants.

    Args:
        rates: constants by the source that they were fitted without.
    """
    without = {}
    for name, found in rates.items():
        without[name] = {field: getattr(found, field) for field in _FITTED}
    written: dict[str, Any] = {
        "constants": asdict(RATES),
        "constants_without": without,
        "throughput": throughput_errors(rates),
        "throughput_left_out": _counted(map(left_out, read_points())),
    }
    errors = {}
    reasons = {}
    for half in ("fit", "holdout"):
        errors[half], reasons[half] = memory_errors(half)
    written["memory"] = errors
    written["memory_left_out"] = reasons
    return written


def rates_of(without: Mapping[str, Mapping[str, float]]) -> dict[str, Rates]:
    """Return the constants that `results` wrote, by the source that they were fitted without."""
    return {name: replace(_START, **values) for name, values in without.items()}


def table(written: Mapping[str, Any]) -> str:
    """Return the results as the page shows them."""
    throughput = written["throughput"]
    lines = [
        "Throughput:",
        "",
        "| source | kinds | points | left out: median error | nine of ten within "
        "| estimated / measured | Spearman | with all sources: median error |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, errors in throughput["left out"].items():
        title = f"**{name}**" if name in ("all", _COMPARED) else name
        kinds = throughput["kinds"].get(name, "")
        fitted = throughput["fitted"][name]["median_error"]
        lines.append(
            f"| {title} | {kinds} | {errors['points']} | {errors['median_error']:.1%} "
            f"| {errors['p90_error']:.1%} | {errors['median_ratio']:.2f} "
            f"| {_rank(errors, name)} | {fitted:.1%} |"
        )
    lines += [
        "",
        f"The median of the sources' medians, without {', '.join(_SHOWN_ONLY)}, is "
        f"{throughput['median_of_sources']:.1%}.",
        "",
        "Memory, for which nothing was fitted but the share of unused pieces:",
        "",
        "| source | half | points | median error | nine of ten within | estimated / measured "
        "| Spearman |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for half, errors_by_source in written["memory"].items():
        for name, errors in errors_by_source.items():
            title = f"**all of {half}**" if name == "all" else name
            lines.append(
                f"| {title} | {half} | {errors['points']} | {errors['median_error']:.1%} "
                f"| {errors['p90_error']:.1%} | {errors['median_ratio']:.2f} "
                f"| {_rank(errors, name)} |"
            )
    lines += [
        "",
        "Left out, by a rule on their fields (`left_out` and `memory_left_out` in `validate.py`):",
        "",
    ]
    lines.append(f"- throughput: {_listed(written['throughput_left_out'])}.")
    for half, reasons in written["memory_left_out"].items():
        lines.append(f"- memory, {half}: {_listed(reasons)}.")
    return "\n".join(lines) + "\n"


def _rank(errors: Mapping[str, Any], name: str) -> str:
    if errors["spearman"] is None or name in ("all", _COMPARED):
        return ""
    return f"{errors['spearman']:.2f}"


def _listed(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items())


def main() -> None:
    """Fit on all sources, or write the results and the page's table."""
    if "--fit" in sys.argv[1:]:
        print(fit(cases()))
        print(f"unused share: {unused_share():.4f}")
        return
    if "--kept" in sys.argv[1:]:
        kept = json.loads((RESULTS / "planner.json").read_text(encoding="utf-8"))
        written = results(rates_of(kept["constants_without"]))
    else:
        written = results(left_out_rates())
    (RESULTS / "planner.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    page = ROOT / "docs/planner.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.write_text(f"{before}{_BEGIN}{table(written)}{_END}{after}", encoding="utf-8")
    print(table(written))


_BEGIN: Final = "<!-- python -m benchmarks.planner.validate -->\n"
_END: Final = "<!-- end -->\n"

if __name__ == "__main__":
    main()
