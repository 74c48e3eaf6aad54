"""A check before the first step that a model computes the same for sequences that ranks share as
for whole ones.

A model that numbers its positions itself, or mixes them elsewhere than in attention, would train on
other numbers without an error. Here a few tokens run through it both ways. First through each model
of transformers, with padding on both ends, which shows how it numbers positions; then through the
task, with the first rows of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from framework.engine import random_state
from framework.engine.distributed import device
from framework.engine.step_batches import changed
from framework.errors import in_one_line
from framework.models.sequence import Numbering, SequenceGroup, numberings, refused_positions, whole
from framework.system.log import warn
from framework.tasks.task import Positions, Ratio, Task

_POSITIONS: Final = 8  # of a rank, in tokens that are made here
_MOST_POSITIONS: Final = 16  # of a rank, in tokens of the data
_ROWS: Final = 3
_PADDED: Final = 3  # positions at the end of one row, and at the begin of another
# Differences that rounding makes, as a share of the largest output.
_BOUND: Final = 1e-3
_HALF_BOUND: Final = 0.08
_LOSS_BOUND: Final = 0.01  # of a loss, which may have means over a rank's positions beside its sum
# Rounding may send a token to another expert: this share of the positions may differ.
_SHARE_OF_ROUTED: Final = 0.2
_ROUTED: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_FAILURES: Final = (
    TypeError,
    ValueError,
    RuntimeError,
    IndexError,
    KeyError,
    AttributeError,
    NotImplementedError,
)
Pairs = list[tuple[Tensor, Tensor]]


class PositionCheck:
    """Compares outputs for whole sequences with those for shared ones, of one engine."""

    def __init__(self, engine: Any, task: Task, group: SequenceGroup) -> None:
        self._engine = engine
        self._task = task
        self._group = group
        self._model: nn.Module = engine.module
        self._positions = Positions(group.rank, group.size)
        weights = [weight for weight in self._model.parameters() if weight.is_floating_point()]
        is_half = any(weight.dtype.itemsize < torch.float32.itemsize for weight in weights)
        is_exact = not is_half and not engine.torch_autocast_enabled()
        self._bound = _BOUND if is_exact else _HALF_BOUND
        configs = [module.config for module in self._model.modules() if hasattr(module, "config")]
        self._is_routed = any(_has_experts(config) for config in configs)

    def settle_numbering(self) -> None:
        """Find how the models of transformers in the model number positions. Collective.

        Raises:
            ConfigError: kind ``sequence-needs-attention``: in no way that ranks can share.
        """
        for name, numbering in numberings(self._model).items():
            module = self._model.get_submodule(name)
            probe = _probe(module, numbering, size=self._group.size)
            if probe is not None:
                with _looking(self._engine):
                    self._settle(module, numbering, probe)

    def _settle(self, module: nn.Module, numbering: Numbering, probe: dict[str, Tensor]) -> None:
        """Set the first rule of `numbering` by which a model computes the same for shared
        sequences as for whole ones. Warn if it cannot be compared; raise ConfigError if no rule is
        right. Collective.
        """
        model = self._engine if module is self._model else module
        mask = probe["attention_mask"].bool()
        shared = probe | {"input_ids": self._positions.of(probe["input_ids"])}
        try:
            with whole():
                expected = model(**probe)
        except _FAILURES as error:
            _warn_not_compared(module, in_one_line(error))
            return
        differences = list[float]()
        for rule in Numbering.RULES:
            numbering.rule = rule
            try:
                with self._group.shared():
                    pairs = self._pairs(expected, model(**shared))
            except _FAILURES as error:
                reason = f"it fails where ranks share the positions: {in_one_line(error)}"
                raise refused_positions(module, reason) from error
            if not pairs:
                _warn_not_compared(module, "it returns nothing that has positions")
                return
            differences.append(self._difference(pairs, self._positions.of(mask)))
            if differences[-1] <= self._bound:
                return
        numbering.rule = Numbering.IN_ORDER
        with whole():
            second = model(**probe)
        repeated = [
            pair for pair in _tensor_pairs(expected, second) if pair[0].shape[:2] == mask.shape
        ]
        if self._difference(repeated, mask) > self._bound:
            _warn_not_compared(module, "it computes other numbers from the same tokens every time")
            return
        raise refused_positions(module, _reason(min(differences)))

    def look_at_batch(
        self, batch: Any, split: Callable[[Any], Any], as_read: Callable[[Any], Any]
    ) -> None:
        """Compare the task's outputs and loss for the first rows of a batch; warn if they cannot be
        compared. Collective.

        `split` returns inputs and targets of a batch, on the device; `as_read` converts inputs to
        the type that the model reads.

        Raises:
            ConfigError: kind ``sequence-needs-attention``.
        """
        task = self._task
        engine = self._engine
        try:
            with _looking(engine):
                inputs, targets = _cut(split(batch), most=_MOST_POSITIONS * self._group.size)
                shared_inputs, shared_targets = task.share(inputs, targets, self._positions)
                with whole():
                    expected = task.forward(engine, as_read(inputs))
                    loss = task.loss(expected, targets)
                with self._group.shared():
                    outputs = task.forward(engine, as_read(shared_inputs))
                    shared_loss = task.loss(outputs, shared_targets)
                pairs = self._pairs(expected, outputs)
        except _FAILURES as error:
            _warn_not_compared(self._model, in_one_line(error))
            return
        difference = self._difference(pairs, self._counting_positions(inputs))
        if difference > self._bound:
            raise refused_positions(self._model, _reason(difference))
        self._compare_losses(
            _sums_and_counts(loss), _sums_and_counts(shared_loss), is_mean=isinstance(loss, Tensor)
        )

    def _counting_positions(self, inputs: Any) -> Tensor | None:
        """Return this rank's part of the attention mask (rows, positions), or None without one."""
        if not isinstance(inputs, Mapping):
            return None
        mask = inputs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return None
        return self._positions.of(mask.bool(), fill=0)

    def _compare_losses(self, expected: Tensor, shared: Tensor, *, is_mean: bool) -> None:
        """Compare sums and counts (parts, 2) of a loss over whole sequences with the sums and
        counts of all ranks of the group together. Collective.
        """
        torch.distributed.all_reduce(shared, group=self._group.group)
        count = float(expected[0, 1])
        shared_count = float(shared[0, 1])
        if not is_mean and abs(count - shared_count) > 0.5:
            reason = (
                f"its loss counts {shared_count:g} where ranks share the positions of what counts "
                f"{count:g} whole"
            )
            raise refused_positions(self._model, reason)
        loss = float((expected[:, 0] / expected[:, 1]).sum())
        shared_loss = float((shared[:, 0] / shared[:, 1]).sum())
        difference = abs(loss - shared_loss) / max(abs(loss), 1e-12)
        bound = max(_LOSS_BOUND, self._bound)
        if difference > bound and not self._is_routed:  # false for a loss that is not finite
            raise refused_positions(
                self._model,
                f"its loss is another by {difference:.1%} where ranks share the positions",
            )

    def _pairs(self, expected: Any, shared: Any) -> Pairs:
        """Return this rank's part of each output that has positions, for whole sequences and for
        shared ones.
        """
        rank = self._group.rank
        size = self._group.size
        pairs: Pairs = []
        for whole_output, shared_output in _tensor_pairs(expected, shared):
            length = whole_output.shape[1]
            part_length = -(-length // size)
            if part_length != length and shared_output.shape[1] == part_length:
                # without the positions that were added so that all parts are equally long
                end = max(0, min(part_length, length - rank * part_length))
                part = self._positions.of(whole_output, fill=0)
                pairs.append((part[:, :end], shared_output[:, :end]))
        return pairs

    def _difference(self, pairs: Pairs, counts: Tensor | None) -> float:
        """Return the largest difference on any rank, as a share of the largest number of its
        tensor. `counts` (rows, positions) are the positions that are compared; None for all.
        Collective.
        """
        worst = torch.zeros((), device=device())
        for expected, output in pairs:
            if not expected.numel():
                continue
            rows, length = expected.shape[:2]
            largest = expected.float().nan_to_num(0.0).abs().amax().clamp(min=1e-12)
            differences = (expected.float() - output.float()).abs()
            shares = differences.reshape(rows, length, -1).amax(2) / largest
            if counts is not None and len(counts) == rows:
                shares = shares[counts[:, :length]]
            shares = shares.flatten().nan_to_num(1.0)
            if self._is_routed and len(shares):
                shares = shares.quantile(1 - _SHARE_OF_ROUTED)
            if shares.numel():
                worst = torch.maximum(worst, shares.amax())
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
        return float(worst)


def _tensor_pairs(expected: Any, output: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of tensors of two outputs that may have positions."""
    for left, right in zip(tree_leaves(expected), tree_leaves(output), strict=False):
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            continue
        is_long_enough = min(left.ndim, right.ndim) > 1
        if left.is_floating_point() and is_long_enough and len(left) == len(right):
            yield left, right


def _sums_and_counts(loss: Tensor | Ratio | tuple[Ratio, ...]) -> Tensor:
    """Return the sums and counts (parts, 2) of a task's loss, in float64."""
    if isinstance(loss, Tensor):
        parts: tuple[Ratio, ...] = (Ratio(loss, 1),)
    elif isinstance(loss, tuple):
        parts = loss
    else:
        parts = (loss,)
    rows = [torch.stack((_as_double(part.total), _as_double(part.count))) for part in parts]
    return torch.stack(rows)


def _as_double(number: Tensor | int) -> Tensor:
    return torch.as_tensor(number, device=device()).detach().double()


def _reason(difference: float) -> str:
    return (
        f"its outputs are others where ranks share the positions (by {difference:.1%} of the "
        "largest): it numbers positions by itself, or mixes them elsewhere than in attention"
    )


def _warn_not_compared(module: nn.Module, reason: str) -> None:
    warn(
        f"parallel.sequence: {type(module).__name__} was not compared for shared and for whole "
        f"sequences: {reason}; compare train/loss of some steps with those of parallel.sequence: "
        "1 [sequence-not-compared]",
        is_of_all_ranks=True,
    )


def _has_experts(config: Any) -> bool:
    numbers = [getattr(config, name, None) for name in _ROUTED]
    return any(isinstance(number, int) and number > 1 for number in numbers)


def _probe(module: nn.Module, numbering: Numbering, *, size: int) -> dict[str, Tensor] | None:
    """Return tokens and masks (rows, positions): one row whole, one padded at its end, one at its
    begin. None for a model that reads no tokens.
    """
    config: Any = module.config
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        return None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (_ROWS, _POSITIONS * size), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -_PADDED:] = 0
    mask[2, :_PADDED] = 0
    if numbering.pad is not None:
        ids[ids == numbering.pad] = (numbering.pad + 1) % vocabulary
        ids.masked_fill_(mask == 0, numbering.pad)
    return {"input_ids": ids.to(device()), "attention_mask": mask.to(device())}


def _cut(pair: tuple[Any, Any], *, most: int) -> tuple[Any, Any]:
    """Return the first rows and positions of inputs and targets; tensors without rows or positions
    stay whole.

    Raises:
        ValueError: it is not known which dimension has the positions.
    """
    shapes = list[tuple[int, ...]]()

    def note(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > 1:
            shapes.append(tuple(value.shape))
        return value

    changed(pair[0], note)
    if not shapes:
        raise ValueError("no input has rows and positions")
    rows, length = shapes[0][:2]

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for dim, size in enumerate(value.shape):
            if dim == 0 and size == rows:
                value = value[:_ROWS]
            elif dim and size == length:
                value = value.narrow(dim, 0, min(most, size))
        return value

    return changed(pair[0], cut), changed(pair[1], cut)


@contextmanager
def _looking(engine: Any) -> Iterator[None]:
    """Compute in evaluation mode and without gradients; modes, buffers and states of generators
    stay as they were.
    """
    modes = [(module, module.training) for module in engine.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in engine.module.buffers()]
    states = random_state.capture()
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for buffer, value in buffers:
            buffer.copy_(value)
        random_state.restore(states)
