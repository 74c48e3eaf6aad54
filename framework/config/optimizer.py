"""`optimizer`: the update rule, and `scheduler`: the learning rate over steps.

Names of optimizers are torch's; `framework/plan/render.py` turns them into DeepSpeed's. Five
schedules are DeepSpeed's own; `constant` and `cosine` are ours. DeepSpeed's warm-up schedules take
the first two steps at the minimum, mostly zero, with either curve (runtime/lr_schedules.py: the
rate before the first `step()` is the minimum, and so are log(1) and 0 / warmup_num_steps of the way
up).
"""

from __future__ import annotations

from math import ceil
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from framework.config.base import (
    Count,
    CountFromTwo,
    Fraction,
    Kind,
    NonNegative,
    Object,
    OneOf,
    Positive,
    PositiveCount,
    Section,
    Target,
)

_Betas = Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)]


class Group(Section):
    """Weights that are stepped with values of their own."""

    match: str
    """Regular expression; the weights whose whole name it matches belong to the group, unless an
    earlier one has them. For example ``.*norm.*|.*bias``.
    """
    lr: NonNegative | None = None
    """Their learning rate; under every scheduler it keeps its ratio to `optimizer.lr`. Left out:
    the optimizer's.
    """
    weight_decay: NonNegative | None = None
    """Their weight decay, of vectors too; left out: the optimizer's."""


class OptimizerKind(Kind):
    """Base of all optimizers that are known by name. `builds` is called with the parameters, and
    with the fields as keyword arguments.
    """

    registered_in: ClassVar[str] = "dsf.optimizers"
    lr: NonNegative = 1e-3
    """Learning rate; a scheduler changes it over time."""


class BuiltInOptimizer(OptimizerKind):
    """Base of the built-in optimizers."""

    weight_decay: NonNegative = 0.0
    """Strength of the pull of weights towards zero."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """Which weights are pulled. matrices: no decay on biases and norms, that is on tensors with
    fewer than two dimensions.
    """
    groups: list[Group] = []
    """Weights with a learning rate or a weight decay of their own, by name."""
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Learning rate of each layer as a share of that of the next one up (Clark et al. 2020,
    ELECTRA); what follows the last numbered layer has the full rate, what precedes the first one
    the lowest. 1: all have the same.
    """


# Keys that give weights values of their own: DeepSpeed reads them from the parameter groups, not
# the JSON.
GROUP_KEYS: Final = frozenset({"weight_decay_on", "groups", "layer_decay"})


