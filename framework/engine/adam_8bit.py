"""AdamW with moments in 8 bits, in blocks of 256 numbers (Dettmers et al. 2022, arXiv:2110.02861).

A moment is kept as codes, one byte a number, which stand for 256 fixed numbers between -1 and 1
(the second moment: between 0 and 1), close together near zero; and the largest number of each
block, in fp32, by which they are multiplied. That is the definition of bitsandbytes and torchao.
Codes and scales are plain tensors, so that checkpoints hold them as they are.

Blocks are counted in the tensor that is stepped. Under ZeRO that is a rank's share, so that other
ranks or stages round otherwise, and the state goes on in one layout only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import torch

from framework.config.optimizer import MOMENT_BLOCK as BLOCK
from framework.config.optimizer import NUMBERS_AT_ONCE
from framework.engine.weight_by_weight import WeightByWeight

FIRST: Final = "exp_avg"
SECOND: Final = "exp_avg_sq"
SCALES: Final = "_scales"
"""What follows the key of a moment in the key of its blocks' largest numbers."""
_LEAST_SCALE: Final = 1e-12
_EXPONENTS: Final = 7


@lru_cache
def code_values(*, has_sign: bool) -> tuple[float, ...]:
    """Return the 256 numbers that codes stand for, in rising order: the dynamic tree of Dettmers
    2016 (arXiv:1511.04561, section 1.3.2), with as many fractions as bits are left beside the
    exponent.
    """
    values = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        num_fractions = 2**exponent if has_sign else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1, num_fractions + 1)
        fractions = (edges[:-1] + edges[1:]) / 2
        numbers = (10.0 ** (exponent - _EXPONENTS + 1) * fractions).tolist()
        values += numbers
        if has_sign:
            values += [-number for number in numbers]
    return tuple(sorted(values))


class _Codes:
    """The numbers of the codes of one moment on a device, and the borders between them."""

    def __init__(self, device: torch.device, *, has_sign: bool) -> None:
        self.values = torch.tensor(code_values(has_sign=has_sign), device=device)
        self.borders = (self.values[:-1] + self.values[1:]) / 2

    def read(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the numbers of blocks (rows) in fp32."""
        numbers = self.values[codes.int()]
        return numbers.mul_(scales.unsqueeze(1))

    def write(self, codes: torch.Tensor, scales: torch.Tensor, numbers: torch.Tensor) -> None:
        """Keep the numbers of blocks (rows), each as the nearest code."""
        largest = numbers.abs().amax(dim=1).clamp_(min=_LEAST_SCALE)
        scaled = numbers / largest.unsqueeze(1)
        scales.copy_(largest)
        codes.copy_(torch.bucketize(scaled, self.borders, out_int32=True, right=True))


class AdamW8bit(WeightByWeight):
    """AdamW (Loshchilov & Hutter 2019) with its moments in 8 bits. Steps are computed in fp32."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """Take weights, or groups of them, and AdamW's settings."""
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._codes: dict[tuple[torch.device, bool], _Codes] = {}

    def codes_on(self, device: torch.device, *, has_sign: bool) -> _Codes:
        """Return the codes of the first moment (`has_sign`) or the second, for a device."""
        key = (device, has_sign)
        if key not in self._codes:
            self._codes[key] = _Codes(device, has_sign=has_sign)
        return self._codes[key]

    def _step_weight(
        self, weight: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]
    ) -> None:
        if not weight.numel():
            return
        state = self.state[weight]
        if "step" not in state:
            state.update(_new_state(weight))
        state["step"] += 1
        gradient = gradient.reshape(-1)
        numbers = weight.detach().reshape(-1)  # a view, unless the weight's order is another
        size = numbers.numel()
        whole = size - size % BLOCK
        for start in range(0, whole, NUMBERS_AT_ONCE):
            stop = min(start + NUMBERS_AT_ONCE, whole)
            self._step_blocks(numbers, gradient, state, group, start, stop, width=BLOCK)
        if whole < size:  # the last block is shorter
            self._step_blocks(numbers, gradient, state, group, whole, size, width=size - whole)
        if not weight.is_contiguous():
            weight.copy_(numbers.view_as(weight))

    def _step_blocks(
        self,
        numbers: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        group: Mapping[str, Any],
        start: int,
        stop: int,
        *,
        width: int,
    ) -> None:
        """Step the numbers from `start` to `stop` of a weight, whole blocks of this width."""
        scales = slice(start // BLOCK, -(-stop // BLOCK))
        slopes = gradient[start:stop].view(-1, width).float()
        first_beta, second_beta = group["betas"]
        moments = {}
        for key, beta, target in (
            (FIRST, first_beta, slopes),
            (SECOND, second_beta, slopes.square()),
        ):
            codes = self.codes_on(numbers.device, has_sign=key == FIRST)
            kept = state[key].view(-1)[start:stop].view(-1, width)
            kept_scales = state[key + SCALES][scales]
            moments[key] = codes.read(kept, kept_scales).lerp_(target, 1 - beta)
            codes.write(kept, kept_scales, moments[key])
        steps = float(state["step"])
        root = moments[SECOND].sqrt_().div_((1 - second_beta**steps) ** 0.5).add_(group["eps"])
        rate = group["lr"]
        stepped = numbers[start:stop].view(-1, width)
        if stepped.dtype == torch.float32:
            computed = stepped
        else:
            computed = stepped.float()
        computed.mul_(1 - rate * group["weight_decay"])
        computed.addcdiv_(moments[FIRST], root, value=-rate / (1 - first_beta**steps))
        if computed is not stepped:
            stepped.copy_(computed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as any optimizer does, but for codes, which torch would convert to numbers of the
        weights' type.
        """
        codes: dict[Any, dict[str, torch.Tensor]] = {}
        others: dict[Any, dict[str, Any]] = {}
        for number, state in state_dict["state"].items():
            codes[number] = {key: state[key] for key in (FIRST, SECOND) if key in state}
            others[number] = {
                key: value for key, value in state.items() if key not in codes[number]
            }
        super().load_state_dict({**state_dict, "state": others})
        stored = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, weight in zip(stored, weights, strict=True):
            for key, value in codes.get(number, {}).items():
                self.state[weight][key] = value.to(weight.device, copy=True)
            for key in (FIRST + SCALES, SECOND + SCALES):
                if key in others.get(number, {}):  # fp32 beside weights in half precision
                    scales = others[number][key].to(weight.device, torch.float32, copy=True)
                    self.state[weight][key] = scales


def _new_state(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    num_blocks = -(-weight.numel() // BLOCK)
    state = {"step": torch.zeros(())}
    for key in (FIRST, SECOND):
        shape = weight.shape
        state[key] = torch.zeros(shape, dtype=torch.uint8, device=weight.device)
        state[key + SCALES] = torch.zeros(num_blocks, device=weight.device)
    for value in state.values():
        # DeepSpeed's files on NVMe have fp32 numbers, one for each of the weight (0.19.8,
        # swap_tensor/optimizer_utils.py `OptimizerStateSwapInfo`).
        value.swappable = False  # type: ignore[attr-defined]
    return state
