"""Memory of a rank elsewhere than on its device: on the host, on an NVMe drive, and in the files of
a checkpoint.

What is where was read in DeepSpeed 0.19.8's `runtime/zero/stage_1_and_2.py` and `stage3.py`,
`runtime/swap_tensor/` and `runtime/engine.py`, and in our `checkpoint/save_stream.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import ceil
from typing import Any, Final

_FP32: Final = 4
# DeepSpeed's swapper leaves smaller tensors alone (`MIN_AIO_BYTES`, or a block if that is larger),
# and rounds others up to a multiple for each of its threads (`AIO_ALIGNED_BYTES`).
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
        zero: section of the run config.
        aio: section of `deepspeed`, the settings of reads and writes of a drive.
        width: bytes of a weight.
        sum_width: bytes of a summed gradient.
        has_copies: whether copies of the weights are stepped.
        copy_width: bytes of a stepped weight, and of the gradient that it is stepped by.
        moment_width: bytes of the widest number of the optimizer's state.
        state_bytes: bytes of optimizer state, moving average included, of an element of the share.
        whole_state: bytes of optimizer state that every rank has of all weights.
        swaps_state: whether this state lies on the drive beside the weights that are stepped.
        copies: bytes that the optimizer takes while it steps.
        groups: for each of the optimizer's groups the rank's share of every weight (stage 3), or of
            all weights in one.
        parts: shares that the optimizer steps at once.
        weights: sizes of all trained weights.
        touched: elements of the complete weights that have a part in the fullest rank's share; 0
            at stages 0 and 3.
        columns: elements of ZenFlow's columns.
        kept: elements of the first parts that are stepped on the device (Twin-Flow).
        frozen: sizes of all frozen weights.
        frozen_shares: what the rank has of each at stage 3.
        saves_frozen: whether frozen weights are in checkpoints.
        shared: trained elements that another pipeline stage writes into checkpoints.
        buffers: bytes beside the weights.
        pins: whether the host's memory is pinned, unless the config turns it off.
        accumulates: whether a step has several micro-batches.
    """

    stage: int
    zero: Mapping[str, Any]
    aio: Mapping[str, Any]
    width: int
    sum_width: int
    has_copies: bool
    copy_width: int
    moment_width: int
    state_bytes: float
    whole_state: int
    swaps_state: bool
    copies: int
    groups: Sequence[Sequence[int]]
    parts: Sequence[int]
    weights: Sequence[int]
    touched: int
    columns: int
    kept: int
    frozen: Sequence[int]
    frozen_shares: Sequence[int]
    saves_frozen: bool
    shared: int
    buffers: int
    pins: bool
    accumulates: bool

    @property
    def _optimizer(self) -> Mapping[str, Any]:
        section: Mapping[str, Any] = self.zero["offload_optimizer"]
        return section

    @property
    def _params(self) -> Mapping[str, Any]:
        if self.stage < 3:
            return {"device": "none"}
        section: Mapping[str, Any] = self.zero["offload_param"]
        return section

    @property
    def optimizer_place(self) -> str:
        """Device of the optimizer's state: ``none`` (it stays), ``cpu`` or ``nvme``."""
        if self.stage:
            return str(self._optimizer["device"])
        return "none"

    @property
    def _least_swapped(self) -> int:
        """Bytes of the smallest tensor that goes to the drive."""
        block_size: int = self.aio.get("block_size", _LEAST_SWAPPED)
        return max(_LEAST_SWAPPED, block_size)

    def _aligned(self, size: int) -> int:
        """Return the bytes that a tensor has on the drive and in the swapper's buffers."""
        num_threads: int = self.aio.get("intra_op_parallelism", 1)
        multiple = _ALIGNED * num_threads
        return ceil(size / multiple) * multiple

    @property
    def _swapped(self) -> list[int]:
        """Parts with their optimizer state on the drive."""
        if self.optimizer_place != "nvme":
            return []
        return [part for part in self.parts if _FP32 * part >= self._least_swapped]

    @property
    def _swapped_gradients(self) -> list[int]:
        """Shares of single weights with their gradients on the drive."""
        if not self._swapped:
            return []
        return [share for share in self._shares if _FP32 * share >= self._least_swapped]

    @property
    def _shares(self) -> list[int]:
        return list(chain(*self.groups))

    @property
    def unswapped_gradients(self) -> int:
        """Elements of the gradients that are too small to be swapped out: they wait on the device,
        in fp32.
        """
        if self._swapped:
            return sum(self._shares) - sum(self._swapped_gradients)
        return 0

    def host(self, *, is_staged: bool) -> dict[str, int]:
        """Return the bytes of host memory, by component; `is_staged`: saves are written in the
        background.
        """
        components: dict[str, int] = {}
        pinned: list[int] = []
        if self.optimizer_place != "none":
            self._add_optimizer(components, pinned)
        if self._params["device"] != "none":
            self._add_weights(components, pinned)
        if is_staged:
            self._add_save(components, pinned)
        if self.pins:
            components["pinned memory, rounded up"] = sum(_rounding(size) for size in pinned)
        return components

    def _add_save(self, components: dict[str, int], pinned: list[int]) -> None:
        """Add a save in the background to `components`, and to `pinned` the bytes of its buffer."""
        model, own, largest = self.saved()
        components["checkpoint on its way to disk"] = model + own
        if self.pins and self.optimizer_place == "none" and largest <= _LARGEST_PINNED_SAVE:
            pinned.append(largest)
            components["pinned buffer of a save"] = largest

    def _add_optimizer(self, components: dict[str, int], pinned: list[int]) -> None:
        """Add an optimizer on the host to `components`, and to `pinned` the bytes of its tensors in
        pinned memory.
        """
        swapped = self._swapped
        kept = sum(self.parts) - sum(swapped) - self.kept
        components[name_of_copies(self.copy_width)] = self.copy_width * kept
        components["gradients"] = self.copy_width * kept
        num_with_state = kept
        if not self.swaps_state:
            num_with_state += sum(swapped)
        components["optimizer state"] = self.whole_state + int(self.state_bytes * num_with_state)
        components["optimizer copies"] = self.copies
        if self.stage == 3:
            components["gradient buffer"] = self.sum_width * sum(self.parts)
            tensors = [components["gradient buffer"]]
            ends = zip(self.parts, accumulate(self.parts), strict=True)
            on_host = [part for part, end in ends if end > self.kept]
            tensors += [self.copy_width * part for part in on_host if part not in swapped]
        else:
            components["copies of weights"] = self.width * (kept + max(self.weights))
            # gradients in half precision are summed where they are stepped from
            has_sums = self.accumulates and self.copy_width == _FP32
            components["sums of gradients"] = self.width * self.touched if has_sums else 0
            tensors = self._tensors_below_stage_3()
        if (self._optimizer.get("zenflow") or {}).get("offload"):
            components["moments of columns"] = 2 * self.width * self.columns
        if swapped:
            buffer = self._aligned(_FP32 * max(self.parts))
            components["swap buffers"] = self._optimizer["buffer_count"] * buffer
        if self._optimizer["pin_memory"]:
            pinned += tensors

    def _tensors_below_stage_3(self) -> list[int]:
        """Return the bytes of the tensors of an optimizer on the host at stages 1 and 2."""
        tensors = []
        for part in self.parts:
            tensors += [self.copy_width * part, self.copy_width * part, self.width * part]
        tensors.append(self.width * max(self.weights))
        return tensors

    def _add_weights(self, components: dict[str, int], pinned: list[int]) -> None:
        """Add weights of stage 3 on the host to `components`, and the bytes of each to `pinned`."""
        flat = list(self._flat_weights())
        pinned += [self.width * size for size in flat]
        components["weights"] = self.width * (sum(flat) + sum(self.frozen_shares))
        if self._params["device"] == "nvme":
            buffers = self._weight_buffers(sum(flat))
            components["swap buffers"] = components.get("swap buffers", 0) + buffers

    def _weight_buffers(self, num_on_host: int) -> int:
        """Return the bytes of the swapper's buffers for weights."""
        buffer = self._aligned(self.width * self._params["buffer_size"])
        buffers: int = self._params["buffer_count"] * buffer
        # one more for weights on the drive, which go back to it after a step
        if num_on_host < sum(self._shares):
            buffers += self.width * max(self.parts)
        return buffers

    def _flat_weights(self) -> Iterator[int]:
        """Yield the elements of each group's weights that stay on the host: of all up to
        `max_in_cpu` in order, others are on the drive.
        """
        left = self._params.get("max_in_cpu", 2**63)
        for group in self.groups:
            yield min(sum(group), max(left, 0))
            left -= sum(group)

    def drive(self) -> dict[str, int]:
        """Return the bytes of the swapper's files, by component."""
        components: dict[str, int] = {}
        if self._swapped:
            components |= self._optimizer_files()
        if self._params["device"] == "nvme":
            components["weights"] = self._weight_files()
        return components

    def _optimizer_files(self) -> dict[str, int]:
        """Return the bytes of the files of the optimizer, by component."""
        swapped = self._swapped
        files = {"fp32 weights": sum(self._aligned(_FP32 * part) for part in swapped)}
        if self.swaps_state:
            state_files = [self._aligned(int(self.state_bytes * part)) for part in swapped]
            files["optimizer state"] = sum(state_files)
        gradient_files = [self._aligned(_FP32 * share) for share in self._swapped_gradients]
        files["gradients"] = sum(gradient_files)
        return files

    def _weight_files(self) -> int:
        """Return the bytes of the files of weights; small weights have none."""
        shares = [*self._shares, *self.frozen_shares]
        files = [self._aligned(self.width * share) for share in shares]
        return sum(size for size in files if size >= self._least_swapped)

    def saved(self) -> tuple[int, int, int]:
        """Return three sizes of a checkpoint in bytes: what one rank writes for all, what each rank
        writes beside it, and the largest tensor.
        """
        frozen = self.frozen if self.saves_frozen else ()
        num_frozen = sum(frozen)
        tensor_bytes = _PER_TENSOR * (len(self.weights) + len(frozen))
        stepped = self.copy_width * self.has_copies + self.state_bytes
        widest = max(self.copy_width, self.moment_width)
        share = sum(self.parts)
        if self.stage == 3:
            frozen_bytes = 0
            if self.saves_frozen:
                frozen_bytes = self.width * sum(self.frozen_shares)
            own = stepped * share + self.whole_state + frozen_bytes + self.buffers + tensor_bytes
            return 0, int(own), widest * max(self.parts)
        num_saved = sum(self.weights) + num_frozen - self.shared
        model = self.width * num_saved + self.buffers + tensor_bytes
        if self.stage:
            model += 2 * self.width * self.columns
            largest = max(self.width * max(self.weights), widest * max(self.parts))
            return model, self.whole_state + int(stepped * share), largest
        # a weight has a state tensor for each fp32 number that is kept of an element
        state_tensors = _PER_TENSOR * len(self.weights) * stepped / _FP32
        model += self.whole_state + int(stepped * sum(self.weights) + state_tensors)
        return model, 0, _FP32 * max(self.weights)


def name_of_copies(width: int) -> str:
    """Return what the copies of weights that are stepped are called, by the bytes of a number."""
    return "fp32 weights" if width == _FP32 else "stepped weights"


def _rounding(size: int) -> int:
    """Return the bytes by which torch rounds a pinned tensor up: to a power of two."""
    if not size:
        return 0
    return (1 << (size - 1).bit_length()) - size
