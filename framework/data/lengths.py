"""Orders by length: steps of like samples, and short samples first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from framework.data.order import ComputedOrder, Order, Positions, mix_int
from framework.errors import ConfigError

_WINDOW_SALT: Final = 0xB0C7
_EASIEST: Final = 0.01


def lengths_of(dataset: Any, key: str) -> Positions:
    """Return the lengths of all samples: `lengths` of a dataset, or its column ``length``.

    Raises:
        ConfigError: kind ``data-without-lengths``: the dataset has neither.
    """
    lengths = getattr(dataset, "lengths", None)
    if lengths is None and "length" in (getattr(dataset, "column_names", None) or ()):
        lengths = dataset["length"]
    if lengths is None or not hasattr(dataset, "__getitem__") or len(lengths) != len(dataset):
        fix = f"give the dataset an attribute `lengths`, one number per sample, or leave {key} out"
        raise ConfigError.of(
            "data-without-lengths", "the lengths of the training samples are not known", fix, key
        )
    return np.asarray(lengths, dtype=np.int64)


def bucketed(
    order_of: Callable[..., Order],
    lengths: Positions,
    positions: Positions,
    *,
    seed: int,
    size: int,
    steps: int,
) -> Any:
    """Return a function that `MicroBatchSampler` takes as `order_of`: of an epoch (`epoch=`), it
    returns the order with steps of like lengths. Arguments are as in `_bucketed_order`.
    """
    return partial(_bucketed_order, order_of, lengths, positions, seed=seed, size=size, steps=steps)


def _bucketed_order(
    order_of: Callable[..., Order],
    lengths: Positions,
    positions: Positions,
    *,
    epoch: int,
    seed: int,
    size: int,
    steps: int,
) -> Order:
    """Return the order of an epoch with samples of like lengths in each step.

    Windows of `steps` steps, each of `size` samples, are sorted by length, and the steps of a
    window are put in random order. Last samples that fill no step stay where they are.

    Args:
        order_of: returns the order to begin with, given `epoch`.
        lengths: of the samples, by number.
        positions: 0 to N - 1.
        epoch: from 0.
        seed: `run.seed`.
        size: global batch size.
        steps: `data.bucket_steps`.
    """
    samples: Positions = order_of(epoch=epoch)(positions).copy()
    end = len(samples) // size * size
    for start in range(0, end, steps * size):
        window = samples[start : min(start + steps * size, end)]
        by_length = window[np.argsort(lengths[window], kind="stable")].reshape(-1, size)
        order_of_steps = ComputedOrder(
            len(by_length), seed=mix_int(_WINDOW_SALT, seed, start), epoch=epoch
        )
        window[:] = by_length[order_of_steps[np.arange(len(by_length))]].ravel()
    order: Order = samples.take
    return order


def shortest_first(step: int, *, by_length: Positions, seed: int, size: int, steps: int) -> Order:
    """Return the order of one of the first steps: `size` of the shortest samples, drawn from a pool
    that grows with every step. `by_length` are all sample numbers, the shortest first; `steps` is
    the number of steps until the pool has all of them.

    Platanios et al. 2019, "Competence-based curriculum learning", the square-root schedule from
    0.01.
    """
    share = np.sqrt((step + 1) / steps * (1 - _EASIEST**2) + _EASIEST**2)
    pool = by_length[: max(size, int(share * len(by_length)))]
    order = ComputedOrder(len(pool), seed=seed, epoch=-1 - step)  # epochs from 0 on are the run's
    return lambda positions: pool[order[positions]]
