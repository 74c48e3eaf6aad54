"""Rules about the metric that decides which checkpoint is kept, and about the moving average of the weights.

Rules about the metric that decides which checkpoint is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from framework.config.optimizer import Lamb
from framework.config.run_config import RunConfig
from framework.config.zero import OptimizerToCPU
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
    """List the metrics that evaluation measures, as far as the task is known by name."""
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


# Rules about the moving average of the weights.


# More of the first weights than this, and the average tells how the run began rather than how it went.
_LARGEST_REST: Final = 0.5


def ema_measured_and_not_kept(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """There is nothing to measure."""
    if config.evaluation.weights == "ema" and config.training.ema is None:
        yield Problem(
            kind="ema-not-kept",
            key="evaluation.weights",
            value="ema",
            reason="no moving average is kept",
            fix="set training.ema: {decay: 0.999}, or evaluation.weights: trained",
        )


def ema_beside_its_weights(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """The average is one more state of the optimizer, which must be in memory, in one place, when a step ends."""
    offload = config.zero.offload_optimizer
    if config.training.ema is None:
        return
    if offload.device == "nvme":
        yield Problem(
            kind="ema-with-offload",
            key="zero.offload_optimizer.device",
            value="nvme",
            reason="DeepSpeed's files on the drive have no place for a moving average of the weights",
            fix="set zero.offload_optimizer: {device: cpu}, or leave training.ema out",
        )
    if isinstance(offload, OptimizerToCPU) and offload.ratio < 1:
        yield Problem(
            kind="ema-with-offload",
            key="zero.offload_optimizer.ratio",
            value=offload.ratio,
            reason="a second optimizer then steps the rest, and keeps no moving average of the weights",
            fix="set zero.offload_optimizer: {device: cpu, ratio: 1.0}, or leave training.ema out",
        )


def ema_with_lamb(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/fp16/unfused_optimizer.py `step_fused_lamb`: the step is given its gradients from outside, and
    no weight shows that it was stepped."""
    is_half = config.precision.dtype in ("fp16", "bf16")
    if config.training.ema is not None and isinstance(config.optimizer, Lamb) and is_half and config.zero.stage == 0:
        yield Problem(
            kind="ema-with-lamb",
            key="optimizer.kind",
            value="lamb",
            reason=f"in {config.precision.dtype} at ZeRO stage 0 DeepSpeed steps LAMB past the moving average of the "
            "weights, which would never begin",
            fix="use adamw, or leave training.ema out",
        )


def length_for_ema(config: RunConfig, total_steps: int | None) -> Iterator[Problem]:
    """An average that reaches back further than the run is mostly what the run began with."""
    ema = config.training.ema
    if ema is None or total_steps is None:
        return
    if ema.start_step >= total_steps:
        yield Problem(
            kind="ema-never-starts",
            key="training.ema.start_step",
            value=ema.start_step,
            severity="warning",
            reason=f"the run has {total_steps} steps, and the average stays what the weights are",
            fix=f"set it below {total_steps}, or leave training.ema out",
        )
        return
    updates = (total_steps - ema.start_step) // ema.every_steps
    rest = ema.decay**updates
    if rest > _LARGEST_REST:
        yield Problem(
            kind="ema-longer-than-run",
            key="training.ema.decay",
            value=ema.decay,
            severity="warning",
            reason=f"after {updates:,} update{'' if updates == 1 else 's'} {rest:.0%} of the average is still what "
            "it began with",
            fix=_shorter(updates),
        )


def _shorter(updates: int) -> str:
    """A decay that reaches back over about a tenth of the run."""
    decay = 1 - 10 / updates if updates > 20 else 0.5
    return f"set training.ema.decay: {decay:.3g}, or begin later with training.ema.start_step"
