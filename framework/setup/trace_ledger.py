"""Counts operations, and bytes of memory, of a model's parts while it runs on fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from framework.plan.operations import masked
from framework.plan.rank_work import CollectiveKind

# Operations that allocate memory and move nothing.
_EMPTY = (
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty.memory_format,
)


# Collectives of tensor and sequence groups: kind, and the number of the argument with its bytes.
_COLLECTIVES: dict[Any, tuple[CollectiveKind, int]] = {
    torch.ops.c10d.allreduce_.default: ("sum", 0),
    torch.ops.c10d.allgather_.default: ("join", 0),
    torch.ops.c10d.alltoall_base_.default: ("exchange", 1),
}

# Products that selective recomputation runs again (`models.kept_products`).
_BATCHED_PRODUCTS = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)


@dataclass
class Record:
    """Figures of one part of the model.

    Attributes:
        name, module: of the part; no module for the loss and for what runs before the first part.
        unsaved: inputs that no operation had saved for the backward pass when the part began.
        figures: operations and bytes by name.
        peak_bytes: most bytes alive in its forward and in its backward pass.
    """

    name: str
    module: nn.Module | None = None
    unsaved: list[Tensor] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)
    peak_bytes: Counter[str] = field(default_factory=Counter)


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of every part, and the bytes of all storages that they allocate.

    Attributes:
        phase: ``forward`` or ``backward``.
        first_edges: edge of the autograd graph to the first value with a gradient; the tensor
            itself would be kept alive.
        collectives: how many there are of each kind, phase and number of bytes.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records = [Record("inputs")]
        self.current = self.records[0]
        self.phase = "forward"
        self.first_edges: list[Any] = []
        self.collectives: Counter[tuple[CollectiveKind, str, int]] = Counter()
        weights = chain(model.parameters(), model.buffers())
        self._of_weights = {tensor.untyped_storage()._cdata for tensor in weights}
        self._live: set[int] = set()
        self._saved: set[int] = set()
        self._live_bytes = 0
        for tensor in inputs:
            self._add_storage(tensor)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(
            self._note_saved, lambda tensor: tensor
        )

    def begin(self, name: str, module: nn.Module | None) -> Record:
        """Begin the record of a part; operations count for it from now on."""
        self.current = Record(name, module)
        self.records.append(self.current)
        return self.current

    def count(self, flops: int, operands: Sequence[Tensor]) -> None:
        """Add the operations of a product with a weight.

        `operands`: the two that it multiplies; one without a gradient spares the backward pass one
        of its two products.
        """
        figures = self.current.figures
        figures["flops"] += flops
        figures["frozen"] += sum(flops for tensor in operands if not tensor.requires_grad)

    def count_scores(self, flops: int, operands: Sequence[Tensor], causal_length: int = 0) -> None:
        """Add the operations of products without a weight, such as attention's; causal attention
        states the length of its sequences.
        """
        figures = self.current.figures
        hidden = masked(flops, causal_length) if causal_length else 0
        figures["flops"] += flops
        figures["masked"] += hidden
        figures["scores"] += flops - hidden
        if not any(tensor.requires_grad for tensor in operands):
            figures["frozen"] += 2 * flops
            figures["frozen_scores"] += 2 * flops

    def _add_storage(self, tensor: Tensor) -> None:
        """Count the bytes of a tensor's storage until it is freed; a weight's do not count."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        size = storage.nbytes()
        if number in self._live or number in self._of_weights:
            return
        self._live.add(number)
        self._live_bytes += size
        weakref.finalize(storage, self._drop_storage, number, size).atexit = False

    def _drop_storage(self, number: int, size: int) -> None:
        self._live.discard(number)
        self._live_bytes -= size

    def _note_saved(self, tensor: Tensor) -> Tensor:
        """Count a storage that the forward pass saves for the backward pass, once; returns the
        tensor.
        """
        storage = tensor.untyped_storage()
        number = storage._cdata
        is_counted = number in self._of_weights or number in self._saved
        if self.phase == "forward" and not is_counted:
            self._saved.add(number)
            figures = self.current.figures
            figures["saved"] += storage.nbytes()
            figures["widest"] = max(figures["widest"], storage.nbytes())
        return tensor

    def _has_weight(self, operands: Sequence[Tensor]) -> bool:
        """Check whether one of the tensors is a weight, or a view of one."""
        return any(each.untyped_storage()._cdata in self._of_weights for each in operands)

    def has_saved(self, tensor: Tensor) -> bool:
        """Check whether the tensor's storage is saved for the backward pass."""
        return tensor.untyped_storage()._cdata in self._saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        if func in _COLLECTIVES:
            kind, place = _COLLECTIVES[func]
            self.collectives[kind, self.phase, total_bytes(tensors_in(args[place]))] += 1
        elif self.phase == "forward":
            self._count_operation(func, args, kwargs, result)
        for tensor in outputs:
            self._add_storage(tensor)
        peak_bytes = self.current.peak_bytes
        peak_bytes[self.phase] = max(peak_bytes[self.phase], self._live_bytes)
        return result

    def _count_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add the FLOPs of a matrix product, or the bytes that another operation moves. Views, and
        questions of fake tensors for their device, start nothing on a device.
        """
        figures = self.current.figures
        count_flops = flop_registry.get(func._overloadpacket)
        if count_flops is not None:
            figures["operations"] += 1
            self._count_product(func, args, int(count_flops(*args, **kwargs, out_val=result)))
            if func not in _BATCHED_PRODUCTS:
                figures["products"] += total_bytes(tensors_in(result))
            return
        inputs = tensors_in((args, kwargs))
        outputs = tensors_in(result)
        is_written = func._schema.is_mutable or _has_new_memory(outputs, inputs)
        if is_written and func not in _EMPTY:
            figures["operations"] += 1
            figures["moved"] += total_bytes(inputs) + total_bytes(outputs)

    def _count_product(self, func: Any, args: Any, flops: int) -> None:
        """Add the FLOPs of a product, by the operands that it multiplies."""
        operands = tensors_in(args)
        if func in _BATCHED_PRODUCTS and self._has_weight(operands):
            self.count(flops, operands[-2:])
        elif func in _BATCHED_PRODUCTS or "attention" in func.__name__:
            # the fifth argument of the CPU's fused attention; no other has a truth value there
            is_causal = args[4:5] == (True,)
            causal_length = args[0].shape[-2] if is_causal else 0
            self.count_scores(flops, operands, causal_length)
        elif func is torch.ops.aten.addmm.default:  # the first one is added
            self.count(flops, operands[1:3])
        else:
            self.count(flops, operands[:2])


def _has_new_memory(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Return whether an operation has allocated memory for an output; a view has not."""
    input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return any(tensor.untyped_storage()._cdata not in input_storages for tensor in outputs)


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(num_bytes, tensors))


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
