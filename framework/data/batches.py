"""Collation of samples into batches, and errors of samples that cannot be stacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from framework.errors import ConfigError, Problem


def _unstackable(values: Sequence[Any], *, place: str = "") -> Problem | None:
    """The first difference between the samples of a batch, or the first value in them that torch cannot stack. Looked
    for only after torch has failed to, so that it costs nothing.
    """
    first = values[0]
    shapes = [_shape(value) for value in values]
    at = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), None)
    reason = f"samples cannot be stacked into a batch: {place or 'the sample'} is {shapes[0]}"
    own = "or give the dataset a collate_fn(samples) that"
    if at is not None:
        reason += f" in sample 0 of the batch and {shapes[at]} in sample {at}"
        fix = f"give all samples one shape (crop, resize, pad), {own} pads each batch"
        return Problem("samples-differ", reason, fix, "data")
    if isinstance(first, (Mapping, tuple, list)):
        names = first if isinstance(first, Mapping) else range(len(first))
        parts = ((f"[{name!r}]", [value[name] for value in values]) for name in names)
    elif isinstance(first, (Tensor, int, float, str, bytes, np.number, np.bool_)) or (
        isinstance(first, np.ndarray) and first.dtype.kind in "biufc"
    ):
        return None
    else:
        fix = f"return tensors, numpy arrays or numbers, {own} makes the batch"
        return Problem("sample-type", reason, fix, "data")
    found = (_unstackable(part, place=f"{place or 'sample'}{name}") for name, part in parts)
    return next((problem for problem in found if problem is not None), None)


def _shape(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        of_objects = " of objects" if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc" else ""
        return f"{'an' if kind == 'array' else 'a'} {kind}{of_objects} of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(sorted(map(str, value)))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return "a number"
    kind = f"{type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
    return "None" if value is None else f"of type {kind}"


Collate = Callable[[Any], Any]


@dataclass(frozen=True)
class WholeBatch:
    """Result of `__getitems__` of a dataset here: a batch that needs no collating, (batch, ...) per field."""

    fields: tuple[Tensor, ...]


class BatchDataset(Dataset[tuple[Any, ...]]):
    """A dataset that is read a batch at a time."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(field[0] for field in self.__getitems__([range(len(self))[index]]).fields)

    def __getitems__(self, indices: Sequence[int]) -> WholeBatch:
        raise NotImplementedError


def collate(samples: Any) -> Any:
    """Pass a `WholeBatch` through as the tuple of its fields; otherwise do what torch's `default_collate` does.

    Raises:
        ConfigError: kind ``samples-differ`` or ``sample-type``: the samples cannot be stacked.
    """
    if isinstance(samples, WholeBatch):
        return samples.fields
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, KeyError, AttributeError, IndexError) as error:
        problem = _unstackable(list(samples))
        if problem is None:  # no room in shared memory, say
            raise
        raise ConfigError(problem) from error


def own_collate(dataset: Any) -> Collate | None:
    """The dataset's own `collate_fn`, if it has one (to pad texts of unequal length, say)."""
    own = getattr(dataset, "collate_fn", None)
    return own if callable(own) else None
