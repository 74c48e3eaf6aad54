"""The weights that an optimizer of the user's own holds: all that are trained, each once, and no
others.

DeepSpeed takes what it is given. A weight with a gradient that is in no group is counted in the
norm at stage 0 alone, and at stage 3 it is in no checkpoint (0.19.8, engine.py
`_get_zero_param_shapes`, `_get_zero_frozen_param_attributes`).
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch

from framework.checkpoint.state.optimizer_shards import Names
from framework.config.base import Object, Target
from framework.engine.distributed import gather
from framework.engine.held_weights import num_elements
from framework.errors import ConfigError, counted, in_one_line

if TYPE_CHECKING:
    from framework.engine.initialize import MakeOptimizer

_OVER_ALL: Final = "give it all parameters that it is called with"


def make_over_all(
    make: MakeOptimizer,
    given: list[torch.nn.Parameter],
    *,
    names: Names,
    section: Any,
    is_stage: bool,
) -> torch.optim.Optimizer:
    """Make an optimizer that holds every trained weight once.

    Collective where `is_stage`: the stages of a pipeline hold other weights each, and all refuse
    what one refuses.

    Args:
        make: the user's function.
        given: what it is called with: the trained weights, or groups of them.
        names: of all weights that this rank holds.
        section: of the config, which names the optimizer.
        is_stage: whether this rank has a stage of a pipeline.

    Raises:
        ConfigError: kind ``optimizer-target-result``: a weight is left out, or held twice, or
            another tensor is held.
    """
    try:
        optimizer = make(given)
        wrong = _what_is_wrong(optimizer, names)
    except Exception as error:
        if not is_stage:
            raise
        wrong = f"on the weights of a stage it fails: {in_one_line(error)}", _OVER_ALL
    if is_stage:
        wrong = next(filter(None, gather(wrong)), None)
    if wrong is None:
        return optimizer
    key = "optimizer"
    value = ""
    if isinstance(section, Target):
        key = "optimizer.target"
        value = section.target
    elif isinstance(section, Object):
        value = section.object
    reason, fix = wrong
    raise ConfigError.of("optimizer-target-result", reason, fix, key, value)


def _what_is_wrong(optimizer: torch.optim.Optimizer, names: Names) -> tuple[str, str] | None:
    """Return a reason and a fix, or None."""
    held = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    known = {id(weight) for weight in names}
    num_others = sum(id(weight) not in known for weight in held)
    if num_others:
        shapes = [tuple(weight.shape) for weight in held if id(weight) not in known]
        reason = (
            f"it holds {counted(num_others, 'tensor')} that it was not given, of shape {shapes[0]}"
        )
        return (
            reason,
            f"{_OVER_ALL}, and nothing else; what is to be trained belongs into the model",
        )
    seen: set[int] = set()
    for weight in held:
        if id(weight) in seen:
            return f"it holds {names[weight]} more than once", f"{_OVER_ALL}, each once"
        seen.add(id(weight))
    # DeepSpeed steps no weight without elements.
    trained = [weight for weight in names if weight.requires_grad and num_elements(weight)]
    lacking = [names[weight] for weight in trained if id(weight) not in seen]
    if not lacking:
        return None
    reason = f"none of its groups holds {lacking[0]}"
    if lacking[1:]:
        reason += f" and {len(lacking) - 1} more"
    reason += f" of the {len(trained)} weights that require a gradient"
    return reason, f"{_OVER_ALL}, and name those that shall stay as they are in training.freeze"
