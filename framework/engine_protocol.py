"""The protocol between time and arithmetic: what a run asks of a DeepSpeed engine, plain or
pipelined. No caller reaches through it to DeepSpeed's own object.

Nothing here imports torch: the Trainer moves batches and results from one side to the other without
looking inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from framework.system.files import FileRecord, NewFile

if TYPE_CHECKING:
    import torch

    from framework.checkpoint.manifest import SavedCheckpoint
    from framework.checkpoint.save_stream import OpenFile

# Phases of a run, as reports of a hang name them; a callback is a phase by its name.
STARTING: Final = "the start"
LOADING: Final = "the load of a checkpoint"
STEPS: Final = "a step"
EVALUATING: Final = "an evaluation"
SAVING: Final = "a save"

Gather = Callable[[Any], list[Any]]
"""A collective: every rank's value, in the order of ranks, on every rank."""


class StepResult(Protocol):
    """Result of one optimizer step, left on the device."""

    @property
    def may_be_skipped(self) -> bool:
        """Check whether the weights may be as they were, because gradients overflowed; their norm
        then is not that of an update.
        """
        ...

    def read(self) -> Mapping[str, float]:
        """Return the metrics of the step under their public names (``train/loss`` is the mean over
        micro-batches and ranks).

        Collective: every rank calls it or none does. Waits for the device, so it is called at
        logging points only.
        """
        ...


@dataclass(frozen=True)
class BadStep:
    """A step with a bad loss or gradient norm, and the limits of both.

    Attributes:
        ranks: the ranks with a loss that is not finite, or differed when it was computed again.
        verdict: ``transient`` or ``persistent`` for a step that was computed again, else empty.
        is_taken: whether the step was good then, and its update was made.
    """

    step: int
    loss: float
    grad_norm: float
    loss_limit: float
    norm_limit: float
    _: KW_ONLY
    ranks: tuple[str, ...] = ()
    verdict: str = ""
    is_taken: bool = False

    def __str__(self) -> str:
        pairs = (
            ("train/loss", self.loss, self.loss_limit),
            ("train/grad_norm", self.grad_norm, self.norm_limit),
        )
        reasons = []
        for name, value, limit in pairs:
            if not math.isfinite(value):
                reasons.append(f"{name} = {value:.6g}")
            elif not value <= limit:
                reasons.append(f"{name} = {value:.6g}, above {limit:.4g}")
        ranks = ""
        if self.ranks:
            ranks = f" ({', '.join(self.ranks)})"
        return f"step {self.step}: {' and '.join(reasons)}{ranks}{self._described_rerun()}"

    def _described_rerun(self) -> str:
        if not self.verdict:
            return ""
        if self.verdict == "persistent":
            return "; computed again it is the same: persistent, of the data or the model"
        place = "the ranks named" if self.ranks else "which rank, its loss does not show"
        return f"; computed again it is another: transient, suspect the hardware ({place})"

    def details(self) -> dict[str, Any]:
        """Return the fields of an event; numbers that JSON does not have as text."""
        details: dict[str, Any] = {}
        for name in ("loss", "grad_norm", "loss_limit", "norm_limit"):
            value = getattr(self, name)
            details[name] = value if math.isfinite(value) else str(value)
        if self.ranks:
            details["ranks"] = list(self.ranks)
        if self.verdict:
            details["verdict"] = self.verdict
        if self.is_taken:
            details["is_taken"] = self.is_taken
        return details


class BadStepWatch(Protocol):
    """An engine's look at all of its steps (`training.bad_steps`)."""

    @property
    def has_news(self) -> bool:
        """Check whether the host knows of a bad step that was not read."""
        ...

    def read(self) -> list[BadStep]:
        """List the bad steps since the last reading. Collective."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the state that a checkpoint holds."""
        ...


