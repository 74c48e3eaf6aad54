"""One pass over an evaluation set: sums of every batch, and what looks at all predictions together.

Sums are `engine.metrics.EvalSums`. What `Task.collect` returns is gathered on rank 0, where
`Task.finish` computes figures of it that every rank then has.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed

from framework.engine.distributed import device, from_rank0, rank
from framework.engine.gathered import SHARE_OF_HOST, Collected, Source, host_limit, size_of
from framework.engine.metrics import Evaluation
from framework.engine_protocol import Table
from framework.errors import ConfigError, TrainingError, in_one_line
from framework.system.log import print_line, warn
from framework.tasks.task import Task, collects

if TYPE_CHECKING:
    from framework.engine.torch_metrics import MetricSums
    from framework.plan.layout import Layout

# Errors of a computation over too few samples, such as one class alone: the trial of evaluation
# has one batch.
_OF_FEW_SAMPLES: Final = (ValueError, ArithmeticError)


class UndefinedOnFewError(ArithmeticError):
    """A metric cannot be computed of the first batch alone; the next evaluation has all."""


@dataclass
class _Results:
    """What rank 0 has computed; the other ranks have no tables."""

    figures: dict[str, float] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    undefined: UndefinedOnFewError | None = None


@dataclass(frozen=True)
class _Failure:
    text: str
    is_of_few: bool


class WholeEvaluation(Evaluation):
    """A pass that also measures what looks at all predictions together."""

    looks_at_all = True

    def __init__(self, task: Task, layout: Layout, batches: Any, *, is_trial: bool) -> None:
        """Begin a pass.

        Args:
            task: what its batches mean.
            layout: of the ranks.
            batches: the loader; it knows the order of its ranks.
            is_trial: it is the trial before the first step, of the first batch alone.
        """
        super().__init__(task)
        self._is_trial = is_trial
        self._takes_turns = bool(getattr(batches, "takes_turns", False))
        self._num_batches: int = getattr(batches, "of_batches", 1)
        self._collected: Collected | None = None
        self._metric_sums: MetricSums | None = None
        source = Source.of(layout, rank())
        self._is_source = source.is_source
        limit = host_limit()
        if collects(task):
            self._collected = Collected(source, task_name=task.shown_name(), most_bytes=limit)
        if task.added_metrics is not None:
            from framework.engine.torch_metrics import MetricSums

            self._metric_sums = MetricSums(task.added_metrics, device(), most_bytes=limit)

    def add(self, outputs: Any, targets: Any, *, counts: bool) -> None:
        super().add(outputs, targets, counts=counts)
        if not (counts and self._is_source):
            return
        if self._collected is not None:
            self._collected.add(self._task.collect(outputs, targets), targets)
        if self._metric_sums is not None:
            predictions, truth = self._task.predicted(outputs, targets)
            self._metric_sums.update(predictions, truth)

    def figures(self) -> dict[str, float]:
        """Return all metrics under their public names, alike on every rank. Collective.

        Raises:
            ConfigError: kinds ``task-metric-result``, ``task-collect-result``,
                ``collected-too-large``.
            TrainingError: kind ``metric-failed``: `Task.finish`, or a metric, has raised.
            UndefinedOnFewError: so in the trial, where a single batch may be the reason.
        """
        figures = super().figures()
        computed = _Results()
        if self._collected is not None:
            gathered = self._collected.on_rank0(
                takes_turns=self._takes_turns, num_batches=self._num_batches
            )
            if self._is_trial and rank() == 0:
                self._announce(gathered.num_bytes)
            finish = f"{self._task.shown_name()}.finish"
            self._try_to_take(finish, lambda: self._task.finish(gathered.values), computed)
        if self._metric_sums is not None:
            self._metric_sums.bring_to_rank0(self._is_source, num_batches=self._num_batches)
            for name, compute in self._metric_sums.computations():
                self._try_to_take(name, compute, computed)
        if computed.undefined is not None:
            raise computed.undefined
        self.tables = computed.tables
        return figures | {f"eval/{name}": value for name, value in computed.figures.items()}

    def _try_to_take(self, name: str, compute: Callable[[], Any], results: _Results) -> None:
        """Take a result; one that a single batch has no value of is kept as an error, so that the
        others are tried as well. Collective.
        """
        try:
            self._take(name, compute, results)
        except UndefinedOnFewError as error:
            results.undefined = results.undefined or error

    def _take(self, name: str, compute: Callable[[], Any], results: _Results) -> None:
        """Compute on rank 0, and add the figures to the results of every rank; tables stay there.
        Collective.
        """
        computed: Any = None
        cause: Exception | None = None
        if rank() == 0:
            try:
                with torch.no_grad():
                    found = as_results(compute(), name=name)
                results.tables.update(found.tables)  # written by rank 0 alone
                computed = found.figures
            except ConfigError as error:
                computed = error
            except Exception as error:
                cause = error
                computed = _Failure(_described(error), isinstance(error, _OF_FEW_SAMPLES))
        computed = from_rank0(computed)
        if isinstance(computed, _Failure):
            if self._is_trial and computed.is_of_few:
                if rank() == 0:
                    warn(
                        f"{name} raised {computed.text}: of the first batch alone it has no value, "
                        "so it is tried again by the first evaluation of all [metric-not-tried]"
                    )
                raise UndefinedOnFewError(f"{name} raised {computed.text}")
            raise TrainingError(f"{name} raised {computed.text} [metric-failed]") from cause
        results.figures.update(computed)

    def _announce(self, num_bytes: int) -> None:
        total = num_bytes * self._num_batches
        print_line(
            f"evaluation: {self._task.shown_name()}.collect brings about {size_of(total)} to rank "
            f"0 in each pass (at most {size_of(host_limit())}, {SHARE_OF_HOST:.0%} of the host's "
            "free memory)"
        )


def _described(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{in_one_line(error, longest=300)} ({frame.filename}:{frame.lineno})"


def as_results(values: Any, *, name: str) -> _Results:
    """Sort what was computed into figures and tables.

    Args:
        values: metric name -> a number, or a vector or matrix of numbers as a tensor, an array or
            lists.
        name: of what computed them, for the message.

    Raises:
        ConfigError: kind ``task-metric-result``: something else.
    """
    if not isinstance(values, Mapping):
        reason = f"{name} returned a {type(values).__name__}"
        fix = "return a dict of figures by the name of the metric"
        raise ConfigError.of("task-metric-result", reason, fix, "task")
    results = _Results()
    for key, value in values.items():
        try:
            tensor = torch.as_tensor(value).detach().double().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            reason = f"{name} returned a {type(value).__name__} for the metric {key!r}"
            fix = "return a float, or a matrix of numbers, which is written to a file"
            raise ConfigError.of("task-metric-result", reason, fix, "task") from error
        if tensor.numel() == 1:
            results.figures[str(key)] = float(tensor)
        elif 1 <= tensor.ndim <= 2:
            results.tables[str(key)] = tensor.view(-1, tensor.shape[-1]).tolist()
        else:
            reason = f"{name} returned the shape {tuple(tensor.shape)} for the metric {key!r}"
            fix = "return a number, or a matrix"
            raise ConfigError.of("task-metric-result", reason, fix, "task")
    return results
