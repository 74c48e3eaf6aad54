"""Names of the metrics that every run may log: unit, kind and meaning of each, in one table.

The engine, the loop, the rules on configs and the report take the names and the parts of a step
from here; the table of docs/metrics.md is written from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["value", "mean", "rate", "peak", "count"]
"""``value``: of one step; ``mean``: over ranks, and for times over the steps since the point
before; ``rate``: per second since then; ``peak``: the most of any rank so far; ``count``: of
events.
"""


@dataclass(frozen=True)
class Metric:
    """A metric that every run may log.

    Attributes:
        name: ``area/name``.
        unit: empty for plain numbers.
        kind: how its values of ranks and steps become one.
        meaning: in the words of docs/metrics.md; so is `absent`.
        absent: when no point has it; empty if all have.
    """

    name: str
    unit: str
    kind: Kind
    meaning: str
    absent: str = ""


WORK_PHASES: Final = ("data", "copy", "forward", "backward", "optimizer")
"""Parts of a step in which a rank does work of its own; in the others it waits for the slowest."""
REST: Final = "other"
"""The rest of a step."""
PHASES: Final = (
    "data",
    "copy",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "bubble",
    REST,
)
"""Parts of a step, in its order."""


def time_of(phase: str) -> str:
    """Return the name of the metric of a part of a step."""
    return f"time/{phase}_ms"


METRICS: Final = (
    Metric(
        "train/loss",
        "",
        "mean",
        "mean over the step's micro-batches and all ranks",
    ),
    Metric(
        "train/lr",
        "",
        "value",
        "learning rate of the step",
    ),
    Metric(
        "train/grad_norm",
        "",
        "value",
        "of all gradients before clipping",
        "where DeepSpeed keeps none",
    ),
    Metric(
        "train/loss_scale",
        "",
        "value",
        "of fp16",
        "without fp16",
    ),
    Metric(
        "train/skipped_steps",
        "steps",
        "count",
        "skipped so far, because gradients were not finite, or by "
        "[`training.bad_steps`](bad-steps.md)",
    ),
    Metric(
        "train/balance_loss",
        "",
        "mean",
        "of mixtures of experts, unweighted, mean over them: 1 where tokens spread evenly",
        "without `model.moe`, or a mixture of transformers with `output_router_logits`",
    ),
    Metric(
        "train/dropped_tokens",
        "share",
        "mean",
        "of the experts that tokens chose, those that had no room",
        "without `model.moe`, or a mixture of transformers with `output_router_logits`",
    ),
    Metric(
        "train/spike_score",
        "share",
        "value",
        "of the last 128 logged losses, those more than six standard deviations off the mean of "
        "up to 128 before them (losses that are not finite are off); each start begins with none",
        "before the 17th logged loss",
    ),
    Metric(
        "throughput/samples_per_sec",
        "1/s",
        "rate",
        "on all ranks",
    ),
    Metric(
        "throughput/tokens_per_sec",
        "1/s",
        "rate",
        "on all ranks",
        "where samples have no fixed number of tokens",
    ),
    Metric(
        "throughput/tflops",
        "10^12 operations/s",
        "rate",
        "*model* operations of one device on average (below)",
        "for a model of one's own, and images whose size only the data knows",
    ),
    Metric(
        "throughput/mfu",
        "share",
        "rate",
        "`tflops` of the device's listed peak: model FLOPs utilisation",
        "where `tflops` is, and where no peak is listed for the device (a processor, say) or the "
        "type of numbers",
    ),
    Metric(
        "throughput/hfu",
        "share",
        "rate",
        "the same with what recomputation computes again: hardware FLOPs utilisation",
        "without `training.recompute_every`, and as `mfu`",
    ),
    Metric(
        "time/step_ms",
        "ms",
        "mean",
        "of one optimizer step, all in all: the sum of the parts that follow",
    ),
    Metric(
        "time/data_ms",
        "ms",
        "mean",
        "waiting for the loader; on a GPU as far as the device had nothing to do meanwhile",
    ),
    Metric(
        "time/copy_ms",
        "ms",
        "mean",
        "batches on their way to the device",
    ),
    Metric(
        "time/forward_ms",
        "ms",
        "mean",
        "model and loss; at ZeRO stage 3 with the gathering of weights",
    ),
    Metric(
        "time/backward_ms",
        "ms",
        "mean",
        "backward pass, with what is sent during it",
    ),
    Metric(
        "time/communication_ms",
        "ms",
        "mean",
        "what the step waits for when the backward pass has ended: sums of gradients that are "
        "left; at ZeRO stages 1 and 2 also the gathering of weights after the optimizer",
        "with one rank",
    ),
    Metric(
        "time/bubble_ms",
        "ms",
        "mean",
        "stages of a pipeline that wait for, and send to, their neighbours",
        "without a pipeline",
    ),
    Metric(
        "time/optimizer_ms",
        "ms",
        "mean",
        "clipping, the optimizer, and at stage 3 what it gathers",
    ),
    Metric(
        "time/other_ms",
        "ms",
        "mean",
        "the rest: logging, agreement on stops, Python between the parts",
    ),
    Metric(
        "time/checkpoint_ms",
        "ms",
        "mean",
        "that training waited for saves since the point before",
        "without a save; of the last one, which no point follows, see `events.jsonl`",
    ),
    Metric(
        "data/stalls",
        "waits",
        "count",
        "for the loader, longer than a tenth of a step, since the point before",
    ),
    Metric(
        "ranks/slowest",
        "rank",
        "value",
        "that spends most time on work of its own: data, copy, forward, backward and optimizer",
        "with one rank",
    ),
    Metric(
        "ranks/slowest_factor",
        "times",
        "value",
        "that time, of the median of the other ranks; a wait within forward or backward pass, as "
        "at stage 3, counts as work and hides a part",
        "with one rank",
    ),
    Metric(
        "run/restarts",
        "starts",
        "count",
        "of this run folder before this one",
    ),
    Metric(
        "memory/host_peak_bytes",
        "bytes",
        "peak",
        "largest resident set so far",
    ),
    Metric(
        "memory/device_peak_bytes",
        "bytes",
        "peak",
        "most that was allocated so far",
        "on a processor",
    ),
)
BY_NAME: Final = {metric.name: metric for metric in METRICS}
AREAS: Final = frozenset(name.partition("/")[0] for name in BY_NAME)
"""Areas of these names; a run's own metrics have others."""
