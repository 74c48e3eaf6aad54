"""Points as the Trainer writes them."""

from __future__ import annotations

from framework.train.monitors.base import Point


def point(step: int, **metrics: float) -> Point:
    """`train_loss=1.0` becomes the metric ``train/loss``."""
    named = {
        name if "/" in name else name.replace("_", "/", 1): value for name, value in metrics.items()
    }
    return Point(step, step / 4, 1_700_000_000.1234, named)
