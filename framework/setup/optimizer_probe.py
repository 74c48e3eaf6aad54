"""Tries the user's optimizer on a small loss, to find whether ZeRO or a tensor group may step it.

At stages 1 to 3 DeepSpeed joins the weights of a group end to end and gives every rank a share of
that vector. An optimizer that works on one number at a time takes the same step there. One that
uses rows and columns (Muon, Shampoo), the norm of a weight (LAMB), or sums over all weights
(Prodigy) silently takes another step.

The optimizer is made and given its shares as DeepSpeed does it, and stepped beside a second one
over the whole weights. Both get the gradients of a real loss at the whole weights: they turn with
the weights as in a training, so that thresholds, warm-ups and estimates of a step size are reached;
and differences in the last bits do not grow, since they do not change later gradients.

A bound that no gradient of the trial reaches (clipping by the norm of all at 10, steps that are
left out at a peak, a ratio of norms of at most 1) shows in no step. So whole weights are stepped
once more, with each sum, norm and extreme over many numbers made far larger or smaller: a step that
changes depends on them.

torch's own optimizers that work number by number are known. Of one of them only the groups can
differ that the user's function makes, which a few steps show; a trial to the end takes a third of a
second.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import sin
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from framework.engine.initialize import MakeOptimizer
from framework.errors import ConfigError
from framework.setup.user_optimizer import (
    NotJudgedError,
    made_optimizer,
    refuse_unreadable_state,
    take_step,
)
from framework.system.log import warn

_NUM_SHARES: Final = 2
_FIRST_SHARE: Final = 0.4  # of the numbers of a group: ends within a weight
_TOLERANCE: Final = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Allowed difference, as a fraction of the largest change: kernels for vectors and matrices differ
in the last bits.
"""
_ROUNDINGS: Final = 64  # allowed in any case, of the largest weight
_RATE_IF_NONE: Final = 1e-2  # for an optimizer made with lr 0, which a schedule sets later

_MOST_DIGITS: Final = 12  # by which a sum is swayed, up or down
# Operations that give fewer numbers than they take, and add none up.
_PICKS: Final = ("index", "index_select", "gather", "take", "masked_select", "nonzero", "item")

_BY_NUMBER: Final = (
    "take an optimizer that works number by number, such as AdamW, Lion or SGD, or optimizer.kind: "
    "adafactor, lamb or muon"
)


