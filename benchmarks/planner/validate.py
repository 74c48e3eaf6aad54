"""The planner's estimates against published measurements: ``python -m benchmarks.planner.validate
[--fit]``.

``--fit`` chooses the constants of `framework/plan/time.py` on the `fit` half of the points alone
and prints them; without it the errors of both halves are written to
`benchmarks/results/planner.json` and to the table in `docs/planner.md`. Which points take part is
decided by their fields (`left_out`), in both halves alike.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log, sqrt
from typing import Any, Final

from benchmarks.planner.published import read_points, tokens_per_second_per_gpu
from benchmarks.records import RESULTS, ROOT
from framework.config.load import config_from_values
from framework.config.model import GPT
from framework.plan.cluster import Cluster
from framework.plan.device_overhead import beside_tensors
from framework.plan.devices import Machine, find_network
from framework.plan.memory import NotEstimatedError, estimate
from framework.plan.plan import Plan, make_plan
from framework.plan.time import RATES, Parallelism, Rates, StepTime, step_time
from framework.plan.work import LayerWork, ModelWork, model_work

Point = dict[str, Any]
# A bare name is the kind that most of them are; 40 GB of an A100 and 96 of a GH200 stand in
# `device_gb`.
_DEVICES: Final = {
    "A100": "a100-80gb",
    "H100": "h100-80gb",
    "H200": "h200-141gb",
    "B200": "b200-180gb",
    "MI300X": "mi300x-192gb",
    "GH200": "gh200-96gb",
}
# What a source says about its network or devices where that is not the usual (`notes` in
# points.json; the card of the model that bigscience trained names 4 Omni-Path links for 8 GPUs).
_NETWORKS: Final = {"bigscience-tr11": "omni-path"}
_DEVICES_PER_HOST: Final = {"lsaie": 4}
# Share of the forward pass that runs again. Selective, of torchtitan: every second matrix product.
_RECOMPUTED: Final = {"none": 0.0, "selective": 0.5, "full": 1.0}


def speed(point: Point) -> float | None:
    """Tokens per second of one device; where no batch is printed a step is one micro-batch, as
    frameworks have it.
    """
    found = tokens_per_second_per_gpu(point)
    known = [point[key] for key in ("micro_batch", "sequence", "step_seconds")]
    if found is not None or None in known or point["global_batch"] or point["accumulation"]:
        return found
    is_data_parallel = {point["tensor"], point["pipeline"], point["sequence_parallel"]} <= {None, 1}
    return float(known[0] * known[1] / known[2]) if is_data_parallel else None


def vocabulary(point: Point) -> int | None:
    """The model's vocabulary: printed, or what the printed number of parameters leaves for two
    matrices of it.
    """
    model = point["model"]
    if model["vocab"] is not None or None in (
        model["layers"],
        model["hidden"],
        point["parameters"],
    ):
        return None if model["vocab"] is None else int(model["vocab"])
    blocks = 12 * model["layers"] * model["hidden"] ** 2
    return round((point["parameters"] - blocks) / model["hidden"] / 2)


def left_out(point: Point) -> str | None:
    """Why a point's throughput is not compared; decided by its fields."""
    model, note = point["model"], point["note"] or ""
    shape = [*(model[key] for key in ("layers", "hidden", "heads")), vocabulary(point)]
    reasons = {
        "no throughput printed": speed(point) is None,
        "no dense transformer": model["kind"] not in ("gpt", "llama"),
        "shape of the model not printed": None in shape,
        "precision not modelled or not printed": point["precision"] not in ("bf16", "fp16"),
        "device not printed or not listed": point["device"] not in _DEVICES,
        "size of the run not printed": None
        in [point[key] for key in ("num_gpus", "micro_batch", "sequence")],
        "compiled": "compile" in note.lower(),
        "power limited": "power limited" in note,
        "deterministic mode": "deterministic" in note,
        "optimizer state in bf16": "optimizer states" in note,
        "context parallelism, which is not DeepSpeed's": (point["sequence_parallel"] or 1) > 1,
        "offloaded, bandwidth of the host not printed": point["offload"] not in (None, "none"),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def recompute_of(point: Point) -> str:
    """What is computed again. Where the source leaves it open: what its own TFLOP/s count
    (Megatron's formula, of Narayanan et al. 2021, has 4 passes with it and 3 without), else
    nothing, which is every framework's default.
    """
    printed = re.search(r"([\d.]+) TFLOP/s as printed", point["note"] or "")
    if point["recompute"] != "unknown" or not printed or point["step_seconds"] is None:
        return str(point["recompute"] or "none").replace("unknown", "none")
    model, length = point["model"], point["sequence"]
    hidden, layers = model["hidden"], model["layers"]
    once = 24 * point["global_batch"] * length * layers * hidden**2
    once *= 1 + length / (6 * hidden) + model["vocab"] / (16 * layers * hidden)
    passes = float(printed[1]) * 1e12 * point["step_seconds"] * point["num_gpus"] / once
    return "full" if passes > 3.5 else "none"


def config_of(point: Point) -> GPT:
    """The point's model as a run config describes it."""
    model = point["model"]
    is_llama, is_mosaic = model["kind"] == "llama", point["source"]["name"] == "llm-foundry"
    kv_heads = model["kv_heads"] or model["heads"]
    perceptron = model["ffn"] or 4 * model["hidden"]
    if is_llama and model["ffn"] is None:  # the printed number of parameters leaves one width
        attention = 2 * model["hidden"] ** 2 * (1 + kv_heads / model["heads"])
        perceptron = round(
            (point["parameters"] / model["layers"] - attention) / 3 / model["hidden"]
        )
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


def work_of(point: Point, micro_size: int = 1) -> ModelWork:
    """The work of the point's model."""
    work = model_work(config_of(point), micro_size=micro_size, sequence_length=point["sequence"])
    assert work is not None
    if point["source"]["framework"] == "Megatron-DeepSpeed":
        work = with_scores(work, micro_size * point["model"]["heads"] * point["sequence"] ** 2)
    return work


def with_scores(work: ModelWork, scores: int) -> ModelWork:
    """The work where attention writes all of its scores to memory, as before FlashAttention (Dao et
    al. 2022): two products, a fused softmax and a dropout read and write them in half precision,
    and three tensors of them are saved.
    """
    moved, saved = (2 + 4 + 5 + 2) * scores, 5 * scores
    parts = (
        replace(
            part,
            masked_flops=0,
            moved_bytes=part.moved_bytes + moved,
            saved_bytes=part.saved_bytes + saved,
            split_bytes=part.split_bytes + saved,
        )
        if part.count > 1
        else part
        for part in work.parts
    )
    return replace(work, parts=tuple(parts))


def bucket_of(point: Point) -> int:
    """Elements of DeepSpeed's buckets: as the source's notes print them, else its default."""
    printed = re.search(r"buckets of (\d+e\d+)", point["source"].get("notes", ""))
    return int(float(printed[1])) if printed else 500_000_000


def parallelism_of(point: Point) -> Parallelism:
    """The distribution of the point's step."""
    tensor, pipe = point["tensor"] or 1, point["pipeline"] or 1
    data = point["num_gpus"] // tensor // pipe
    stage = int(point["strategy"][-1]) if (point["strategy"] or "ddp") != "ddp" else 0
    accumulation = point["accumulation"]
    if accumulation is None:
        accumulation = max((point["global_batch"] or 0) // (point["micro_batch"] * data), 1)
    is_fsdp = "DeepSpeed" not in point["source"]["framework"] and stage > 1
    # llm-foundry's DEFAULT sums in fp32, PURE does not; bigscience does so where it trains in bf16
    # (`notes`).
    in_fp32 = "DEFAULT" in (point["note"] or "")
    in_fp32 = in_fp32 or (
        point["source"]["name"] == "bigscience-tr11" and point["precision"] == "bf16"
    )
    return Parallelism(
        data=data,
        pipe=pipe,
        tensor=tensor,
        zero_stage=3 if is_fsdp else stage,  # FSDP's SHARD_GRAD_OP is stage 3 whose weights stay
        accumulation=accumulation,
        micro_size=point["micro_batch"],
        dtype=point["precision"],
        gradient_bytes=4 if in_fp32 else 2,
        recomputed=_RECOMPUTED[recompute_of(point)],
        # FSDP's is a block
        bucket=12 * point["model"]["hidden"] ** 2 if is_fsdp else bucket_of(point),
        overlaps=is_fsdp or stage in (0, 3),
        scatters=is_fsdp or stage == 3,
        live=0 if stage == 3 else 10**12,
        by_weight=not is_fsdp,
        interleaving=point["virtual_pipeline"] or 1,
        block_sums=(2, 2),
    )


def machine_of(point: Point) -> Machine:
    """The machine of the point."""
    name = _DEVICES[point["device"]]
    if point["device_gb"] == 40:
        name = "a100-40gb"
    source = point["source"]["name"]
    per_host = _DEVICES_PER_HOST.get(
        source, point["num_gpus"] // (point["nodes"] or 0) if point["nodes"] else 8
    )
    machine = Machine.listed(name, devices_per_host=per_host)
    if source in _NETWORKS:
        machine = replace(machine, network=find_network(_NETWORKS[source]))
    if (point["device"], point["device_gb"]) == ("H100", 96):  # 2.4 TB/s (notes of the source)
        machine = replace(machine, device=replace(machine.device, memory_bytes_per_second=2.4e12))
    return machine


@dataclass(frozen=True)
class Case:
    """A point that is compared; `measured` in tokens per second of one device."""

    point: Point
    work: ModelWork
    parallelism: Parallelism
    machine: Machine
    measured: float

    def time(self, rates: Rates = RATES) -> StepTime:
        """The estimate."""
        return step_time(self.work, self.parallelism, self.machine, rates)

    def ratio(self, rates: Rates = RATES) -> float:
        """Estimated by measured throughput."""
        estimated = self.time(rates).tokens_per_second_per_device
        assert estimated is not None
        return estimated / self.measured


def cases(split: str) -> list[Case]:
    """The points of one half that are compared."""
    found = []
    for point in read_points(split):
        if left_out(point) is None:
            measured = speed(point)
            assert measured is not None
            found.append(
                Case(point, work_of(point), parallelism_of(point), machine_of(point), measured)
            )
    return found


def memory_left_out(point: Point) -> str | None:
    """Why a point's memory is not compared; decided by its fields. Nothing was fitted for
    memory.
    """
    reasons = {
        "no memory printed": point["memory_gib"] is None,
        "not DeepSpeed, which the estimate is of": "DeepSpeed" not in point["source"]["framework"],
        "micro-batch or length not printed": None
        in [point[key] for key in ("num_gpus", "micro_batch", "sequence")],
        "the largest at its start, not in a step": "the peak is that of the initialization"
        in (point["note"] or ""),
        "selective recomputation": point["recompute"] == "selective",
    }
    shared = left_out(point)
    if shared == "no throughput printed":
        shared = left_out(point | {"tokens_per_second_per_gpu": 1.0})
    return next((reason for reason, applies in reasons.items() if applies), shared)


def plan_of(point: Point) -> Plan:
    """The point as a plan of ours: its ranks are those of one tensor-parallel rank each."""
    by, precision, model = parallelism_of(point), point["precision"], config_of(point)
    sums = "fp32" if by.gradient_bytes == 4 else precision
    values = {
        "model": {"kind": "gpt"} | model.model_dump(exclude_unset=True),
        "data": {"kind": "text", "sequence_length": point["sequence"]},
        "task": {"kind": "causal_lm"},
        "batch": {"micro_size": by.micro_size, "accumulation_steps": by.accumulation},
        "precision": {"dtype": precision, "grad_accumulation": sums, "grad_reduction": sums},
        "zero": {
            "stage": by.zero_stage,
            "reduce_bucket_size": by.bucket,
            "allgather_bucket_size": by.bucket,
        },
        "parallel": {"pipe": by.pipe},
        "optimizer": {"kind": "adamw", "implementation": "deepspeed"},
        "training": {"max_steps": 10, "recompute_every": int(by.recomputed)},
    }
    return make_plan(config_from_values(values), Cluster(by.data * by.pipe, 1, "cuda"))


def of_one_rank(work: ModelWork, tensor: int) -> ModelWork:
    """The work of one of the tensor-parallel ranks, which split matrices and what Megatron splits
    between them.
    """

    def split(part: LayerWork) -> LayerWork:
        is_last = part.name in ("head", "loss")
        share = 1.0 if is_last else part.split_bytes / max(part.saved_bytes, 1)
        sizes = {
            key: round(getattr(part, key) * (1 - share + share / tensor))
            for key in ("saved_bytes", "peak_bytes", "backward_bytes", "passing_bytes")
        }
        output = part.output_bytes // (tensor if is_last else 1)
        return replace(part, num_params=part.num_params // tensor, output_bytes=output, **sizes)

    weights = {
        name: (shape[0] // tensor, *shape[1:]) if len(shape) > 1 else shape
        for name, shape in work.weights.items()
    }
    return replace(work, weights=weights, parts=tuple(map(split, work.parts)))


def memory_of(point: Point) -> float:
    """Estimated GiB of the fullest rank at its fullest moment.

    Raises:
        NotEstimatedError: the estimate lacks something that the point has.
    """
    by = parallelism_of(point)
    work = work_of(point, micro_size=by.micro_size)
    found = estimate(plan_of(point), work=of_one_rank(work, by.tensor))
    moment = "between" if point["memory_kind"] == "live_allocated" else found.peak
    # nvidia-smi shows what no tensor holds too; torch's own figure of what it reserves only its
    # unused pieces.
    beside = beside_tensors(found, plan_of(point), _DEVICES[point["device"]])
    kinds = {"nvidia_smi": {*beside}, "peak_reserved": {"fragmentation"}}.get(
        point["memory_kind"], set()
    )
    return (
        found.total(moment) + sum(size for name, size in beside.items() if name in kinds)
    ) / 2**30


def unused_share() -> float:
    """Fit the `unused_share` of devices.json: what torch reserves beyond its tensors, as a share of
    what grows with the micro-batch, on the points of the fit half that print both for DeepSpeed.
    """
    pairs = []
    for point in read_points("fit"):
        printed = re.search(r"DeepSpeed;.* ([\d.]+) GiB reserved", point["note"] or "")
        if printed and point["memory_kind"] == "peak_allocated":
            pairs.append((point["micro_batch"], point["memory_gib"], float(printed[1])))
    slope = statistics.linear_regression(
        [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    ).slope
    return statistics.median(
        (reserved - allocated) / (slope * micro) for micro, allocated, reserved in pairs
    )


# Fitted; the others of `Rates` have a source of their own, or nothing in the points shows them.
_FITTED: Final = ("plateau", "plateau_hopper", "attention", "attention_hopper", "width", "memory")


def fit(start: Rates = RATES) -> tuple[Rates, float]:
    """Choose the constants on the `fit` half: least squares of log ratios, none counted above 0.3,
    by a search along one constant after the other with ever smaller steps.
    """
    points = cases("fit")

    def loss(rates: Rates) -> float:
        return sqrt(statistics.fmean(min(log(case.ratio(rates)) ** 2, 0.09) for case in points))

    best, least, step = start, loss(start), 0.1
    while step > 0.002:
        before = least
        for name in _FITTED:
            for factor in (1 + step, 1 / (1 + step)):
                tried = replace(
                    best,
                    **{name: min(getattr(best, name) * factor, 1.0 if name != "width" else 1e5)},
                )
                if (found := loss(tried)) < least:
                    best, least = tried, found
        if least > before - 1e-6:
            step /= 2
    return best, least


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each value, ties sharing theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation of two rows of figures."""
    return statistics.correlation(ranks(one), ranks(other))


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Errors of pairs of an estimate and a measurement."""
    errors = sorted(abs(estimated / measured - 1) for estimated, measured in pairs)
    measured = [pair[1] for pair in pairs]
    ranked = len(pairs) >= 5 and len({*measured}) > 1
    return {
        "points": len(pairs),
        "median_error": round(statistics.median(errors), 4),
        "p90_error": round(errors[min(int(0.9 * len(errors)), len(errors) - 1)], 4),
        "median_ratio": round(
            statistics.median(estimated / measured for estimated, measured in pairs), 4
        ),
        "spearman": round(spearman([pair[0] for pair in pairs], measured), 3) if ranked else None,
    }


def by_source(pairs: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """Errors of all, and by source, of names of sources with an estimate and a measurement."""
    found: dict[str, list[tuple[float, float]]] = {}
    for source, estimated, measured in pairs:
        found.setdefault(source, []).append((estimated, measured))
    if not found:
        return {}
    total = [pair for those in found.values() for pair in those]
    return {"all": summary(total), **{source: summary(those) for source, those in found.items()}}


def throughput_errors(split: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Errors of one half, and how many points are left out for which reason."""
    pairs = [
        (case.point["source"]["name"], case.ratio() * case.measured, case.measured)
        for case in cases(split)
    ]
    return by_source(pairs), _counted(map(left_out, read_points(split)))


def memory_errors(split: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Errors of one half, and how many points are left out for which reason."""
    pairs, reasons = [], list[str | None]()
    for point in read_points(split):
        reason = memory_left_out(point)
        if reason is None:
            try:
                pairs.append((point["source"]["name"], memory_of(point), point["memory_gib"]))
            except NotEstimatedError as error:
                reason = str(error)
        reasons.append(reason)
    return by_source(pairs), _counted(reasons)


def _counted(reasons: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(reason for reason in reasons if reason).most_common())


def results() -> dict[str, Any]:
    """What is written: errors and what is left out, by half, and the constants."""
    found: dict[str, Any] = {"constants": asdict(RATES)}
    for what, errors in (("throughput", throughput_errors), ("memory", memory_errors)):
        halves = {half: errors(half) for half in ("fit", "holdout")}
        found[what] = {half: rows for half, (rows, _) in halves.items()}
        found[f"{what}_left_out"] = {half: reasons for half, (_, reasons) in halves.items()}
    return found


def table(found: Mapping[str, Any]) -> str:
    """The results as the page shows them."""
    lines = [
        "| what | source | half | points | median error | nine of ten within | estimated / measured | Spearman |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for what in ("throughput", "memory"):
        for half, sources in found[what].items():
            for name, row in sources.items():
                source = f"**all of {half}**" if name == "all" else name
                ranked = (
                    "" if row["spearman"] is None or name == "all" else f"{row['spearman']:.2f}"
                )
                errors = f"{row['median_error']:.1%} | {row['p90_error']:.1%} | {row['median_ratio']:.2f}"
                lines.append(
                    f"| {what} | {source} | {half} | {row['points']} | {errors} | {ranked} |"
                )
    lines += [
        "",
        "Left out, by a rule on their fields (`left_out` and `memory_left_out` in `validate.py`):",
        "",
    ]
    for what in ("throughput", "memory"):
        for half, reasons in found[f"{what}_left_out"].items():
            listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            lines.append(f"- {what}, {half}: {listed}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit, or write the results and the page's table."""
    if "--fit" in sys.argv[1:]:
        rates, loss = fit()
        print(
            f"{rates}\nroot of the mean square of log ratios: {loss:.4f}\nunused share: {unused_share():.4f}"
        )
        return
    found = results()
    (RESULTS / "planner.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    page = ROOT / "docs/planner.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    page.write_text(
        f"{before}{_BEGIN}{table(found)}{_END}{rest.partition(_END)[2]}", encoding="utf-8"
    )
    print(table(found))


_BEGIN: Final = "<!-- python -m benchmarks.planner.validate -->\n"
_END: Final = "<!-- end -->\n"

if __name__ == "__main__":
    main()
