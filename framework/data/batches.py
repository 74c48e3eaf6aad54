"""How samples become a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from framework.data.unstackable import unstackable
from framework.errors import ConfigError

Collate = Callable[[Any], Any]


@dataclass(frozen=True)
class WholeBatch:
    """What `__getitems__` of a dataset here returns: a batch that needs no collating.

    Attributes:
        fields: one tensor per field of a sample, each of shape (batch, ...).
    """

    fields: tuple[Tensor, ...]


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
        problem = unstackable(samples)
        if problem is None:  # no room in shared memory, say
            raise
        raise ConfigError(problem) from error


def own_collate(dataset: Any) -> Collate | None:
    """The dataset's own `collate_fn`, if it has one (to pad texts of unequal length, say).

    A dataset carries its `collate_fn` because only it knows what its samples look like, and so that training and
    evaluation cannot be given different ones by accident.
    """
    own = getattr(dataset, "collate_fn", None)
    return own if callable(own) else None
