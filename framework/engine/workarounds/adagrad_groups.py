"""Keeps Adagrad's parameter groups under ZeRO.

Adagrad makes its state where it is built, for whole weights. DeepSpeed 0.19.8 builds another one
for its shares (`initialize_optimizer_states` in runtime/zero/stage_1_and_2.py and stage3.py), from
the defaults and in a single group: the schedule goes on setting the rates of the first one, further
groups end the first step, and at stage 3 no checkpoint loads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


@contextmanager
def keeping_adagrad() -> Iterator[None]:
    """Have ZeRO step the Adagrad that it is given within the block."""
    classes: tuple[Any, ...] = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    originals = [class_.initialize_optimizer_states for class_ in classes]
    for class_, original in zip(classes, originals, strict=True):
        class_.initialize_optimizer_states = _keeping(original)
    try:
        yield
    finally:
        for class_, original in zip(classes, originals, strict=True):
            class_.initialize_optimizer_states = original


def _keeping(make_state: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return DeepSpeed's function with the optimizer as it was before, with its groups, and the
    state of the shares; that of whole weights is freed.
    """

    @functools.wraps(make_state)
    def make_state_of_shares(zero: Any) -> None:
        given = zero.optimizer
        make_state(zero)
        if zero.optimizer is not given:
            given.state = zero.optimizer.state
            zero.optimizer = given

    return make_state_of_shares
