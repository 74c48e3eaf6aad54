"""Steps with a loss or gradient norm that is not finite, or a spike (`training.bad_steps`): found
on the device, left out, computed once more.

Whether a step is bad is decided from the loss and the norm of all ranks, alike on all of them, and
noted in a table that is read at logged points. To leave the update out, torch's fused Adam reads
the decision on the device. For any other optimizer the host reads it, after the norm that
DeepSpeed 0.19.8 waits for at ZeRO 1 to 3 anyway.
"""

from __future__ import annotations

import functools
import math
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import deepspeed
import torch
import torch.distributed

from framework.checkpoint.names import BAD_STEPS
from framework.config.training import BadSteps
from framework.engine import random_state
from framework.engine.distributed import gather
from framework.engine.gradient_divisor import reads_on_device
from framework.engine.workarounds.grad_norm import KeptNorm
from framework.engine_protocol import BadStep

_FEWEST: Final = 20  # good steps, before spikes are looked for
_ROUNDING: Final = 1e-6  # share of the mean by which even equal values may be exceeded
_SAME: Final = 1e-3  # relative difference of reruns: GPUs may add in another order
_MOST: Final = sys.float_info.max
_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
# Columns of the table, which has a row for each step since it was read: 1, loss and norm, their
# limits, this rank's loss, whether the step is good.
_LOSS, _NORM, _LOSS_LIMIT, _NORM_LIMIT, _RANK_LOSS, _GOOD = range(1, 7)
TakeStep = Callable[[Iterator[Any]], Any]


