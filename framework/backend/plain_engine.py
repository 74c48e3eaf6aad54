"""`PlainEngine`: DeepSpeed's data-parallel engine (ZeRO 0-3) behind the five methods of `framework.train.engine.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch

from framework.backend.checkpoint_bytes import load_bytes, move_in, save_bytes
from framework.backend.device_batches import HALF, DeviceBatches
from framework.backend.distributed import device
from framework.backend.ema import WeightAverage
from framework.backend.grad_norm import keep_norm
from framework.backend.grad_scaler import forget_autocast, may_have_been_skipped, scale_fp16_loss, telling_of_overflow
from framework.backend.measures import EvalSums, engine_metrics, mean_over_ranks
from framework.backend.safe_files import use_safe_files
from framework.backend.schedules import client_schedule
from framework.backend.state_views import names_of
from framework.files import FileRecord, NewFile, OpenFile
from framework.models.parameter_groups import parameter_groups
from framework.plan.plan import Plan
from framework.tasks.task import Task
from framework.train.saved import SavedCheckpoint


def build_model(build: Callable[[], torch.nn.Module], *, ds_config: Mapping[str, Any]) -> torch.nn.Module:
    """Build a model; at ZeRO stage 3 inside `zero.Init`, so that no rank ever holds all weights."""
    if ds_config["zero_optimization"]["stage"] < 3:
        return build()
    with deepspeed.zero.Init(config_dict_or_path=dict(ds_config)):
        return build()


def build_engine(
    plan: Plan,
    *,
    ds_config: Mapping[str, Any],
    model: torch.nn.Module,
    task: Task,
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> PlainEngine:
    """Wrap a model with `deepspeed.initialize`. Collective."""
    training = plan.config.training
    forget_autocast()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=trained_parameters(plan, model),
        optimizer=make_optimizer,
        lr_scheduler=client_schedule(plan),
        dist_init_required=False,
        config=dict(ds_config),
    )
    scale_fp16_loss(engine)
    half = HALF.get(plan.config.precision.dtype)
    return PlainEngine(engine, task=task, batches=DeviceBatches(device(), half, training.channels_last),
                       average=WeightAverage(engine, plan.config))  # fmt: skip


def trained_parameters(plan: Plan, model: torch.nn.Module) -> list[torch.nn.Parameter] | list[dict[str, Any]]:
    """What the optimizer is given: the parameters that are trained, in groups where weight decay is not for all of them."""
    optimizer = plan.config.optimizer
    return parameter_groups(
        model.parameters(),
        weight_decay=getattr(optimizer, "weight_decay", 0.0),
        weight_decay_on=getattr(optimizer, "weight_decay_on", "all"),
    )


@dataclass(frozen=True)
class _Step:
    """The loss of one step, still on the device, the rate it was taken with, the engine it came from, and whether that may have
    left the weights as they were."""

    engine: PlainEngine
    loss: torch.Tensor
    lr: float
    may_be_skipped: bool

    def read(self) -> Mapping[str, float]:
        engine = self.engine
        return {"train/loss": mean_over_ranks(self.loss), "train/lr": self.lr} | engine_metrics(engine.engine, engine.kept_norm)


class PlainEngine:
    """One DeepSpeedEngine and the task that says what a batch means."""

    def __init__(
        self, engine: deepspeed.DeepSpeedEngine, *, task: Task, batches: DeviceBatches, average: WeightAverage
    ) -> None:
        self.engine, self._files = engine, use_safe_files(engine)
        self._task, self._batches, self._average = task, batches, average
        self._accumulation_steps: int = engine.gradient_accumulation_steps()
        self.kept_norm = keep_norm(engine)

    def train_step(self, micro_batches: Iterator[Any]) -> _Step:
        """Forward, backward and DeepSpeed's step for each micro-batch; nothing here waits for the device."""
        engine, task = self.engine, self._task
        lr = float(engine.get_lr()[0])  # before the step: DeepSpeed moves the schedule on at its end
        total: torch.Tensor | None = None
        for _ in range(self._accumulation_steps):
            inputs, targets = task.split(self._batches.move(next(micro_batches)))
            loss = task.loss(task.forward(engine, inputs), targets)
            engine.backward(loss)
            with telling_of_overflow(engine):
                engine.step()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        mean = total / self._accumulation_steps if self._accumulation_steps > 1 else total
        return _Step(self, mean, lr, may_have_been_skipped(engine))

    def evaluate(self, batches: Iterable[tuple[Any, bool]]) -> Mapping[str, float]:
        """Metrics of the task over all samples of all ranks."""
        task, sums = self._task, EvalSums(device())
        self.engine.eval()
        try:
            with torch.no_grad(), self._average.in_evaluation():
                for batch, counts in batches:
                    inputs, targets = task.split(self._batches.move(batch))
                    sums.add(task.measure(task.forward(self.engine, inputs), targets), counts=counts)
        finally:
            self.engine.train()
        return sums.metrics(task)

    def save(
        self, folder: Path, tag: str, state: Mapping[str, Any], *, open_file: OpenFile = NewFile
    ) -> Mapping[str, FileRecord]:
        """DeepSpeed's files plus the random state of every rank. Collective."""
        return save_bytes(self.engine, self._files, folder, tag, state, names=names_of(self.engine.module),
                          open_file=open_file)  # fmt: skip

    def load(self, checkpoint: SavedCheckpoint, *, moved: bool) -> Mapping[str, Any]:
        """Put back weights, optimizer, schedule and, unless it moved, this rank's random state. Collective."""
        state = (
            move_in(self.engine, checkpoint, names=names_of(self.engine.module))
            if moved
            else load_bytes(self.engine, checkpoint.folder, checkpoint.tag)
        )
        self._average.after_load()
        return state

    def close(self) -> None:
        """Remove DeepSpeed's hooks and buffers."""
        self.engine.destroy()


def use_matmul_precision(plan: Plan) -> None:
    """fp32 matrix products may use TF32 where the config says so."""
    torch.set_float32_matmul_precision(getattr(plan.config.precision, "matmul", "highest"))
