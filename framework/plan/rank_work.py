"""Work of one rank of a tensor or sequence group, of a model of the user's own: what a pass over
its part has shown (`framework.setup.trace`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from framework.errors import Problem
from framework.plan.work import ModelWork

CollectiveKind = Literal["sum", "join", "exchange"]


@dataclass(frozen=True)
class Collective:
    """Equal collectives of one micro-batch, in the passes of a rank of a tensor or sequence group.

    Attributes:
        kind: ``sum`` over the tensor group, ``join`` of its parts, or ``exchange`` of positions and
            heads in the sequence group.
        is_backward: whether they are in the backward pass.
        num_bytes: of each: what is summed, what is joined as a whole, what a rank exchanges.
        count: how many there are.
    """

    kind: CollectiveKind
    is_backward: bool
    num_bytes: int
    count: int


@dataclass(frozen=True)
class WorkOfRank:
    """What one rank has of a model of the user's own, where ranks divide it.

    Attributes:
        tensor: ranks that share its weights.
        sequence: ranks that share its sequences.
        work: of the fullest rank; None if it is not known.
        unknown: why it is not.
        problem: of the run, if ranks of these groups cannot divide the model.
    """

    tensor: int
    sequence: int
    work: ModelWork | None
    unknown: str = ""
    problem: Problem | None = None

    def of_samples(self, count: int) -> WorkOfRank:
        """Return the work on a micro-batch of another number of samples."""
        if self.work is None:
            return self
        return replace(self, work=self.work.of_samples(count))
