"""Steps whose loss or gradient norm is not finite, or a spike (`training.bad_steps`): found on the
device, left out, computed once more.

What is bad is decided from the loss and the norm of all ranks, alike on all of them, and noted in a
table that is read at logged points. Where the update is to be left out, torch's fused Adam reads
the decision on the device; for any other optimizer the host reads it, behind the norm that
DeepSpeed 0.19.8 waits for at ZeRO 1 to 3 anyway.
"""

from __future__ import annotations

import functools
import math
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import deepspeed
import torch
import torch.distributed

from framework.checkpoint.names import BAD_STEPS
from framework.config.training import BadSteps
from framework.engine import random_state
from framework.engine.distributed import gather
from framework.engine.protocol import BadStep
from framework.engine.workarounds.grad_norm import KeptNorm

_FEWEST: Final = 20
_ROUNDING: Final = 1e-6  # of equal values, which have no other deviation
_SAME: Final = 1e-3  # as much may differ where GPUs add in another order
_MOST: Final = sys.float_info.max
_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
# Columns of the table, a row for each step since it was read: 1, both values, their limits, this
# rank's own loss.
_LOSS, _NORM, _LOSS_LIMIT, _NORM_LIMIT, _OWN, _GOOD = range(1, 7)
TakeStep = Callable[[Iterator[Any]], Any]


