"""Lines of a run's files: the types of the values that a report counts with.

A line may come from an old release or from a disk that was full, so a value of another type is left
out and the rest of the line is read. A line without its step or its kind is damaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, ConfigDict, Field, OnErrorOmit, TypeAdapter, with_config
from typing_extensions import Required, TypedDict

LIMIT: Final = 10**15
"""Steps and seconds are smaller: sums with a larger number lose their digits."""


def _as_step(value: Any) -> Any:
    """Read a step that was written as a float."""
    if isinstance(value, float) and math.isfinite(value):
        return int(value)
    return value


_Step = Annotated[int, Field(ge=0, lt=LIMIT), BeforeValidator(_as_step)]
_Number = Annotated[int | float, Field(gt=-LIMIT, lt=LIMIT)]
_Float = Annotated[float, Field(gt=-LIMIT, lt=LIMIT)]
_Kind = Annotated[str, BeforeValidator(str)]
# null stands for a metric that was not finite; an integer may be larger than any float.
_Metric = Annotated[float | bool | int | None, Field(union_mode="left_to_right")]


@with_config(ConfigDict(strict=True, extra="allow"))
class Point(TypedDict, total=False):
    """A line of ``metrics.jsonl``, with the metrics in a mapping or beside the other keys."""

    step: Required[_Step]
    time: OnErrorOmit[_Float]
    time_seconds: OnErrorOmit[_Float]
    epoch: OnErrorOmit[_Float]
    metrics: OnErrorOmit[dict[str, Any]]


@with_config(ConfigDict(strict=True, extra="allow"))
class Event(TypedDict, total=False):
    """A line of ``events.jsonl``, with further keys for some kinds."""

    kind: Required[_Kind]
    step: OnErrorOmit[_Number]
    time_seconds: OnErrorOmit[_Number]
    seconds: OnErrorOmit[_Number]


NOT_METRICS: Final = frozenset({"step", "epoch", "time", "time_seconds", "metrics"})
POINT: Final = TypeAdapter(Point)
EVENT: Final = TypeAdapter(Event)
METRICS: Final = TypeAdapter(dict[str, OnErrorOmit[_Metric]], config=ConfigDict(strict=True))


def metrics_of(point: Point) -> Iterator[tuple[str, float]]:
    """Yield name and value of each metric of a point; NaN where it is not finite, or larger than
    any float.
    """
    metrics = point.get("metrics", point)
    for name, value in METRICS.validate_python(metrics).items():
        if name not in NOT_METRICS:
            yield name, _finite(value)


def _finite(value: float | None) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan
