"""Orders by length: steps of like samples, and short samples first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from framework.data.order import ComputedOrder, Order, Positions, mix_int
from framework.errors import ConfigError

_WINDOW_SALT: Final = 0xB0C7
_EASIEST: Final = 0.01


def lengths_of(dataset: Any, key: str) -> Positions:
    """The lengths of all samples: `lengths` of a dataset, or its column ``length``.

    Raises:
        ConfigError: kind ``data-without-lengths``; `key` asked for them.
    """
    found = getattr(dataset, "lengths", None)
    if found is None and "length" in (getattr(dataset, "column_names", None) or ()):
        found = dataset["length"]
    if found is None or not hasattr(dataset, "__getitem__") or len(found) != len(dataset):
        fix = f"give the dataset an attribute `lengths`, one number per sample, or leave {key} out"
        raise ConfigError.of("data-without-lengths", "the lengths of the training samples are not known", fix, key)
    return np.asarray(found, dtype=np.int64)


def bucketed(
    order_of: Callable[[int], Order], lengths: Positions, *, seed: int, size: int, steps: int
) -> Callable[[int], Order]:
    """Orders of epochs whose steps of `size` samples have like lengths: windows of so many steps are sorted, and their
    steps drawn in another order.
    """

    def order(epoch: int) -> Order:
        found = order_of(epoch)(np.arange(len(lengths)))
        end = len(found) // size * size
        for start in range(0, end, steps * size):
            window = found[start : min(start + steps * size, end)]
            by_length = window[np.argsort(lengths[window], kind="stable")].reshape(-1, size)
            drawn = ComputedOrder(len(by_length), seed=mix_int(_WINDOW_SALT, seed, start), epoch=epoch)
            window[:] = by_length[drawn[np.arange(len(by_length))]].ravel()
        return found.take

    return order


def shortest_first(lengths: Positions, *, seed: int, size: int, steps: int) -> Callable[[int], Order]:
    """The order of each of the first steps: `size` of the shortest samples, of which a step may draw ever more.

    Platanios et al. 2019, "Competence-based curriculum learning", the square-root schedule from 0.01.
    """
    by_length = np.argsort(lengths, kind="stable")

    def order(step: int) -> Order:
        share = np.sqrt((step + 1) / steps * (1 - _EASIEST**2) + _EASIEST**2)
        pool = by_length[: max(size, int(share * len(by_length)))]
        drawn = ComputedOrder(len(pool), seed=seed, epoch=-1 - step)
        return lambda positions: pool[drawn[positions]]

    return order
