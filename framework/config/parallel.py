"""`parallel`: how the model itself is spread over devices."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import StringConstraints

from framework.config.base import WORDS_OF_PATTERNS, Count, PositiveCount, Section

_PARTITION: Final = r"^(uniform|parameters|measured|type:.+)$"
WORDS_OF_PATTERNS[_PARTITION] = (
    "not a way to cut a model",
    lambda text: "write parameters, uniform, measured, or type:<regex of layer class names>",
)


class Parallel(Section):
    """How the model itself is spread over devices."""

    pipe: PositiveCount = 1
    """Pipeline stages, each on a device of its own; every other device count is data parallel. 1: no pipeline."""
    partition: Annotated[str, StringConstraints(pattern=_PARTITION)] = "parameters"
    """What the stages share evenly: ``parameters`` (trainable ones), ``uniform`` (number of layers), ``type:<regex>``
    (layers whose class name matches), ``measured`` (seconds per layer, timed on rank 0 before the run)."""
    stages: list[Count] | None = None
    """The stage of every layer, one number per layer in order; left out: `partition` decides."""
