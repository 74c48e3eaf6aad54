"""`RunConfig`: everything that was asked, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from framework.config.base import TAG_KEYS, PositiveCount, RunName, Section
from framework.config.data import DataSection, Digits
from framework.config.model import LeNet, ModelSection
from framework.config.optimizer import AdamW, Constant, OptimizerSection, SchedulerSection
from framework.config.precision import FP32, PrecisionSection
from framework.config.training import (
    Batch,
    Checkpoint,
    Classification,
    Evaluation,
    Monitors,
    Parallel,
    TaskSection,
    Training,
)
from framework.config.zero import Zero


class Run(Section):
    """Name and place of the run."""

    name: RunName = "run"
    """Name of the run and of its folder: letters, digits, ``_``, ``-`` and ``.``."""
    output_dir: str = "runs"
    """Folder that holds the run folder."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the initial weights, of the data order and of everything random."""
    world_size: PositiveCount | None = None
    """Number of devices this run is meant for; left out: any. Training on another number is refused."""
    backend: Literal["nccl", "gloo", "hccl", "ccl", "mpi"] | None = None
    """torch.distributed backend; left out: the device's own (nccl on NVIDIA, gloo on CPU, hccl on Ascend)."""

    @property
    def folder(self) -> Path:
        """The run folder: everything that the run writes is in it."""
        return Path(self.output_dir, self.name)


class RunConfig(Section):
    """One training run, described."""

    run: Run = Run()
    """Name and place of the run."""
    model: ModelSection = LeNet()
    """What is trained."""
    data: DataSection = Digits()
    """What it is trained on."""
    task: TaskSection = Classification()
    """What a batch means: loss and metrics."""
    batch: Batch = Batch()
    """How many samples make a step."""
    precision: PrecisionSection = FP32()
    """Number format of weights and computation."""
    zero: Zero = Zero()
    """How state is spread over the devices."""
    parallel: Parallel = Parallel()
    """How the model itself is spread over the devices."""
    optimizer: OptimizerSection = AdamW()
    """The update rule."""
    scheduler: SchedulerSection = Constant()
    """The learning rate over steps."""
    training: Training = Training()
    """How long, and how steps are taken."""
    evaluation: Evaluation = Evaluation()
    """When evaluation data is measured."""
    checkpoint: Checkpoint = Checkpoint()
    """When state is saved and where it starts from."""
    monitors: Monitors = Monitors()
    """Who is told about the metrics."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Further DeepSpeed keys for the JSON; keys that a section above decides are refused here."""

    def to_dict(self) -> dict[str, Any]:
        """The resolved config, every default written out, as plain lists, dicts, strings and numbers."""
        return self.model_dump(mode="json", fallback=_stable_repr)


def kind_of_default(section: str) -> dict[str, str]:
    """Return the default of a section that is left out, such as ``{"kind": "adamw"}``; empty where it has no kinds."""
    default = RunConfig.model_fields[section].default if section in RunConfig.model_fields else None
    return {key: value for key in TAG_KEYS if isinstance(value := getattr(default, key, None), str)}


def _stable_repr(value: object) -> str:
    """Arguments from Python that are no plain values; without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
