"""Weights of ZeRO stage 3, which are spread over the ranks between two uses.

DeepSpeed has no whole weights then: it gathers a weight for each use and drops it afterwards
(runtime/zero/partition_parameters.py `_partition_param`). Here what was written into a gathered
weight is written back when the weight is released; and a weight that is not gathered is refused by
its name at the line that writes into it.

Nothing waits for the device before `lost_and_differing`.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, Final

import deepspeed
import torch
import torch.distributed
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor
from torch.nn import Parameter

from framework.checkpoint.state.weight_names import Names
from framework.engine.weight_sums import bit_sum, differing_positions
from framework.errors import Problem

# Torch leaves these before it looks at memory, where a tensor has no elements
# (aten/src/ATen/native/Distributions.cpp), and on GPUs those for lists of tensors
# (aten/src/ATen/native/cuda/MultiTensorApply.cuh).
_DRAWS: Final = (
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
)
_UNREACHABLE: Final = "Cannot access data pointer of Tensor"  # c10/core/StorageImpl.h
_LOADED: Final = re.compile(
    r"size mismatch for (\S+): [^\n]*the shape in current model is torch\.Size\(\[0\]\)"
)
# Names of spread weights, by the address of the storage that stands for the weight.
_spread_names: Final[dict[int, str]] = {}
# Functions that were replaced: owner, name and original.
_replaced_writes: Final[list[tuple[Any, str, Any]]] = []
_num_watching = 0


class SpreadWeights:
    """The weights of ZeRO stage 3, which are whole between a gathering and a release only.

    Attributes:
        compares: whether weights that are released now are compared between ranks.
        has_compared: whether any weight was, since `forget`.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, names: Names) -> None:
        self._optimizer = engine.optimizer
        self._device = engine.device
        # otherwise the gathered weight differs from the share that is kept
        self._is_exact = not engine.zero_quantized_weights()
        self._weights = [
            weight for weight in engine.module.parameters() if hasattr(weight, "ds_id")
        ]
        self._names = [names.get(weight, "?") for weight in self._weights]
        self._numbers = {weight: number for number, weight in enumerate(self._weights)}
        # Experts are spread over fewer ranks than other weights.
        numbers_of: dict[Any, list[int]] = {}
        for number, weight in enumerate(self._weights):
            numbers_of.setdefault(weight.ds_process_group, []).append(number)
        self._numbers_by_group = list(numbers_of.items())
        self._empties = [
            _guard(weight, name) for weight, name in zip(self._weights, self._names, strict=True)
        ]
        self._partitions = [weight.partition for weight in self._weights]
        self.compares = False
        self._is_guarded = True
        for weight, partition in zip(self._weights, self._partitions, strict=True):
            weight.partition = functools.partial(self._release, weight, partition)
            self._set_empty(weight)
        _watch_silent_writes()
        # as DeepSpeed does after each step: they are whole from the first one on
        self._gather_small()
        self.forget()

    def forget(self) -> None:
        """Forget what was compared so far."""
        least = torch.iinfo(torch.int32).min
        shape = len(self._weights), 2  # by weight: the largest sum and the negated least
        self._ends = torch.full(shape, least, dtype=torch.int32, device=self._device)
        self._lost = torch.zeros(len(self._weights), dtype=torch.bool, device=self._device)
        self.has_compared = False

    def close(self) -> None:
        """Leave the weights as DeepSpeed has them."""
        _unwatch_silent_writes()
        self._guard_weights(False)
        for weight, partition in zip(self._weights, self._partitions, strict=True):
            weight.partition = partition

    @contextmanager
    def gathered(self, weights: Iterable[Parameter]) -> Iterator[None]:
        """Gather weights for the time of the block; what is written there is kept, and compared
        between ranks. Collective.
        """
        spread_weights = [weight for weight in weights if weight in self._numbers]
        before = self.compares
        with deepspeed.zero.GatheredParameters(spread_weights, enabled=bool(spread_weights)):
            yield
            self.compares = True
        self.compares = before
        self._gather_small()

    def lost_and_differing(self) -> tuple[list[str], list[str]]:
        """Return the names of weights with a write that was lost on this rank, and of weights that
        differ between ranks. Collective; waits for the device.
        """
        lost = [self._names[number] for number in self._lost.nonzero().flatten().tolist()]
        differing = []
        for group, numbers in self._numbers_by_group:
            positions = differing_positions(self._ends[numbers].flatten(), group)
            differing += [self._names[numbers[position // 2]] for position in positions]
        return lost, differing

    def keep_what_deepspeed_sets(self) -> None:
        """Have DeepSpeed's functions that set the fp32 copy (utils/tensor_fragment.py) set the
        weight as well.
        """
        optimizer = self._optimizer
        set_full = optimizer.set_full_hp_param
        set_local = optimizer.set_local_hp_param

        def set_full_both(value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
            set_full(value, param, optim_state_key)
            if optim_state_key is None and param.requires_grad:
                start, count = rank_share(param)
                set_share(param, value.flatten()[start : start + count])
                if param.ds_status is ZeroParamStatus.AVAILABLE:
                    param.data.copy_(value.view_as(param))

        def set_local_both(value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
            set_local(value, param, optim_state_key)
            if optim_state_key is None and param.requires_grad:
                start, count = rank_share(param)
                share = value.flatten()[:count]
                set_share(param, share)
                if param.ds_status is ZeroParamStatus.AVAILABLE:
                    param.data.view(-1)[start : start + count].copy_(share)

        optimizer.set_full_hp_param = set_full_both
        optimizer.set_local_hp_param = set_local_both

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """Let DeepSpeed save and load the spread weights as plain empty tensors."""
        self._guard_weights(False)
        try:
            yield
        finally:
            self._guard_weights(True)

    def _release(
        self,
        weight: Any,
        partition: Callable[..., None],
        param_list: Sequence[Any] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Stand in for `partition` of a weight (`Init._convert_to_deepspeed_param`): write back
        what was written into gathered weights, and guard the released ones.
        """
        weights = [weight] if param_list is None else param_list
        if not has_been_updated:
            with torch.no_grad():
                for released in weights:
                    if released.ds_status is ZeroParamStatus.AVAILABLE:
                        self._write_back(released)
        partition(param_list, hierarchy, has_been_updated, free_data)
        if free_data:
            for released in weights:
                self._set_empty(released)

    def _write_back(self, weight: Any) -> None:
        """Write a gathered weight into this rank's share of it, and sum it up for the comparison
        between ranks. A write is noted as lost if the share lies on another device or on NVMe, or
        has a second copy (hpZ).
        """
        kept = weight.ds_tensor
        gathered = weight.data
        is_exact = self._is_exact and not hasattr(kept, "ds_quant_scale")
        if not is_exact or gathered.numel() != weight.ds_numel or kept.numel() != kept.ds_numel:
            return
        start, count = rank_share(weight)
        number = self._numbers.get(weight)
        share = gathered.reshape(-1).narrow(0, start, count)
        is_apart = kept.device != gathered.device or weight.ds_secondary_tensor is not None
        is_apart |= kept.final_location is OffloadDeviceEnum.nvme
        if count and not is_apart:
            kept.narrow(0, 0, count).copy_(share)
        if not self.compares or number is None:
            return
        self.has_compared = True
        if count and is_apart:
            is_lost = (share.to(kept.device) != kept.narrow(0, 0, count)).any()
            self._lost[number] |= is_lost.to(self._device)
        total = bit_sum(gathered.reshape(-1))
        ends = torch.stack((total, -total))
        self._ends[number] = torch.maximum(self._ends[number], ends)

    def _set_empty(self, weight: Any) -> None:
        """Let the guarded empty tensor stand for a weight that is not gathered."""
        number = self._numbers.get(weight)
        if number is None or not self._is_guarded:
            return
        if weight.ds_status is ZeroParamStatus.NOT_AVAILABLE:
            weight.data = self._empties[number]

    def _guard_weights(self, is_guarded: bool) -> None:
        """Have spread weights raise where they are written or read by their address; or make them
        plain empty tensors.
        """
        self._is_guarded = is_guarded
        for weight in self._weights:
            self._set_empty(weight)
            if not is_guarded and weight.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)

    def _gather_small(self) -> None:
        """Gather the weights that DeepSpeed keeps whole (`param_persistence_threshold`)."""
        small = self._optimizer.persistent_parameters
        if small:
            small[0].all_gather(small)


def rank_share(weight: Any) -> tuple[int, int]:
    """Return the offset and the number of elements of this rank's share of a weight, without
    padding.
    """
    size = weight.ds_tensor.ds_numel
    start = size * torch.distributed.get_rank(weight.ds_process_group)
    count = max(min(size, weight.ds_numel - start), 0)
    if count == 0:
        return 0, 0
    return start, count


def set_share(weight: Any, share: Tensor) -> None:
    """Write this rank's share of a weight, and forget its second copy (hpZ)."""
    with torch.no_grad():
        weight.ds_tensor.narrow(0, 0, share.numel()).copy_(share)
    weight.ds_secondary_tensor = None


def _guard(weight: Any, name: str) -> Tensor:
    """Make the empty tensor that stands for a spread weight: torch raises where it is written."""
    empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
    storage = empty.untyped_storage()
    torch._C._set_throw_on_mutable_data_ptr(empty)
    _spread_names[storage._cdata] = name
    # an error is explained when the engine is closed
    weakref.finalize(empty, _spread_names.pop, storage._cdata, None)
    return empty


def _watch_silent_writes() -> None:
    """Have writes into a spread weight from which torch returns silently raise as others do."""
    global _num_watching
    _num_watching += 1
    if _num_watching > 1:
        return
    for name in _DRAWS:
        _refuse_writes_by(torch.Tensor, name)
    for name in dir(torch):
        if name.startswith("_foreach_") and name.endswith("_"):
            _refuse_writes_by(torch, name)


def _refuse_writes_by(owner: Any, name: str) -> None:
    """Have a function of torch raise if its first argument is, or holds, a spread weight."""
    write = getattr(owner, name)

    @functools.wraps(write)
    def refusing_spread(target: Any, *arguments: Any, **named: Any) -> Any:
        if _names_in(target):
            raise RuntimeError(_UNREACHABLE)
        return write(target, *arguments, **named)

    _replaced_writes.append((owner, name, write))
    setattr(owner, name, refusing_spread)


def _unwatch_silent_writes() -> None:
    """Put torch's functions back when the last engine that watches has closed."""
    global _num_watching
    _num_watching -= 1
    while not _num_watching and _replaced_writes:
        owner, name, write = _replaced_writes.pop()
        if owner is torch.Tensor:
            delattr(owner, name)  # its base class has it
        else:
            setattr(owner, name, write)


def written_while_spread(error: BaseException, *, place: str = "") -> Problem | None:
    """Explain an error of code that writes into a weight which stage 3 has spread; None for other
    errors. `place` is the line of that code.
    """
    message = str(error)
    if not isinstance(error, RuntimeError) or not _spread_names:
        return None
    loaded = _LOADED.search(message)
    if not loaded and _UNREACHABLE not in message:
        return None
    names = list[str]()
    if loaded:
        names.append(loaded[1])
    for frame, _ in walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            names += _names_in(value)
    unique = list(dict.fromkeys(names))
    if unique:
        weight = f"weight {' or '.join(unique[:2])}"
    else:
        weight = "a weight"
    reason = (
        f"{weight} is written, or read by its address,{place} while ZeRO stage 3 has spread it "
        "over the ranks"
    )
    fix = (
        "do it within state.gathered() of a callback or engine.gathered() of a loop of your own, "
        "keep what forward moves in a buffer, or set zero.stage: 2"
    )
    return Problem("weight-written", reason, fix)


def _names_in(value: Any) -> list[str]:
    """Return the names of the spread weights in a value: a tensor, or a list or tuple of them."""
    if isinstance(value, (list, tuple)):
        values = value
    else:
        values = (value,)
    names = []
    for tensor in values:
        if not isinstance(tensor, Tensor) or tensor.numel() or tensor.layout is not torch.strided:
            continue
        name = _spread_names.get(tensor.untyped_storage()._cdata)
        if name:
            names.append(name)
    return names
