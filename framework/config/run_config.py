"""`RunConfig`: everything that was asked, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from framework.config.base import TAG_KEYS, PositiveCount, RunName, Section
from framework.config.data import DataSection, Digits
from framework.config.model import LeNet, ModelSection
from framework.config.optimizer import AdamW, Constant, OptimizerSection, SchedulerSection
from framework.config.precision import FP32, PrecisionSection
from framework.config.training import (
    Batch,
    CallbackSection,
    Checkpoint,
    Classification,
    Evaluation,
    Monitors,
    Parallel,
    Profile,
    Supervision,
    TaskSection,
    Training,
)
from framework.config.zero import Zero

# Where `auto` may stand: the value is chosen for the cluster before the run
# (`framework/plan/auto.py`).
AUTO: Final = "auto"
AUTO_KEYS: Final = ("zero.stage", "parallel.pipe", "batch.micro_size")


class Run(Section):
    """Name and place of the run."""

    name: RunName = "run"
    """Name of the run and of its folder: letters, digits, ``_``, ``-`` and ``.``."""
    output_dir: str = "runs"
    """Folder that holds the run folder."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the initial weights, of the data order and of everything random."""
    world_size: PositiveCount | None = None
    """Number of devices this run is meant for; left out: any. Training on another number is
    refused.
    """
    backend: Literal["nccl", "gloo", "hccl", "ccl", "mpi"] | None = None
    """torch.distributed backend; left out: the device's own (nccl on NVIDIA, gloo on CPU, hccl on
    Ascend).
    """

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
    callbacks: list[CallbackSection] = []
    """What happens at the events of the run: early_stopping, reduce_on_plateau, or your own by
    ``target``, any object with some of on_start, on_step, on_log, on_evaluation, on_save, on_end
    (docs/callbacks.md).
    """
    supervision: Supervision = Supervision()
    """What happens after a failure."""
    profile: Profile | None = None
    """Which steps are looked at closely; left out: none, at no cost."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Further DeepSpeed keys for the JSON; keys that a section above decides are refused here."""

    _auto: frozenset[str] = PrivateAttr(frozenset())
    _was_auto: frozenset[str] = PrivateAttr(frozenset())

    @model_validator(mode="wrap")
    @classmethod
    def _take_auto(cls, values: Any, handler: ModelWrapValidatorHandler[RunConfig]) -> RunConfig:
        """Check everything else as if the keys that are `auto` were left out."""
        found = auto_keys(values)
        config = handler(_without(values, found) if found else values)
        if found:
            config._auto = config._was_auto = found
        return config

    @property
    def auto(self) -> frozenset[str]:
        """Dotted keys that are still to be chosen."""
        return self._auto

    @property
    def was_auto(self) -> frozenset[str]:
        """Dotted keys that the config left to be chosen, whether they have been or not."""
        return self._was_auto

    def noting_auto(self, keys: Iterable[str]) -> RunConfig:
        """The same config, whose values of these keys have been chosen."""
        config = self.model_copy()
        config._was_auto = self._was_auto | frozenset(keys)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The resolved config, every default written out, as plain lists, dicts, strings and
        numbers.
        """
        values = self.model_dump(mode="json", fallback=_stable_repr)
        if self.profile is None:  # manifests of checkpoints hold sections alone
            del values["profile"]
        return self._with_auto(values)

    def written(self) -> dict[str, Any]:
        """The config as it was written, without the defaults of what was left out."""
        return self._with_auto(self.model_dump(exclude_unset=True))

    def _with_auto(self, values: dict[str, Any]) -> dict[str, Any]:
        for section, _, name in (key.partition(".") for key in self._auto):
            values.setdefault(section, {})[name] = AUTO
        return values


def auto_keys(values: Any) -> frozenset[str]:
    """Find the keys that are `auto` in plain values; `parallel: auto` stands for all of its
    sizes.
    """
    found = set()
    for key in AUTO_KEYS if isinstance(values, Mapping) else ():
        name, _, last = key.partition(".")
        section = values.get(name)
        if (section == AUTO and name == "parallel") or (
            isinstance(section, Mapping) and section.get(last) == AUTO
        ):
            found.add(key)
    return frozenset(found)


def _without(values: Mapping[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    kept = dict(values)
    for name, _, last in (key.partition(".") for key in keys):
        section = kept[name]
        kept[name] = (
            {} if section == AUTO else {key: value for key, value in section.items() if key != last}
        )
    return kept


def kind_of_default(section: str) -> dict[str, str]:
    """Return the default of a section that is left out, such as ``{"kind": "adamw"}``; empty where
    it has no kinds.
    """
    if section in RunConfig.model_fields:
        default = RunConfig.model_fields[section].default
    else:
        default = None
    return {key: value for key in TAG_KEYS if isinstance(value := getattr(default, key, None), str)}


def _stable_repr(value: object) -> str:
    """Arguments from Python that are no plain values; without addresses, which differ between
    processes.
    """
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