class Engine(Protocol):
    """One model with its optimizer on this rank."""

    @property
    def module(self) -> torch.nn.Module:
        """The model in training, or this rank's stage of it; at ZeRO stage 3 its weights are
        partitioned.
        """
        ...

    @property
    def steps_taken(self) -> int:
        """Optimizer steps so far, including those of earlier starts."""
        ...

    @property
    def ds_config(self) -> Mapping[str, Any]:
        """The JSON that DeepSpeed was given, with rates for each parameter group of this rank."""
        ...

    @property
    def bad_steps(self) -> BadStepWatch | None:
        """The look at all steps; None without `training.bad_steps`."""
        ...

    def ahead(self, micro_batches: Iterator[Any], *, num_steps: int) -> Iterator[Any]:
        """Return the micro-batches of `num_steps` steps for `train_step`, which then may begin to
        copy the next one before its step. An error in that is raised in the step that needs it.
        """
        ...

    def train_step(self, micro_batches: Iterator[Any]) -> StepResult:
        """Take one optimizer step on the next `accumulation_steps` micro-batches. Does not wait for
        the device.
        """
        ...

    def pass_over(self, micro_batches: Iterator[Any]) -> StepResult:
        """Leave out a step after a roll back: read its data, and move counters and schedule on."""
        ...

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rate of every parameter group until the schedule sets it again."""
        ...

    @property
    def tables(self) -> Mapping[str, Table]:
        """Metrics of the last evaluation that are matrices, by name; empty but on rank 0."""
        ...

    @property
    def can_try_evaluation(self) -> bool:
        """Whether evaluation can be tried before the first step."""
        ...

    def trying_evaluation(self) -> AbstractContextManager[None]:
        """Return a context in which evaluation changes nothing that training reads."""
        ...

    def evaluate(
        self,
        batches: Iterable[tuple[Any, bool]],
        *,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> Mapping[str, float]:
        """Return the metrics over all samples of all ranks, each counted once; nothing if the
        evaluation stops before its end.

        A batch that comes with False is padding: it is run, because a forward pass may be
        collective, and not counted. `is_stopping` is called between batches, equally often on every
        rank.
        """
        ...

    def save(
        self, folder: Path, tag: str, state: Mapping[str, Any], *, open_file: OpenFile = NewFile
    ) -> Mapping[str, FileRecord]:
        """Write weights, optimizer, schedule, random states and `state` to ``folder/tag``.
        Collective.

        `open_file` takes the path of a file and returns what its bytes are written to.

        Returns:
            The files that this rank wrote, all flushed to disk, by name within the folder, as their
            `close` returned them.

        Raises:
            OSError: the file system refused, on this rank; the others return as usual.
        """
        ...

    def load(
        self, checkpoint: SavedCheckpoint, *, moved: bool, changed: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """Put back what `save` wrote and return its `state`. Collective.

        Args:
            checkpoint: finished, its bytes verified.
            moved: it was written by other ranks, at another ZeRO stage, pipeline or precision than
                this engine's.
            changed: dotted keys of the config that it has otherwise, and that stay as they are.
        """
        ...

    def description(self) -> dict[str, Any]:
        """Describe for a checkpoint's manifest which weights it holds. Collective."""
        ...

    def gathered(
        self, module: torch.nn.Module | None = None
    ) -> AbstractContextManager[torch.nn.Module]:
        """Return a context in which the weights of the model, or of one of its modules, are
        complete at every ZeRO stage. Numbers that all ranks write into them are kept. Collective.
        """
        ...

    @property
    def full_weights(self) -> FullTensors:
        """Whole weights, gradients and optimizer states by name."""
        ...

    def before_steps(self, call: Callable[[], object]) -> None:
        """Have `call` called on every rank before each step, when its gradients are complete."""
        ...

    def close(self) -> None:
        """Release what the engine holds on the device."""
        ...


class FullTensors(Protocol):
    """Whole tensors of a model in training by the names of its weights, at every ZeRO stage, in
    pipelines and in tensor groups. Every method is collective.
    """

    def weight_names(self) -> list[str]: ...

    def full_weight(self, name: str) -> torch.Tensor: ...

    def set_full_weight(self, name: str, value: torch.Tensor) -> None: ...

    def full_gradient(self, name: str) -> torch.Tensor: ...

    def set_full_gradient(self, name: str, value: torch.Tensor) -> None: ...

    def full_optimizer_state(self, name: str, key: str) -> torch.Tensor: ...

    def set_full_optimizer_state(self, name: str, key: str, value: torch.Tensor) -> None: ...


