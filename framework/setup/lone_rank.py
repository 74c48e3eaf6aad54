"""The last rank of a tensor and a sequence group, in a process without the others: it divides a
model and its sequences as a run does, and its collectives send nothing. For passes on fake tensors.

Where sizes do not divide evenly, the last rank has the largest part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch import nn

from framework.config.run_config import RunConfig
from framework.models.adapters import add_adapters
from framework.models.sequence import SequenceGroup, share_attention
from framework.setup.weightless import converting_weightless
from framework.tasks.task import Positions, Task


@dataclass(frozen=True)
class LoneRank:
    """A rank without the other ranks of its groups.

    Attributes:
        tensor: its tensor group; None: nothing is divided.
        sequence: its sequence group; None: it sees all positions.
    """

    tensor: Any = None
    sequence: SequenceGroup | None = None

    def divided(self, model: nn.Module, config: RunConfig, task: Task) -> nn.Module:
        """Leave this rank's part of the weights in a model, and of the vocabulary in its task.

        Raises:
            ConfigError: as in `TensorCut`.
        """
        if self.tensor is None:
            return model
        from framework.engine.tensor_cut import TensorCut

        cut = TensorCut(self.tensor, config.parallel.tensor_plan, task)
        model = cut(model)
        cut.part.may_draw = False  # its seeds are numbers, and fake tensors have none
        return model

    def adapted(self, model: nn.Module, config: RunConfig) -> nn.Module:
        """Put adapters into a model that is divided, if the config has any."""
        lora = config.training.lora
        if lora is None:
            return model
        with converting_weightless():
            if self.tensor is None:
                return add_adapters(model, lora, seed=config.run.seed)
            from framework.engine.tensor_adapters import add_divided_adapters

            return add_divided_adapters(model, lora, seed=config.run.seed)

    def share_sequences(
        self, model: nn.Module, task: Task, inputs: Any, targets: Any
    ) -> tuple[Any, Any]:
        """Let the attention of a model share sequences, and return this rank's part of a batch.

        Raises:
            ConfigError: the model's attention, or the task, does not share them.
        """
        if self.sequence is None:
            return inputs, targets
        share_attention(model)
        return task.share(inputs, targets, Positions(self.sequence.rank, self.sequence.size))

    def sharing(self) -> AbstractContextManager[None]:
        """Let models see this rank's part of sequences within the block."""
        if self.sequence is None:
            return nullcontext()
        return self.sequence.shared()


@contextmanager
def lone_rank(tensor: int, sequence: int) -> Iterator[LoneRank]:
    """Make this process the last rank of groups of these sizes within the block."""
    if tensor * sequence == 1:
        yield LoneRank()
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = tensor * sequence
    last = ranks - 1
    torch.distributed.init_process_group("fake", rank=last, world_size=ranks, store=FakeStore())
    try:
        tensor_group: Any = None
        shared: SequenceGroup | None = None
        # as `rank_groups.make_groups` has them: neighbours are in one tensor group
        if tensor > 1:
            tensor_group = torch.distributed.new_group(list(range(ranks - tensor, ranks)))
        if sequence > 1:
            group = torch.distributed.new_group(list(range(tensor - 1, ranks, tensor)))
            shared = SequenceGroup(sequence - 1, sequence, group)
        yield LoneRank(tensor_group, shared)
    finally:
        torch.distributed.destroy_process_group()
