"""Weights without a copy, at ZeRO stage 0 in fp32: the optimizer steps the module's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class PlainWeights:
    """Stands in for `WrittenWeights` where what is written into a weight is in its place."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def reset(self) -> None:
        """Begin anew: nothing is compared."""

    def carry(self) -> None:
        """Carry nothing."""

    def refuse(self) -> None:
        """Refuse nothing."""

    def close(self) -> None:
        """Release nothing."""

    @contextmanager
    def gathered(self, module: torch.nn.Module | None = None) -> Iterator[torch.nn.Module]:
        """Yield the model, or one of its modules: their weights are complete at any time."""
        yield module or self._module

    def setting(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def unguarded(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()
