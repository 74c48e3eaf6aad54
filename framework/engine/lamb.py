"""LAMB (You et al. 2020) for whole weights and for shares of them: ZeRO 1, 2 and 3, tensor groups,
and experts that ranks share.

The formula is that of DeepSpeed's kernel (0.19.8, ops/csrc/lamb/fused_lamb_cuda_kernel.cu), which
steps whole weights on NVIDIA GPUs alone: Adam's update without its correction of bias, with weight
decay in it, is scaled by the norm of the weight over its own; the rate takes the correction.

Each rank adds up squares of its own numbers of a weight, and the ranks that hold the rest add up
their sums: one all-reduce for a parameter group (at ZeRO 3 for a sub-group), of two numbers for
each weight. Experts that a layer packs into one weight have norms of their own, as experts of one
module each have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import Tensor, nn

from framework.engine.shared_weights import SharedWeight, shared_weights, totals_over_ranks
from framework.models.packed_experts import find_packed


class _Scaled(NamedTuple):
    """Numbers of one weight, or of one expert of a packed weight, in the tensor that is stepped.

    Attributes:
        offset: where they begin.
        num: how many they are; 0: this rank steps none of them.
        groups: process groups over which sums go, one after the other.
    """

    offset: int
    num: int
    groups: tuple[Any, ...]

    def numbers(self, stepped: Tensor) -> Tensor:
        """Return them, a view of the stepped tensor."""
        if self.num == stepped.numel():  # of any order in memory
            return stepped
        return stepped.view(-1).narrow(0, self.offset, self.num)


class Lamb(torch.optim.Optimizer):
    """LAMB, with the options and the state of DeepSpeed's."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_coeff: float,
        min_coeff: float,
        bias_correction: bool,
    ) -> None:
        """Take weights, or groups of them.

        Args:
            params: the weights.
            lr: size of a step as a share of the weight, where its norm is within bounds.
            betas: decay of the running means of the gradient and of its square.
            eps: added to the root of the second mean.
            weight_decay: share of the weight in the update.
            max_coeff: most that an update is multiplied by.
            min_coeff: least that it is multiplied by.
            bias_correction: whether the rate takes Adam's correction of bias.
        """
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)
        # a tensor that is stepped -> the weights in it, in order; others are one weight
        self._scaled: dict[Tensor, list[_Scaled]] = {}
        self._device = torch.device("cpu")

    def take_shares(self, engine: deepspeed.DeepSpeedEngine) -> None:
        """Learn where the weights lie, once DeepSpeed has laid them out."""
        num_experts = _num_experts(engine.module)
        for stepped, weights in shared_weights(engine, self).items():
            scaled: list[_Scaled] = []
            for weight in weights:
                scaled += _scaled_parts(weight, num_experts.get(weight.weight))
            self._scaled[stepped] = scaled
        self._device = engine.device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all groups, in the same order on all ranks. Collective."""
        for group in self.param_groups:
            # At ZeRO 0 code of the run may have frozen a weight, on all ranks.
            stepped = [tensor for tensor in group["params"] if tensor.grad is not None]
            if stepped:
                self._step_tensors(stepped, group)

    def _step_tensors(self, stepped: list[Tensor], group: Mapping[str, Any]) -> None:
        updates = self._updates(stepped, group)
        places: list[tuple[Tensor, Tensor]] = []
        groups_of: list[tuple[Any, ...]] = []
        for tensor, update in zip(stepped, updates, strict=True):
            for scaled in self._scaled.get(tensor, [_Scaled(0, tensor.numel(), ())]):
                places.append((scaled.numbers(tensor), scaled.numbers(update)))
                groups_of.append(scaled.groups)
        ratios = self._ratios(places, groups_of, group)
        for (_, update), ratio in zip(places, ratios, strict=True):
            update.mul_(ratio)
        for tensor, update in zip(stepped, updates, strict=True):
            tensor.add_(update, alpha=-self._rate(tensor, group))

    def _updates(self, stepped: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
        """Return the updates before they are scaled, and move the means."""
        gradients: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        for tensor in stepped:
            assert tensor.grad is not None
            gradients.append(tensor.grad)
            state = self.state[tensor]
            if "exp_avg" not in state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(tensor)
                state["exp_avg_sq"] = torch.zeros_like(tensor)
            state["step"] += 1
            means.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
        first_beta, second_beta = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - first_beta)
        torch._foreach_mul_(squares, second_beta)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second_beta)
        updates = list(torch._foreach_sqrt(squares))
        torch._foreach_add_(updates, group["eps"])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, means)
        if group["weight_decay"]:
            torch._foreach_add_(updates, stepped, alpha=group["weight_decay"])
        return updates

    def _ratios(
        self,
        places: Sequence[tuple[Tensor, Tensor]],
        groups_of: Sequence[tuple[Any, ...]],
        group: Mapping[str, Any],
    ) -> Sequence[Tensor]:
        """Return the ratio of norms by which each update is scaled, 0-d. Collective.

        Args:
            places: numbers of each weight and of its update.
            groups_of: process groups of each.
            group: with the bounds.
        """
        values = [weight for weight, _ in places] + [update for _, update in places]
        norms = torch.stack(torch._foreach_norm(values)).view(2, -1)
        sums = list(norms.square().t().contiguous())
        totals = totals_over_ranks(sums, groups_of, self._device)
        of_weights, of_updates = torch.stack(totals).sqrt().unbind(1)
        ratios = (of_weights / of_updates).clamp(group["min_coeff"], group["max_coeff"])
        has_both = (of_weights > 0) & (of_updates > 0)
        return torch.where(has_both, ratios, 1.0).unbind()

    def _rate(self, tensor: Tensor, group: Mapping[str, Any]) -> float:
        """Return the rate of a tensor's next step, with the correction of bias."""
        rate = float(group["lr"])
        if not group["bias_correction"]:
            return rate
        num_steps = float(self.state[tensor]["step"])
        first_beta, second_beta = group["betas"]
        first_correction = float(1 - first_beta**num_steps)
        second_correction = float(1 - second_beta**num_steps)
        return rate * sqrt(second_correction) / first_correction


def _num_experts(model: nn.Module) -> dict[Tensor, int]:
    """Return the experts that this rank holds of packed weights."""
    num_experts: dict[Tensor, int] = {}
    for module in find_packed(model).values():
        for weight in module.parameters(recurse=False):
            num_experts[weight] = int(module.num_experts)  # type: ignore[arg-type]
    return num_experts


def _scaled_parts(weight: SharedWeight, num_experts: int | None) -> list[_Scaled]:
    """Return this rank's numbers of a weight, or of each of the experts in it; None: it is no
    packed one.
    """
    share = weight.share
    if num_experts is None:
        return [_Scaled(share.offset, share.num, weight.groups)]
    size = weight.shape.numel() // num_experts
    parts = []
    for expert in range(num_experts):
        begin = max(share.start, expert * size)
        end = min(share.start + share.num, (expert + 1) * size)
        offset = share.offset + begin - share.start
        if begin >= end:
            begin = end = offset = 0
        # Ranks of a tensor group, or of an expert group, have other experts.
        parts.append(_Scaled(offset, end - begin, weight.replicas))
    return parts
