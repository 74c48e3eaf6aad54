"""The moving average of the weights, kept as one more tensor of the optimizer's state beside its
moments.

There it is fp32, beside weights of `precision.states: bf16` as well, laid out and cut as the
weights that the optimizer steps, so that it is saved, resumed and moved to other layouts as the
moments are. It is updated on the device, by hooks of the optimizer's own step: a step that is
skipped after an overflow never reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch

from framework.checkpoint.state.optimizer_shards import EMA_KEY, OptimizerViews, type_of_average
from framework.checkpoint.state.weight_names import opened
from framework.config.run_config import RunConfig


class WeightAverage:
    """The average of one engine's weights: ema = decay x ema + (1 - decay) x weights, after every
    `every_steps` steps.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        config: RunConfig,
        *,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin with the next step of the engine, from its weights then. `before` is called before
        the weights are exchanged.
        """
        assert config.training.ema is not None
        self._before = before
        self._engine = engine
        self._settings = config.training.ema
        self._is_measured = config.evaluation.weights == "ema"
        self._first: dict[torch.Tensor, torch.Tensor] = {}  # of the step that is being taken
        self._base: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self._base.register_step_pre_hook(self._begin)
        self._base.register_step_post_hook(self._update)

    @contextmanager
    def in_evaluation(self) -> Iterator[None]:
        """Have the model compute with the average within the block, if that is to be measured. No
        more than the model's own weights are copied. Collective.

        After an error the weights are not put back: that is collective as well, and the other ranks
        are elsewhere.
        """
        if not self._is_measured:
            yield
            return
        self._before()
        self._exchange()
        yield
        self._exchange()

    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the weights before the first step. They are not yet put into the optimizer's state:
        an optimizer makes its own state only if it finds none.
        """
        for parameter in _stepped(optimizer):
            if EMA_KEY not in optimizer.state.get(parameter, {}):
                dtype = type_of_average(parameter)
                self._first[parameter] = parameter.detach().to(dtype, copy=True)

    @torch.no_grad()
    def _update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Update the average after a step of the optimizer: of one group of flattened weights (ZeRO
        1 to 3), or of all weights.
        """
        settings = self._settings
        parameters = _stepped(optimizer)
        for parameter in parameters:
            if parameter in self._first:
                optimizer.state[parameter][EMA_KEY] = self._first.pop(parameter)
        if not parameters:
            return
        # DeepSpeed counts the step when it is over
        steps_since_start = self._engine.global_steps + 1 - settings.start_step
        averages = [optimizer.state[parameter][EMA_KEY] for parameter in parameters]
        weights = [parameter.detach() for parameter in parameters]
        if steps_since_start <= 0:
            torch._foreach_copy_(averages, weights)
        elif steps_since_start % settings.every_steps == 0:
            self._move(averages, weights, is_left_out=getattr(optimizer, "found_inf", None))

    def _move(
        self,
        averages: list[torch.Tensor],
        weights: list[torch.Tensor],
        *,
        is_left_out: torch.Tensor | None,
    ) -> None:
        """Move averages towards the weights; not if `is_left_out`, a number on the device, is 1:
        then the weights are as they were.
        """
        share = 1.0 - self._settings.decay
        is_wider = any(
            average.dtype != weight.dtype for average, weight in zip(averages, weights, strict=True)
        )
        if is_left_out is None and not is_wider:
            torch._foreach_lerp_(averages, weights, share)
            return
        device_share: torch.Tensor | float = share
        if is_left_out is not None:
            device_share = share * (1.0 - is_left_out)
        for average, weight in zip(averages, weights, strict=True):
            # one copy of a weight in half precision at a time
            average.lerp_(weight.to(average.dtype), _in_type_of(average, device_share))

    def _exchange(self) -> None:
        """Swap the weights that are stepped with their averages, and copy the new weights into the
        model. Collective.
        """
        with opened(self._engine.optimizer):
            for parameter, state in self._base.state.items():
                if EMA_KEY in state:
                    average = state[EMA_KEY]
                    parameter.data, average.data = average.data, parameter.data
            OptimizerViews(self._engine, {}).spread_weights()


def _in_type_of(average: torch.Tensor, share: torch.Tensor | float) -> torch.Tensor | float:
    if isinstance(share, torch.Tensor):
        return share.to(average.dtype)
    return share


def forget_average(engine: deepspeed.DeepSpeedEngine) -> None:
    """Forget the average that came with a checkpoint, for a run that keeps none."""
    base: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for state in base.state.values():
        state.pop(EMA_KEY, None)
    # at ZeRO 1 and 2 DeepSpeed holds views of it
    for parameter in engine.module.parameters():
        mapping = getattr(parameter, "_hp_mapping", None)
        fragments = getattr(mapping, "optim_fragment", None)
        if fragments:
            fragments.pop(EMA_KEY, None)


def _stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """List the parameters that a step of the optimizer changes."""
    parameters: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        parameters += [parameter for parameter in group["params"] if parameter.grad is not None]
    return parameters
