"""Weights that are frozen in some steps (`training.freeze` with steps): exactly as a plain loop has
it, whose optimizer holds all weights and finds no gradient of those.

They are in the optimizer from the start, in groups of their own, so that DeepSpeed's flat rows are
apart as well. In a step in which they are frozen a hook replaces their gradients by zeros, before
DeepSpeed reduces and clips them, and the optimizer's step passes over their groups: nothing decays,
no moment moves, AdamW's first correction is that of their first own step. What is frozen is a
function of the number of the step, and a resumed run needs nothing more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import deepspeed
import torch

from framework.config.freezing import entry_of, is_frozen, scheduled
from framework.config.training import FreezeEntry
from framework.engine.parameter_groups import FROZEN_BY
from framework.errors import ConfigError, counted
from framework.system.log import note, print_line


class StepwiseFreezing:
    """Stands between an engine and its optimizer, where `training.freeze` has entries with
    steps.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        entries: Sequence[FreezeEntry],
        names: Mapping[torch.Tensor, str],
    ) -> None:
        """Freeze weights of an engine in the steps that the entries name; of weights under plain
        names.
        """
        self._engine = engine
        self._entries = entries
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        if not scheduled(entries):
            return
        self._optimizer = engine.optimizer
        self._base: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        # An entry's number for each group; a checkpoint brings its own groups, and is not to bring
        # this.
        self._entry_of_group = [group.pop(FROZEN_BY, None) for group in self._base.param_groups]
        self._names: dict[int, list[str]] = {number: [] for number in scheduled(entries)}
        for parameter in engine.module.parameters():
            number = entry_of(names[parameter], entries)
            if number in self._names:
                if not parameter.requires_grad:  # of a pipeline's layer
                    reason = f"the model's own code freezes {names[parameter]}"
                    raise _refusal(number, reason, "let it be trained there")
                self._names[number].append(names[parameter])
                self._hooks.append(
                    parameter.register_hook(functools.partial(self._gradient, number))
                )
        # a stage may have none
        self._names = {number: found for number, found in self._names.items() if found}
        self._refuse_joined_groups()
        self._take = engine._take_model_step
        engine._take_model_step = self._taken
        # ZeRO steps one group, or a part of one, after the other
        if hasattr(self._optimizer, "_optimizer_step"):
            self._step_part = self._optimizer._optimizer_step
            self._optimizer._optimizer_step = self._step_unless_frozen
        else:
            base = self._base
            step = self._base.step
            base.step = functools.wraps(step)(functools.partial(self._step, step))

    def close(self) -> None:
        """Let go of the model, which may outlive the run."""
        for hook in self._hooks:
            hook.remove()

    def _is_frozen(self, number: int | None) -> bool:
        """Check whether an entry's weights are frozen in the step that is being taken."""
        return number is not None and is_frozen(
            self._entries[number], self._engine.global_steps + 1
        )

    def _gradient(self, number: int, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._is_frozen(number):
            return torch.zeros_like(gradient)
        return None

    def _step(self, step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Stand in for `step` of an optimizer that steps all groups at once."""
        groups = self._base.param_groups
        pairs = zip(groups, self._entry_of_group, strict=True)
        self._base.param_groups = [group for group, number in pairs if not self._is_frozen(number)]
        try:
            return step(*arguments, **named)
        finally:
            self._base.param_groups = groups

    def _step_unless_frozen(self, number: int) -> None:
        """Stand in for `_optimizer_step` of DeepSpeed's ZeRO optimizers (stage_1_and_2.py,
        stage3.py).
        """
        group_of_part = getattr(self._optimizer, "sub_group_to_group_id", None)  # at stage 3
        group = number if group_of_part is None else group_of_part[number]
        if not self._is_frozen(self._entry_of_group[group]):
            self._step_part(number)

    def _taken(self, *arguments: Any, **named: Any) -> None:
        """Stand in for `DeepSpeedEngine._take_model_step`: log what changes with this step."""
        step = self._engine.global_steps + 1
        changed = [
            number for number in self._names if step > 1 and self._changes_with(step, number)
        ]
        for number in changed:
            names = self._names[number]
            if len(names) > 1:
                more = f" and {len(names) - 1} more"
            else:
                more = ""
            if is_frozen(self._entries[number], step):
                verb = "frozen"
            else:
                verb = "trained"
            line = f"from step {step} on {counted(len(names), 'weight')} {verb}: {names[0]}{more}"
            (print_line if torch.distributed.get_rank() == 0 else note)(line)
        self._take(*arguments, **named)
        if changed and hasattr(self._optimizer, "_hp_optimizer_states_linked"):
            # DeepSpeed links the state of all groups after the first step, when these had none.
            self._optimizer._hp_optimizer_states_linked = False

    def _changes_with(self, step: int, number: int) -> bool:
        entry = self._entries[number]
        return is_frozen(entry, step) != is_frozen(entry, step - 1)

    def _refuse_joined_groups(self) -> None:
        """Refuse an optimizer that has made other groups than it was given."""
        if {number for number in self._entry_of_group if number is not None} != set(self._names):
            reason = (
                "the optimizer makes parameter groups of its own, and these weights are not "
                "apart in them"
            )
            fix = (
                "return an optimizer over the groups that it is given, such as "
                "torch.optim.SGD(parameters, lr=0.1)"
            )
            raise _refusal(next(iter(self._names)), reason, fix)


def _refusal(number: int, reason: str, fix: str) -> ConfigError:
    return ConfigError.of("freeze-needs-groups", reason, fix, f"training.freeze.{number}")