@dataclass(frozen=True)
class _Trial:
    """A loss of a few weights, and the number of steps that they are trained."""

    num_inputs: int
    num_hidden: int
    num_steps: int
    dtype: torch.dtype = torch.float64
    only_matrices: bool = False

    @cached_property
    def start(self) -> list[Tensor]:
        """Weights of four shapes, one of them a vector."""
        hidden = self.num_hidden
        shapes = (hidden, self.num_inputs), (hidden, 3), (hidden,), (3, hidden // 4, 2, 2)
        return [0.3 * _numbers(shape, self.dtype, seed=seed) for seed, shape in enumerate(shapes)]

    @property
    def trained(self) -> list[Tensor]:
        """Weights that the optimizer gets."""
        if self.only_matrices:
            return self.start[:2]
        return self.start

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of six batches."""
        inputs = _numbers((48, self.num_inputs), self.dtype, seed=11)
        targets = _numbers((48, self.num_hidden), self.dtype, seed=12)
        return list(zip(inputs.view(6, 8, -1), targets.view(6, 8, -1), strict=True))

    def gradients(self, weights: Sequence[Tensor], step: int) -> list[Tensor]:
        """Compute the gradients on the batch of a step.

        The loss hardly changes with the length of the first weight's rows, as under a norm: some
        optimizers remove the component of a step along the weight if it is small. At some steps the
        loss is many times as steep, or nearly flat, as losses are for a while.
        """
        inputs, targets = self.batches[step % len(self.batches)]
        with torch.enable_grad():
            leaves = [weight.detach().requires_grad_() for weight in weights]
            rows, head, bias, filters = leaves + self.start[len(leaves) :]
            first = rows / rows.norm(dim=1, keepdim=True) ** 0.98
            hidden = torch.tanh(inputs @ first.T + bias)
            filtered = torch.tanh(hidden @ filters.flatten(1).T)
            errors = filtered @ head.T - targets
            # not steeper for large errors: large rates do not make the weights infinite
            loss = torch.sqrt(1 + errors**2).mean()
            return list(torch.autograd.grad(_slope(step) * loss, leaves))


_TRIALS: Final = (
    _Trial(num_inputs=6, num_hidden=8, num_steps=120),
    # some optimizers factor or quantize large weights only
    _Trial(num_inputs=130, num_hidden=132, num_steps=6),
)
_KNOWN: Final = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers that work number by number."""
_STEPS_OF_KNOWN: Final = 4
_QUANTIZED: Final = _Trial(num_inputs=64, num_hidden=256, num_steps=1, dtype=torch.float32)


def _slope(step: int) -> float:
    """Return the factor of the loss at a step: now and then nearly flat, or many times as steep."""
    if step % 23 == 22:
        return 0.01
    if step % 17 == 16:
        return 30.0
    return 1.0


def check_optimizer(
    make: MakeOptimizer, *, stage: int, key: str, value: str, tensor: int = 1
) -> None:
    """Refuse an optimizer that DeepSpeed cannot step, or not at this ZeRO stage or in a tensor
    group of this size. It is tried on small weights.

    Random numbers of a step are drawn alike for whole weights and shares, so that the rest of the
    step is compared. An optimizer that cannot be made or stepped here, because it needs a GPU or
    the model's own weights, is not judged; a warning mentions it.

    Raises:
        ConfigError: kind ``optimizer-needs-closure``, ``optimizer-needs-modes``,
            ``optimizer-group-object`` or ``optimizer-sees-shape``, or an error of `make` itself.
    """
    with _undisturbed():
        try:
            _refuse_unreadable(make, key=key, value=value)
            reason = _disagreement(make, stage, tensor, key=key, value=value)
            is_from_stage_3 = False
            if stage == 3 and reason:
                is_from_stage_3 = not _disagreement(make, 2, tensor, key=key, value=value)
        except NotJudgedError as error:
            if stage or tensor > 1:
                warn(
                    f"{key} = {value}: it could not be tried on small weights ({error}); shares "
                    "of weights are stepped rightly only by what works number by number "
                    "[optimizer-not-tried]",
                    is_of_all_ranks=True,
                )
            return
    if reason:
        raise _sees_shape(reason, stage, tensor, key, value, is_from_stage_3=is_from_stage_3)


def _refuse_unreadable(make: MakeOptimizer, *, key: str, value: str) -> None:
    """Refuse an optimizer with state that no checkpoint would give back: after a step on weights
    that are large, and of round sizes, as those are that some optimizers quantize. One that cannot
    be stepped is left to the trials.
    """
    for only_matrices in (False, True):
        trial = replace(_QUANTIZED, only_matrices=only_matrices)
        with suppress(NotJudgedError):
            whole = _Whole(make, trial.trained, key=key, value=value)
            whole.step(trial.gradients(whole.weights, 0), 0)
            refuse_unreadable_state(whole.optimizer, key=key, value=value)
            return


def _sees_shape(
    reason: str, stage: int, tensor: int, key: str, value: str, *, is_from_stage_3: bool
) -> ConfigError:
    """Return the error of an optimizer that steps shares otherwise than whole weights.

    `is_from_stage_3`: it works at stage 2.
    """
    if is_from_stage_3:
        reason += (
            ", at zero.stage 3, where it is made from flat, empty tensors and stepped once "
            "for each of its groups"
        )
        fix = f"set zero.stage: 2, or {_BY_NUMBER}"
        return ConfigError.of("optimizer-sees-shape", reason, fix, key, value)
    if stage:
        reason += f", and at zero.stage {stage} it sees shares of one flat vector of all weights"
    if tensor > 1:
        reason += f", and of parallel.tensor: {tensor} each rank has a part of it"
    setting = "parallel.tensor: 1" if tensor > 1 else "zero.stage: 0"
    return ConfigError.of(
        "optimizer-sees-shape", reason, f"set {setting}, or {_BY_NUMBER}", key, value
    )


def _disagreement(make: MakeOptimizer, stage: int, tensor: int, *, key: str, value: str) -> str:
    """Return why shares are stepped otherwise than whole weights, or an empty text.

    Raises:
        NotJudgedError: not even whole weights can be stepped here.
    """
    is_divided = stage > 0 or tensor > 1
    for trial in _TRIALS:
        reason = _disagreement_in(make, trial, stage, is_divided, key=key, value=value)
        if reason or not is_divided:
            return reason
    return ""


def _disagreement_in(
    make: MakeOptimizer, trial: _Trial, stage: int, is_divided: bool, *, key: str, value: str
) -> str:
    """Return the disagreement in one trial, in the first form of it that the optimizer takes: some
    take only floats, or only matrices. Raises NotJudgedError if it takes none.
    """
    first_error: NotJudgedError | None = None
    for only_matrices in (False, True):
        # doubles first: a small learning rate changes only the last bits of a float
        for dtype in (torch.float64, torch.float32):
            form = replace(trial, dtype=dtype, only_matrices=only_matrices)
            try:
                return _compared(make, form, stage, is_divided, key=key, value=value)
            except NotJudgedError as error:
                first_error = first_error or error
    assert first_error is not None
    raise first_error


def _compared(
    make: MakeOptimizer, trial: _Trial, stage: int, is_divided: bool, *, key: str, value: str
) -> str:
    """Return the first disagreement between whole weights and shares over the steps of a trial, or
    empty text. Raises NotJudgedError if whole weights cannot be stepped.
    """
    start = trial.trained
    whole = _Whole(make, start, key=key, value=value)
    if not is_divided:
        for step in range(3):  # closures and modes are asked for at once
            whole.step(trial.gradients(whole.weights, step), step)
        return ""
    if _is_known(whole.optimizer):
        trial = replace(trial, num_steps=_STEPS_OF_KNOWN)
    shares = []
    try:
        for number in range(_NUM_SHARES):
            shares.append(_Share(make, start, number, stage, key=key, value=value))
    except NotJudgedError as error:
        return f"it cannot be made for its share of the weights ({error})"
    reason = _first_difference(trial, whole, shares)
    if not reason and trial.num_steps >= _TRIALS[0].num_steps:
        return _swayed(make, trial, key=key, value=value)
    return reason


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this is one of torch's optimizers that work number by number, with nothing of
    the user's in its step.
    """
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    return type(optimizer) in _KNOWN and "step" not in vars(optimizer)


def _swayed(make: MakeOptimizer, trial: _Trial, *, key: str, value: str) -> str:
    """Step whole weights twice, the second time with other sums over many numbers, and return that
    the steps differ, or empty text.
    """
    plain = _Whole(make, trial.trained, key=key, value=value)
    swayed = _Whole(make, trial.trained, key=key, value=value)
    for step in range(trial.num_steps):
        gradients = trial.gradients(plain.weights, step)
        plain.step(gradients, step)
        with _SwayedSums(step):
            swayed.step(gradients, step)
        weights = _joined(plain.weights)
        if not torch.isfinite(weights).all():  # nothing is left to compare
            return ""
        if not torch.equal(_joined(swayed.weights), weights):
            return "its step depends on a sum, a norm or an extreme of many numbers"
    return ""


def _first_difference(trial: _Trial, whole: _Whole, shares: Sequence[_Share]) -> str:
    """Step whole weights and shares of them, and return where they differ first, or empty text."""
    begin = _joined(trial.trained)
    farthest = 0.0
    for step in range(trial.num_steps):
        gradients = trial.gradients(whole.weights, step)
        whole.step(gradients, step)
        weights = _joined(whole.weights)
        if not torch.isfinite(weights).all():  # nothing is left to compare
            return ""
        farthest = max(farthest, float((weights - begin).abs().max()))
        least = _ROUNDINGS * torch.finfo(trial.dtype).eps * float(weights.abs().max())
        allowed = max(_TOLERANCE[trial.dtype] * farthest, least)
        for share in shares:
            try:
                share.step(_joined(gradients), step)
            except NotJudgedError as error:
                return f"it takes no weight that is a flat vector ({error})"
            # NaN is no distance that is allowed
            if not share.distance(weights) <= allowed:
                return "its step depends on the shape of a weight, or on many numbers at once"
        if step % 4 == 3:
            for share in shares:
                name = _differing_scalar(whole.scalars(), share.scalars())
                if name:
                    return f"it keeps a number that depends on all weights it steps ({name})"
    return ""


class _Stepped:
    """An optimizer in a trial: its groups are those that it was made with, or shares of them."""

    number = 0  # in the trial, for its random generators: 0 for whole weights, from 1 for shares

    def __init__(self, optimizer: torch.optim.Optimizer, *, key: str, value: str) -> None:
        self.optimizer = optimizer
        self._key = key
        self._value = value
        if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
            reason = (
                "it has train() and eval(), and weights of two kinds: the run would evaluate "
                "and save the wrong ones"
            )
            fix = (
                "take optimizer.kind: schedule_free, or an optimizer without them, such as adamw "
                "with scheduler: {kind: wsd, ...} or ema"
            )
            raise ConfigError.of("optimizer-needs-modes", reason, fix, key, value)
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), float) and not group["lr"]:
                group["lr"] = _RATE_IF_NONE

    def take_step(self, step: int) -> None:
        """Take a step, with random generators that no other optimizer of the trial shares."""
        seed = step * (_NUM_SHARES + 1) + self.number
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks for all devices
        with _EqualDraws(step):
            take_step(self.optimizer, key=self._key, value=self._value)


class _Whole(_Stepped):
    """Steps whole weights, as plain PyTorch does."""

    def __init__(
        self, make: MakeOptimizer, start: Sequence[Tensor], *, key: str, value: str
    ) -> None:
        self.weights = [torch.nn.Parameter(weight.clone()) for weight in start]
        super().__init__(made_optimizer(make, self.weights), key=key, value=value)

    def step(self, gradients: Sequence[Tensor], step: int) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient.clone()
        self.take_step(step)

    def scalars(self) -> Mapping[str, list[float]]:
        return _scalars(self.optimizer, [group["params"] for group in self.optimizer.param_groups])


class _Share(_Stepped):
    """Steps a share of every group's flat vector, as DeepSpeed does (0.19.8,
    runtime/zero/stage_1_and_2.py and stage3.py).

    The optimizer is made over the model's weights, which are empty at stage 3. There `step` is
    called once for each group, while the other groups hold no weights.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        start: Sequence[Tensor],
        number: int,
        stage: int,
        *,
        key: str,
        value: str,
    ) -> None:
        parameters = [_as_zero_leaves_it(weight, stage) for weight in start]
        optimizer = made_optimizer(make, parameters)
        places = _places(parameters, start)
        self.number = number + 1
        self._steps_groups_alone = stage == 3
        self._places = []
        self._flat = []
        flat_start = _joined(start)
        for group in optimizer.param_groups:
            group_places = torch.cat([places[id(parameter)] for parameter in group["params"]])
            cut = round(_FIRST_SHARE * len(group_places))
            share = group_places[:cut] if number == 0 else group_places[cut:]
            self._places.append(share)
            self._flat.append(torch.nn.Parameter(flat_start[share]))
            group["params"] = [self._flat[-1]]
        if isinstance(optimizer, torch.optim.Adagrad):  # its constructor makes its state
            optimizer.state = torch.optim.Adagrad(self._flat, **optimizer.defaults).state
        super().__init__(optimizer, key=key, value=value)

    def step(self, gradient: Tensor, step: int) -> None:
        for flat, places in zip(self._flat, self._places, strict=True):
            flat.grad = gradient[places].clone()
        if not self._steps_groups_alone:
            self.take_step(step)
            return
        for group in self.optimizer.param_groups:
            group["params"] = []
        for group, flat in zip(self.optimizer.param_groups, self._flat, strict=False):
            group["params"] = [flat]
            self.take_step(step)
            group["params"] = []

    def distance(self, weights: Tensor) -> float:
        """Return the largest distance between the numbers of this share and the whole weights."""
        distances = []
        for flat, places in zip(self._flat, self._places, strict=True):
            distances.append((flat.detach() - weights[places]).abs())
        return float(torch.cat(distances).max())

    def scalars(self) -> Mapping[str, list[float]]:
        return _scalars(self.optimizer, [[flat] for flat in self._flat])


