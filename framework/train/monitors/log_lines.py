"""Lines of a run's progress: the metrics of a point as text, and the log of each rank."""

from __future__ import annotations

from framework.errors import printable
from framework.system.log import note
from framework.train.monitors.base import Point

_FORMATS = {
    "train/loss": "loss {:.4f}",
    "train/lr": "lr {:.3g}",
    "train/grad_norm": "grad norm {:.3g}",
    "throughput/samples_per_sec": "{:,.0f} samples/s",
    "throughput/tokens_per_sec": "{:,.0f} tokens/s",
    "memory/device_peak_bytes": "{:.1f} GB",
}
_BYTES_PER_GB = 1e9
_LEFT_OUT_FIRST = ("memory/device_peak_bytes", "train/grad_norm", "train/lr")


def describe(
    point: Point, *, longest: int | None = None, widths: dict[str, int] | None = None
) -> str:
    """Write the most important metrics of a point as one line.

    Where a point has tokens, samples per second are left out.

    Args:
        longest: longest line; to fit in, less important metrics are left out.
        widths: the largest width of each metric so far, which is updated. A metric takes that
            width, so that columns of lines stand below each other.
    """
    texts: dict[str, str] = {}
    for name, text_format in _FORMATS.items():
        if name in point.metrics:
            value = point.metrics[name]
            if name.endswith("_bytes"):
                value = value / _BYTES_PER_GB
            texts[name] = text_format.format(value)
    if "throughput/tokens_per_sec" in texts:
        texts.pop("throughput/samples_per_sec", None)
    for name, value in point.metrics.items():
        if name.startswith("eval/"):
            texts[name] = f"{name} {value:.4f}"
    if widths is not None:
        for name, text in texts.items():
            widths[name] = max(len(text), widths.get(name, 0))
            texts[name] = text.ljust(widths[name])
    for name in _LEFT_OUT_FIRST:
        if longest is not None and len("  ".join(texts.values())) > longest:
            texts.pop(name, None)
    return printable("  ".join(texts.values()).rstrip())


class LogLines:
    """One line per logged point, on every rank, also where the terminal shows a bar or nothing: the
    log of a rank that died shows how far it came.
    """

    name = "log"

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def write(self, point: Point) -> None:
        note(f"step {point.step}/{self._total_steps}  epoch {point.epoch:.2f}  {describe(point)}")

    def close(self) -> None:
        """Leave the log open: the end of the run follows in it."""
