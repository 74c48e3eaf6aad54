"""Rules about the moving average of the weights, the metric that decides which checkpoint is kept,
and monitors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from deepspeed_lint.text.typos import nearest
from framework.config.base import Target
from framework.config.optimizer import Constant
from framework.config.run_config import RunConfig, watched_metrics
from framework.config.training import EMA, EarlyStopping, ReduceOnPlateau
from framework.errors import Problem, Severity
from framework.plan.cluster import Cluster
from framework.plan.rules.base import Found, rule
from framework.system.metric_names import AREAS, BY_NAME

_BEST: Final = "checkpoint.keep_best"
# Last words of the names of metrics that grow while a model improves.
_MORE_IS_BETTER: Final = ("accuracy", "f1", "precision", "recall", "auc", "auroc", "bleu")
# With a larger share of the first weights, the average shows how the run began rather than how it
# went.
_LARGEST_REST: Final = 0.5


@rule()
def callbacks_have_evaluations(config: RunConfig, cluster: Cluster) -> Found:
    """Find shipped callbacks without evaluations, which they need, and one that changes the rate
    beside a schedule.
    """
    often = config.evaluation.is_often
    for number, callback in enumerate(config.callbacks):
        if not isinstance(callback, EarlyStopping):
            continue
        key = f"callbacks.{number}"
        if not often:
            reason = "nothing is evaluated before the end"
            fix = "set evaluation.every_epochs or every_steps"
            yield Problem(
                "callback-without-evaluations", reason, fix, key, callback.kind, severity="warning"
            )
        if isinstance(callback, ReduceOnPlateau):
            yield from _rate_beside_schedule(config, callback, key)


def _rate_beside_schedule(
    config: RunConfig, callback: ReduceOnPlateau, key: str
) -> Iterator[Problem]:
    """Find a schedule that undoes what a callback does to the rate."""
    if config.scheduler == Constant():
        return
    kind = getattr(config.scheduler, "kind", "own")
    reason = f"the {kind} schedule sets the rate of every step anew"
    yield Problem(
        "plateau-with-schedule", reason, "set scheduler: {kind: constant}", key, callback.kind
    )


def length_for_ema(config: RunConfig, total_steps: int | None) -> Iterator[Problem]:
    """Find an average that reaches back further than the run: it is mostly the first weights."""
    ema = config.training.ema
    if ema is None or total_steps is None:
        return
    if ema.start_step >= total_steps:
        reason = f"the run has {total_steps} steps, and the average stays what the weights are"
        fix = f"set it below {total_steps}, or leave training.ema out"
        key = "training.ema.start_step"
        yield Problem("ema-never-starts", reason, fix, key, ema.start_step, severity="warning")
        return
    yield from _rest_of_first_weights(ema, (total_steps - ema.start_step) // ema.every_steps)


def _rest_of_first_weights(ema: EMA, updates: int) -> Iterator[Problem]:
    """Find an average that after all its updates is mostly the first weights."""
    rest = ema.decay**updates
    if rest <= _LARGEST_REST:
        return
    key = "training.ema.decay"
    # this one reaches back over about a tenth of the run
    decay = 1 - 10 / updates if updates > 20 else 0.5
    after = "after 1 update" if updates == 1 else f"after {updates:,} updates"
    reason = f"{after} {rest:.0%} of the average is still what it began with"
    fix = f"set {key}: {decay:.3g}, or begin later with training.ema.start_step"
    yield Problem("ema-longer-than-run", reason, fix, key, ema.decay, severity="warning")


@rule()
def best_is_measured(config: RunConfig, cluster: Cluster) -> Found:
    """Find a metric that is never measured: it keeps no checkpoint and stops no run, which would be
    seen only when the best one is gone, or at the first evaluation.
    """
    for key, metric in watched_metrics(config):
        if metric.startswith("eval/"):
            yield from _measured_by_task(config, key, metric)
        else:
            yield from _measured_in_training(config, key, metric)
    checkpoint = config.checkpoint
    evaluation = config.evaluation
    metric = checkpoint.keep_best or ""
    if not metric.startswith("eval/") or evaluation.is_often:
        return
    fix = "set evaluation.every_epochs: 1"
    if not evaluation.at_end:
        yield Problem("metric-never-measured", "evaluation is off", fix, _BEST, metric)
    elif checkpoint.is_often:
        reason = "it is measured after the last step only, so no earlier checkpoint can be the best"
        yield Problem("metric-measured-once", reason, fix, _BEST, metric, severity="warning")


def _measured_in_training(config: RunConfig, key: str, metric: str) -> Iterator[Problem]:
    """Find a metric that neither training nor the machine has."""
    if metric in BY_NAME:
        return
    # One of our areas may have a metric that `BY_NAME` lacks; another area is a slip for certain.
    severity: Severity = "error"
    if metric.partition("/")[0] in AREAS:
        severity = "warning"
    known = [*BY_NAME, *_evaluated(config)]
    yield _unknown(key, metric, known, "no run measures it", severity)


def _measured_by_task(config: RunConfig, key: str, metric: str) -> Iterator[Problem]:
    """Find a metric of evaluation that the task does not measure."""
    names = _evaluated(config)
    # The user's own evaluation sets may have names (`setup/watched_metrics.py`).
    is_own_data = config.data.is_own_code
    name = metric.removeprefix("eval/")
    if is_own_data:
        name = metric.rpartition("/")[2]
    # A metric of several results has each under its own name.
    several = tuple(f"{added}_" for added in _added(config))
    if names and f"eval/{name}" not in names and not name.startswith(several):
        kind = getattr(config.task, "kind", "")
        reason = f"the {kind} task measures {', '.join(names)}"
        yield _unknown(key, metric, names, reason, "error")


@rule("largest-is-best", "warning")
def best_has_a_direction(config: RunConfig, cluster: Cluster) -> Found:
    """Find metrics with the default direction of `best_is` where the other one is meant: a loss of
    `keep_best`, a score of a callback.
    """
    checkpoint = config.checkpoint
    is_default = checkpoint.best_is == "max" and "best_is" not in checkpoint.model_fields_set
    if is_default and (checkpoint.keep_best or "").endswith(("loss", "perplexity", "error")):
        reason = "checkpoint.best_is is max, so the checkpoint with the largest value is kept"
        yield _BEST, reason, "set checkpoint.best_is: min"
    for number, callback in enumerate(config.callbacks):
        if not isinstance(callback, EarlyStopping) or "best_is" in callback.model_fields_set:
            continue
        if callback.metric.endswith(_MORE_IS_BETTER):
            reason = "best_is is min, so the smallest value counts as the best"
            fix = "set best_is: max beside it"
            key = f"callbacks.{number}.metric"
            yield Problem("smallest-is-best", reason, fix, key, callback.metric, severity="warning")


def _added(config: RunConfig) -> list[str]:
    """List the metrics of torchmetrics; a config of some sections alone was handed none over."""
    return [*config.evaluation.metrics, *getattr(config, "given_metrics", ())]


def _evaluated(config: RunConfig) -> list[str]:
    """List the metrics that evaluation measures, as far as the task is known by name."""
    names = getattr(config.task, "metrics", ())
    if not names:
        return []
    return [f"eval/{name}" for name in (*names, *_added(config))]


def _unknown(
    key: str, metric: str, known: Sequence[str], reason: str, severity: Severity
) -> Problem:
    """Return the problem of a metric that is not known, with the nearest known one as the fix."""
    meant = _nearest_metric(metric, known)
    fix = f"write one of {', '.join(known)}"
    if meant is not None:
        fix = f"did you mean {meant}?"
    return Problem("unknown-metric", reason, fix, key, metric, severity=severity)


def _nearest_metric(metric: str, known: Sequence[str]) -> str | None:
    """Return the known metric with a name, without the area, that begins so or is nearest."""
    area, _, name = metric.rpartition("/")
    # of metrics with the same name the one of the same area comes last, and wins
    alike = sorted(known, key=lambda other: other.startswith(f"{area}/"))
    by_name = {other.rpartition("/")[2]: other for other in alike}
    meant = None
    if name:
        meant = next((other for other in by_name if other.startswith(name)), None)
    if meant is None:
        meant = nearest(name, by_name)
    if meant is None:
        return None
    return by_name[meant]


# Names of arguments with secret values.
_CREDENTIAL: Final = re.compile(
    r"(^|_)"
    r"(api_?key|password|passwd|secret|credentials?|private_key"
    r"|(access|auth|api|bearer|hf)_?token|token)"
    r"($|_)",
    re.IGNORECASE,
)


@rule("credential-in-config")
def credentials_of_monitors(config: RunConfig, cluster: Cluster) -> Found:
    """Find credentials in a config, which is copied to config.yaml and to the services themselves.
    No value is shown.
    """
    mlflow = config.monitors.mlflow
    if mlflow is not None and _has_password(mlflow.tracking_uri or ""):
        reason = "it holds a password, and would be copied into the run folder"
        fix = "set it in the environment"
        key = "monitors.mlflow.tracking_uri"
        yield Problem("credential-in-config", reason, fix, key)
    for number, other in enumerate(config.monitors.others):
        prefix = ".args" if isinstance(other, Target) else ""
        for name in other.factory().kwargs:
            yield from _secret_argument(name, f"monitors.others.{number}{prefix}.{name}")


def _secret_argument(name: str, key: str) -> Iterator[Problem]:
    if _CREDENTIAL.search(name):
        reason = "it looks like a credential, and would be copied into the run folder"
        fix = "read it from the environment in your code"
        yield Problem("credential-in-config", reason, fix, key)


def _has_password(uri: str) -> bool:
    host = uri.partition("://")[2].partition("/")[0]
    return "@" in host