def _as_zero_leaves_it(weight: Tensor, stage: int) -> torch.nn.Parameter:
    """Return the parameter that the optimizer is made with: ZeRO-3 leaves a flat, empty tensor with
    a note of the shape.
    """
    if stage < 3:
        return torch.nn.Parameter(weight.clone())
    empty: Any = torch.nn.Parameter(weight.new_empty(0))
    empty.ds_shape = weight.shape
    empty.ds_numel = weight.numel()
    parameter: torch.nn.Parameter = empty
    return parameter


def _places(parameters: Sequence[Tensor], start: Sequence[Tensor]) -> Mapping[int, Tensor]:
    """Return the places of each weight's numbers in the joined vector, by the parameter's id."""
    places = {}
    begin = 0
    for parameter, weight in zip(parameters, start, strict=True):
        places[id(parameter)] = torch.arange(begin, begin + weight.numel())
        begin += weight.numel()
    return places


def _scalars(
    optimizer: torch.optim.Optimizer, held: Sequence[Sequence[Tensor]]
) -> Mapping[str, list[float]]:
    """Return the single numbers that an optimizer keeps in its groups and in the states of their
    weights, by name.
    """
    scalars: dict[str, list[float]] = {}
    for index, (group, weights) in enumerate(zip(optimizer.param_groups, held, strict=False)):
        for name, value in group.items():
            number = _as_number(value)
            if number is not None:
                scalars.setdefault(f"{name} of group {index}", []).append(number)
        for weight in weights:
            for name, value in optimizer.state.get(weight, {}).items():
                number = _as_number(value)
                if number is not None:
                    scalars.setdefault(f"{name} of group {index}'s state", []).append(number)
    return scalars


