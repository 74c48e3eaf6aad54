"""A check that an optimizer of the user's own holds all trained weights, each once, and no others.

DeepSpeed takes any groups. A weight with a gradient that is in no group is counted in the norm at
stage 0 alone, and at stage 3 it is in no checkpoint (0.19.8, engine.py `_get_zero_param_shapes`,
`_get_zero_frozen_param_attributes`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from framework.checkpoint.state.weight_names import Names
from framework.config.base import Object, Target
from framework.engine.distributed import gather
from framework.engine.held_weights import num_elements
from framework.errors import ConfigError, counted, in_one_line

if TYPE_CHECKING:
    from framework.engine.initialize import MakeOptimizer


_OVER_ALL: Final = "give it all parameters that it is called with"


class NamedMaker:
    """Makes an optimizer with a function of the user's that takes (name, parameter) pairs, as
    `Module.named_parameters` yields them, so that it can make groups by name.
    """

    def __init__(self, make: Callable[[list[Any]], torch.optim.Optimizer]) -> None:
        self._make = make

    def __call__(
        self, parameters: Sequence[Any], names: Names | None = None
    ) -> torch.optim.Optimizer:
        """Make the optimizer.

        Args:
            parameters: the trained weights.
            names: their names; numbers in a trial on weights of no model.

        Raises:
            ConfigError: kind ``optimizer-target-result``: the weights are in groups already.
        """
        pairs: list[tuple[str, Any]] = []
        for number, parameter in enumerate(parameters):
            if isinstance(parameter, Mapping):
                reason = "training.freeze with steps makes groups, and so would the function"
                fix = "make the groups with optimizer.groups, or freeze weights in all steps"
                if "moe" in parameter:
                    reason = "parallel.expert makes groups, and so would the function"
                    fix = "make the groups with optimizer.groups, or set parallel.expert: 1"
                raise ConfigError.of("optimizer-target-result", reason, fix, "optimizer")
            name = f"weight.{number}"
            if names is not None:
                name = names[parameter]
            pairs.append((name, parameter))
        optimizer = self._make(pairs)
        _drop_empty_groups(optimizer)
        return optimizer


def _drop_empty_groups(optimizer: torch.optim.Optimizer) -> None:
    """Drop groups without a weight, which a stage of a pipeline or the names of a trial may leave:
    DeepSpeed asks the first weight of each group for its type (runtime/zero/stage_1_and_2.py).
    """
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def make_over_all(
    make: MakeOptimizer,
    parameters: list[torch.nn.Parameter],
    *,
    names: Names,
    section: Any,
    is_stage: bool,
) -> torch.optim.Optimizer:
    """Make an optimizer that holds every trained weight once.

    Collective if `is_stage`: each stage of a pipeline holds other weights, and all stages refuse
    what one refuses.

    Args:
        make: the user's function.
        parameters: its argument: the trained weights, or groups of them.
        names: names of all weights that this rank holds.
        section: section of the config that names the optimizer.
        is_stage: whether this rank has a stage of a pipeline.

    Raises:
        ConfigError: kind ``optimizer-target-result``: a weight is left out, or held twice, or
            another tensor is held.
    """
    try:
        if isinstance(make, NamedMaker):
            optimizer = make(parameters, names)
        else:
            optimizer = make(parameters)
            _drop_empty_groups(optimizer)
        fault = _fault_of(optimizer, names)
    except Exception as error:
        if not is_stage:
            raise
        fault = f"on the weights of a stage it fails: {in_one_line(error)}", _OVER_ALL
    if is_stage:
        fault = next((stage_fault for stage_fault in gather(fault) if stage_fault), None)
    if fault is None:
        return optimizer
    key, value = _key_and_value(section)
    reason, fix = fault
    raise ConfigError.of("optimizer-target-result", reason, fix, key, value)


def _key_and_value(section: Any) -> tuple[str, str]:
    """Return the key that names the user's optimizer, and its value."""
    if isinstance(section, Target):
        return "optimizer.target", section.target
    if isinstance(section, Object):
        return "optimizer", section.object
    return "optimizer", ""


def _fault_of(optimizer: torch.optim.Optimizer, names: Names) -> tuple[str, str] | None:
    """Return a reason to refuse an optimizer and a fix, or None."""
    weights: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        weights += group["params"]
    known = {id(weight) for weight in names}
    others = [weight for weight in weights if id(weight) not in known]
    if others:
        count = counted(len(others), "tensor")
        reason = f"it holds {count} that it was not given, of shape {tuple(others[0].shape)}"
        fix = f"{_OVER_ALL}, and nothing else; what is to be trained belongs into the model"
        return reason, fix
    seen: set[int] = set()
    for weight in weights:
        if id(weight) in seen:
            return f"it holds {names[weight]} more than once", f"{_OVER_ALL}, each once"
        seen.add(id(weight))
    return _lacking(names, seen)


def _lacking(names: Names, held: Container[int]) -> tuple[str, str] | None:
    """Return reason and fix where a trained weight is not `held`, by its identity, or None."""
    # DeepSpeed steps no weight without elements.
    trained = [weight for weight in names if weight.requires_grad and num_elements(weight)]
    lacking = [names[weight] for weight in trained if id(weight) not in held]
    if not lacking:
        return None
    reason = f"none of its groups holds {lacking[0]}"
    if len(lacking) > 1:
        reason += f" and {len(lacking) - 1} more"
    reason += f" of the {len(trained)} weights that require a gradient"
    return reason, f"{_OVER_ALL}, and name those that shall stay as they are in training.freeze"
