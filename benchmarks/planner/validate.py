"""The planner's estimates against published measurements: ``python -m benchmarks.planner.validate [--fit]``.

``--fit`` chooses the constants of `framework/plan/time.py` on the `fit` half of the points alone and prints them;
without it the errors of both halves are written to `benchmarks/results/planner.json` and to the table in
`docs/planner.md`. Which points take part is decided by their fields (`left_out`), in both halves alike.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log, sqrt
from typing import Any, Final

from benchmarks.planner.published import read_points, tokens_per_second_per_gpu
from benchmarks.records import RESULTS, ROOT
from framework.config.model import GPT
from framework.plan.devices import Machine, find_network
from framework.plan.time import RATES, Parallelism, Rates, StepTime, step_time
from framework.plan.work import ModelWork, model_work

Point = dict[str, Any]
# A bare name is the kind that most of them are; 40 GB of an A100 and 96 of a GH200 stand in `device_gb`.
_DEVICES: Final = {
    "A100": "a100-80gb",
    "H100": "h100-80gb",
    "H200": "h200-141gb",
    "B200": "b200-180gb",
    "MI300X": "mi300x-192gb",
    "GH200": "gh200-96gb",
}
# What a source says about its network or devices where that is not the usual (`notes` in points.json; the card of the
# model that bigscience trained names 4 Omni-Path links for 8 GPUs).
_NETWORKS: Final = {"bigscience-tr11": "omni-path"}
_DEVICES_PER_HOST: Final = {"lsaie": 4}
# Share of the forward pass that runs again. Selective, of torchtitan: every second matrix product.
_RECOMPUTED: Final = {"none": 0.0, "selective": 0.5, "full": 1.0}


def left_out(point: Point) -> str | None:
    """Why a point's throughput is not compared; decided by its fields."""
    model, note = point["model"], point["note"] or ""
    shape = [model[key] for key in ("layers", "hidden", "heads", "vocab")]
    reasons = {
        "no throughput printed": tokens_per_second_per_gpu(point) is None,
        "no dense transformer": model["kind"] not in ("gpt", "llama"),
        "shape of the model not printed": None in shape,
        "precision not modelled or not printed": point["precision"] not in ("bf16", "fp16"),
        "device not printed or not listed": point["device"] not in _DEVICES,
        "size of the run not printed": None in [point[key] for key in ("num_gpus", "micro_batch", "sequence")],
        "compiled": "compile" in note.lower(),
        "power limited": "power limited" in note,
        "deterministic mode": "deterministic" in note,
        "context parallelism, which is not DeepSpeed's": (point["sequence_parallel"] or 1) > 1,
        "offloaded, bandwidth of the host not printed": point["offload"] not in (None, "none"),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def recompute_of(point: Point) -> str:
    """What is computed again. Where the source leaves it open: what its own TFLOP/s count (Megatron's formula, of
    Narayanan et al. 2021, has 4 passes with it and 3 without), else nothing, which is every framework's default.
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


def work_of(point: Point) -> ModelWork:
    """The work of the point's model for one sample."""
    model = point["model"]
    is_llama, is_mosaic = model["kind"] == "llama", point["source"]["name"] == "llm-foundry"
    kv_heads = model["kv_heads"] or model["heads"]
    perceptron = model["ffn"] or 4 * model["hidden"]
    if is_llama and model["ffn"] is None:  # the printed number of parameters leaves one width
        attention = 2 * model["hidden"] ** 2 * (1 + kv_heads / model["heads"])
        perceptron = round((point["parameters"] / model["layers"] - attention) / 3 / model["hidden"])
    config = GPT(
        num_layers=model["layers"],
        hidden_size=model["hidden"],
        num_heads=model["heads"],
        num_kv_heads=kv_heads,
        mlp_size=perceptron,
        vocab_size=model["vocab"],
        max_positions=point["sequence"],
        dropout=0.0,
        positions="rotary" if is_llama else "learned",
        norm="rmsnorm" if is_llama else "layernorm",
        mlp="swiglu" if is_llama else "gelu",
        bias=not (is_llama or is_mosaic),
        tie_embeddings=not is_llama,
    )
    work = model_work(config, micro_size=1, sequence_length=point["sequence"])
    assert work is not None
    if point["source"]["framework"] == "Megatron-DeepSpeed":
        work = with_scores(work, model["heads"] * point["sequence"] ** 2)
    return work


def with_scores(work: ModelWork, scores: int) -> ModelWork:
    """The work where attention writes its scores to memory, as before FlashAttention (Dao et al. 2022): two products,
    a fused softmax and a dropout read and write them in half precision, and three tensors of them are saved.
    """
    moved, saved = (2 + 4 + 5 + 2) * scores, 5 * scores
    parts = (
        replace(
            part,
            moved_bytes=part.moved_bytes + moved,
            saved_bytes=part.saved_bytes + saved,
            split_bytes=part.split_bytes + saved,
        )
        if part.count > 1
        else part
        for part in work.parts
    )
    return replace(work, parts=tuple(parts))


def parallelism_of(point: Point) -> Parallelism:
    """The distribution of the point's step."""
    tensor, pipe = point["tensor"] or 1, point["pipeline"] or 1
    data = point["num_gpus"] // tensor // pipe
    stage = int(point["strategy"][-1]) if (point["strategy"] or "ddp") != "ddp" else 0
    accumulation = point["accumulation"]
    if accumulation is None:
        accumulation = max((point["global_batch"] or 0) // (point["micro_batch"] * data), 1)
    is_fsdp = "DeepSpeed" not in point["source"]["framework"] and stage > 1
    # llm-foundry's DEFAULT sums in fp32, PURE does not; bigscience does so where it trains in bf16 (`notes`).
    in_fp32 = "DEFAULT" in (point["note"] or "")
    in_fp32 = in_fp32 or (point["source"]["name"] == "bigscience-tr11" and point["precision"] == "bf16")
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
        **({"bucket": 12 * point["model"]["hidden"] ** 2} if is_fsdp else {}),  # a block at a time
        overlaps=is_fsdp or stage in (0, 3),
        scatters=is_fsdp or stage == 3,
        live=0 if stage == 3 else 10**12,
        interleaving=point["virtual_pipeline"] or 1,
        block_sums=(2, 2),
    )


def machine_of(point: Point) -> Machine:
    """The machine of the point."""
    name = _DEVICES[point["device"]]
    if point["device_gb"] == 40:
        name = "a100-40gb"
    source = point["source"]["name"]
    per_host = _DEVICES_PER_HOST.get(source, point["num_gpus"] // (point["nodes"] or 0) if point["nodes"] else 8)
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
            measured = tokens_per_second_per_gpu(point)
            assert measured is not None
            found.append(Case(point, work_of(point), parallelism_of(point), machine_of(point), measured))
    return found


# Fitted; the others of `Rates` have a source of their own, or nothing in the points shows them.
_FITTED: Final = ("plateau", "plateau_hopper", "attention", "attention_hopper", "width", "memory")


def fit(start: Rates = RATES) -> tuple[Rates, float]:
    """Choose the constants on the `fit` half: least squares of log ratios, none counted above 0.3, by a search along
    one constant after the other with ever smaller steps.
    """
    points = cases("fit")

    def loss(rates: Rates) -> float:
        return sqrt(statistics.fmean(min(log(case.ratio(rates)) ** 2, 0.09) for case in points))

    best, least, step = start, loss(start), 0.1
    while step > 0.002:
        before = least
        for name in _FITTED:
            for factor in (1 + step, 1 / (1 + step)):
                tried = replace(best, **{name: min(getattr(best, name) * factor, 1.0 if name != "width" else 1e5)})
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
        "median_ratio": round(statistics.median(estimated / measured for estimated, measured in pairs), 4),
        "spearman": round(spearman([pair[0] for pair in pairs], measured), 3) if ranked else None,
    }


def errors(split: str) -> dict[str, Any]:
    """Errors of one half: of all its points, and by source."""
    found: dict[str, list[tuple[float, float]]] = {}
    for case in cases(split):
        estimated = case.time().tokens_per_second_per_device
        assert estimated is not None
        found.setdefault(case.point["source"]["name"], []).append((estimated, case.measured))
    total = [pair for pairs in found.values() for pair in pairs]
    return {"all": summary(total), **{name: summary(pairs) for name, pairs in found.items()}}


def results() -> dict[str, Any]:
    """What is written: errors and what is left out, by half, and the constants."""
    halves = ("fit", "holdout")
    reasons = {half: Counter(filter(None, map(left_out, read_points(half)))) for half in halves}
    return {
        "throughput": {half: errors(half) for half in halves},
        "left_out_of_throughput": {half: dict(reasons[half].most_common()) for half in halves},
        "constants": asdict(RATES),
    }


def table(found: Mapping[str, Any]) -> str:
    """The results as the page shows them."""
    lines = [
        "| source | half | points | median error | nine of ten within | estimated / measured, median | Spearman |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for half, sources in found["throughput"].items():
        for name, row in sources.items():
            source = f"**all of {half}**" if name == "all" else name
            ranked = "" if row["spearman"] is None or name == "all" else f"{row['spearman']:.2f}"
            cells = (
                row["points"],
                f"{row['median_error']:.1%}",
                f"{row['p90_error']:.1%}",
                f"{row['median_ratio']:.2f}",
            )
            lines.append(f"| {source} | {half} | {' | '.join(map(str, cells))} | {ranked} |")
    return "\n".join(lines)


def main() -> None:
    """Fit, or write the results and the page's table."""
    if "--fit" in sys.argv[1:]:
        rates, loss = fit()
        print(f"{rates}\nroot of the mean square of log ratios: {loss:.4f}")
        return
    found = results()
    (RESULTS / "planner.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    page = ROOT / "docs/planner.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    page.write_text(f"{before}{_BEGIN}{table(found)}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")
    print(table(found))


_BEGIN: Final = "<!-- throughput: python -m benchmarks.planner.validate -->\n"
_END: Final = "<!-- end -->\n"

if __name__ == "__main__":
    main()
