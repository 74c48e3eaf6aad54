"""Training and evaluation mode of a model, set as plain loops set it: by `model.train()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import deepspeed
import torch
import torch.distributed

from framework.engine.distributed import gather_in, rank
from framework.errors import counted
from framework.system.log import print_line


class Modes:
    """Modes of one engine's modules. `train()` of the model, and of each module that overrides it,
    decides.

    Modes that the user's code sets after that, in a callback or in a loop of its own, stay through
    evaluations.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        *,
        plain_name: Callable[[str], str],
        stages: Any = None,
    ) -> None:
        """Put the model into training mode, and log the modules that were built in evaluation mode
        beneath a root in training mode. Collective over the stages.

        Args:
            engine: the engine with the model.
            plain_name: returns the plain model's name of a module of the engine.
            stages: process group of a pipeline's stages; None without a pipeline.
        """
        self._engine = engine
        module: torch.nn.Module = engine.module
        in_evaluation: list[str] = []
        if module.training:
            in_evaluation = [name for name, part in module.named_modules() if not part.training]
        self._train()
        parts = dict(module.named_modules())
        changed = [plain_name(name) for name in in_evaluation if parts[name].training]
        if stages is not None:
            changed = list(chain.from_iterable(gather_in(stages, changed)))
        if changed and rank() == 0:
            _report(changed)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model into evaluation mode for the time of the block, and into training mode
        after it. Modes of single modules that the user's code has set come back then; a mode of the
        whole model does not, which is logged.
        """
        root = self._engine.module
        set_by_user: dict[torch.nn.Module, bool] = {}
        if root.training == self._modes[root]:
            for part, training in self._modes.items():
                if part.training != training:
                    set_by_user[part] = part.training
        elif rank() == 0:
            print_line(
                "note: a callback left the whole model in evaluation mode; after this evaluation "
                "it is in training mode again"
            )
        self._engine.eval()
        try:
            yield
        finally:
            self._train()
            for part, training in set_by_user.items():
                part.training = training

    def _train(self) -> None:
        self._engine.train()
        # as `train()` has set them; what differs later was set by the user's code
        self._modes = {part: part.training for part in self._engine.module.modules()}


def _report(names: list[str]) -> None:
    count = counted(len(names), "module")
    print_line(
        f"note: the model was built with {count} in evaluation mode ({names[0]} is the first); "
        "training begins with model.train(), as in plain loops, and dropout and batch norms in "
        "them are at work. To keep a module in evaluation mode override train() in its class or "
        "the model's, or call its eval() in a callback's on_start"
    )
