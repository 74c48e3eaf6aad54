"""Verdict: what bounds a run, in one sentence, with the figure that shows it and what to try next.

A pure function over mean metrics. A share `s` of a step that is spent on something else than the
model's own arithmetic can make the run at most 1 / (1 - s) times as fast once it is gone; each
threshold is the share from which that is worth the work its remedy takes. Where several are
reached, the one that exceeds its threshold most bounds the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from framework.system.metric_names import PHASES, time_of

Kind = Literal[
    "data-bound",
    "host-bound",
    "communication-bound",
    "bubble-bound",
    "checkpoint-bound",
    "memory-bound",
    "compute-bound",
    "mixed",
    "unknown",
]

# A loader that keeps up leaves no wait, and more workers cost one line of the config: from 1.11
# times on.
DATA_SHARE: Final = 0.10
# The same for saving: saving less often, or in the background, is a line as well.
CHECKPOINT_SHARE: Final = 0.10
# Time in no phase of the step, and copies to the device: the device waits for Python. Up to 1.25
# times.
HOST_SHARE: Final = 0.20
# With the optimizer, what a step costs however small its batch is: from here on it exceeds forward
# and backward.
FIXED_SHARE: Final = 0.50
# Below a tenth of the peak, with nothing that it waits for, a device runs kernels that are too
# small to fill it.
IDLE_MFU: Final = 0.10
# Only what is not hidden behind arithmetic counts. Its remedies change layout or batch, which takes
# up to 1.33 times.
COMMUNICATION_SHARE: Final = 0.25
# Times the median of the other ranks: from here on the others wait for the slow rank rather than
# for what is sent.
SLOW_RANK: Final = 1.2
# (p - 1) / (m + p - 1) of p stages and m micro-batches; a fifth is m = 4 (p - 1), the usual advice
# for pipelines.
BUBBLE_SHARE: Final = 0.20
# The allocator needs the rest: beyond it fragments end a run sooner than arithmetic on paper does.
MEMORY_SHARE: Final = 0.90
# From here on a device does what good implementations get out of it, and a full memory is put to
# good use.
GOOD_MFU: Final = 0.40
# Most of a step.
COMPUTE_SHARE: Final = 0.50

_OUT_OF_MEMORY: Final = re.compile(r"out[ -]of[ -]memory", re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """Judgement on a run.

    Attributes:
        kind: what bounds it; ``unknown`` if too little was measured, ``mixed`` if nothing stands
            out.
        sentence: the same in one sentence, with the figure.
        advice: what to try next.
        share: that figure as a fraction of 1; None if the sentence has no figure.
    """

    kind: Kind
    sentence: str
    advice: str
    share: float | None = None


def _shares(metrics: Mapping[str, float], step: float) -> dict[str, float]:
    """Return the timed phases as shares of a step of `step` ms."""
    shares = {}
    for phase in PHASES:
        milliseconds = metrics.get(time_of(phase), math.nan)
        if math.isfinite(milliseconds):
            shares[phase] = max(0.0, milliseconds) / step
    return shares


def judge(
    metrics: Mapping[str, float],
    *,
    pipe_size: int = 1,
    accumulation_steps: int = 1,
    saving_share: float = 0.0,
    device_bytes: float | None = None,
    ended_with: str = "",
) -> Verdict:
    """Find what bounds a run.

    Args:
        metrics: mean of every metric over the run without its warm-up; ``time/*_ms`` are parts of
            ``time/step_ms``.
        pipe_size: stages of its pipeline.
        accumulation_steps: micro-batches of a step.
        saving_share: part of the time for steps and saves that saves take.
        device_bytes: memory of one device; None if it is not known.
        ended_with: the error that ended it, if one did.
    """
    if _OUT_OF_MEMORY.search(ended_with):
        return Verdict(
            "memory-bound",
            "memory-bound: the run ended because a device ran out of memory",
            _LESS_MEMORY,
        )
    step = metrics.get("time/step_ms", math.nan)
    if not (math.isfinite(step) and step > 0):
        advice = "log more often (training.log_every), so that there is an interval to measure"
        return Verdict("unknown", "unknown: no time of a step was measured", advice)
    shares = _shares(metrics, step)
    factor = metrics.get("ranks/slowest_factor", 1.0)
    if pipe_size > 1:
        factor = 1.0  # stages differ
    causes = [
        _waiting_for_data(shares, step),
        _communication(shares, step, factor),
        _bubble(pipe_size, accumulation_steps),
        _host(shares, step),
        _fixed_costs(shares, step),
        _saving(saving_share),
    ]
    excess, verdict = max(causes, key=lambda cause: cause[0])
    if excess >= 1:
        return verdict
    return _device_verdict(shares, metrics, device_bytes)


# Share of a cause in units of its threshold, and the verdict if it is the largest.
_Cause = tuple[float, Verdict]


def _cause(kind: Kind, share: float, threshold: float, text: str, advice: str) -> _Cause:
    """Return the share in units of its threshold, and the verdict with this text."""
    return share / threshold, Verdict(kind, f"{kind}: {text}", advice, share)


def _share_text(share: float, step_ms: float) -> str:
    return f"{share:.0%} of a step ({_milliseconds(share * step_ms)} of {_milliseconds(step_ms)})"


def _saving(share: float) -> _Cause:
    """Judge saving; `share`: of the time for steps and saves."""
    advice = "save less often (checkpoint.every_steps), in the background, or to a faster disk"
    text = f"saving takes {share:.0%} of the time for steps and saves"
    return _cause("checkpoint-bound", share, CHECKPOINT_SHARE, text, advice)


def _waiting_for_data(shares: Mapping[str, float], step_ms: float) -> _Cause:
    share = shares.get("data", 0.0)
    text = f"ranks wait for the loader for {_share_text(share, step_ms)}"
    advice = (
        "raise data.num_workers, do less per sample (prepare or cache it once), or keep the "
        "data on a local disk"
    )
    return _cause("data-bound", share, DATA_SHARE, text, advice)


def _communication(shares: Mapping[str, float], step_ms: float, factor: float) -> _Cause:
    """Judge communication; `factor`: how much longer the slowest rank works than the others."""
    share = shares.get("communication", 0.0)
    text = f"communication that nothing hides takes {_share_text(share, step_ms)}"
    advice = (
        "accumulate more micro-batches per step (batch.global_size), lower zero.stage where "
        "memory allows it, set zero.overlap_comm: true, or keep what talks most on one host"
    )
    if factor >= SLOW_RANK:
        text += (
            f", and the slowest rank works {factor:.2f} times as long as the others, which "
            "wait for it"
        )
        advice = (
            "look for what slows that rank (ranks/slowest): its device, its processor, its disk; "
            "then " + advice
        )
    return _cause("communication-bound", share, COMMUNICATION_SHARE, text, advice)


def _bubble(pipe_size: int, micro_batches: int) -> _Cause:
    share = (pipe_size - 1) / (micro_batches + pipe_size - 1)
    text = (
        f"with {pipe_size} stages and {micro_batches} micro-batches per step, stages are idle for "
        f"{share:.0%} of it ((p - 1) / (m + p - 1))"
    )
    advice = (
        f"raise batch.accumulation_steps to {4 * (pipe_size - 1)} or more with a smaller "
        "micro_size, or use fewer stages"
    )
    return _cause("bubble-bound", share, BUBBLE_SHARE, text, advice)


_LESS_HOST: Final = (
    "raise batch.micro_size or accumulation_steps, compile the model, use a fused optimizer, and "
    "log less often"
)


def _host(shares: Mapping[str, float], step_ms: float) -> _Cause:
    share = shares.get("other", 0.0) + shares.get("copy", 0.0)
    text = f"Python and copies between the phases take {_share_text(share, step_ms)}"
    return _cause("host-bound", share, HOST_SHARE, text, _LESS_HOST)


def _fixed_costs(shares: Mapping[str, float], step_ms: float) -> _Cause:
    """Judge what a step costs with any batch."""
    share = shares.get("other", 0.0) + shares.get("copy", 0.0) + shares.get("optimizer", 0.0)
    text = (
        "work of a step that does not grow with its batch (optimizer, copies, Python) takes "
        f"{_share_text(share, step_ms)}"
    )
    return _cause("host-bound", share, FIXED_SHARE, text, _LESS_HOST)


def _device_verdict(
    shares: Mapping[str, float], metrics: Mapping[str, float], device_bytes: float | None
) -> Verdict:
    """Judge a run that waits for nothing: by its memory, and by how busy its device is. Metrics
    that are missing count as not known.
    """
    mfu = metrics.get("throughput/mfu", math.nan)
    full = (metrics.get("memory/device_peak_bytes") or 0.0) / (device_bytes or math.inf)
    if full >= MEMORY_SHARE and not mfu >= GOOD_MFU:
        text = (
            f"memory-bound: {full:.0%} of a device's memory is in use at the peak, so no "
            "larger micro-batch fits"
        )
        return Verdict("memory-bound", text, _LESS_MEMORY, full)
    if mfu < IDLE_MFU:
        text = (
            f"host-bound: the device reaches {mfu:.1%} of its peak (MFU) and waits for nothing "
            "that was measured"
        )
        return Verdict(
            "host-bound", text, "raise batch.micro_size, compile the model, or use bf16", mfu
        )
    compute = shares.get("forward", 0.0) + shares.get("backward", 0.0)
    if compute >= COMPUTE_SHARE:
        text = f"compute-bound: forward and backward take {compute:.0%} of a step"
        return Verdict("compute-bound", text + _utilization(mfu), _FASTER_DEVICE, compute)
    if {"forward", "backward"} <= shares.keys():
        return _mixed(shares)
    if not math.isnan(mfu):
        text = "compute-bound: the run waits for no data"
        return Verdict("compute-bound", text + _utilization(mfu), _FASTER_DEVICE, mfu)
    return _unknown(shares)


def _utilization(mfu: float) -> str:
    if math.isnan(mfu):
        return ""
    return f", at {mfu:.0%} of the device's peak (MFU)"


def _mixed(shares: Mapping[str, float]) -> Verdict:
    largest = sorted(shares, key=lambda phase: -shares[phase])[:2]
    parts = " and ".join(f"{phase} {shares[phase]:.0%}" for phase in largest)
    advice = "nothing stands out: look at the split of a step below"
    text = f"mixed: no part of a step bounds the run; its largest are {parts}"
    return Verdict("mixed", text, advice)


def _unknown(shares: Mapping[str, float]) -> Verdict:
    text = "unknown: no part was timed"
    if "data" in shares:
        waits = f"waiting for data takes {_percent(shares['data'])} of a step"
        text = f"not data-bound: {waits}, and its other parts were not timed"
    return Verdict(
        "unknown",
        text,
        "train with a release that times the parts of a step (time/forward_ms and others)",
    )


_FASTER_DEVICE: Final = "lower precision (precision.dtype: bf16), compiled kernels, or more devices"
_LESS_MEMORY: Final = (
    "recompute activations (training.recompute_every), raise zero.stage, offload the optimizer, "
    "or lower batch.micro_size and accumulate more"
)


def _percent(share: float) -> str:
    if share >= 0.0005:
        return f"{share:.1%}"
    return "less than 0.1%"


def _milliseconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f} ms"
    return f"{value:.3g} ms"
