"""Python's collection of cyclic garbage: at known steps, and not in the midst of one.

By itself it begins where as many objects were made as its threshold: each rank collects in another
step, and the others wait for it; a collection of all objects that torch and a model have takes
tenths of a second. Here what is there after the first steps is left out of collections
(`gc.freeze`), and what was made since the last logged point is collected at the next one,
`_MOST_STEPS` apart at most. What outlived a collection is looked at again every `_STEPS_OF_OLD`
steps: code that imports packages after the first steps makes hundreds of thousands of objects,
which took a tenth of a second at every logged point.

So what a step leaves behind in cycles stays for `_MOST_STEPS`; what outlived a logged point and is
lost in a cycle later stays for `_STEPS_OF_OLD`; and what was there after the first steps, and
becomes a part of a cycle without further references, stays to the end of the run.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

_MOST_STEPS: Final = 50
_STEPS_OF_OLD: Final = 1000
# The generations of Python's collector that hold what is younger than its last collection.
_YOUNG: Final = 1
# Steps before it begins: a run that is shorter is over before a first collection would pay.
_FIRST_STEPS: Final = 10
# Engines that take steps now. Workers of a loader are forked: they collect by themselves.
_held: Final[set[int]] = set()


class Garbage:
    """Collects garbage at logged points of one engine, from its tenth step to `close`."""

    def __init__(self, engine: Any, *, log_every: int) -> None:
        """Stand in for the engine's `_take_model_step`."""
        self._engine = engine
        self._every = min(log_every, _MOST_STEPS)
        self._steps_left = _FIRST_STEPS
        self._next_of_old = 0
        engine._take_model_step = partial(self._take, engine._take_model_step)

    def _take(self, take: Callable[..., None], *arguments: Any, **named: Any) -> None:
        take(*arguments, **named)
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._begin()
        elif id(self) in _held and self._engine.global_steps % self._every == 0:
            self._collect()

    def _collect(self) -> None:
        """Collect what was made since the last logged point, and seldom what outlived it."""
        step = self._engine.global_steps
        if step < self._next_of_old:
            gc.collect(_YOUNG)
            return
        gc.collect()
        self._next_of_old = step + _STEPS_OF_OLD

    def _begin(self) -> None:
        """End automatic collections; not where the user's code has ended them."""
        if gc.isenabled():
            gc.collect()
            gc.freeze()
            gc.disable()
        elif not _held:
            return
        _held.add(id(self))
        self._next_of_old = self._engine.global_steps + _STEPS_OF_OLD

    def close(self) -> None:
        """Let Python collect by itself again, if no other engine is open."""
        if id(self) in _held:
            _held.remove(id(self))
            if not _held:
                gc.unfreeze()
                gc.enable()


def _collect_in_child() -> None:
    if _held:
        _held.clear()
        gc.enable()


os.register_at_fork(after_in_child=_collect_in_child)
