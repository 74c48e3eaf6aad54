"""Values that autograd saves, held in host memory between the forward and the backward pass.

A saved tensor is copied into page-locked memory on a stream of its own while the pass goes on, and
fetched back ahead of its use: tensors are used about in the reverse order, so that each fetch also
begins the next ones. At most `WINDOW` copies are under way, and the computing stream waits for the
oldest beyond them: the device never holds more than the window for it. Where layers are recomputed,
what autograd saves is their inputs.

On a processor the same hooks make plain copies, as there is no stream and no other memory.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from framework.system.log import warn

WINDOW: Final = 2
"""Tensors on their way to the host, and as many on their way back."""
LEAST_BYTES: Final = 4096
"""Smaller tensors stay where they are: a copy would take longer than they are worth."""


class _Held:
    """A saved tensor in host memory.

    Attributes:
        number: place in the order in which tensors were saved.
        host: its copy in host memory; it has the tensor's own strides where these leave no gaps.
        device: where it is fetched to.
        tensor: on the device, while it is on its way to the host, and once it is fetched.
        arrived: mark of its copy, in either direction.
    """

    __slots__ = ("__weakref__", "arrived", "device", "host", "key", "number", "tensor")

    def __init__(self, number: int, tensor: Tensor, host: Tensor, arrived: Any) -> None:
        self.number = number
        self.host = host
        self.device = tensor.device
        self.key = _key(tensor)
        self.tensor: Tensor | None = tensor
        self.arrived = arrived


class _View:
    """A saved tensor that shows the memory of a held one in another shape."""

    __slots__ = ("held", "shape", "strides")

    def __init__(self, held: _Held, tensor: Tensor) -> None:
        self.held = held
        self.shape = tensor.shape
        self.strides = tensor.stride()


class Copies(Protocol):
    """How tensors are copied between a device and its host."""

    def new_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return host memory (size,) for copies; RuntimeError if there is none."""

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Begin a copy after all that the computing stream was given so far; return a mark."""

    def wait(self, mark: Any) -> None:
        """Let what the computing stream is given from now on wait for the copy of a mark."""


class PlainCopies:
    """Copies that are made at once."""

    def new_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory (size,)."""
        return torch.empty(size, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def wait(self, mark: None) -> None:
        """Do nothing: the copy is made."""


class CudaCopies:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned: list[Tensor] = []
        weakref.finalize(self, _unpin, self._pinned).atexit = False

    def new_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return page-locked memory (size,), no larger than it need be: torch's own allocator
        rounds it up to a power of two. It has pages of its own: CUDA locks whole pages, and
        refuses those that it has locked for a neighbour.
        """
        try:
            pages = mmap.mmap(-1, size * dtype.itemsize)
        except OSError as failure:
            raise RuntimeError(f"mmap: {failure.strerror or failure}") from failure
        memory = torch.frombuffer(pages, dtype=dtype)
        error = int(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if error:
            _forget_error(self._device)
            raise RuntimeError(f"cudaHostRegister: error {error}")
        self._pinned.append(memory)
        return memory

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Begin a copy; the memory on the device is not used again before it is made."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        on_device = source if source.is_cuda else target
        on_device.record_stream(self._stream)
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Let the computing stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(mark)


def _unpin(pinned: list[Tensor]) -> None:
    for memory in pinned:
        _runtime().cudaHostUnregister(memory.data_ptr())


def _forget_error(device: torch.device) -> None:
    """Take the last error out of CUDA's memory, where the check after the next kernel would find
    it: the run would end for a copy that it can do without.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def _runtime() -> Any:
    """Return the functions of CUDA's runtime."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def copies_of(device: torch.device) -> Copies:
    """Return the way in which a device copies to and from its host."""
    if device.type == "cuda":
        return CudaCopies(device)
    return PlainCopies()


class HostActivations:
    """Holds what autograd saves within `saving` in host memory until the backward pass takes it.

    Attributes:
        held_bytes: of host memory that tensors take now.
        most_bytes: the most that they have taken.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        copies: Copies | None = None,
        *,
        host_bytes: int | None = None,
    ) -> None:
        """Prepare to hold what a model saves.

        Args:
            model: its weights and buffers stay.
            device: on which it runs.
            copies: to and from the host; left out: as the device has them.
            host_bytes: host memory that may be taken; what does not fit stays on the device.
        """
        self._model = model
        self._left = host_bytes
        self._device = device
        self._copies = copies or copies_of(device)
        self._fixed: set[int] = set()  # addresses of the model's weights and buffers
        self._number = 0
        # References hold nothing back: a graph that is freed without a backward pass is gone.
        self._leaving: deque[weakref.ref[_Held]] = deque()
        self._order: dict[int, weakref.ref[_Held]] = {}
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._is_full = False
        self.held_bytes = 0
        self.most_bytes = 0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Take what autograd saves within the block to the host."""
        self._fixed = set()
        for tensor in chain(self._model.parameters(), self._model.buffers()):
            if tensor.numel():  # a weight that ZeRO stage 3 has spread has no address
                self._fixed.add(tensor.untyped_storage().data_ptr())
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    # The forward pass.

    def _pack(self, tensor: Tensor) -> Tensor | _Held | _View:
        """Begin the copy of a saved tensor to the host; return what stands for it, or the tensor
        itself where it stays.
        """
        if isinstance(tensor, nn.Parameter):
            return tensor  # at ZeRO stage 3 its memory comes and goes
        tensor = tensor.detach()  # torch warns of a cycle: the graph would hold its own output
        if not self._may_leave(tensor):
            return tensor
        key = _key(tensor)
        for reference in self._leaving:  # several operations save one tensor
            known = reference()
            if known is None or known.key != key or known.tensor is None:
                continue
            if _is_dense(tensor):
                return _View(known, tensor)
        host = self._host_memory(tensor)
        if host is None:
            return tensor
        held = _Held(self._number, tensor, host, self._copies.copy(host, tensor))
        reference = weakref.ref(held)
        self._order[held.number] = reference
        self._number += 1
        weakref.finalize(held, self._release, held.number, host).atexit = False
        self._leaving.append(reference)
        if len(self._leaving) > WINDOW:
            self._let_go(self._leaving.popleft())
        return held

    def _may_leave(self, tensor: Tensor) -> bool:
        """Check whether a saved tensor is a value of this device, and large enough."""
        if tensor.device.type != self._device.type or tensor.layout != torch.strided:
            return False
        if type(tensor) is not Tensor:
            return False
        if tensor.nbytes < LEAST_BYTES or 0 in tensor.stride():
            return False  # an expanded tensor has fewer numbers than elements
        return tensor.untyped_storage().data_ptr() not in self._fixed  # a view of a weight

    def _host_memory(self, tensor: Tensor) -> Tensor | None:
        """Return memory for a copy of a tensor, None where the host has no more of it."""
        size = tensor.numel()
        free = self._free.get((tensor.dtype, size))
        if free:
            flat = free.pop()
        else:
            new = self._new_memory(size, tensor)
            if new is None:
                return None
            flat = new
        self.held_bytes += flat.nbytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        return torch.as_strided(flat, tensor.shape, _dense_strides(tensor))

    def _new_memory(self, size: int, tensor: Tensor) -> Tensor | None:
        """Allocate host memory for a tensor; None, with one warning, where there is no more."""
        if self._is_full:
            return None
        reason = f"{tensor.nbytes:,} bytes more would fill it"
        if self._left is None or tensor.nbytes <= self._left:
            try:
                memory = self._copies.new_memory(size, tensor.dtype)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
            else:
                if self._left is not None:
                    self._left -= memory.nbytes
                return memory
        self._is_full = True
        warn(
            f"training.offload_activations: the host has no more memory for them ({reason}); "
            "further values stay on the device [activations-stay]"
        )
        return None

    def _let_go(self, reference: weakref.ref[_Held]) -> None:
        """Free a tensor's memory on the device, once its copy is made."""
        held = reference()
        if held is not None:
            self._copies.wait(held.arrived)
            held.tensor = None

    # The backward pass.

    def _unpack(self, packed: Tensor | _Held | _View) -> Tensor:
        """Return a saved tensor on its device, and begin the fetches of those saved before it."""
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, _View):
            shown = self._unpack(packed.held)
            return shown.as_strided(packed.shape, packed.strides, shown.storage_offset())
        tensor = self._fetched(packed)
        self._copies.wait(packed.arrived)
        for before in range(1, WINDOW + 1):
            reference = self._order.get(packed.number - before)
            earlier = None if reference is None else reference()
            if earlier is not None:
                self._fetched(earlier)
        return tensor

    def _fetched(self, held: _Held) -> Tensor:
        """Return the tensor on its device; its copy may be under way."""
        if held.tensor is None:
            held.tensor = torch.empty_like(held.host, device=held.device)
            held.arrived = self._copies.copy(held.tensor, held.host)
        return held.tensor

    def _release(self, number: int, host: Tensor) -> None:
        """Take back the host memory of a tensor that nothing needs any more."""
        self._order.pop(number, None)
        flat = torch.as_strided(host, (host.numel(),), (1,))
        self.held_bytes -= flat.nbytes
        self._free.setdefault((flat.dtype, len(flat)), []).append(flat)


def _key(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common if they show the same memory, and nothing was written
    to it between them. None of it holds for tensors with gaps.
    """
    if not _is_dense(tensor):
        return ()
    return tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor._version


def _is_dense(tensor: Tensor) -> bool:
    """Check whether a tensor has all elements of its memory, in any order of its dimensions."""
    return tensor.stride() == _dense_strides(tensor)


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides, without the gaps that a part of a larger tensor has."""
    order = sorted(range(tensor.ndim), key=lambda place: tensor.stride(place), reverse=True)
    strides = list(tensor.shape)
    step = 1
    for place in reversed(order):
        strides[place] = step
        step *= tensor.shape[place]
    return tuple(strides)
