"""Rules about the moving average of the weights, the metric that decides which checkpoint is kept,
and monitors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from framework.config.base import Object, Target
from framework.config.optimizer import Constant
from framework.config.run_config import RunConfig
from framework.config.training import EarlyStopping, ReduceOnPlateau
from framework.errors import Problem, Severity
from framework.plan.cluster import Cluster
from framework.plan.rules.base import Found, rule
from framework.text.typos import nearest

_BEST: Final = "checkpoint.keep_best"
# What every run may log; a test holds it against what one did.
LOGGED: Final[Sequence[str]] = json.loads(
    Path(__file__).with_name("logged.json").read_text(encoding="utf-8")
)
_AREAS: Final = frozenset(name.partition("/")[0] for name in LOGGED)
# More of the first weights than this, and the average tells how the run began rather than how it
# went.
_LARGEST_REST: Final = 0.5


@rule()
def callbacks_have_evaluations(config: RunConfig, cluster: Cluster) -> Found:
    """Those in the box look at evaluations, and the one that moves the rate shares it with no
    schedule.
    """
    often = config.evaluation.is_often
    for number, callback in enumerate(config.callbacks):
        if not isinstance(callback, EarlyStopping):
            continue
        key = f"callbacks.{number}"
        moves = isinstance(callback, ReduceOnPlateau)
        if not often:
            reason = "nothing is evaluated before the end"
            fix = "set evaluation.every_epochs or every_steps"
            yield Problem(
                "callback-without-evaluations", reason, fix, key, callback.kind, severity="warning"
            )
        if moves and config.scheduler != Constant():
            reason = (
                f"the {getattr(config.scheduler, 'kind', 'own')} schedule sets the rate of "
                "every step anew"
            )
            yield Problem(
                "plateau-with-schedule",
                reason,
                "set scheduler: {kind: constant}",
                key,
                callback.kind,
            )


def length_for_ema(config: RunConfig, total_steps: int | None) -> Iterator[Problem]:
    """An average that reaches back further than the run is mostly what the run began with."""
    ema = config.training.ema
    if ema is None or total_steps is None:
        return
    if ema.start_step >= total_steps:
        reason = f"the run has {total_steps} steps, and the average stays what the weights are"
        fix = f"set it below {total_steps}, or leave training.ema out"
        key = "training.ema.start_step"
        yield Problem("ema-never-starts", reason, fix, key, ema.start_step, severity="warning")
        return
    updates = (total_steps - ema.start_step) // ema.every_steps
    rest = ema.decay**updates
    key = "training.ema.decay"
    if rest > _LARGEST_REST:
        # reaches back over about a tenth of the run
        decay = 1 - 10 / updates if updates > 20 else 0.5
        after = f"after {updates:,} update{'' if updates == 1 else 's'}"
        reason = f"{after} {rest:.0%} of the average is still what it began with"
        fix = f"set {key}: {decay:.3g}, or begin later with training.ema.start_step"
        yield Problem("ema-longer-than-run", reason, fix, key, ema.decay, severity="warning")


@rule()
def best_is_measured(config: RunConfig, cluster: Cluster) -> Found:
    """A metric that is never measured keeps no checkpoint, and nobody would see it before the best
    one is gone.
    """
    metric = config.checkpoint.keep_best
    checkpoint = config.checkpoint
    if metric is None:
        return
    if not metric.startswith("eval/"):
        # An area that is ours may get a metric that this list does not know; another one is a slip
        # for certain.
        if metric.partition("/")[0] in _AREAS:
            severity: Severity = "warning"
        else:
            severity = "error"
        if metric not in LOGGED:
            yield _unknown(metric, [*LOGGED, *_evaluated(config)], "no run measures it", severity)
        return
    evaluation = config.evaluation
    names = _evaluated(config)
    # Sets of one's own may have names, which `setup/components.py` knows.
    is_of_a_set = (
        isinstance(config.data, Target | Object) and f"eval/{metric.rpartition('/')[2]}" in names
    )
    if names and metric not in names and not is_of_a_set:
        kind = getattr(config.task, "kind", "")
        yield _unknown(metric, names, f"the {kind} task measures {', '.join(names)}", "error")
    if evaluation.is_often:
        return
    fix = "set evaluation.every_epochs: 1"
    if not evaluation.at_end:
        yield Problem("metric-never-measured", "evaluation is off", fix, _BEST, metric)
    elif checkpoint.is_often:
        reason = "it is measured after the last step only, so no earlier checkpoint can be the best"
        yield Problem("metric-measured-once", reason, fix, _BEST, metric, severity="warning")


@rule("largest-is-best", "warning")
def best_has_a_direction(config: RunConfig, cluster: Cluster) -> Found:
    """`best_is` is ``max`` unless it is written down, and of a loss nobody wants the largest."""
    checkpoint = config.checkpoint
    is_default = checkpoint.best_is == "max" and "best_is" not in checkpoint.model_fields_set
    if is_default and (checkpoint.keep_best or "").endswith(("loss", "perplexity", "error")):
        reason = "checkpoint.best_is is max, so the checkpoint with the largest value is kept"
        yield _BEST, reason, "set checkpoint.best_is: min"


def _evaluated(config: RunConfig) -> list[str]:
    """List the metrics that evaluation measures, as far as the task is known by name."""
    return [f"eval/{name}" for name in getattr(config.task, "metrics", ())]


def _unknown(metric: str, known: Sequence[str], reason: str, severity: Severity) -> Problem:
    area, _, name = metric.rpartition("/")
    # its own area wins
    alike = sorted(known, key=lambda each: not each.startswith(f"{area}/"), reverse=True)
    by_name = {each.rpartition("/")[2]: each for each in alike}
    meant = next((each for each in by_name if name and each.startswith(name)), None) or nearest(
        name, by_name
    )
    if meant is None:
        fix = f"write one of {', '.join(known)}"
    else:
        fix = f"did you mean {by_name[meant]}?"
    return Problem("unknown-metric", reason, fix, _BEST, metric, severity=severity)


# Names of arguments whose values open something.
_CREDENTIAL: Final = re.compile(
    r"(^|_)(api_?key|password|passwd|secret|credentials?|private_key|(access|auth|api|bearer|hf)_?token|token)($|_)",
    re.IGNORECASE,
)


@rule("credential-in-config")
def credentials_of_monitors(config: RunConfig, cluster: Cluster) -> Found:
    """What is in a config is copied to config.yaml and to the services themselves. No value is
    shown.
    """
    reason = "and would be copied into the run folder"
    mlflow = config.monitors.mlflow
    if (
        mlflow is not None
        and "@" in (mlflow.tracking_uri or "").partition("://")[2].partition("/")[0]
    ):
        fix = "set it in the environment"
        key = "monitors.mlflow.tracking_uri"
        yield Problem("credential-in-config", f"it holds a password, {reason}", fix, key)
    for number, other in enumerate(config.monitors.others):
        for name in other.args:
            if _CREDENTIAL.search(name):
                fix = "read it from the environment in your code"
                key = f"monitors.others.{number}.args.{name}"
                yield Problem(
                    "credential-in-config", f"it looks like a credential, {reason}", fix, key
                )
