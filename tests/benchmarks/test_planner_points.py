"""The published points that the planner is judged by."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from typing import Any

import pytest

from benchmarks.planner.published import HERE, read_devices, read_points, tokens_per_second_per_gpu

FILE = json.loads((HERE / "points.json").read_text(encoding="utf-8"))
POINTS = read_points()
MEASURED = ("memory_gib", "tokens_per_second_per_gpu", "samples_per_second", "step_seconds")
# The highest peak of those that a name leaves open is the limit.
DEVICE_OF = {
    "A100": "a100-80gb",
    "H100": "h100-80gb",
    "H200": "h200-141gb",
    "B200": "b200-180gb",
    "MI300X": "mi300x-192gb",
}
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
RANGES: dict[str, tuple[float, float]] = {
    "parameters": (1e8, 1e12),
    "device_gb": (16, 192),
    "num_gpus": (1, 16_384),
    "nodes": (1, 2048),
    "tensor": (1, 8),
    "pipeline": (1, 64),
    "virtual_pipeline": (1, 32),
    "sequence_parallel": (1, 64),
    "expert": (1, 64),
    "sequence": (128, 1_048_576),
    "micro_batch": (1, 512),
    "accumulation": (1, 2048),
    "global_batch": (1, 16_384),
    "memory_gib": (0.1, 192),
    "tokens_per_second_per_gpu": (10, 200_000),
    "samples_per_second": (0.1, 100_000),
    "step_seconds": (0.01, 1000),
    "mfu": (0.05, 0.8),
}
CHOICES: dict[str, set[str | None]] = {
    "strategy": {"ddp", "zero1", "zero2", "zero3", None},
    "precision": {"fp32", "tf32", "amp", "fp16", "bf16", "fp8", "nvfp4", None},
    "optimizer": {"adam", "adamw", "dist_muon", "muon", None},
    "recompute": {"none", "selective", "full", "unknown", None},
    "offload": {"none", "activations", "optimizer", "optimizer+parameters", None},
    "memory_kind": {
        "peak_allocated",
        "peak_reserved",
        "live_allocated",
        "nvidia_smi",
        "unknown",
        None,
    },
}


def measured_points(*keys: str) -> list[dict[str, Any]]:
    return [point for point in POINTS if any(point[key] is not None for key in keys)]


def test_there_are_enough_points_and_each_measured_something() -> None:
    assert len(POINTS) >= 300
    assert len({point["id"] for point in POINTS}) == len(POINTS)
    assert measured_points(*MEASURED) == POINTS
    assert (HERE / "points.json").stat().st_size < 230_000


def test_each_point_has_a_source_that_can_be_looked_up() -> None:
    addresses = {source["address"] for source in FILE["sources"].values()}
    assert len(addresses) == len(FILE["sources"])
    for address in addresses:
        assert re.search(
            r"@[0-9a-f]{12}$| (issue|pull request) #\d+$|^(docs|gist|arxiv)\.", address
        ), address
    assert {point["source"]["name"] for point in POINTS} == set(FILE["sources"])
    assert {point["model"]["name"] for point in POINTS} == set(FILE["models"])


@pytest.mark.parametrize("field", RANGES)
def test_numbers_are_of_sane_size(field: str) -> None:
    low, high = RANGES[field]
    known = {point["id"]: point[field] for point in POINTS if point[field] is not None}
    assert known
    assert {name: value for name, value in known.items() if not low <= value <= high} == {}


def test_words_are_the_known_ones() -> None:
    assert set(FILE["fields"]) == {*RANGES, *CHOICES, "id", "source", "model", "device", "note"}
    for field, words in CHOICES.items():
        assert {point[field] for point in POINTS} <= words, field
    for point in POINTS:
        assert (point["memory_gib"] is None) == (point["memory_kind"] is None), point["id"]


def test_no_point_is_faster_than_its_device() -> None:
    devices, checked = read_devices(), Counter[str]()
    for point in POINTS:
        parameters = point["model"].get("active_parameters") or point["parameters"]
        is_dense = point["model"]["kind"] in ("gpt", "llama", "qwen") or point["model"].get(
            "active_parameters"
        )
        speed, name = tokens_per_second_per_gpu(point), DEVICE_OF.get(point["device"])
        if not (parameters and is_dense and speed and name) or point["precision"] == "nvfp4":
            continue
        peaks = [
            devices[name][f"tflops_{dtype}"]
            for dtype in ([point["precision"]] if point["precision"] in DTYPES else DTYPES)
        ]
        peak = max(peak for peak in peaks if peak is not None)
        assert speed * 6 * parameters < peak * 1e12, point["id"]
        checked[point["source"]["name"]] += 1
    assert checked.total() > 350
    assert len(checked) >= 6


def test_utilization_follows_from_the_speed() -> None:
    """The source's own formula, dense attention of all positions counted, gives the source's own
    percentage.
    """
    devices, checked = read_devices(), 0
    for point in POINTS:
        if point["mfu"] is None or point["precision"] == "fp8":
            continue
        model, name = point["model"], DEVICE_OF[point["device"]]
        flops = 6 * point["parameters"] + 12 * model["layers"] * model["hidden"] * point["sequence"]
        peak = devices[name]["tflops_bf16"] * 1e12
        assert point["mfu"] == pytest.approx(
            flops * point["tokens_per_second_per_gpu"] / peak, rel=0.015
        ), point["id"]
        checked += 1
    assert checked > 150


def test_sizes_of_a_run_agree() -> None:
    for point in POINTS:
        sizes = [point[key] or 1 for key in ("tensor", "pipeline", "sequence_parallel")]
        model_parallel = sizes[0] * sizes[1] * sizes[2]
        if point["num_gpus"] is not None:
            assert point["num_gpus"] % model_parallel == 0, point["id"]
            batches = [point[key] for key in ("micro_batch", "accumulation", "global_batch")]
            if None not in batches:
                ranks = point["num_gpus"] // model_parallel
                assert batches[0] * batches[1] * ranks == batches[2], point["id"]


def test_samples_per_second_agree_with_the_step() -> None:
    checked = 0
    for point in POINTS:
        if point["samples_per_second"] is not None and point["step_seconds"] is not None:
            samples = point["micro_batch"] * (point["accumulation"] or 1) * point["num_gpus"]
            assert samples / point["step_seconds"] == pytest.approx(
                point["samples_per_second"], rel=0.02
            ), point["id"]
            checked += 1
    assert checked > 20


def test_memory_fits_the_device() -> None:
    checked = 0
    for point in POINTS:
        if point["memory_gib"] is not None and point["device_gb"] is not None:
            assert point["memory_gib"] <= point["device_gb"], point["id"]
            checked += 1
    assert checked > 100


def test_buckets_of_zero_2_are_those_of_the_issue() -> None:
    rows = [point for point in POINTS if point["source"]["name"] == "deepspeed-1302"]
    assert [round(point["memory_gib"] * 1024) for point in rows] == [
        *(21152, 21152, 20198, 19625, 19284, 19247, 19247),
        *(8900, 9600),
    ]


def test_the_split_follows_its_rule() -> None:
    """A hash of the origin decides, no person, and a source that is added moves no other."""
    for name, source in FILE["sources"].items():
        origin = "/".join(source["address"].split()[0].split("/")[:2])
        first = hashlib.sha256(origin.encode()).hexdigest()[0]
        assert (source["origin"], source["split"]) == (
            origin,
            "fit" if first < "8" else "holdout",
        ), name


@pytest.mark.parametrize("split", ["fit", "holdout"])
@pytest.mark.parametrize("keys", [("memory_gib",), MEASURED[1:]], ids=["memory", "throughput"])
def test_both_halves_hold_memory_and_throughput(split: str, keys: tuple[str, ...]) -> None:
    points = [point for point in measured_points(*keys) if point["source"]["split"] == split]
    assert len(points) >= 50
    assert len({point["source"]["name"] for point in points}) >= 3
    assert {point["id"] for point in points} <= {point["id"] for point in read_points(split)}


def test_the_page_counts_the_points() -> None:
    page = (HERE / "README.md").read_text(encoding="utf-8")
    for name, source in FILE["sources"].items():
        rows = [point for point in POINTS if point["source"]["name"] == name]
        memory = len([point for point in rows if point["memory_gib"] is not None])
        speed = len(
            [point for point in rows if any(point[key] is not None for key in MEASURED[1:])]
        )
        cells = f"| {name}: {source['address']} | {len(rows)} | {memory or ''} | {speed or ''} | {source['split']} |"
        assert cells in page
    assert f"`points.json` holds {len(POINTS)} points" in page
