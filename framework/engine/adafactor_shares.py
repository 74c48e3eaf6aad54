"""Adafactor where every rank has a share of the weights: ZeRO 1, 2 and 3, tensor groups, and
experts that ranks share.

The step is torch's of whole weights. What it takes of many numbers is a sum: squares of gradients
by row and by column, squares of a weight and of its update. Each rank adds up squares of its own
share, at their places in the whole weight, and the ranks that hold the rest add up their sums: two
all-reduces for a parameter group (at ZeRO 3 for a sub-group), of one number for each row and column
and of one for each weight.

So the means of rows and columns, and the squares of vectors, are the same on all ranks that hold
numbers of a weight. They are kept whole, and a checkpoint has them in every layout alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import Tensor
from torch.nn.functional import pad

from framework.checkpoint.state.optimizer_shards import COL_VAR, ROW_VAR, VARIANCE, whole_key
from framework.engine.shared_weights import SharedWeight, shared_weights, totals_over_ranks


def _kept_shapes(weight: SharedWeight) -> dict[str, torch.Size]:
    """Return the shapes of a whole weight's state by key: as torch has it."""
    whole = weight.whole_shape
    if len(whole) < 2:
        return {VARIANCE: whole}
    return {
        ROW_VAR: torch.Size((*whole[:-1], 1)),
        COL_VAR: torch.Size((*whole[:-2], 1, whole[-1])),
    }