def _as_number(value: Any) -> float | None:
    """Return a number, or a tensor of one number without axes, as a float; None for others."""
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return float(value)
    if isinstance(value, (int, float)):
        return float(value)
    return None


def _differing_scalar(whole: Mapping[str, list[float]], share: Mapping[str, list[float]]) -> str:
    """Return the name of numbers that are not all the same, of whole weights and a share, or empty
    text.
    """
    for name, numbers in share.items():
        both = numbers + whole.get(name, [])
        least = min(both)
        most = max(both)
        if most - least > 1e-4 * max(abs(most), abs(least)):
            return name
    return ""


class _EqualDraws(TorchDispatchMode):
    """Fills every random tensor with one number that depends on the step, so that whole weights and
    shares of them draw the same. A single draw, or an order, is left to the generator, since ranks
    do not share one.
    """

    def __init__(self, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Numbers that such draws may give, other ones at each step.
        self._normal = 1.4 * sin(2.4 * step + 1)
        self._uniform = 0.5 + 0.45 * sin(1.7 * step)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return drawn
        if not isinstance(drawn, Tensor) or drawn.numel() < 2:
            return drawn
        full_name: str = func._overloadpacket.__name__
        if full_name in ("randperm", "multinomial"):  # orders and choices
            return drawn
        return self._fill(drawn, full_name, func, args, kwargs or {})

    def _fill(
        self, drawn: Tensor, full_name: str, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Fill a random tensor with this step's number, scaled as the function's arguments want."""
        name = full_name.removesuffix("_")
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
        if name in ("normal", "randn", "randn_like"):
            mean = arguments.get("mean", 0.0)
            std = arguments.get("std", 1.0)
            return drawn.copy_(mean + std * torch.full_like(drawn, self._normal))
        if name == "bernoulli":
            default: Any = 0.5 if full_name.endswith("_") else arguments["self"]
            chance: Any = arguments.get("p", default)
            return drawn.copy_(torch.full_like(drawn, self._uniform) < chance)
        low = arguments.get("from", 0.0)
        high = arguments.get("to", 1.0)
        if drawn.is_floating_point():
            return drawn.fill_(low + (high - low) * self._uniform)
        return drawn.fill_(0)


class _SwayedSums(TorchDispatchMode):
    """Multiplies what an operation makes of more numbers (sums, norms, means, extremes) by factors
    that depend on the step and on the operation's turn. Views, choices by place, counts and truth
    values stay as they are.
    """

    def __init__(self, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = random.Random(step)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func._overloadpacket.__name__ in _PICKS:
            return made
        if any(result.alias_info is not None for result in func._schema.returns):
            return made
        sizes = [_size(leaf) for leaf in tree_leaves(args)]
        most = max(sizes, default=0)
        return tree_map(lambda leaf: self._sway(leaf, most), made)

    def _sway(self, leaf: Any, most: int) -> Any:
        if _size(leaf) and leaf.is_floating_point() and leaf.numel() < most:
            return leaf * 10.0 ** self._draws.uniform(-_MOST_DIGITS, _MOST_DIGITS)
        return leaf


def _size(leaf: Any) -> int:
    """Return the count of numbers of a tensor, and 0 for anything else."""
    return leaf.numel() if isinstance(leaf, Tensor) else 0


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore the random generators of this process afterwards; compile nothing meanwhile."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    eager: Callable[[], AbstractContextManager[Any]] = nullcontext
    if "torch._dynamo" in sys.modules:
        eager = _eager
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), eager():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _eager() -> AbstractContextManager[Any]:
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int) -> Tensor:
    """Return normal numbers, drawn as doubles, so that all dtypes start from the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
