"""Weights that are read when they are asked for: a run that starts from a model holds one of its weights at a time, not
all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

Read = Callable[[], torch.Tensor]


class LazyWeights(Mapping[str, torch.Tensor]):
    """Name -> tensor on the CPU, in the order given; each access reads it anew, from mapped files.

    `shapes` tells what there is without reading it.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], read: Mapping[str, Read]) -> None:
        assert shapes.keys() == read.keys()
        self.shapes, self._read = dict(shapes), dict(read)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def let_go(self) -> None:
        """Close the files; nothing can be read any more."""
        self.shapes, self._read = {}, {}


def shapes_of(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Size]:
    """The shape of every weight; lazy ones are not read for it."""
    if isinstance(weights, LazyWeights):
        return weights.shapes
    return {name: tensor.shape for name, tensor in weights.items()}