class _Rows(NamedTuple):
    """The rows of a part in which a rank has numbers.

    Attributes:
        first: number of the first row, over all matrices of the weight.
        stop: number after the last row.
        before: numbers of the first row that are in another rank's share.
        length: of a row.
    """

    first: int
    stop: int
    before: int
    length: int

    @classmethod
    def of(cls, weight: SharedWeight) -> _Rows:
        """Return the rows of a weight of at least two dimensions."""
        length = weight.shape[-1]
        first, before = divmod(weight.share.start, length)
        stop = -(-(weight.share.start + weight.share.num) // length)
        return cls(first, stop, before, length)

    def filled(self, numbers: Tensor) -> Tensor:
        """Return numbers as whole rows, with zeros for what other ranks have."""
        after = (self.stop - self.first) * self.length - self.before - numbers.numel()
        return pad(numbers, (self.before, after)).view(-1, self.length)

    def matrices(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield the matrices of `num_rows` rows that they belong to: number, and its rows among
        these.
        """
        for number in range(self.first // num_rows, -(-self.stop // num_rows)):
            first = max(number * num_rows, self.first) - self.first
            stop = min((number + 1) * num_rows, self.stop) - self.first
            yield number, first, stop


class AdafactorOfShares(torch.optim.Optimizer):
    """torch's Adafactor for shares of weights, with the same options.

    Attributes:
        weights: a tensor that is stepped, flat or one weight -> the weights in it, in order.
        device: where sums are sent; a share may lie on the host.
    """

    weights: Mapping[Tensor, Sequence[SharedWeight]]
    device: torch.device

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        beta2_decay: float,
        eps: tuple[float, float],
        d: float,
        weight_decay: float,
    ) -> None:
        """Take weights, or groups of them; the rest is as in torch.optim.Adafactor."""
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.weights = {}
        self.device = torch.device("cpu")

    def take_shares(self, engine: deepspeed.DeepSpeedEngine) -> None:
        """Learn where the weights lie, once ZeRO or a tensor group has divided them."""
        self.weights = shared_weights(engine, self)
        self.device = engine.device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all groups, in the same order on all ranks. Collective."""
        for group in self.param_groups:
            # At ZeRO 0 code of the run may have frozen a weight, on all ranks.
            stepped = [tensor for tensor in group["params"] if tensor.grad is not None]
            self._step_tensors(stepped, group)

    def _step_tensors(self, stepped: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        places: list[_Place] = []
        for tensor in stepped:
            self.kept(tensor)["step"] += 1
            for number, weight in enumerate(self.weights[tensor]):
                places.append(_Place(tensor, number, weight))
        sums = self._total([_sums(place) for place in places], places)
        updates = []
        for place, sums_of_weight in zip(places, sums, strict=True):
            self._move_means(place, sums_of_weight[1:], group)
            updates.append(self._update(place, group))
        squares = self._total([_square(update) for update in updates], places)
        for number, (tensor, _, weight) in enumerate(places):
            num = max(weight.whole_shape.numel(), 1)
            size = (sums[number][0] / num).sqrt().clamp(min=group["eps"][1])
            excess = ((squares[number][0] / num).sqrt() / group["d"]).clamp(min=1.0)
            rate = float(group["lr"])
            relative_rate = min(rate, float(self.state[tensor]["step"]) ** -0.5)
            values = weight.numbers(tensor)
            values.mul_(1 - rate * group["weight_decay"])
            values.sub_(updates[number].mul_(relative_rate * size / excess))

    def kept(self, tensor: Tensor) -> dict[str, Any]:
        """Return the state of a tensor that is stepped, made of zeros if there is none."""
        state: dict[str, Any] = self.state[tensor]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        for number, weight in enumerate(self.weights[tensor]):
            for key, shape in _kept_shapes(weight).items():
                name = whole_key(key, number)
                if name not in state:
                    state[name] = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
                # DeepSpeed's files on NVMe have one size for all state of a tensor (0.19.8,
                # swap_tensor/optimizer_utils.py `OptimizerStateSwapInfo`).
                state[name].swappable = False
        return state

    def whole_state(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Yield weight of the model, key and values of all state that is kept whole."""
        for tensor, weights in self.weights.items():
            state = self.kept(tensor)
            for number, weight in enumerate(weights):
                for key in _kept_shapes(weight):
                    yield weight.weight, key, state[whole_key(key, number)]

    def _total(self, sums: Sequence[Tensor], places: Sequence[_Place]) -> list[Tensor]:
        """Return the sums of weights, each flat, over the ranks that hold them."""
        groups_of = [place.weight.groups for place in places]
        return totals_over_ranks(sums, groups_of, self.device)

    def _means(self, place: _Place) -> dict[str, Tensor]:
        """Return the kept means of a whole weight by key, in torch's shapes."""
        state = self.state[place.tensor]
        means = {}
        for key, shape in _kept_shapes(place.weight).items():
            means[key] = state[whole_key(key, place.number)].view(shape)
        return means

    def _move_means(self, place: _Place, sums: Tensor, group: Mapping[str, Any]) -> None:
        """Move the means of squares towards the squares of this step's gradient."""
        share = float(self.state[place.tensor]["step"]) ** group["beta2_decay"]
        whole = place.weight.whole_shape
        counts = {VARIANCE: 1, ROW_VAR: whole[-1:].numel(), COL_VAR: whole[-2:-1].numel()}
        offset = 0
        for key, mean in self._means(place).items():
            added = sums.narrow(0, offset, mean.numel())
            mean.lerp_(added.view(mean.shape) / counts[key], share)
            offset += mean.numel()

    def _update(self, place: _Place, group: Mapping[str, Any]) -> Tensor:
        """Return this rank's part of a weight's update before it is scaled, flat."""
        weight = place.weight
        gradient = place.gradient
        if not weight.share.num:
            return torch.zeros_like(gradient)
        least = group["eps"][0]
        means = self._means(place)
        if VARIANCE in means:
            variance = weight.taken(means[VARIANCE].view(-1))
            estimate = variance.narrow(0, weight.share.start, weight.share.num).clone()
        else:
            estimate = _estimate(weight, means[ROW_VAR], means[COL_VAR], least)
        return estimate.clamp_(min=least * least).rsqrt_().mul_(gradient)


class _Place(NamedTuple):
    """A weight in a tensor that is stepped.

    Attributes:
        tensor: that is stepped.
        number: of the weight among those in the tensor.
        weight: the weight.
    """

    tensor: Tensor
    number: int
    weight: SharedWeight

    @property
    def gradient(self) -> Tensor:
        """The gradient of this rank's numbers, flat."""
        assert self.tensor.grad is not None
        # convolutions on images in channels_last have such gradients
        return self.weight.numbers(self.tensor.grad.contiguous())


def _square(values: Tensor) -> Tensor:
    """Return the sum of squares, as a vector of one number."""
    norm: Tensor = torch.linalg.vector_norm(values)
    return norm.square().view(1)


def _sums(place: _Place) -> Tensor:
    """Return what this rank's numbers add to the sums of a whole weight, flat: squares of the
    weight, then squares of its gradient by row and by column, or one by one for a vector.
    """
    weight = place.weight
    shape = weight.shape
    share = weight.share
    gradient = place.gradient
    of_weight = _square(weight.numbers(place.tensor))
    dims = len(shape)
    if dims < 2:
        squares = gradient.new_zeros(shape.numel())
        squares.narrow(0, share.start, share.num).copy_(gradient.square())
        return torch.cat([of_weight, weight.placed(squares)])
    by_row = gradient.new_zeros(*shape[:-1], 1)
    by_column = gradient.new_zeros(*shape[:-2], 1, shape[-1])
    if share.num:
        rows = _Rows.of(weight)
        filled = rows.filled(gradient)
        norms = torch.linalg.vector_norm(filled, dim=1)
        by_row.view(-1)[rows.first : rows.stop] = norms.square()
        for matrix, first, stop in rows.matrices(shape[-2]):
            norms = torch.linalg.vector_norm(filled[first:stop], dim=0)
            by_column.view(-1, shape[-1])[matrix] = norms.square()
    placed_rows = weight.placed(by_row, over=dims - 1)
    placed_columns = weight.placed(by_column, over=dims - 2)
    return torch.cat([of_weight, placed_rows.flatten(), placed_columns.flatten()])


def _estimate(weight: SharedWeight, row_var: Tensor, col_var: Tensor, least: float) -> Tensor:
    """Return the estimated means of squares of this rank's numbers, flat, from the means of the
    whole weight's rows and columns.
    """
    dims = len(weight.shape)
    of_rows = weight.taken(row_var, over=dims - 1).reshape(-1, 1)
    of_columns = weight.taken(col_var, over=dims - 2).reshape(-1, weight.shape[-1])
    means = row_var.mean(dim=-2, keepdim=True).clamp_(min=least)
    # of one size in both dimensions that were added up
    if weight.part is not None and weight.part.split.dim < dims - 2:
        means = weight.part.of(means)
    means = means.reshape(-1)
    rows = _Rows.of(weight)
    estimate = row_var.new_empty(rows.stop - rows.first, rows.length)
    for matrix, first, stop in rows.matrices(weight.shape[-2]):
        own_rows = of_rows[rows.first + first : rows.first + stop]
        torch.mul(own_rows, of_columns[matrix], out=estimate[first:stop])
        estimate[first:stop].div_(means[matrix])
    return estimate.view(-1).narrow(0, rows.before, weight.share.num)
