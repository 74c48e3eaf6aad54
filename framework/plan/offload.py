"""Memory of a rank elsewhere than on its device: on the host, on an NVMe drive, and in the files of
a checkpoint.

What is where was read in DeepSpeed 0.19.8's `runtime/zero/stage_1_and_2.py` and `stage3.py`,
`runtime/swap_tensor/` and `runtime/engine.py`, and in our `checkpoint/save_stream.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

_FP32: Final = 4
# DeepSpeed's swapper leaves smaller tensors alone (`MIN_AIO_BYTES`), and rounds others up
# (`AIO_ALIGNED_BYTES`).
_LEAST_SWAPPED: Final = 2**20
_ALIGNED: Final = 1024
# torch pins host memory in powers of two (c10 `CachingHostAllocator.h`), and a save only what is no
# larger than this.
_LARGEST_PINNED_SAVE: Final = 2**28
# `torch.save` writes the place, name and padding of each tensor: 530 to 640 bytes.
_PER_TENSOR: Final = 600


@dataclass(frozen=True)
class Shares:
    """A rank's share of a model; sizes in elements.

    Attributes:
        stage: of ZeRO.
        ranks: that share.
        zero: section of the run config.
        width: bytes of a weight.
        sum_width: bytes of a summed gradient.
        has_copies: whether fp32 copies of the weights are stepped.
        state_bytes: bytes of optimizer state, moving average included, of an element.
        copies: bytes that the optimizer takes while it steps.
        groups: for each of the optimizer's groups the rank's share of every weight (stage 3), or of
            all in one.
        parts: what it steps at once.
        weights: each whole trained weight.
        touched: at most, of the whole weights that have a part in a rank's share.
        frozen: each whole frozen weight.
        saves_frozen: whether they are in checkpoints.
        shared: trained elements that another pipeline stage writes into checkpoints.
        buffers: bytes beside the weights.
        pins: whether the host's memory is pinned, where the config does not ask otherwise.
        accumulates: whether a step has several micro-batches.
    """

    stage: int
    ranks: int
    zero: Mapping[str, Any]
    width: int
    sum_width: int
    has_copies: bool
    state_bytes: float
    copies: int
    groups: Sequence[Sequence[int]]
    parts: Sequence[int]
    weights: Sequence[int]
    touched: int
    frozen: Sequence[int]
    saves_frozen: bool
    shared: int
    buffers: int
    pins: bool
    accumulates: bool

    @property
    def _optimizer(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.zero["offload_optimizer"]
        return found

    @property
    def _params(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = (
            self.zero["offload_param"] if self.stage == 3 else {"device": "none"}
        )
        return found

    @property
    def optimizer_place(self) -> str:
        """Return where the optimizer's state is: ``none`` (the device), ``cpu`` or ``nvme``."""
        if self.stage:
            return str(self._optimizer["device"])
        return "none"

    @property
    def _swapped(self) -> list[int]:
        """Those of the parts whose optimizer state is on the drive."""
        is_swapped = self.optimizer_place == "nvme"
        return [part for part in self.parts if is_swapped and _FP32 * part >= _LEAST_SWAPPED]

    @property
    def _swapped_gradients(self) -> list[int]:
        """Shares of single weights whose gradients are swapped out."""
        return [
            share for share in self._shares if self._swapped and _FP32 * share >= _LEAST_SWAPPED
        ]

    @property
    def _shares(self) -> Iterator[int]:
        return (share for group in self.groups for share in group)

    @property
    def unswapped_gradients(self) -> int:
        """Elements of the gradients that are too small to be swapped out: they wait on the device,
        in fp32.
        """
        if self._swapped:
            return sum(self._shares) - sum(self._swapped_gradients)
        return 0

    def host(self, *, is_staged: bool) -> dict[str, int]:
        """Bytes of host memory, by component; `is_staged`: saves are written in the background."""
        found: dict[str, int] = {}
        pinned: list[int] = []
        if self.optimizer_place != "none":
            swapped = self._swapped
            kept = sum(self.parts) - sum(swapped)
            found |= {"fp32 weights": _FP32 * kept, "gradients": _FP32 * kept}
            found |= {
                "optimizer state": int(self.state_bytes * kept),
                "optimizer copies": self.copies,
            }
            if self.stage == 3:
                found["gradient buffer"] = self.sum_width * sum(self.parts)
                pinned += [
                    found["gradient buffer"],
                    *(_FP32 * part for part in self.parts if part not in swapped),
                ]
            else:
                largest = max(self.weights)
                found["copies of weights"] = self.width * (kept + largest)
                found["sums of gradients"] = self.width * self.touched * self.accumulates
                pinned += [
                    width * part for part in self.parts for width in (_FP32, _FP32, self.width)
                ]
                pinned.append(self.width * largest)
            if swapped:
                found["swap buffers"] = self._optimizer["buffer_count"] * _aligned(
                    _FP32 * max(self.parts)
                )
            pinned = pinned if self._optimizer["pin_memory"] else []
        if self._params["device"] != "none":
            flat = list(self._flat_weights())
            pinned += [self.width * size for size in flat]
            frozen = sum(ceil(size / self.ranks) for size in self.frozen)
            found["weights"] = self.width * (sum(flat) + frozen)
            if self._params["device"] == "nvme":
                buffers = self._params["buffer_count"] * _aligned(
                    self.width * self._params["buffer_size"]
                )
                # beside them one for what goes back to the drive after a step
                if sum(flat) < sum(self._shares):
                    buffers += self.width * max(self.parts)
                found["swap buffers"] = found.get("swap buffers", 0) + buffers
        if is_staged:
            model, own, single = self.saved()
            found["checkpoint on its way to disk"] = model + own
            if self.pins and self.optimizer_place == "none" and single <= _LARGEST_PINNED_SAVE:
                pinned.append(single)
                found["pinned buffer of a save"] = single
        if self.pins:
            found["pinned memory, rounded up"] = sum(
                (1 << (size - 1).bit_length()) - size for size in pinned if size
            )
        return found

    def _flat_weights(self) -> Iterator[int]:
        """Elements of each group's weights that rest on the host."""
        left = self._params.get("max_in_cpu", 2**63)
        for group in self.groups:
            yield min(sum(group), max(left, 0))
            left -= sum(group)

    def drive(self) -> dict[str, int]:
        """Bytes of the swapper's files, by component."""
        found = {}
        swapped = self._swapped
        if swapped:
            found["fp32 weights"] = sum(_aligned(_FP32 * part) for part in swapped)
            found["optimizer state"] = sum(
                _aligned(int(self.state_bytes * part)) for part in swapped
            )
            found["gradients"] = sum(_aligned(_FP32 * share) for share in self._swapped_gradients)
        if self._params["device"] == "nvme":
            shares = (*self._shares, *(ceil(size / self.ranks) for size in self.frozen))
            files = (_aligned(self.width * share) for share in shares)
            found["weights"] = sum(size for size in files if size >= _LEAST_SWAPPED)
        return found

    def saved(self) -> tuple[int, int, int]:
        """Bytes of a checkpoint that one rank writes for all, that each writes beside, and of the
        largest tensor.
        """
        kept = self.frozen if self.saves_frozen else ()
        of_tensors = _PER_TENSOR * (len(self.weights) + len(kept))
        stepped = _FP32 * self.has_copies + self.state_bytes
        frozen = sum(kept)
        share = sum(self.parts)
        if self.stage == 3:
            own = (
                stepped * share + self.width * ceil(frozen / self.ranks) + self.buffers + of_tensors
            )
            return 0, int(own), _FP32 * max(self.parts)
        model = self.width * (sum(self.weights) + frozen - self.shared) + self.buffers + of_tensors
        if self.stage:
            return (
                model,
                int(stepped * share),
                max(self.width * max(self.weights), _FP32 * max(self.parts)),
            )
        model += int(
            stepped * sum(self.weights) + _PER_TENSOR * len(self.weights) * stepped / _FP32
        )
        return model, 0, _FP32 * max(self.weights)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
