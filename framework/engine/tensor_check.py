"""A check that the ranks of a tensor group have the same gradients of weights that they do not
divide.

They compute the same outside of divided layers, and so have equal gradients there. If a weight
between a column and a row layer is not in the plan, each rank has its gradient for the rank's own
units alone: the copies drift apart, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from framework.engine.distributed import gather
from framework.errors import ConfigError

_KEY: Final = "parallel.tensor_plan"
# Differences that rounding may make, as a share of a gradient's norm; and the least norm to compare
# with, as a share of the largest norm of any weight: some gradients are nothing but rounding (a
# key's bias).
_BOUNDS: Final = (0.01, 1e-3)
_HALF_BOUNDS: Final = (0.1, 0.05)
_MOST_NAMED: Final = 3


class GradientCheck:
    """Compares sums and norms of gradients within tensor groups: in the first step, and in logged
    steps when they are read. Between logged points it does nothing.
    """

    def __init__(
        self, engine: Any, names: Mapping[Tensor, str], *, group: Any, every: int, is_own_plan: bool
    ) -> None:
        """Compare from the first step on.

        Args:
            engine: the engine with the weights.
            names: plain names of its weights.
            group: process group of the tensor ranks.
            every: number of steps from one logged step to the next.
            is_own_plan: whether the plan came with the model.
        """
        self._group = group
        self._every = every
        self._is_own_plan = is_own_plan
        self._weights: dict[str, Any] = {}
        for weight in engine.module.parameters():
            if weight.requires_grad and "split" not in vars(weight):
                self._weights[names[weight]] = weight
        is_half = any(
            weight.dtype.itemsize < torch.float32.itemsize for weight in self._weights.values()
        )
        self._tolerance, self._floor = _BOUNDS
        if is_half or engine.torch_autocast_enabled():
            self._tolerance, self._floor = _HALF_BOUNDS
        self._device = engine.device
        self._is_first = True
        # (weights, 2): sum and sum of squares, of a step that was not compared
        self._sums: Tensor | None = None
        self._hooks: list[Any] = []

    def begin(self, step: int) -> None:
        """Begin the step of this number."""
        self._sums = None
        if not (self._is_first or step % self._every == 0):
            return
        self._sums = torch.zeros(len(self._weights), 2, device=self._device)
        for row, weight in enumerate(self._weights.values()):
            self._hooks.append(weight.register_hook(partial(self._note, row)))

    def end(self) -> None:
        """End a step; the first one is compared at once.

        Raises:
            ConfigError: as in `compare`.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._is_first:
            self._is_first = False
            self.compare()

    def compare(self) -> None:
        """Compare the sums of the last step, if that is not done yet. Collective; waits for the
        device.

        Raises:
            ConfigError: kind ``tensor-plan``: the gradients of a weight differ.
        """
        rank_sums = self._sums
        self._sums = None
        if rank_sums is None:
            return
        differences = rank_sums.new_zeros(0, dtype=torch.float64)
        largest = rank_sums.new_zeros((), dtype=torch.float64)
        if self._weights:  # a stage of a pipeline may have none, as all ranks of its group
            differences = self._differences(rank_sums)
            largest = differences.amax()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        if largest.item() <= self._tolerance:
            return
        too_large: dict[str, float] = {}
        by_name = dict(zip(self._weights, differences.tolist(), strict=True))
        for others in gather(by_name):  # stages of a pipeline have other weights
            for name, value in others.items():
                if value > self._tolerance:
                    too_large[name] = max(value, too_large.get(name, 0.0))
        raise self._refusal(too_large)

    def _differences(self, rank_sums: Tensor) -> Tensor:
        """Return how far the gradients of each weight differ in the tensor group, (weights,)
        float64, from their sums and sums of squares on this rank, (weights, 2). Collective.
        """
        ranks = torch.distributed.get_world_size(self._group)
        rows = [torch.empty_like(rank_sums) for _ in range(ranks)]
        torch.distributed.all_gather(rows, rank_sums, group=self._group)
        sums, squares = torch.stack(rows).double().unbind(2)  # (ranks, weights) each
        norms = squares.sqrt()
        # each weight's largest norm on any rank, but not less than a share of the largest of all
        scale = norms.amax(0)
        scale = torch.maximum(scale, self._floor * scale.amax()).clamp(min=1e-300)
        differences = torch.maximum(_range_over_ranks(sums), _range_over_ranks(norms)) / scale
        return differences.nan_to_num(0.0, posinf=0.0)  # of a step that overflowed

    def _note(self, row: int, gradient: Tensor) -> None:
        if self._sums is None:
            return
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self._sums[row] += torch.stack((gradient.sum(dtype=torch.float32), norm.square()))

    def _refusal(self, differences: Mapping[str, float]) -> ConfigError:
        """Return the error of weights whose gradients differ between ranks, by these shares."""
        names = list(differences)
        shown = ", ".join(names[:_MOST_NAMED])
        if len(names) > _MOST_NAMED:
            shown += f" and {len(names) - _MOST_NAMED} more"
        reason = (
            f"ranks of a tensor group have other gradients of {shown} (by "
            f"{max(differences.values()):.0%}), which the plan does not divide: each sees the part "
            "of its own units"
        )
        # a weight of the model itself is named itself: there is no module to name
        entry = f'"{names[0].rpartition(".")[0] or names[0]}": summed'
        fix = f"write {entry} into the plan"
        if self._is_own_plan:
            fix = (
                f"write the model's plan (its _tp_plan) as {_KEY}, with {entry} in it, or set "
                "parallel.tensor: 1"
            )
        return ConfigError.of("tensor-plan", reason, fix, _KEY, names[0])


def _range_over_ranks(values: Tensor) -> Tensor:
    return values.amax(0) - values.amin(0)