class AdamW(BuiltInOptimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"
    weight_decay: NonNegative = 0.01
    betas: _Betas = [0.9, 0.999]
    """Decay of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the second mean."""
    implementation: Literal["auto", "torch", "fused", "deepspeed"] = "auto"
    """``auto``: ``fused`` on CUDA, ``torch`` on CPU and with CPU offload. ``torch``: torch.optim,
    resumes bit for bit, compiles nothing. ``fused``: torch's one kernel for all weights of a group,
    which resumes bit for bit as well, with fewer temporaries; the last bits may depend on the
    number of ranks. ``deepspeed``: its fused kernel (with CPU offload its vectorised host kernel,
    several times faster there); compiled at first use. On the host it resumes bit for bit, on the
    device a resumed run drifts in the last bits.
    """

    def is_fused(self, *, is_on_cuda: bool) -> bool:
        """Check whether torch's fused kernel steps the weights, which lie on CUDA or not."""
        return self.implementation == "fused" or (self.implementation == "auto" and is_on_cuda)


class Adam(AdamW):
    """Adam (Kingma & Ba 2015): weight decay is added to the gradient. DeepSpeed calls AdamW "Adam";
    this is the real one.
    """

    kind: Literal["adam"] = "adam"  # type: ignore[assignment]
    weight_decay: NonNegative = 0.0


# Numbers of a moment in 8 bits that have one scale, and numbers that are stepped at once.
MOMENT_BLOCK: Final = 256
NUMBERS_AT_ONCE: Final = 1 << 22
# Numbers that are compared at once in the look for what was written into weights: few where they
# lie in a cache, more where every piece is some kernels to launch.
COMPARED_ON_CPU: Final = 1 << 17
COMPARED_AT_ONCE: Final = 1 << 22


class AdamW8bit(BuiltInOptimizer):
    """AdamW with moments in 8 bits (Dettmers et al. 2022), in blocks of 256 numbers, as
    bitsandbytes and torchao define it: a quarter of AdamW's state.
    """

    kind: Literal["adamw_8bit"] = "adamw_8bit"
    weight_decay: NonNegative = 0.01
    betas: _Betas = [0.9, 0.999]
    """Decay of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the second mean."""


class ScheduleFree(BuiltInOptimizer):
    """Schedule-free AdamW (Defazio et al. 2024): an average of the weights takes the place of a
    falling rate, and is what is measured and exported. `scheduler.kind: constant` is its warm-up.
    """

    kind: Literal["schedule_free"] = "schedule_free"
    weight_decay: NonNegative = 0.0
    betas: Annotated[
        list[Annotated[float, Field(gt=0.0, lt=1.0)]], Field(min_length=2, max_length=2)
    ] = [0.9, 0.999]
    """Share of the average in the weights that are trained; decay of the running mean of the
    gradient's square.
    """
    eps: Positive = 1e-8
    """Added to the root of that mean."""


class SGD(BuiltInOptimizer):
    """Stochastic gradient descent with momentum."""

    kind: Literal["sgd"] = "sgd"
    lr: NonNegative = 1e-2
    momentum: Fraction = 0.0
    """Share of the last update carried over."""
    nesterov: bool = False
    """Look ahead along the momentum (needs momentum > 0)."""


class Adagrad(BuiltInOptimizer):
    """Adagrad (Duchi et al. 2011)."""

    kind: Literal["adagrad"] = "adagrad"
    lr: NonNegative = 1e-2
    eps: Positive = 1e-10
    """Added to the root of the summed squares."""


class Lion(BuiltInOptimizer):
    """Lion (Chen et al. 2023) by DeepSpeed's fused kernel on NVIDIA GPUs, by its host kernel with
    CPU offload, and in torch's operations elsewhere.
    """

    kind: Literal["lion"] = "lion"
    lr: NonNegative = 1e-4
    betas: _Betas = [0.9, 0.99]
    """Interpolation of the update, decay of the running mean."""


class Lamb(BuiltInOptimizer):
    """LAMB (You et al. 2020) by the formula of DeepSpeed's kernel: steps in proportion to the norm
    of each weight, for large batches.
    """

    kind: Literal["lamb"] = "lamb"
    betas: _Betas = [0.9, 0.999]
    """Decay of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the second mean."""
    max_coeff: Positive = 10.0
    """Upper bound of the layer-wise ratio."""
    min_coeff: Positive = 0.01
    """Lower bound of the layer-wise ratio."""
    bias_correction: bool = True
    """Correct the rate for the first steps, in which the running means are small."""


class Adafactor(BuiltInOptimizer):
    """Adafactor (Shazeer & Stern 2018) as torch has it: of a matrix it keeps the means of rows and
    columns alone. Each step is a share of the weight's own size.
    """

    kind: Literal["adafactor"] = "adafactor"
    lr: NonNegative = 1e-2
    beta2_decay: Annotated[float, Field(le=0.0)] = -0.8
    """Power of the step by which the mean of squares changes less and less."""
    eps: Annotated[list[Positive], Field(min_length=2, max_length=2)] = [
        1.1920928955078125e-07,
        1e-3,
    ]
    """Least root of the mean square, of the gradient and of a weight."""
    d: Annotated[float, Field(ge=1.0)] = 1.0
    """Most that an update may be, as a root mean square, before it is scaled down."""


class Muon(BuiltInOptimizer):
    """Muon (Jordan et al. 2024) for the matrices of hidden layers, whose momentum it makes
    orthogonal, and AdamW for all other weights; both are torch's.
    """

    kind: Literal["muon"] = "muon"
    lr: Positive = 0.02
    """Learning rate of the matrices; a scheduler changes it over time, and `adam_lr` by the same
    share.
    """
    weight_decay: NonNegative = 0.1
    matrices: list[str] = []
    """Regular expressions for whole names: the weights that Muon steps, each with two dimensions.
    Left out: those of layers inside a numbered block, such as ``blocks.3.mlp.up.weight``; not
    embeddings, positions and head.
    """
    momentum: Fraction = 0.95
    """Share of the mean of gradients carried over."""
    nesterov: bool = True
    """Look ahead along the momentum."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz iterations of a step."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    """How the rate follows the shape (rows, columns). ``original``: times sqrt(max(1, rows /
    columns)). ``match_rms_adamw``: times 0.2 sqrt(max(rows, columns)), for rates and weight decay
    of AdamW (Liu et al. 2025).
    """
    adam_lr: NonNegative = 3e-4
    """Learning rate of the other weights."""
    betas: _Betas = [0.9, 0.95]
    """AdamW's decay of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """AdamW's, added to the root of the second mean."""


class OptimizerObject(Object):
    """An optimizer factory that was handed over from Python."""

    lr: NonNegative | None = None
    """Its learning rate, where it says one."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its other keyword arguments, where it says them and they are plain values."""


OptimizerSection = Annotated[OptimizerKind | Target | OptimizerObject, OneOf()]


def optimizer_lr(optimizer: OptimizerSection) -> float | None:
    """Return the learning rate that the config gives the optimizer, or None."""
    if isinstance(optimizer, Target):
        lr = optimizer.args.get("lr")
    else:
        lr = optimizer.lr
    if isinstance(lr, (int, float)):
        return float(lr)
    return None


class SchedulerKind(Kind):
    """Base of all schedules that are known by name. `builds` is called with the optimizer, and with
    the fields as keyword arguments.
    """

    registered_in: ClassVar[str] = "dsf.schedulers"


class Constant(SchedulerKind):
    """The optimizer's learning rate all the time, after a linear warm-up where one is asked for."""

    kind: Literal["constant"] = "constant"
    warmup_steps: Count = 0
    """Steps of linear warm-up; step t (from 0) runs at lr x (t + 1) / warmup_steps."""
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Warm-up as a share of the schedule's steps, rounded up; in place of `warmup_steps`."""

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the steps of the warm-up in a schedule of this length."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        return ceil(self.warmup_ratio * total_steps)


class _Falling(Constant):
    """What falls until the end of the run, or until a step of it."""

    min_ratio: Fraction = 0.0
    """Last learning rate as a share of the first."""
    total_steps: PositiveCount | None = None
    """Step at which the minimum is reached; left out: the length of the run."""


class Cosine(_Falling):
    """Linear warm-up to the optimizer's rate, then half a cosine down to `min_ratio` of it
    (Loshchilov & Hutter 2017).
    """

    kind: Literal["cosine"] = "cosine"  # type: ignore[assignment]
    cycles: PositiveCount = 1
    """Cosines of equal length after the warm-up, each from the full rate again (warm restarts)."""


class Polynomial(_Falling):
    """Linear warm-up, then down to `min_ratio` of the optimizer's rate by a power of the steps that
    are left.
    """

    kind: Literal["polynomial"] = "polynomial"  # type: ignore[assignment]
    power: Positive = 1.0
    """1: a straight line; 2: a parabola that ends flat."""


class Linear(_Falling):
    """Linear warm-up to the optimizer's rate, then a straight line down to `min_ratio` of it."""

    kind: Literal["linear"] = "linear"  # type: ignore[assignment]


class WSD(_Falling):
    """Warm-up, stable, decay: the full rate until the last `decay_steps`, so that a run can be made
    longer without another start (Hu et al. 2024; Haegele et al. 2024).
    """

    kind: Literal["wsd"] = "wsd"  # type: ignore[assignment]
    decay_steps: PositiveCount
    """Steps of the way down at the end."""
    curve: Literal["linear", "sqrt", "cosine"] = "linear"
    """Way down: a straight line, 1 - sqrt(progress), or half a cosine."""


class InverseSqrt(SchedulerKind):
    """Linear warm-up, then the optimizer's rate times sqrt(warmup_steps / steps) (Vaswani et al.
    2017).
    """

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup_steps: PositiveCount = 1000
    """Steps of linear warm-up, and the unit in which the way down is counted."""

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the steps of the warm-up in a schedule of any length."""
        return self.warmup_steps


class DeepSpeedSchedule(SchedulerKind):
    """Base of the schedules that DeepSpeed's JSON names; the framework hands all others to it."""


class WarmupLR(DeepSpeedSchedule):
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


class WarmupCosineLR(DeepSpeedSchedule):
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


class OneCycle(DeepSpeedSchedule):
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
    """Also move Adam's first beta from `max_momentum` down and up again; its second one is then
    0.99 (DeepSpeed's own default is true).
    """
    min_momentum: Fraction = 0.8
    """Momentum at the top of the cycle."""
    max_momentum: Fraction = 0.9
    """Momentum at its ends."""


class LRRangeTest(DeepSpeedSchedule):
    """DeepSpeed's LRRangeTest (Smith 2017): a rate that grows, to find the largest one that
    trains.
    """

    kind: Literal["lr_range_test"] = "lr_range_test"
    min_lr: Positive = 1e-3
    """First learning rate."""
    step_size: PositiveCount = 2000
    """Steps per growth interval."""
    step_rate: NonNegative = 1.0
    """Growth per interval as a multiple of `min_lr`."""
    staircase: bool = False
    """Grow once per interval instead of every step."""


SchedulerSection = Annotated[SchedulerKind | Target | Object, OneOf()]


def has_groups(optimizer: Any) -> bool:
    """Check whether an optimizer may step some weights with other values than the rest."""
    if has_groups_by_name(optimizer):
        return True
    return bool(getattr(optimizer, "weight_decay_on", "all") != "all" and optimizer.weight_decay)


def has_groups_by_name(optimizer: Any) -> bool:
    """Check whether a weight's name, and not its shape alone, may decide how it is stepped."""
    if isinstance(optimizer, Muon) or getattr(optimizer, "groups", None):
        return True
    return bool(getattr(optimizer, "layer_decay", 1.0) != 1.0)
