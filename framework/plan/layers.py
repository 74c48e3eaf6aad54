"""Layers of a model on a tape, and their division over ranks: a kind of model names the function
that lists its own (`ModelKind.work`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import ceil, gcd, prod
from typing import Any, Final

from framework.config.base import ModelKind
from framework.config.model import ModelSection
from framework.plan.operations import Tape, Value

# A layer's operations on a tape: what goes in -> what comes out, a value or a tuple of values.
Run = Callable[[Tape, Any], Any]
# Name, run and number of equal layers, one after the other: {} in the name is each one's number.
Layers = Iterator[tuple[str, Run, int]]


@dataclass(frozen=True)
class RankShare:
    """Division of a model over ranks: of its heads, inner units and vocabulary, and of the
    positions of a sequence.

    Attributes:
        tensor: ranks that share every weight that is divided.
        sequence: ranks that share every sequence.
        tile: positions that have logits at once; 0: all.
        mlp_tile: positions that a perceptron computes at once; 0: all.
        texts: texts of equal length in each row of packed ones; 0: rows are not packed.
    """

    tensor: int = 1
    sequence: int = 1
    tile: int = 0
    mlp_tile: int = 0
    texts: float = 0

    def of(self, size: int) -> int:
        """Return the largest share that a rank of a tensor group has of a divided size."""
        return ceil(size / self.tensor)

    def logits(self, tape: Tape, value: Value, count: int) -> Value:
        """Apply the output layer for `count` tokens: logits of this rank's share of them, or in
        tiles their loss.
        """
        if self.tile:
            return tape.tiled_loss(value, self.of(count), self.tile)
        split = True if self.tensor > 1 else None
        return tape.logits(value, self.of(count), split=split)

    def team(self, num_heads: int) -> int:
        """Return how many ranks of a sequence group share the heads of attention; `num_heads` of
        queries that a rank of a tensor group has.
        """
        return gcd(num_heads, self.sequence)

    def ring(self, num_heads: int) -> int:
        """Return how many teams keys and values go around; 1: a team has all positions."""
        return self.sequence // self.team(num_heads)

    def heads(self, tape: Tape, value: Value, head_size: int, num_queries: int) -> Value:
        """Map (batch, own positions, size) to (batch, own heads, positions of the team, head
        size). `num_queries`: heads of queries that a rank of a tensor group has.
        """
        batch, length, size = value.shape
        num_heads = size // head_size
        heads = value.view(batch, num_heads, length, head_size)
        team = self.team(num_queries)
        own_heads = max(num_heads // team, 1)
        return self._exchanged(tape, heads, (batch, own_heads, length * team), team)

    def rows(self, tape: Tape, heads: Value, size: int) -> Value:
        """Map `heads` of queries back to (batch, own positions, size)."""
        batch, num_heads, length, head_size = heads.shape
        team = size // head_size // num_heads
        positions = length // team
        back = self._exchanged(tape, heads, (batch, num_heads * team, positions), team)
        return back.view(batch, positions, size)

    def _exchanged(self, tape: Tape, value: Value, shape: tuple[int, ...], team: int) -> Value:
        """Exchange a value in a team, to a shape with the same last dimension."""
        if team == 1:
            return value
        return tape.run(value, shape=(*shape, value.shape[-1]))


UNDIVIDED: Final = RankShare()


# The function that a kind of model names.
ListLayers = Callable[[Any, RankShare], Layers | None]


def forward_of(model: ModelSection, share: RankShare = UNDIVIDED) -> Layers | None:
    """Return the layers of a model, or of a rank's share of it; None for a model that names no
    function for them, and for a share of a model that is not divided.
    """
    if not isinstance(model, ModelKind) or not model.work:
        return None
    return _function(model.work)(model, share)


@cache
def _function(path: str) -> ListLayers:
    module_name, _, name = path.partition(":")
    function: ListLayers = getattr(import_module(module_name), name)
    return function


def num_layers(model: ModelSection) -> int | None:
    """Count the layers between which a pipeline can cut a model; None where they are not known."""
    layers = forward_of(model)
    if layers is None:
        return None
    return sum(count for *_, count in layers)


def flatten(tape: Tape, value: Value) -> Value:
    """Make a row of each sample."""
    return value.view(value.shape[0], prod(value.shape[1:]))


def with_arguments(operation: Callable[..., Value], *args: Any, **options: Any) -> Run:
    """Return a run that calls an operation of a tape with these arguments after the value."""
    return lambda tape, value: operation(tape, value, *args, **options)
