"""Rules about the metric that decides which checkpoint is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from framework.config.run_config import RunConfig
from framework.errors import Problem, Severity
from framework.plan.cluster import Cluster
from framework.text.typos import nearest

_KEY: Final = "checkpoint.keep_best"
# What every run may log; a test holds it against what one did.
LOGGED: Final = (
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "train/loss_scale",
    "train/skipped_steps",
    "throughput/samples_per_sec",
    "throughput/tokens_per_sec",
    "time/step_ms",
    "time/data_ms",
    "memory/host_peak_bytes",
    "memory/device_peak_bytes",
)
_AREAS: Final = frozenset(name.partition("/")[0] for name in LOGGED)
_SMALLER_IS_BETTER: Final = ("loss", "perplexity", "error")


def best_is_measured(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """A metric that is never measured keeps no checkpoint, and nobody would see it before the best one is gone."""
    metric = config.checkpoint.keep_best
    if metric is None:
        return
    if not metric.startswith("eval/"):
        # An area that is ours may get a metric that this list does not know; another one is a slip for certain.
        severity: Severity = "warning" if metric.partition("/")[0] in _AREAS else "error"
        if metric not in LOGGED:
            yield _unknown(metric, [*LOGGED, *_evaluated(config)], "no run measures it", severity)
        return
    evaluation, names = config.evaluation, _evaluated(config)
    if names and metric not in names:
        kind = getattr(config.task, "kind", "")
        yield _unknown(metric, names, f"the {kind} task measures {', '.join(names)}", "error")
    in_between = evaluation.every_steps or evaluation.every_epochs
    if not in_between and not evaluation.at_end:
        yield Problem(
            kind="metric-never-measured",
            key=_KEY,
            value=metric,
            reason="evaluation is off",
            fix="set evaluation.every_epochs: 1",
        )
    elif not in_between and (config.checkpoint.every_steps or config.checkpoint.every_epochs):
        yield Problem(
            kind="metric-measured-once",
            key=_KEY,
            value=metric,
            severity="warning",
            reason="it is measured after the last step only, so no earlier checkpoint can be the best",
            fix="set evaluation.every_epochs: 1",
        )


def best_has_a_direction(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """`best_is` is ``max`` unless it is written down, and of a loss nobody wants the largest."""
    metric, checkpoint = config.checkpoint.keep_best or "", config.checkpoint
    if (
        metric.endswith(_SMALLER_IS_BETTER)
        and checkpoint.best_is == "max"
        and "best_is" not in checkpoint.model_fields_set
    ):
        yield Problem(
            kind="largest-is-best",
            key=_KEY,
            value=metric,
            severity="warning",
            reason="checkpoint.best_is is max, so the checkpoint with the largest value is kept",
            fix="set checkpoint.best_is: min",
        )


def _evaluated(config: RunConfig) -> list[str]:
    """What evaluation measures, as far as the task is known by name."""
    return [f"eval/{name}" for name in getattr(config.task, "metrics", ())]


def _unknown(metric: str, known: Sequence[str], reason: str, severity: Severity) -> Problem:
    area, _, name = metric.rpartition("/")
    alike = sorted(known, key=lambda each: not each.startswith(f"{area}/"), reverse=True)  # its own area wins
    by_name = {each.rpartition("/")[2]: each for each in alike}
    meant = next((each for each in by_name if name and each.startswith(name)), None) or nearest(name, by_name)
    guess = by_name[meant] if meant is not None else None
    return Problem(
        kind="unknown-metric",
        key=_KEY,
        value=metric,
        severity=severity,
        reason=reason,
        fix=f"did you mean {guess}?" if guess else f"write one of {', '.join(known)}",
    )
