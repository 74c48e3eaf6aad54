"""`RunConfig`: all settings of a run, as the user wrote them, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from framework.config.base import TAG_KEYS, PositiveCount, RunName, Section
from framework.config.data import DataSection
from framework.config.model import ModelSection
from framework.config.optimizer import AdamW, Constant, OptimizerSection, SchedulerSection
from framework.config.paths import PathText
from framework.config.precision import FP32, PrecisionSection
from framework.config.training import (
    Batch,
    CallbackSection,
    Checkpoint,
    Classification,
    EarlyStopping,
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
CODE_SECTIONS: Final = ("model", "data", "task", "evaluation")
"""Sections whose code a command calls that reads a checkpoint."""
AUTO_KEYS: Final = (
    "zero.stage",
    "parallel.pipe",
    "parallel.tensor",
    "parallel.sequence",
    "parallel.expert",
    "batch.micro_size",
)


class Run(Section):
    """Name and place of the run."""

    name: RunName = "run"
    """Name of the run and of its folder: letters, digits, ``_``, ``-`` and ``.``."""
    output_dir: PathText = "runs"
    """Folder that holds the run folder; ``~`` is the home folder, as in every path."""
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
    memory_margin: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of a device's usable memory that estimates leave free: `plan`, `check` and `auto` take
    a run to fit if it needs no more than the rest.
    """

    @property
    def folder(self) -> Path:
        """The run folder: everything that the run writes is in it."""
        return Path(self.output_dir, self.name)


class RunConfig(Section):
    """One training run, described."""

    # Defaults are not validated, which would compile each section beside the whole.
    run: Run = Run.model_construct()
    """Name and place of the run."""
    # Validated as what a file holds, so that only a run with a default imports its kind.
    model: ModelSection = cast(Any, {"kind": "lenet"})
    """What is trained."""
    data: DataSection = cast(Any, {"kind": "digits"})
    """What it is trained on."""
    task: TaskSection = Classification.model_construct()
    """What a batch means: loss and metrics."""
    batch: Batch = Batch.model_construct()
    """How many samples make a step."""
    precision: PrecisionSection = FP32.model_construct()
    """Number format of weights and computation."""
    zero: Zero = Zero.model_construct()
    """How state is spread over the devices."""
    parallel: Parallel = Parallel.model_construct()
    """How the model itself is spread over the devices."""
    optimizer: OptimizerSection = AdamW.model_construct()
    """The update rule."""
    scheduler: SchedulerSection = Constant.model_construct()
    """The learning rate over steps."""
    training: Training = Training.model_construct()
    """How long, and how steps are taken."""
    evaluation: Evaluation = Evaluation.model_construct()
    """When evaluation data is measured."""
    checkpoint: Checkpoint = Checkpoint.model_construct()
    """When state is saved and where it starts from."""
    monitors: Monitors = Monitors.model_construct()
    """Where metrics are sent."""
    callbacks: list[CallbackSection] = []
    """What happens at the events of the run: early_stopping, reduce_on_plateau, or your own by
    ``target``, any object with some of on_start, on_gradients, on_step, on_log, on_evaluation,
    on_save, on_end (docs/callbacks.md).
    """
    supervision: Supervision = Supervision.model_construct()
    """What happens after a failure."""
    profile: Profile | None = None
    """Which steps are looked at closely; left out: none, at no cost."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Further DeepSpeed keys for the JSON; keys that a section above decides are refused here."""

    _auto: frozenset[str] = PrivateAttr(frozenset())
    _was_auto: frozenset[str] = PrivateAttr(frozenset())
    _given_metrics: frozenset[str] = PrivateAttr(frozenset())

    @model_validator(mode="wrap")
    @classmethod
    def _take_auto(cls, values: Any, handler: ModelWrapValidatorHandler[RunConfig]) -> RunConfig:
        """Validate the config as if the keys that are `auto` were left out."""
        keys = auto_keys(values)
        if not keys:
            return handler(values)
        config = handler(_without(values, keys))
        config._auto = keys
        config._was_auto = keys
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
        """Return the same config, with a note that the values of these keys were chosen."""
        config = self.model_copy()
        config._was_auto = self._was_auto | frozenset(keys)
        return config

    @property
    def given_metrics(self) -> list[str]:
        """The names of metrics that were handed over from Python, beside `evaluation.metrics`."""
        return sorted(self._given_metrics)

    def with_given_metrics(self, names: Iterable[str]) -> RunConfig:
        """Return the config with the names of metrics that are handed over from Python."""
        config = self.model_copy()
        config._given_metrics = frozenset(names)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved config, with every default, as plain lists, dicts, strings and
        numbers.
        """
        values = self.model_dump(mode="json", fallback=_stable_repr)
        if self.profile is None:  # manifests of checkpoints hold sections alone
            del values["profile"]
        return self._with_auto(values)

    def written(self) -> dict[str, Any]:
        """Return the config as it was written, without defaults."""
        return self._with_auto(self.model_dump(exclude_unset=True))

    def _with_auto(self, values: dict[str, Any]) -> dict[str, Any]:
        """Set the keys that are still to be chosen to ``auto``, and return the same dict."""
        for key in self._auto:
            section, _, name = key.partition(".")
            values.setdefault(section, {})[name] = AUTO
        return values


def auto_keys(values: Any) -> frozenset[str]:
    """Return the keys that are `auto` in plain values; `parallel: auto` stands for all of its
    sizes.
    """
    if not isinstance(values, Mapping):
        return frozenset()
    keys: set[str] = set()
    for key in AUTO_KEYS:
        section_name, _, name = key.partition(".")
        section = values.get(section_name)
        is_section_auto = section_name == "parallel" and section == AUTO
        is_key_auto = isinstance(section, Mapping) and section.get(name) == AUTO
        if is_section_auto or is_key_auto:
            keys.add(key)
    return frozenset(keys)


def _without(values: Mapping[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    """Return plain values of a config without keys, such as ``zero.stage``, that are `auto`."""
    kept = dict(values)
    for key in keys:
        section_name, _, name = key.partition(".")
        section = kept[section_name]
        if section == AUTO:
            kept[section_name] = {}
        else:
            kept[section_name] = {other: section[other] for other in section if other != name}
    return kept


def kind_of_default(section: str) -> dict[str, str]:
    """Return the kind of a section that is left out, such as ``{"kind": "adamw"}``; empty if it has
    no kinds.
    """
    kinds: dict[str, str] = {}
    if section in RunConfig.model_fields:
        default = RunConfig.model_fields[section].default
        for key in TAG_KEYS:
            if isinstance(default, Mapping):
                kind = default.get(key)
            else:
                kind = getattr(default, key, None)
            if isinstance(kind, str):
                kinds[key] = kind
    return kinds


def _stable_repr(value: object) -> str:
    """Represent an argument from Python that is no plain value.

    Addresses are left out: they differ between processes.
    """
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def watched_metrics(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the name of every metric that a run follows; other sections
    of the config need not be readable.
    """
    if config.checkpoint.keep_best:
        yield "checkpoint.keep_best", config.checkpoint.keep_best
    for number, callback in enumerate(config.callbacks):
        if isinstance(callback, EarlyStopping):
            yield f"callbacks.{number}.metric", callback.metric
