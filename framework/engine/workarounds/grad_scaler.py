"""Loss scales that DeepSpeed 0.19.8 forgets: to save (fp16 under torch.autocast), or to use (fp16
weights at ZeRO stage 0).

Under autocast it makes a `torch.amp.GradScaler`, which the engine holds at stage 0 and the
optimizer at stages 1 to 3, and which it neither saves nor restores. The scale of fp16 weights it
saves by itself, but at stage 0 only divides the gradients by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import deepspeed
import torch
import torch.distributed
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from framework.errors import TrainingError, explaining


class _ScaledLoss:
    """Stands in for the engine's GradScaler: scales the loss by what the optimizer divides the
    gradients by.
    """

    def __init__(self, optimizer: FP16_Optimizer | FP16_UnfusedOptimizer) -> None:
        self._optimizer = optimizer

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.float() * float(self._optimizer.loss_scale)

    def step(self, optimizer: FP16_Optimizer | FP16_UnfusedOptimizer) -> None:
        """Step alone: the optimizer unscales and updates by itself."""
        optimizer.step()

    def unscale_(self, optimizer: object) -> None: ...

    def update(self) -> None: ...


def scale_fp16_loss(engine: deepspeed.DeepSpeedEngine) -> None:
    """Make an engine with fp16 weights scale its loss at stage 0, as it does at stages 1 to 3.

    DeepSpeed's `backward` (runtime/engine.py) does so for the optimizers of ZeRO only; the others
    divide by the scale all the same, and a small gradient is lost twice.
    """
    if engine.fp16_enabled() and isinstance(
        engine.optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)
    ):
        engine.torch_autocast_z0_gradscaler = _ScaledLoss(engine.optimizer)


def forget_autocast() -> None:
    """Before an engine is built: DeepSpeed notes in its module that one computes in autocast, and
    for ever, so that the next engine of the process would scale its gradients as well (at ZeRO 1 to
    3, in whatever precision).
    """
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None


def grad_scaler(engine: deepspeed.DeepSpeedEngine) -> torch.amp.GradScaler | None:
    """The scaler of an engine; None where it needs none."""
    held = getattr(engine, "torch_autocast_z0_gradscaler", None)
    if isinstance(held, _ScaledLoss):
        return None
    return (
        held if held is not None else getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    )


def scaler_state(engine: deepspeed.DeepSpeedEngine) -> dict[str, float] | None:
    """Scale and counters as plain values; None where there is no scaler."""
    scaler = grad_scaler(engine)
    if scaler is None:
        return None
    return dict(scaler.state_dict())


def restore_scaler(
    engine: deepspeed.DeepSpeedEngine, states: Sequence[Mapping[str, float] | None]
) -> None:
    """Put back what `scaler_state` returned on every rank of the run that saved.

    On as many ranks each goes on with its own: at stages 1 to 3 a rank looks for overflows in its
    own part only. On others all take the smallest. A run without a scaler, or that goes on from one
    without, has nothing to put back.
    """
    scaler = grad_scaler(engine)
    known = [state for state in states if state is not None]
    if scaler is None or not known:
        return
    if len(states) == torch.distributed.get_world_size():
        own = states[torch.distributed.get_rank()]
    else:
        own = None
    scaler.load_state_dict(dict(own or min(known, key=lambda state: state["scale"])))


def explaining_overflow(engine: deepspeed.DeepSpeedEngine) -> AbstractContextManager[None]:
    """DeepSpeed ends a run that overflows at the smallest loss scale with a plain exception, on all
    ranks alike.
    """
    return explaining(partial(_diverged, engine))


def _diverged(engine: deepspeed.DeepSpeedEngine, error: Exception) -> TrainingError | None:
    if "loss scale already at minimum" not in str(error):
        return None
    return TrainingError(
        f"step {engine.global_steps + 1}: gradients are not finite even at the smallest loss "
        f"scale ({engine.optimizer.loss_scale:g}): training has diverged; lower optimizer.lr, set "
        "training.clip_grad_norm, or start again from an earlier checkpoint [loss-not-finite]"
    )


def may_have_been_skipped(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Check whether the last step may have left the weights as they were; asking a scaler would
    wait for the device.
    """
    return grad_scaler(engine) is not None or not engine.was_step_applied()
