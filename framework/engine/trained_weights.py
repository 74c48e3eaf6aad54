"""Finds weights that are trained or frozen in mid-run, replaced or added: DeepSpeed would silently
train others.

DeepSpeed 0.19.8 takes the weights that require a gradient when the engine is built
(runtime/utils.py `is_optimized_parameter`). A weight that requires a gradient later is in no
optimizer. At stages 1 to 3 a weight that no longer requires one is stepped all the same, with a
gradient of zeros: it decays, and its moments move it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NoReturn

import deepspeed
import torch

from framework.engine.distributed import claims_error_report
from framework.errors import TrainingError
from framework.system.log import warn

# Flags of 4,000 weights take 0.2 ms of a step, the identities of all weights and modules 0.7 ms:
# with many weights, identities are compared in some steps only.
_MANY: Final = 2000
_STEPS_OF_A_LOOK: Final = 10
_FLAG: Final = "[requires-grad-changed]"
_REPLACED: Final = "[weight-replaced]"


class TrainedWeights:
    """The weights of an engine as they were when it was built. Flags and identities are on the
    host: nothing waits for the device.
    """

    def __init__(
        self, engine: deepspeed.DeepSpeedEngine, names: Mapping[torch.Tensor, str]
    ) -> None:
        self._engine = engine
        self._weights = list(engine.module.parameters())
        self._names = [names[weight] for weight in self._weights]
        self._flags = [weight.requires_grad for weight in self._weights]
        self._accepted = self._flags
        self._has_warned = False
        self._note_members()
        # torch's optimizers leave out a weight without a gradient. DeepSpeed's own give it zeros.
        is_of_torch = isinstance(engine.optimizer, torch.optim.Optimizer)
        self._may_freeze = engine.zero_optimization_stage() == 0 and is_of_torch
        self._take = engine._take_model_step
        engine._take_model_step = self._taken
        if engine.zero_optimization_stage() == 3:
            # It keeps the last step's gradient of a weight that was frozen in any pass of this one
            # (stage3.py `partition_grads` adds to it, `independent_gradient_partition_epilogue`
            # takes zeros).
            self._end_pass = engine.optimizer.independent_gradient_partition_epilogue
            engine.optimizer.independent_gradient_partition_epilogue = self._pass_ended

    def refuse_changes(self) -> None:
        """Refuse weights that are no longer those that the optimizer has.

        Raises:
            TrainingError: kind ``requires-grad-changed`` or ``weight-replaced``.
        """
        self.refuse_changed_flags()
        if self._members() != self._known:
            self._refuse_replaced()
            self._note_members()

    def refuse_changed_flags(self) -> None:
        """Refuse weights with another `requires_grad` than before; raises as `refuse_changes`."""
        flags = list(map(attrgetter("requires_grad"), self._weights))
        if flags != self._accepted:
            self._check_changed_flags(flags)

    def _taken(self, *arguments: Any, **named: Any) -> None:
        """Stand in for `DeepSpeedEngine._take_model_step`: refuse changes before it."""
        is_due = len(self._known) < _MANY or self._engine.global_steps % _STEPS_OF_A_LOOK == 0
        # At stage 3 DeepSpeed's own step fails at once on a weight that it has not divided.
        if is_due or self._engine.zero_optimization_stage() == 3:
            self.refuse_changes()
        else:
            self.refuse_changed_flags()
        self._take(*arguments, **named)

    def _pass_ended(self) -> None:
        """Stand in for `independent_gradient_partition_epilogue` of the optimizer at stage 3."""
        self.refuse_changed_flags()
        self._end_pass()

    def _check_changed_flags(self, flags: list[bool]) -> None:
        """Refuse changed flags; accept frozen weights if the optimizer then leaves them as they
        are.
        """
        pairs = list(zip(self._names, self._flags, flags, strict=True))
        thawed = [name for name, before, now in pairs if now and not before]
        frozen = [name for name, before, now in pairs if before and not now]
        step = self._engine.global_steps
        if thawed:
            reason = "is True now, and the optimizer does not hold it: it is not trained"
            self._refuse_flags(thawed, reason, f"until_step: {step}")
        if frozen and not self._may_freeze:
            self._refuse_frozen(frozen)
        self._accepted = flags
        if frozen and not self._has_warned:
            self._has_warned = True
            warn(
                f"after step {step}: requires_grad of {_in_short(frozen)} is False now; no "
                "checkpoint keeps that, and a resumed run trains it until the code freezes it "
                f"again {_FLAG}",
                is_of_all_ranks=True,
            )

    def _refuse_frozen(self, names: list[str]) -> NoReturn:
        """Refuse weights that DeepSpeed would step on."""
        stage = self._engine.zero_optimization_stage()
        place = f"zero.stage {stage}"
        if stage == 0:
            place += " in half precision"
        reason = f"is False now, and at {place} DeepSpeed steps it on, by zeros for gradients"
        if stage == 3:
            reason += (
                " (a flag that is the same again before every step() is right at stages 0 to 2)"
            )
        self._refuse_flags(names, reason, f"from_step: {self._engine.global_steps + 1}")

    def _refuse_flags(self, names: list[str], reason: str, steps: str) -> NoReturn:
        """Refuse changed flags of weights. `steps` is how an entry of training.freeze names the
        steps in which they are frozen.
        """
        if self._engine.global_steps:
            entry = f"{{match: {names[0]!r}, {steps}}}"
            fix = (
                f"leave the flag alone, and name the weight in training.freeze, for example {entry}"
            )
        else:
            fix = "leave the flag alone, and set it in the model's factory"
        self._refuse(
            f"requires_grad of {_in_short(names)} was changed after the start: it {reason}; {fix}",
            _FLAG,
        )

    def _refuse_replaced(self) -> None:
        """Refuse weights that took the place of others, if the old or the new one is trained."""
        known_ids = {id(weight) for weight in self._weights}
        present = list(self._engine.module.named_parameters())
        present_ids = {id(weight) for _, weight in present}
        names: dict[str, None] = {}
        for name, weight, was_trained in zip(self._names, self._weights, self._flags, strict=True):
            if was_trained and id(weight) not in present_ids:
                names[name] = None
        for name, weight in present:
            if weight.requires_grad and id(weight) not in known_ids:
                names[name] = None
        if names:
            self._refuse(
                f"the model's weight {_in_short(list(names))} is another object than at the "
                "start, or is new or gone, and the optimizer holds those of the start; change "
                "numbers in place (weight.copy_(...)), and build all layers in the model's factory",
                _REPLACED,
            )

    def _note_members(self) -> None:
        """Note the dicts in which modules keep their weights and submodules, and the members."""
        modules = list(self._engine.module.modules())
        self._places: list[dict[str, Any]] = [module._parameters for module in modules]
        self._places += [module._modules for module in modules]
        self._known = self._members()

    def _members(self) -> list[int]:
        """List the identities of all weights and submodules, in C alone: every step waits for
        it.
        """
        return list(map(id, chain.from_iterable(map(dict.values, self._places))))

    def _refuse(self, text: str, kind: str) -> NoReturn:
        error = TrainingError(f"after step {self._engine.global_steps}: {text} {kind}")
        error.is_of_one_rank = claims_error_report(kind)
        raise error


def _in_short(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} (and {len(names) - 1} more)"
