"""Results of one optimizer step: `Step` of a step that was taken, `PassedStep` of one left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from framework.engine.metrics import engine_metrics, memory_metrics, over_ranks

if TYPE_CHECKING:
    from framework.engine.base_engine import BaseEngine


@dataclass(frozen=True)
class Step:
    """Result of one optimizer step. Loss and further metrics stay on the device until `read`.

    Attributes:
        engine: the engine that took the step.
        read_loss: returns this rank's loss, 0-d.
        lr: learning rate of the step.
        may_be_skipped: whether the weights may be as they were.
        further: returns further metrics, which are means.
    """

    engine: BaseEngine
    read_loss: Callable[[], torch.Tensor]
    lr: float
    may_be_skipped: bool
    further: Callable[[], dict[str, float]] = dict

    def read(self) -> Mapping[str, float]:
        """Return the metrics of the step, and look for stragglers in its times. Collective; waits
        for the device.

        Raises:
            ConfigError: as `GradientCheck.compare`.
            TrainingError: as `WrittenWeights.refuse`.
        """
        engine = self.engine
        loss = float(self.read_loss())  # first: this waits for the device
        if engine.tensor_check is not None:
            engine.tensor_check.compare()
        engine.written.refuse()
        rank_metrics = {"train/loss": loss}
        rank_metrics |= self.further()
        rank_metrics |= engine.phases.read()
        rank_metrics |= memory_metrics()
        if engine.stragglers is None:
            metrics = over_ranks(rank_metrics)
        else:
            note = partial(engine.stragglers.note, engine.steps_taken)
            metrics = over_ranks(rank_metrics, note)
        metrics["train/lr"] = self.lr
        return metrics | engine_metrics(engine.engine, engine.kept_norm)


@dataclass(frozen=True)
class PassedStep:
    """Result of a step that was left out."""

    metrics: Mapping[str, float]
    may_be_skipped: bool = True

    def read(self) -> Mapping[str, float]:
        return self.metrics