class WeightDoors:
    """Methods of a run, for callbacks and loops of one's own, that read and set whole weights.

    All ranks make each of these calls, with the same arguments. But for `gathered`, a call of one
    rank alone ends the run [not-on-every-rank], a weight has the name that it has in the model as
    it was built, and what is returned is a copy in fp32 on this rank's device.
    """

    def _source(self) -> Engine:
        """Return the engine with the weights."""
        raise NotImplementedError

    def gathered(
        self, module: torch.nn.Module | None = None
    ) -> AbstractContextManager[torch.nn.Module]:
        """Return a context in which the weights of the model, or of one of its modules, are whole
        at every ZeRO stage.

        Changes to the weights are kept; all ranks must make the same.
        """
        return self._source().gathered(module)

    def weight_names(self) -> list[str]:
        """Return the names of all weights, of all stages of a pipeline."""
        return self._source().full_weights.weight_names()

    def full_weight(self, name: str) -> torch.Tensor:
        """Return a whole weight, as the optimizer steps it."""
        return self._source().full_weights.full_weight(name)

    def set_full_weight(self, name: str, value: torch.Tensor) -> None:
        """Set a weight: what the optimizer steps, and the model's own copy in its precision."""
        self._source().full_weights.set_full_weight(name, value)

    def full_gradient(self, name: str) -> torch.Tensor:
        """Return a whole gradient between the last backward pass of a step and the step: averaged
        over ranks and micro-batches, not yet clipped, without loss scale.
        """
        return self._source().full_weights.full_gradient(name)

    def set_full_gradient(self, name: str, value: torch.Tensor) -> None:
        """Set the gradient that the step clips and takes."""
        self._source().full_weights.set_full_gradient(name, value)

    def full_optimizer_state(self, name: str, key: str) -> torch.Tensor:
        """Return what the optimizer keeps of every number of a weight, such as ``exp_avg``."""
        return self._source().full_weights.full_optimizer_state(name, key)

    def set_full_optimizer_state(self, name: str, key: str, value: torch.Tensor) -> None:
        """Set what the optimizer keeps of every number of a weight."""
        self._source().full_weights.set_full_optimizer_state(name, key, value)


Table = list[list[float]]
"""A metric that is a matrix, as rows."""
EvalSets = Mapping[str, Iterable[tuple[Any, bool]]]


def evaluate_sets(
    engine: Engine,
    sets: EvalSets,
    *,
    is_stopping: Callable[[], bool] = lambda: False,
    tables: dict[str, Table] | None = None,
) -> dict[str, float]:
    """Measure every set: ``eval/<set>/<metric>``, or ``eval/<metric>`` for a set without a name.
    Collective.

    Args:
        engine: with the weights.
        sets: their batches by name.
        is_stopping: as in `Engine.evaluate`.
        tables: on rank 0 gets the metrics that are matrices, by the same names.
    """
    metrics: dict[str, float] = {}
    for name, batches in sets.items():
        area = f"eval/{name}/" if name else "eval/"
        for metric, value in engine.evaluate(batches, is_stopping=is_stopping).items():
            metrics[area + metric.removeprefix("eval/")] = value
        if tables is not None:
            for metric, rows in engine.tables.items():
                tables[area + metric] = rows
    return metrics


class StepProfile(Protocol):
    """A profile of some steps. Nothing in it is collective but a barrier in `begin`, and a failure
    costs only the profile.
    """

    @property
    def is_over(self) -> bool:
        """Check whether nothing is left to be profiled."""
        ...

    def begin(self, step: int) -> None:
        """Begin what is due before a step, counted from 1 over all starts of the run."""
        ...

    def end(self, step: int) -> None:
        """End what is due after a step, and write it."""
        ...

    def close(self) -> None:
        """Write the profile so far."""
        ...