class StepWatch:
    """Looks at every step of an engine.

    Attributes:
        loss: computes this rank's loss of the step that is being taken, of which the ranks' mean is
            the step's.
        keeps_weights: whether a bad step changes nothing.
        has_news: whether the host knows of a bad step that was not read.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        asked: BadSteps,
        kept_norm: KeptNorm | None,
        *,
        most_steps: int,
    ) -> None:
        """Look at the engine's steps from the next one on; at most so many are taken from one
        reading to the next.
        """
        self._engine = engine
        self._asked = asked
        self._kept_norm = kept_norm
        self._rows = most_steps
        self.loss: Callable[[], torch.Tensor] = lambda: torch.zeros((), device=engine.device)
        self.has_news = False
        self.keeps_weights = asked.policy == "skip" or asked.rerun
        # of the rows; of those DeepSpeed did not skip
        self._numbers = list[int]()
        self._uncounted = set[int]()
        # Of steps that were computed twice: whether alike, and whether the second was taken; ranks
        # whose loss differed.
        self._reruns: dict[int, tuple[bool, bool, tuple[str, ...]]] = {}
        self._bad: torch.Tensor | None = None  # of the step that is being taken
        self._is_first_try = False
        self._fewest = max(_FEWEST, asked.window_steps // 2)
        self._step_number = 0
        where: dict[str, Any] = {"dtype": torch.float64, "device": engine.device}
        self._one = torch.ones(1, **where)
        self._most = torch.full((2,), _MOST, **where)
        self._least = torch.full((2,), -math.inf, **where)
        self._least[1] = -0.5  # DeepSpeed's norm is -1 where it is not finite
        self.restore({})
        self._take = engine._take_model_step
        engine._take_model_step = self._taken
        if self.keeps_weights:
            base = getattr(engine.optimizer, "optimizer", engine.optimizer)
            self._reads_on_device = not asked.rerun and _reads_on_device(base)
            base.step = functools.wraps(base.step)(functools.partial(self._step, base, base.step))

    def run(self, take: TakeStep, micro_batches: Iterator[Any]) -> Any:
        """Take a step; where it is bad and is to be computed again, twice. Collective."""
        if not self._asked.rerun:
            return take(micro_batches)
        engine = self._engine
        batches = list[Any]()
        before = random_state.capture()
        counters = {name: getattr(engine, name) for name in _COUNTERS}
        buffers = [(buffer, buffer.clone()) for buffer in engine.module.buffers()]
        self._is_first_try = True
        result = take(_kept(islice(micro_batches, engine.gradient_accumulation_steps()), batches))
        self._is_first_try = False
        if not self._bad:
            return result
        random_state.restore(before)
        for buffer, value in buffers:
            buffer.copy_(value)
        for name, value in counters.items():
            setattr(engine, name, value)
        result = take(iter(batches))
        self.has_news = True
        step = self._numbers.pop()  # the first row stays
        first, second = self._table[len(self._numbers) - 1 : len(self._numbers) + 1].tolist()
        is_taken = bool(second[_GOOD])
        is_same = all(_is_same(first[one], second[one]) for one in (_LOSS, _NORM))
        if is_taken:
            self._uncounted.discard(step)
        differs = not _is_same(first[_OWN], second[_OWN])
        everyone = gather(
            f"rank {torch.distributed.get_rank()} on {socket.gethostname()}" if differs else ""
        )
        self._reruns[step] = is_same, is_taken, tuple(filter(None, everyone))
        return result

    def pass_over(self, micro_batches: Iterator[Any]) -> None:
        """Leave out a step: its data is read and not trained on, counters and schedule go on."""
        engine = self._engine
        for _ in islice(micro_batches, engine.gradient_accumulation_steps()):
            pass
        engine.micro_steps += engine.gradient_accumulation_steps()
        engine.global_samples += engine.train_batch_size()
        engine.global_steps += 1
        engine.skipped_steps += 1
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.step()

    def read(self) -> list[BadStep]:
        """List the bad steps since the last reading, and have DeepSpeed count those that were
        skipped. Collective; waits for the device.
        """
        rows = self._table[: len(self._numbers)].tolist()
        found = [
            (step, row) for step, row in zip(self._numbers, rows, strict=True) if not row[_GOOD]
        ]
        if found:
            losses = gather([row[_OWN] for _, row in found])
        else:
            losses = []
        bad = []
        for index, (step, row) in enumerate(found):
            is_same, is_taken, differing = self._reruns.get(step, (None, False, ()))
            ranks = tuple(
                f"rank {rank}" for rank, own in enumerate(losses) if not math.isfinite(own[index])
            )
            if is_same is None:
                verdict = ""
            elif is_same:
                verdict = "persistent"
            else:
                verdict = "transient"
            values = [value if value != _MOST else math.inf for value in row[_LOSS:_OWN]]
            bad.append(
                BadStep(step, *values, ranks=differing or ranks, verdict=verdict, is_taken=is_taken)
            )
        if self.keeps_weights:
            self._engine.skipped_steps += sum(step in self._uncounted for step, _ in found)
        self._numbers.clear()
        self._uncounted.clear()
        self._reruns.clear()
        self.has_news = False
        return bad

    def state(self) -> dict[str, Any]:
        """Return the last good steps, for a checkpoint."""
        return {BAD_STEPS: self._window.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint holds; one of another window says nothing."""
        size = self._asked.window_steps
        kept = state.get(BAD_STEPS) or ()
        of = self._one
        # 1, loss, norm
        if len(kept) == size:
            self._window = of.new_tensor(kept)
        else:
            self._window = of.new_zeros(size, 3)
        self._table = of.new_zeros(self._rows + 2, 7)
        self._numbers.clear()

    def _taken(self, *arguments: Any, **named: Any) -> None:
        """Stand in for `DeepSpeedEngine._take_model_step`; the schedule goes on with every step,
        taken or not.
        """
        engine = self._engine
        self._bad = None
        schedule = engine.lr_scheduler
        step = engine.global_steps + 1
        self._step_number = step
        self._numbers.append(step)
        if self.keeps_weights:
            engine.lr_scheduler = None
        try:
            self._take(*arguments, **named)
        finally:
            engine.lr_scheduler = schedule
        self._judged()  # where DeepSpeed has asked no optimizer
        (self._uncounted.add if engine.was_step_applied() else self._uncounted.discard)(step)
        if self.keeps_weights and schedule is not None and not (self._is_first_try and self._bad):
            schedule.step()

    def _step(self, base: Any, step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Stand in for `step` of the optimizer, which ZeRO calls for each group of its weights."""
        bad = self._judged()
        if not self._reads_on_device:
            if bad:
                return None
            return step(*arguments, **named)
        base.found_inf = bad.float()
        try:
            return step(*arguments, **named)
        finally:
            del base.found_inf

    def _judged(self) -> torch.Tensor:
        """Decide once in every step, from what all ranks have; collective."""
        if self._bad is None:
            with torch.no_grad():
                self._bad = self._judge()
        return self._bad

    def _judge(self) -> torch.Tensor:
        """Compare both values with their limits; each line is a kernel or two."""
        own = self.loss().float()
        pair = torch.stack((own, self._norm().float())).double()
        ranks = torch.distributed.get_world_size()
        if ranks > 1:
            torch.distributed.all_reduce(pair.div_(ranks))
        limit = self._most
        if self._asked.spike_sigmas:
            count = self._window[:, :1].sum(0)
            sums = self._window[:, 1:].sum(0)
            mean = sums / count.clamp(min=1)
            variance = (
                self._window[:, 1:]
                .square()
                .sum(0)
                .div_(count.clamp(min=1))
                .addcmul_(mean, mean, value=-1)
            )
            deviation = (
                variance.clamp_(min=0)
                .sqrt_()
                .add_(mean.abs(), alpha=_ROUNDING / self._asked.spike_sigmas)
            )
            limit = torch.where(
                count >= self._fewest, mean.add_(deviation, alpha=self._asked.spike_sigmas), limit
            )
        is_good = ((pair > self._least) & (pair <= limit)).all()  # no comparison holds for NaN
        # A bad step leaves an older one in its place.
        row = torch.cat((self._one, pair))
        place = self._window[self._step_number % len(self._window)]
        place.copy_(torch.where(is_good, row, place))
        self._table[len(self._numbers) - 1] = torch.cat(
            (row, limit, own.reshape(1).double(), is_good.reshape(1))
        )
        return ~is_good

    def _norm(self) -> torch.Tensor:
        norm = getattr(self._engine.optimizer, "_global_grad_norm", None)
        kept = self._kept_norm
        if kept is not None:
            if self._engine.gradient_clipping() > 0:
                norm = kept.norm
            else:
                norm = kept.measure()
        if isinstance(norm, torch.Tensor):
            return norm.to(self._engine.device).reshape(())
        return torch.full((), float(norm or 0.0), device=self._engine.device)


def _kept(stream: Iterator[Any], kept: list[Any]) -> Iterator[Any]:
    for batch in stream:
        kept.append(batch)
        yield batch


def _reads_on_device(optimizer: Any) -> bool:
    """Check whether an optimizer leaves everything as it is where its `found_inf` is 1. SGD's
    momentum would begin with what memory held.
    """
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return is_adam and all(group.get("fused") for group in optimizer.param_groups)


def _is_same(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return math.isclose(one, other, rel_tol=_SAME)
