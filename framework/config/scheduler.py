"""`scheduler`: the learning rate over steps. Five kinds are DeepSpeed's own; `constant` and `cosine` are ours.

DeepSpeed's warm-up schedules take the first two steps at the minimum, mostly zero, with either curve
(runtime/lr_schedules.py: the rate before the first `step()` is the minimum, and so are log(1) and 0 / warmup_num_steps
of the way up).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Tag

from framework.config.base import Count, CountFromTwo, Fraction, NonNegative, Positive, PositiveCount, Section, kind_of


class Constant(Section):
    """The optimizer's learning rate all the time."""

    kind: Literal["constant"] = "constant"


class Cosine(Section):
    """Linear warm-up to the optimizer's rate, then half a cosine down to `min_ratio` of it (Loshchilov & Hutter
    2017).
    """

    kind: Literal["cosine"] = "cosine"
    warmup_steps: Count = 0
    """Steps of linear warm-up; step t (from 0) runs at lr x (t + 1) / warmup_steps."""
    min_ratio: Fraction = 0.0
    """Last learning rate as a share of the first."""
    total_steps: PositiveCount | None = None
    """Step at which the minimum is reached; left out: the length of the run."""


class WarmupLR(Section):
    """DeepSpeed's WarmupLR: up from `min_lr` to `max_lr`, then constant."""

    kind: Literal["warmup"] = "warmup"
    warmup_steps: CountFromTwo = 1000
    """Steps of warm-up; DeepSpeed turns 1 into 2."""
    min_lr: NonNegative = 0.0
    """Learning rate before the warm-up."""
    max_lr: NonNegative | None = None
    """Learning rate after the warm-up; left out: the optimizer's."""
    curve: Literal["log", "linear"] = "log"
    """Shape of the warm-up."""


class WarmupDecayLR(WarmupLR):
    """DeepSpeed's WarmupDecayLR: up from `min_lr` to `max_lr`, then linearly down to zero."""

    kind: Literal["warmup_decay"] = "warmup_decay"  # type: ignore[assignment]
    total_steps: PositiveCount | None = None
    """Step at which zero is reached; left out: the length of the run."""


class WarmupCosineLR(Section):
    """DeepSpeed's WarmupCosineLR: up to the optimizer's rate, then half a cosine down."""

    kind: Literal["warmup_cosine"] = "warmup_cosine"
    warmup_steps: CountFromTwo = 1000
    """Steps of warm-up; DeepSpeed turns 1 into 2."""
    warmup_min_ratio: Fraction = 0.0
    """Learning rate before the warm-up as a share of the optimizer's."""
    cos_min_ratio: Fraction = 1e-4
    """Last learning rate as a share of the optimizer's."""
    curve: Literal["log", "linear"] = "log"
    """Shape of the warm-up."""
    total_steps: PositiveCount | None = None
    """Step at which the minimum is reached; left out: the length of the run."""


class OneCycle(Section):
    """DeepSpeed's OneCycle (Smith 2018): up, down again, then decay."""

    kind: Literal["one_cycle"] = "one_cycle"
    min_lr: NonNegative
    """Learning rate at both ends of the cycle."""
    max_lr: NonNegative
    """Learning rate at its top."""
    first_steps: PositiveCount = 2000
    """Steps of the way up."""
    second_steps: PositiveCount | None = None
    """Steps of the way down; left out: as many as up."""
    decay_steps: Count = 0
    """Steps per unit of decay after the cycle; 0: no decay."""
    decay_lr_rate: NonNegative = 0.0
    """Decay per `decay_steps` after the cycle."""
    cycle_momentum: bool = False
    """Also move Adam's first beta from `max_momentum` down and up again (DeepSpeed's own default is true)."""
    min_momentum: Fraction = 0.8
    """Momentum at the top of the cycle."""
    max_momentum: Fraction = 0.9
    """Momentum at its ends."""


class LRRangeTest(Section):
    """DeepSpeed's LRRangeTest (Smith 2017): a rate that grows, to find the largest one that trains."""

    kind: Literal["lr_range_test"] = "lr_range_test"
    min_lr: Positive = 1e-3
    """First learning rate."""
    step_size: PositiveCount = 2000
    """Steps per growth interval."""
    step_rate: NonNegative = 1.0
    """Growth per interval as a multiple of `min_lr`."""
    staircase: bool = False
    """Grow once per interval instead of every step."""


SchedulerSection = Annotated[
    Annotated[Constant, Tag("constant")]
    | Annotated[Cosine, Tag("cosine")]
    | Annotated[WarmupLR, Tag("warmup")]
    | Annotated[WarmupDecayLR, Tag("warmup_decay")]
    | Annotated[WarmupCosineLR, Tag("warmup_cosine")]
    | Annotated[OneCycle, Tag("one_cycle")]
    | Annotated[LRRangeTest, Tag("lr_range_test")],
    Discriminator(kind_of),
]
