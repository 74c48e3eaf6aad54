"""Loss scales that DeepSpeed 0.19.8 does not save (fp16 under torch.autocast), or does not use
(fp16 weights at ZeRO stage 0).

Under autocast it makes a `torch.amp.GradScaler`, which the engine holds at stage 0 and the
optimizer at stages 1 to 3, and which it neither saves nor restores. It saves the scale of fp16
weights by itself, but at stage 0 only divides the gradients by it.
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
    """Stands in for the engine's GradScaler: scales the loss by the number that the optimizer
    divides the gradients by.
    """

    def __init__(self, optimizer: FP16_Optimizer | FP16_UnfusedOptimizer) -> None:
        self._optimizer = optimizer

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.float() * float(self._optimizer.loss_scale)

    def step(self, optimizer: FP16_Optimizer | FP16_UnfusedOptimizer) -> None:
        """Step the optimizer, which unscales and updates by itself."""
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
    """Clear DeepSpeed's note that an earlier engine of the process computed in autocast, before an
    engine is built. With that note, which DeepSpeed keeps in its module, the new engine would scale
    its gradients as well (at ZeRO 1 to 3, in any precision).
    """
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None


def grad_scaler(engine: deepspeed.DeepSpeedEngine) -> torch.amp.GradScaler | None:
    """Return the scaler of an engine, or None."""
    scaler: torch.amp.GradScaler | None
    scaler = getattr(engine, "torch_autocast_z0_gradscaler", None)
    if isinstance(scaler, _ScaledLoss):
        return None
    if scaler is None:
        scaler = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return scaler


def scaler_state(engine: deepspeed.DeepSpeedEngine) -> dict[str, float] | None:
    """Return scale and counters as plain values, or None without a scaler."""
    scaler = grad_scaler(engine)
    if scaler is None:
        return None
    return dict(scaler.state_dict())


def restore_scaler(
    engine: deepspeed.DeepSpeedEngine, states: Sequence[Mapping[str, float] | None]
) -> None:
    """Put back what `scaler_state` returned on every rank of the run that saved.

    On as many ranks as before each one goes on with its own state: at stages 1 to 3 a rank looks
    for overflows in its own part only. On another number of ranks all take the smallest scale. If
    either run has no scaler, nothing is put back.
    """
    scaler = grad_scaler(engine)
    known = [state for state in states if state is not None]
    if scaler is None or not known:
        return
    rank_state: Mapping[str, float] | None = None
    if len(states) == torch.distributed.get_world_size():
        rank_state = states[torch.distributed.get_rank()]
    scaler.load_state_dict(dict(rank_state or min(known, key=lambda state: state["scale"])))


def explaining_overflow(engine: deepspeed.DeepSpeedEngine) -> AbstractContextManager[None]:
    """Explain the plain exception by which DeepSpeed ends a run that overflows at the smallest loss
    scale, on all ranks alike.
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
    """Check whether the last step may have left the weights as they were: always with a scaler, as
    reading its decision would wait for the device.
    """
    return grad_scaler(engine) is not None or not engine.was_step_applied()