class StepWatch:
    """Looks at every step of an engine.

    Attributes:
        loss: computes this rank's loss of the step that is being taken; the mean over ranks is the
            loss of the step.
        keeps_weights: whether a bad step leaves the weights as they are.
        has_news: whether the host knows of a bad step that was not read.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        section: BadSteps,
        kept_norm: KeptNorm | None,
        *,
        most_steps: int,
    ) -> None:
        """Watch the engine's steps from the next one on.

        Args:
            engine: the engine that takes the steps.
            section: ``training.bad_steps`` of the config.
            kept_norm: measures the gradient norm, if DeepSpeed's optimizer does not.
            most_steps: how many steps are taken at most between two readings.
        """
        self._engine = engine
        self._section = section
        self._kept_norm = kept_norm
        self._rows = most_steps
        self.loss: Callable[[], torch.Tensor] = lambda: torch.zeros((), device=engine.device)
        self.has_news = False
        self.keeps_weights = section.policy == "skip" or section.rerun
        self._numbers = list[int]()  # steps, by row of the table
        self._uncounted = set[int]()  # steps that DeepSpeed does not count as skipped
        self._reruns: dict[int, _Rerun] = {}
        self._bad: torch.Tensor | None = None  # of the step that is being taken
        self._is_first_try = False
        self._fewest = max(_FEWEST, section.window_steps // 2)
        self._step_number = 0
        device = engine.device
        self._one = torch.ones(1, dtype=torch.float64, device=device)
        self._most = torch.full((2,), _MOST, dtype=torch.float64, device=device)
        self._least = torch.full((2,), -math.inf, dtype=torch.float64, device=device)
        self._least[1] = -0.5  # DeepSpeed's norm is -1 if it is not finite
        self.restore({})
        self._take = engine._take_model_step
        engine._take_model_step = self._take_watched
        if self.keeps_weights:
            base = getattr(engine.optimizer, "optimizer", engine.optimizer)
            self._reads_on_device = not section.rerun and reads_on_device(base)
            base.step = functools.wraps(base.step)(functools.partial(self._step, base, base.step))

    def run(self, take: TakeStep, micro_batches: Iterator[Any]) -> Any:
        """Take a step by `take(micro_batches)` and return its result; if it is bad and ``rerun`` is
        set, put random state, buffers and counters back and take it once more. Collective.
        """
        if not self._section.rerun:
            return take(micro_batches)
        engine = self._engine
        batches = list[Any]()
        before = random_state.capture()
        counters = {name: getattr(engine, name) for name in _COUNTERS}
        buffers = [(buffer, buffer.clone()) for buffer in engine.module.buffers()]
        self._is_first_try = True
        step_batches = islice(micro_batches, engine.gradient_accumulation_steps())
        result = take(_keeping(step_batches, batches))
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
        self._compare_runs()
        return result

    def _compare_runs(self) -> None:
        """Note whether the last two rows of the table, of one step taken twice, are the same, and
        remove the second. Collective.
        """
        step = self._numbers.pop()
        row = len(self._numbers)
        first, second = self._table[row - 1 : row + 1].tolist()
        is_taken = bool(second[_GOOD])
        if is_taken:
            self._uncounted.discard(step)
        place = ""
        if not _is_same(first[_RANK_LOSS], second[_RANK_LOSS]):
            place = f"rank {torch.distributed.get_rank()} on {socket.gethostname()}"
        places = [rank_place for rank_place in gather(place) if rank_place]
        is_same = _is_same(first[_LOSS], second[_LOSS]) and _is_same(first[_NORM], second[_NORM])
        verdict = "persistent" if is_same else "transient"
        self._reruns[step] = _Rerun(verdict, is_taken, tuple(places))

    def pass_over(self, micro_batches: Iterator[Any]) -> None:
        """Leave out a step: read its data without training, and move counters and schedule on."""
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
        """List the bad steps since the last reading, empty the table, and have DeepSpeed count the
        skipped ones. Collective; waits for the device.
        """
        rows = self._table[: len(self._numbers)].tolist()
        bad_rows = [
            (step, row) for step, row in zip(self._numbers, rows, strict=True) if not row[_GOOD]
        ]
        all_losses: list[list[float]] = []  # of every rank
        if bad_rows:
            all_losses = gather([row[_RANK_LOSS] for _, row in bad_rows])
        bad = []
        for index, (step, row) in enumerate(bad_rows):
            losses_of_ranks = [losses[index] for losses in all_losses]
            bad.append(self._bad_step(step, row, losses_of_ranks))
        if self.keeps_weights:
            skipped = [step for step, _ in bad_rows if step in self._uncounted]
            self._engine.skipped_steps += len(skipped)
        self._numbers.clear()
        self._uncounted.clear()
        self._reruns.clear()
        self.has_news = False
        return bad

    def _bad_step(self, step: int, row: list[float], losses_of_ranks: list[float]) -> BadStep:
        """Describe a bad step by its row of the table, and by the loss of each rank."""
        not_finite = []
        for rank, loss in enumerate(losses_of_ranks):
            if not math.isfinite(loss):
                not_finite.append(f"rank {rank}")
        rerun = self._reruns.get(step, _NO_RERUN)
        values = [value if value != _MOST else math.inf for value in row[_LOSS:_RANK_LOSS]]
        return BadStep(
            step,
            *values,
            ranks=rerun.differing_ranks or tuple(not_finite),
            verdict=rerun.verdict,
            is_taken=rerun.is_taken,
        )

    def state(self) -> dict[str, Any]:
        """Return the last good steps, for a checkpoint."""
        return {BAD_STEPS: self._window.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the last good steps in a checkpoint, with an empty table; a window of another
        size is ignored.
        """
        size = self._section.window_steps
        kept = state.get(BAD_STEPS) or ()
        self._window = self._one.new_zeros(size, 3)  # 1, loss, norm
        if len(kept) == size:
            self._window = self._one.new_tensor(kept)
        self._table = self._one.new_zeros(self._rows + 2, 7)
        self._numbers.clear()

    def _take_watched(self, *arguments: Any, **named: Any) -> None:
        """Stand in for `DeepSpeedEngine._take_model_step`, and move the schedule on with every
        step, taken or not.
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
        self._decide_once()  # also if DeepSpeed has called no optimizer
        if engine.was_step_applied():
            self._uncounted.add(step)
        else:
            self._uncounted.discard(step)
        if self.keeps_weights and schedule is not None and not (self._is_first_try and self._bad):
            schedule.step()

    def _step(self, base: Any, step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Stand in for `step` of torch's optimizer `base`, and leave the update out in a bad step.
        ZeRO calls it for each group of its weights.
        """
        bad = self._decide_once()
        if not self._reads_on_device:
            if bad:
                return None
            return step(*arguments, **named)
        base.found_inf = bad.float()
        try:
            return step(*arguments, **named)
        finally:
            del base.found_inf

    def _decide_once(self) -> torch.Tensor:
        """Decide at the first call in a step whether the step is bad (collective), and return it, a
        0-d bool on the device.
        """
        if self._bad is None:
            with torch.no_grad():
                self._bad = self._compare_with_limits()
        return self._bad

    def _compare_with_limits(self) -> torch.Tensor:
        """Return whether the loss or the norm exceeds its limit (0-d bool), and add the step to the
        table and, if it is good, to the window. Collective; each line is a kernel or two.
        """
        rank_loss = self.loss().float()
        pair = torch.stack((rank_loss, self._norm().float())).double()
        ranks = torch.distributed.get_world_size()
        if ranks > 1:
            torch.distributed.all_reduce(pair.div_(ranks))
        limits = self._limits()
        is_good = ((pair > self._least) & (pair <= limits)).all()  # no comparison holds for NaN
        # In the window a bad step leaves the older step of its place.
        row = torch.cat((self._one, pair))
        place = self._window[self._step_number % len(self._window)]
        place.copy_(torch.where(is_good, row, place))
        columns = (row, limits, rank_loss.reshape(1).double(), is_good.reshape(1))
        self._table[len(self._numbers) - 1] = torch.cat(columns)
        return ~is_good

    def _limits(self) -> torch.Tensor:
        """Return the limits (2,) of loss and norm: the mean of the last good steps and
        `spike_sigmas` standard deviations, or the largest number before there are enough steps.
        """
        sigmas = self._section.spike_sigmas
        if not sigmas:
            return self._most
        values = self._window[:, 1:]
        count = self._window[:, :1].sum(0)
        mean = values.sum(0) / count.clamp(min=1)
        # the mean of the squares minus the square of the mean
        square = values.square().sum(0).div_(count.clamp(min=1))
        variance = square.addcmul_(mean, mean, value=-1).clamp_(min=0)
        deviation = variance.sqrt_().add_(mean.abs(), alpha=_ROUNDING / sigmas)
        return torch.where(count >= self._fewest, mean.add_(deviation, alpha=sigmas), self._most)

    def _norm(self) -> torch.Tensor:
        """Return the gradient norm, 0-d on the device. Collective if it is yet to be measured."""
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


class _Rerun(NamedTuple):
    """A step that was computed twice.

    Attributes:
        verdict: ``persistent`` if loss and norm were the same, else ``transient``; empty for no
            rerun.
        is_taken: whether the second computation was good.
        differing_ranks: ranks with a different loss.
    """

    verdict: str
    is_taken: bool
    differing_ranks: tuple[str, ...]


_NO_RERUN: Final = _Rerun("", False, ())


def _keeping(stream: Iterator[Any], kept: list[Any]) -> Iterator[Any]:
    for batch in stream:
        kept.append(batch)
        yield batch


def _is_same(one: float, other: float) -> bool:
    """Check whether two values differ by rounding at most; all that are not finite are the same."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return math.isclose(one, other, rel_tol=_SAME)
