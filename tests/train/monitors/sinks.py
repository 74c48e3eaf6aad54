"""Readers of what sinks have written, each the package's own where it has one, and what they must
agree with.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Numbers = dict[str, list[tuple[int, float]]]


def sinks(**sections: Any) -> dict[str, Any]:
    """Section `monitors` with all that can be read back here."""
    has_wandb = importlib.util.find_spec("wandb") is not None
    return {
        "csv": True,
        "wandb": {"offline": True} if has_wandb else False,
        "progress": "off",
        # Its process has the lowest priority, and other tests keep the processors busy.
        "wait_seconds": 240,
    } | sections


def of_jsonl(run: Path) -> Numbers:
    """Metric -> step and value, in the order of writing."""
    found: Numbers = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if "/" in name:
                found.setdefault(name, []).append((row["step"], value))
    return found


def of_csv(run: Path) -> Numbers:
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    names = [name for name in rows[0] if "/" in name]
    return {
        name: [(int(row["step"]), float(row[name])) for row in rows if row[name]] for name in names
    }


def of_tensorboard(run: Path) -> Numbers:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = events.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        name: [(one.step, one.value) for one in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }


def wandb_records(run: Path) -> Iterator[Any]:
    """Records of a run's offline files, the oldest first: blocks of 32 KiB, as LevelDB writes its
    log.
    """
    protocol = pytest.importorskip(
        "wandb.proto.wandb_internal_pb2", reason="wandb comes with the dev extra"
    )
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        data, at, part = path.read_bytes(), 7, b""
        assert data[:4] == b":W&B"
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            part += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                record = protocol.Record()
                record.ParseFromString(part)
                part = b""
                yield record


def of_wandb(run: Path) -> Numbers:
    """`finish` returns before W&B's own process has written everything: waits for the last record
    of every file.
    """
    found: Numbers = {}
    deadline, num_files = time.monotonic() + 60, len(list((run / "wandb").glob("offline-run-*")))
    assert num_files > 0, f"W&B has written nothing into {run}"
    while sum(one.WhichOneof("record_type") == "exit" for one in wandb_records(run)) < num_files:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for record in wandb_records(run):
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in row.items():
                if "/" in name:
                    found.setdefault(name, []).append((row["step"], value))
    return found


def check_all_sinks_agree(run: Path, *, wandb: bool = True) -> None:
    """Every sink has the numbers of metrics.jsonl, and no others."""
    expected = of_jsonl(run)
    assert {"train/loss", "train/lr", "throughput/samples_per_sec"} <= set(expected)
    assert len(expected["train/loss"]) >= 2
    assert of_csv(run) == expected
    board = of_tensorboard(run)
    assert set(board) == set(expected)
    for name, points in expected.items():
        # float32
        assert board[name] == [(step, pytest.approx(value, rel=1e-6)) for step, value in points], (
            name
        )
    if wandb:
        assert of_wandb(run) == expected


def samples_of(run: Path) -> str:
    """The last table of evaluation samples, from TensorBoard's own reader."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = events.EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    table: bytes = reader.Tensors("samples/predictions")[-1].tensor_proto.string_val[0]
    return table.decode()


def histograms_of(run: Path) -> dict[str, Any]:
    """Tag -> the last histogram, from TensorBoard's own reader."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = events.EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    return {tag: reader.Histograms(tag)[-1].histogram_value for tag in reader.Tags()["histograms"]}
