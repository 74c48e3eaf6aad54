"""Readers of the points beside this module and of the table of devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from framework.plan.devices import tables, value_of

HERE = Path(__file__).resolve().parent


def read_points(split: str | None = None) -> list[dict[str, Any]]:
    """Return the points of one half of the split, or all, with the entries of `source` and `model`
    in the place of their names.
    """
    file = json.loads((HERE / "points.json").read_text(encoding="utf-8"))
    points = [dict(zip(file["fields"], row, strict=True)) for row in file["points"]]
    for point in points:
        point["source"] = {"name": point["source"], **file["sources"][point["source"]]}
        point["model"] = {"name": point["model"], **file["models"][point["model"]]}
    return [point for point in points if split in (None, point["source"]["split"])]


def read_devices() -> dict[str, dict[str, Any]]:
    """Return the devices' figures without their sources: numbers or None, and `disputed`."""
    devices = tables()["devices"]
    return {
        name: {key: value_of(figure) for key, figure in device.items()}
        for name, device in devices.items()
    }


def tokens_per_second_per_gpu(point: dict[str, Any]) -> float | None:
    """Return the printed figure, or else that of samples per second, or of batch, sequence length
    and step time; None if none of them is known.
    """
    if point["tokens_per_second_per_gpu"] is not None:
        return float(point["tokens_per_second_per_gpu"])
    known = [point[key] for key in ("samples_per_second", "sequence", "num_gpus")]
    if None not in known:
        samples_per_second, sequence, num_gpus = known
        return float(samples_per_second * sequence / num_gpus)
    known = [point[key] for key in ("global_batch", "sequence", "step_seconds", "num_gpus")]
    if None in known:
        return None
    global_batch, sequence, step_seconds, num_gpus = known
    return float(global_batch * sequence / step_seconds / num_gpus)
