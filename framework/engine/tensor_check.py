"""Whether the ranks of a tensor group have the same gradients of what they do not divide.

They compute the same outside of divided layers, and so have equal gradients there. Of a weight that
stands between a column and a row layer, and that the plan does not name, each rank has the part of
its own units alone: the copies drift apart, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from framework.errors import ConfigError

_KEY: Final = "parallel.tensor_plan"
# What rounding may change: of a gradient's norm, and of gradients that are nothing but rounding (a
# key's bias) of the largest norm of any weight.
_BOUNDS: Final = {"exact": (0.01, 1e-3), "half": (0.1, 0.05)}
_MOST_NAMED: Final = 3


class GradientCheck:
    """Compares sums and norms of gradients within tensor groups: of the first step, and of logged
    ones when they are read. Between logged points it does nothing.
    """

    def __init__(
        self, engine: Any, names: Mapping[Tensor, str], *, group: Any, every: int, is_own_plan: bool
    ) -> None:
        """`every` so many steps are logged; `is_own_plan`: the plan came with the model."""
        self._group = group
        self._every = every
        self._is_own_plan = is_own_plan
        self._weights = {
            names[weight]: weight
            for weight in engine.module.parameters()
            if weight.requires_grad and "split" not in vars(weight)
        }
        is_half = any(
            weight.dtype.itemsize < torch.float32.itemsize for weight in self._weights.values()
        )
        self._tolerance, self._floor = _BOUNDS[
            "half" if is_half or engine.torch_autocast_enabled() else "exact"
        ]
        self._device = engine.device
        self._is_first = True
        # (weights, 2): sum and sum of squares, of a step that was not compared
        self._sums: Tensor | None = None
        self._hooks: list[Any] = []

    def begin(self, step: int) -> None:
        """Begin the step of this number."""
        self._sums = None
        if not self._weights or not (self._is_first or step % self._every == 0):
            return
        self._sums = torch.zeros(len(self._weights), 2, device=self._device)
        for row, weight in enumerate(self._weights.values()):
            self._hooks.append(weight.register_hook(partial(self._note, row)))

    def end(self) -> None:
        """End a step; the first one is compared at once.

        Raises:
            ConfigError: as of `compare`.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._is_first:
            self._is_first = False
            self.compare()

    def compare(self) -> None:
        """Compare what the last step has left, once. Collective; waits for the device.

        Raises:
            ConfigError: kind ``tensor-plan``: the gradients of a weight differ.
        """
        if self._sums is None:
            return
        own = self._sums
        self._sums = None
        rows = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(self._group))]
        torch.distributed.all_gather(rows, own, group=self._group)
        sums, squares = torch.stack(rows).double().unbind(2)  # (ranks, weights) each
        norms = squares.sqrt()
        scale = norms.amax(0)
        scale = torch.maximum(scale, self._floor * scale.amax()).clamp(min=1e-300)
        apart = torch.maximum(_spread(sums), _spread(norms)) / scale
        apart = apart.nan_to_num(0.0, posinf=0.0)  # of a step that overflowed
        torch.distributed.all_reduce(apart, torch.distributed.ReduceOp.MAX)
        shares = dict(zip(self._weights, apart.tolist(), strict=True))
        partial_ones = {name: share for name, share in shares.items() if share > self._tolerance}
        if partial_ones:
            raise self._refusal(partial_ones)

    def _note(self, row: int, gradient: Tensor) -> None:
        if self._sums is None:
            return
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self._sums[row] += torch.stack((gradient.sum(dtype=torch.float32), norm.square()))

    def _refusal(self, shares: Mapping[str, float]) -> ConfigError:
        names = list(shares)
        shown = ", ".join(names[:_MOST_NAMED])
        if len(names) > _MOST_NAMED:
            shown += f" and {len(names) - _MOST_NAMED} more"
        reason = (
            f"ranks of a tensor group have other gradients of {shown} (by "
            f"{max(shares.values()):.0%}), which the plan does not divide: each sees the part of "
            "its own units"
        )
        entry = f'"{names[0].rpartition(".")[0]}": summed'
        fix = f"write {entry} into the plan"
        if self._is_own_plan:
            fix = (
                f"write the model's plan (its _tp_plan) as {_KEY}, with {entry} in it, or set "
                "parallel.tensor: 1"
            )
        return ConfigError.of("tensor-plan", reason, fix, _KEY, names[0])


def _spread(values: Tensor) -> Tensor:
    return values.amax(0) - values.amin(0)
