"""Recomputation per operation: outputs of products are kept, and everything else runs again.

Products are most of a model's computation; norms, activations and sums between them are many of its
bytes and little of its time (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models"). torchtitan's per-operation recomputation keeps the same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# Matrix products with two dimensions, which linear layers are, convolutions, and attention in one
# kernel. Attention in steps has batched products, and their outputs grow with the square of the
# sequence: they run again.
_PRODUCTS: Final = (
    "mm",
    "addmm",
    "convolution",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


Kept = defaultdict[Any, deque[tuple[Any, list[int]]]]
"""Operation -> outputs of its runs within a group, in order, each with the writes to it."""


@cache
def _operations() -> frozenset[Any]:
    """Return those operations of `_PRODUCTS` that this torch has."""
    packets = [getattr(torch.ops.aten, name, None) for name in _PRODUCTS]
    found = {packet.default for packet in packets if packet is not None}
    # Attention of packed rows (`torch.nn.attention.varlen`), once that module is imported.
    varlen = getattr(torch.ops.torch_attn, "_varlen_attn", None)
    if varlen is not None:
        found.add(varlen.default)
    return frozenset(found)


class _FirstRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the outputs of products, each with the number of writes to it so far.

    torch's own mode of this sort (`create_selective_checkpoint_contexts`, 2.15) also counts all
    other operations, and ends the run where the second one has more of them: ZeRO stage 3 gathers
    weights within both, another number of times.
    """

    def __init__(self, kept: Kept, pauses: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._pauses = pauses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func in _operations() and not self._pauses():
            # Without their place in the autograd graph, which would hold them, and they it.
            entry = tree_map_only(Tensor, lambda output: output.detach(), outputs)
            self._kept[func].append((entry, _writes(entry)))
        return outputs


class _SecondRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns what the first run has kept in place of running products again. A product runs if its
    output was written to since then.
    """

    def __init__(self, kept: Kept, pauses: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._pauses = pauses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _operations() and not self._pauses():
            outputs, writes = self._kept[func].popleft()
            if _writes(outputs) == writes:
                return outputs
        return func(*args, **(kwargs or {}))


def _writes(outputs: Any) -> list[int]:
    """Return how often each tensor of an operation's outputs was written to."""
    return [leaf._version for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def keeping_products(
    pauses: Callable[[], bool],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return two contexts: of a group's first run, which keeps outputs of products, and of its
    second run, which takes them from there.

    `pauses`: returns true while products are not kept.
    """
    if torch._guards.TracingContext.try_get() is not None:
        # torch.compile marks the operations of its graph by the modes that it knows.
        make_contexts: Callable[..., Any] = create_selective_checkpoint_contexts
        first, second = make_contexts(_policy)
        return first, second
    kept: Kept = defaultdict(deque)
    return _FirstRun(kept, pauses), _SecondRun(kept, pauses)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide for one operation of a graph, as torch's `CheckpointPolicy` describes."""
    if operation in _operations():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
