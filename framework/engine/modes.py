"""Training and evaluation mode of what is trained, set as every plain loop sets it: by
`model.train()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed

from framework.engine.distributed import rank
from framework.errors import counted
from framework.system.log import print_line


class Modes:
    """Modes of one engine's modules: `train()` of the model, and of each module that overrides it,
    decides.

    What the user's code sets after that, in a callback or in a loop of its own, holds through
    evaluations.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        *,
        plain_name: Callable[[str], str],
        stages: Any = None,
    ) -> None:
        """Put the model into training mode, and log what was built in evaluation mode beneath a
        root in training mode. Collective over `stages`, the process group of a pipeline's stages.

        `plain_name` gives a module of the engine the name that it has in the plain model.
        """
        self._engine = engine
        module: torch.nn.Module = engine.module
        left = [
            name for name, part in module.named_modules() if module.training and not part.training
        ]
        self._train()
        parts = dict(module.named_modules())
        changed = [plain_name(name) for name in left if parts[name].training]
        if stages is not None:
            everyone: list[list[str]] = [
                [] for _ in range(torch.distributed.get_world_size(stages))
            ]
            torch.distributed.all_gather_object(everyone, changed, group=stages)
            changed = [name for names in everyone for name in names]
        if changed and rank() == 0:
            _report(changed)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model into evaluation mode meanwhile, and into training mode behind it."""
        root = self._engine.module
        own: dict[torch.nn.Module, bool] = {}
        if root.training == self._given[root]:
            own = {
                part: part.training for part, given in self._given.items() if part.training != given
            }
        elif rank() == 0:
            print_line(
                "note: a callback left the whole model in evaluation mode; behind this evaluation "
                "it is in training mode again"
            )
        self._engine.eval()
        try:
            yield
        finally:
            self._train()
            for part, training in own.items():
                part.training = training

    def _train(self) -> None:
        self._engine.train()
        self._given = {part: part.training for part in self._engine.module.modules()}


def _report(names: list[str]) -> None:
    count = counted(len(names), "module")
    print_line(
        f"note: the model was built with {count} in evaluation mode ({names[0]} is the first); "
        "training begins with model.train(), as in plain loops, and dropout and batch norms in "
        "them are at work. To keep a module in evaluation mode override train() in its class or "
        "the model's, or call its eval() in a callback's on_start"
    )
