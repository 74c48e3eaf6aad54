"""`PlainEngine`: DeepSpeed's data-parallel engine (ZeRO 0-3) behind the five methods of `engine.protocol.Engine`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from framework.checkpoint.state.optimizer_shards import names_of
from framework.engine.distributed import device
from framework.engine.initialize import BaseEngine, MakeOptimizer, Step, initialize
from framework.engine.metrics import EvalSums, mean_over_ranks
from framework.engine.workarounds.grad_scaler import explaining_overflow, may_have_been_skipped, scale_fp16_loss
from framework.engine.workarounds.module_buffers import share_buffers
from framework.plan.plan import Plan
from framework.tasks.task import Task


def build_engine(
    plan: Plan,
    *,
    ds_config: Mapping[str, Any],
    model: torch.nn.Module,
    task: Task,
    make_optimizer: MakeOptimizer | None = None,
) -> PlainEngine:
    """Wrap a model with `deepspeed.initialize`. Collective."""
    engine = initialize(plan, model, ds_config=ds_config, make_optimizer=make_optimizer)
    scale_fp16_loss(engine)
    return PlainEngine(engine, plan, task, names=partial(names_of, engine.module))


class PlainEngine(BaseEngine):
    """One DeepSpeedEngine with the whole model."""

    def train_step(self, micro_batches: Iterator[Any]) -> Step:
        """Forward, backward and DeepSpeed's step for each micro-batch; nothing here waits for the device."""
        engine, task, accumulation_steps = self.engine, self._task, self.engine.gradient_accumulation_steps()
        lr = float(engine.get_lr()[0])  # before the step: DeepSpeed moves the schedule on at its end
        total: torch.Tensor | None = None
        for _ in range(accumulation_steps):
            inputs, targets = self._batches.split(task, next(micro_batches))
            loss = task.loss(task.forward(engine, inputs), targets)
            engine.backward(loss)
            with explaining_overflow(engine):
                engine.step()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        mean = total / accumulation_steps if accumulation_steps > 1 else total
        return Step(self, partial(mean_over_ranks, mean), lr, may_have_been_skipped(engine))

    def evaluate(self, batches: Iterable[tuple[Any, bool]]) -> Mapping[str, float]:
        """Metrics of the task over all samples of all ranks."""
        task, sums = self._task, EvalSums(device())
        share_buffers(self.engine)
        self.engine.eval()
        try:
            with torch.no_grad(), self._average.in_evaluation():
                for batch, counts in batches:
                    inputs, targets = self._batches.split(task, batch)
                    sums.add(task.measure(task.forward(self.engine, inputs), targets), counts=counts)
        finally:
            self.engine.train()
        return sums.metrics(task)


def use_matmul_precision(plan: Plan) -> None:
    """fp32 matrix products may use TF32 where the config says so."""
    torch.set_float32_matmul_precision(getattr(plan.config.precision, "matmul", "highest"))
