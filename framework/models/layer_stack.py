"""The base of every model here that is one flat sequence of layers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn


class LayerStack(nn.Sequential):
    """`nn.Sequential` whose subclasses may have a constructor of their own and can still be sliced.

    `nn.Sequential.__getitem__` builds a slice with `self.__class__(layers)`, which a constructor that takes, say, a
    number of classes cannot answer. Here ``model[:-1]`` is a plain `nn.Sequential` that shares the layers.
    """

    def __getitem__(self, index: Any) -> Any:
        """One layer for an int, an `nn.Sequential` of layers for a slice."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        return nn.Sequential(OrderedDict(list(self._modules.items())[index]))
