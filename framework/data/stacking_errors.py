"""Errors of samples that torch cannot stack into a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from torch import Tensor

from framework.errors import Problem

_NUMBER_KINDS: Final = "biufc"  # numpy's `dtype.kind` of what torch has a type for


def stacking_problem(values: Sequence[Any], *, place: str = "") -> Problem | None:
    """Return the first difference between the samples of a batch, or the first value in them that
    torch cannot stack; None if there is neither. `values` are one field of all samples, at `place`
    within a sample.
    """
    first = values[0]
    shapes = [_shape(value) for value in values]
    reason = f"samples cannot be stacked into a batch: {place or 'the sample'} is {shapes[0]}"
    alternative = "or give the dataset a collate_fn(samples) that"
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            reason += f" in sample 0 of the batch and {shape} in sample {number}"
            fix = f"give all samples one shape (crop, resize, pad), {alternative} pads each batch"
            return Problem("samples-differ", reason, fix, "data")
    if isinstance(first, Mapping):
        names = list(first)
    elif isinstance(first, (tuple, list)):
        names = list(range(len(first)))
    elif _is_stackable(first):
        return None
    else:
        fix = f"return tensors, numpy arrays or numbers, {alternative} makes the batch"
        return Problem("sample-type", reason, fix, "data")
    for name in names:
        field_values = [value[name] for value in values]
        problem = stacking_problem(field_values, place=f"{place or 'sample'}[{name!r}]")
        if problem is not None:
            return problem
    return None


def _is_stackable(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in _NUMBER_KINDS
    return isinstance(value, (Tensor, int, float, str, bytes, np.number, np.bool_))


def _shape(value: Any) -> str:
    """Describe a value by its shape, or its type."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        if value.dtype.kind in _NUMBER_KINDS:
            return f"an array of shape {tuple(value.shape)}"
        return f"an array of objects of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(sorted(map(str, value)))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return "a number"
    if value is None:
        return "None"
    name = f"{type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
    return f"of type {name}"
