"""Weights that are frozen in some steps (`training.freeze` with steps), with the same numbers as in
a plain loop, in which the optimizer holds all weights and finds no gradient of frozen ones.

They are in the optimizer from the start, in groups of their own, so that DeepSpeed's flat tensors
are apart as well. In a step in which they are frozen a hook replaces their gradients by zeros,
before DeepSpeed reduces and clips them, and the optimizer's step passes over their groups: nothing
decays, no moment moves, AdamW's first correction is that of their first own step. The number of the
step decides what is frozen, and a resumed run needs nothing more.
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
    """Stands between an engine and its optimizer, if `training.freeze` has entries with steps."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        entries: Sequence[FreezeEntry],
        names: Mapping[torch.Tensor, str],
    ) -> None:
        """Freeze weights of an engine, known by plain names, in the steps of the entries.

        Raises:
            ConfigError: kind ``freeze-needs-groups``.
        """
        self._engine = engine
        self._entries = entries
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        if not scheduled(entries):
            return
        self._optimizer = engine.optimizer
        self._base: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        # An entry's number for each group. It is taken out of the groups: a checkpoint would bring
        # back its own.
        self._entry_of_group = [group.pop(FROZEN_BY, None) for group in self._base.param_groups]
        self._names: dict[int, list[str]] = {number: [] for number in scheduled(entries)}
        for parameter in engine.module.parameters():
            number = entry_of(names[parameter], entries)
            if number in self._names:
                if not parameter.requires_grad:  # of a pipeline's layer
                    reason = f"the model's own code freezes {names[parameter]}"
                    raise _refusal(number, reason, "let it be trained there")
                self._names[number].append(names[parameter])
                hook = functools.partial(self._zero_if_frozen, number)
                self._hooks.append(parameter.register_hook(hook))
        # a pipeline's stage may have no weight of an entry
        for number in scheduled(entries):
            if not self._names[number]:
                del self._names[number]
        self._refuse_joined_groups()
        self._take = engine._take_model_step
        engine._take_model_step = self._take_logged
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
        if number is None:
            return False
        return is_frozen(self._entries[number], self._engine.global_steps + 1)

    def _zero_if_frozen(self, number: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return zeros for the gradient of a weight of a frozen entry; None keeps the gradient."""
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
        group = number
        group_of_part = getattr(self._optimizer, "sub_group_to_group_id", None)  # at stage 3
        if group_of_part is not None:
            group = group_of_part[number]
        if not self._is_frozen(self._entry_of_group[group]):
            self._step_part(number)

    def _take_logged(self, *arguments: Any, **named: Any) -> None:
        """Stand in for `DeepSpeedEngine._take_model_step`: log what is frozen or trained from this
        step on, and take it.
        """
        step = self._engine.global_steps + 1
        changed = [
            number for number in self._names if step > 1 and self._changes_with(step, number)
        ]
        for number in changed:
            self._report(number, step)
        self._take(*arguments, **named)
        if changed and hasattr(self._optimizer, "_hp_optimizer_states_linked"):
            # DeepSpeed links the state of all groups after the first step, when these had none.
            self._optimizer._hp_optimizer_states_linked = False

    def _report(self, number: int, step: int) -> None:
        names = self._names[number]
        example = names[0]
        if len(names) > 1:
            example += f" and {len(names) - 1} more"
        state = "frozen" if is_frozen(self._entries[number], step) else "trained"
        line = f"from step {step} on {counted(len(names), 'weight')} {state}: {example}"
        if torch.distributed.get_rank() == 0:
            print_line(line)
        else:
            note(line)

    def _changes_with(self, step: int, number: int) -> bool:
        entry = self._entries[number]
        return is_frozen(entry, step) != is_frozen(entry, step - 1)

    def _refuse_joined_groups(self) -> None:
        """Refuse an optimizer with other groups than those that were passed to it."""
        entries = {number for number in self._entry_of_group if number is not None}
        if entries != set(self._names):
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
