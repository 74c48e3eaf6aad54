"""Backward passes of a loop of the user's own between two steps: their gradients add up, as in
plain PyTorch.

DeepSpeed (0.19.8) expects one `engine.backward` for each `engine.step`. With more, ZeRO 1 and 2
step with the last one's gradient alone
(`DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue` writes `averaged_gradients` anew),
and at stage 3 it depends on the forward passes which of them count (`micro_step_id` moves on in
`forward`). A pass through the outputs of another engine runs that engine's hooks as well, and
leaves gradients on its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import deepspeed
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from framework.engine.workarounds.grad_scaler import explaining_overflow
from framework.errors import TrainingError, UsageError
from framework.tasks.loss_checks import refuse_without_graph

_OFFLOAD = (
    "DeepSpeed keeps the last pass's gradient alone with offload_optimizer at ZeRO stages 1 and "
    "2; add the losses and call backward once, or count the passes as batch.accumulation_steps, "
    "with step() after each"
)


# The engine that a backward pass belongs to, while it runs.
_RUNNING: Final[list[BackwardPasses]] = []


class BackwardPasses:
    """The backward passes of an engine since its last step.

    Attributes:
        num_passes: backward passes since the last `step`, of this micro-batch.
        parameters: of the engine's model.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self.num_passes = 0
        self.parameters = list(engine.module.parameters())
        self._engine = engine
        self._optimizer = engine.optimizer
        self._is_broken = False
        self._has_begun = False
        # Hooks on the outputs of `engine(...)` look these up when a pass reaches them.
        self._prologue = engine._backward_prologue
        self._per_tensor = engine._backward_prologue_per_tensor
        engine._backward_prologue = self._begin
        engine._backward_prologue_per_tensor = self._scale

    def run(
        self, loss: torch.Tensor, others: Sequence[BackwardPasses], *, retain_graph: bool = False
    ) -> None:
        """Add the gradients of a loss to those since the last step. Weights of `others`, engines
        that the loss may go through, get none.

        Raises:
            ConfigError: the loss has no graph.
            UsageError: the loss is no single number.
            TrainingError: a second pass cannot be added here; or an earlier one has failed; or
                gradients overflow at the smallest loss scale.
        """
        self.refuse_broken("backward")
        refuse_without_graph(loss, key="backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(getattr(loss, "shape", ()))
            reason = f"{type(loss).__name__} of shape {shape} is no loss; take its mean"
            raise UsageError(f"backward: {reason} [task-loss-result]")
        earlier = self._earlier_gradients()
        with explaining_overflow(self._engine), self.running(others):
            self._has_begun = True
            self._engine.backward(loss, retain_graph=retain_graph)
            self._add_earlier(earlier)
        self.num_passes += 1

    @contextmanager
    def running(self, others: Sequence[BackwardPasses]) -> Iterator[None]:
        """Let only this engine's hooks act on a backward pass within the block; weights of `others`
        get no gradients. If a pass that has begun fails, later calls are refused.
        """
        self._has_begun = False
        _RUNNING.append(self)
        try:
            with _without_gradients(self.parameters, others):
                yield
        except BaseException:
            self._is_broken = self._has_begun
            raise
        finally:
            _RUNNING.pop()

    def end(self) -> None:
        """Reset the count of passes, before the engine's step takes their gradients.

        Raises:
            TrainingError: there are none, or a backward pass has failed.
        """
        self.refuse_broken("step")
        if not self.num_passes:
            reason = (
                "no backward since the last step, so there is no gradient to step with; call "
                "backward(loss) before"
            )
            raise TrainingError(f"step: {reason} [step-without-backward]")
        self.num_passes = 0

    def step(self) -> None:
        """Clip gradients and step, after the last micro-batch of a step; do nothing after others.

        Raises:
            TrainingError: gradients overflow at the smallest loss scale.
        """
        with explaining_overflow(self._engine):
            self._engine.step()

    def refuse_broken(self, call: str) -> None:
        """Refuse to go on with a part of a gradient.

        Raises:
            TrainingError: a backward pass has failed.
        """
        if self._is_broken:
            reason = (
                "an earlier backward pass has failed, and left a part of its gradients; end "
                "the loop with it"
            )
            raise TrainingError(f"{call}: {reason} [backward-failed]")

    def _begin(self) -> None:
        """Stand in for `_backward_prologue`, which DeepSpeed's hooks call: run it in a pass of this
        engine only, and watch a pass of no engine.
        """
        if self in _RUNNING:
            self._has_begun = True
            self._prologue()
        elif not _RUNNING:
            self._watch_pass()

    def _scale(self, gradient: Any) -> Any:
        """Stand in for `_backward_prologue_per_tensor`, likewise."""
        if self in _RUNNING:
            return self._per_tensor(gradient)
        return gradient

    def _watch_pass(self) -> None:
        """Refuse the pass that has begun if it gives weights a gradient; `torch.autograd.grad`
        gives them none.
        """
        hooks = []
        for weight in self.parameters:
            if weight.requires_grad:
                hooks.append(weight.register_post_accumulate_grad_hook(_refuse_gradient))

        def remove() -> None:
            for hook in hooks:
                hook.remove()

        torch.autograd.Variable._execution_engine.queue_callback(remove)

    def _earlier_gradients(self) -> dict[int, Any]:
        """Prepare DeepSpeed for another pass, and return the gradients, by number of a group, that
        it would overwrite.

        Raises:
            TrainingError: kind ``several-backwards``: DeepSpeed cannot keep both.
        """
        if not self.num_passes:
            return {}
        optimizer = self._optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.cpu_offload:
            raise TrainingError(
                f"backward: a second one before step(): {_OFFLOAD} [several-backwards]"
            )
        if isinstance(optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
            # DeepSpeed's `forward` clears it, but may have been called before the last pass.
            optimizer.clear_backward_seen_flag()
        is_stage_1_or_2 = isinstance(optimizer, DeepSpeedZeroOptimizer)
        if is_stage_1_or_2 and self._engine.is_gradient_accumulation_boundary():
            return dict(optimizer.averaged_gradients)
        return {}

    def _add_earlier(self, earlier: dict[int, Any]) -> None:
        """Add gradients that `_earlier_gradients` returned to those of the latest pass."""
        for group, gradients in earlier.items():
            latest = self._optimizer.averaged_gradients[group]
            if gradients is None or latest is gradients:  # one buffer: DeepSpeed adds up
                continue
            for gradient, earlier_gradient in zip(latest, gradients, strict=True):
                gradient.add_(earlier_gradient)


def _refuse_gradient(weight: torch.nn.Parameter) -> None:
    # This hook outlives a pass that failed; an engine's own pass may meet it then.
    if not _RUNNING:
        reason = "a backward pass through outputs of the engine that is not the engine's own"
        raise UsageError(
            f"backward: {reason}; call engine.backward(loss), not loss.backward() "
            "[backward-not-of-engine]"
        )


@contextmanager
def _without_gradients(
    parameters: Sequence[torch.nn.Parameter], others: Sequence[BackwardPasses]
) -> Iterator[None]:
    """Keep gradients away, within the block, from weights of `others` that are not in `parameters`:
    in plain PyTorch their own optimizer's `zero_grad` drops them.
    """
    if not others:
        yield
        return
    engine_weights = set(parameters)
    foreign: list[torch.nn.Parameter] = []
    for passes in others:
        for weight in passes.parameters:
            if weight.requires_grad and weight not in engine_weights:
                foreign.append(weight)
    removed: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for weight in foreign:
        # torch's AccumulateGrad looks at the flag when it runs, but calls DeepSpeed's hooks all the
        # same.
        weight.requires_grad_(False)
        hooks = weight._post_accumulate_grad_hooks
        if hooks:
            removed.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for weight in foreign:
            weight.requires_grad_(True)
        for hooks, removed_hooks in removed:
            hooks.update(removed_hooks)
