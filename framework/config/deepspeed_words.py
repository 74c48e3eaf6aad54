"""DeepSpeed's top-level keys and where a run config says the same: for people who know DeepSpeed's
words and write them here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from framework.config.base import Section
from framework.config.optimizer import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from framework.config.precision import BF16, FP16
from framework.config.zero import OFFLOADS, Zero

_WORDS: Final[dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
# DeepSpeed key -> the section of a run config that decides it.
OWNED: Final[Mapping[str, str]] = _WORDS["owned"]
# Top-level keys that DeepSpeed 0.19.8 reads and no section decides (runtime/config.py,
# runtime/constants.py).
PASSED_THROUGH: Final = frozenset(_WORDS["passed_through"])
# Sections of these that further keys can be put into.
SHARED: Final = frozenset(
    {
        "fp16",
        "bf16",
        "torch_autocast",
        "data_types",
        "zero_optimization",
        "optimizer",
        "scheduler",
        "pipeline",
    }
)
# Each of DeepSpeed's schedules: its name, and our field -> DeepSpeed's parameter.
SCHEDULES: Final[Mapping[type[Section], tuple[str, Mapping[str, str]]]] = {
    section: (section.__name__, _WORDS["schedules"][section.__name__])
    for section in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
_SCHEDULE: Final = {
    theirs: ours for _, names in SCHEDULES.values() for ours, theirs in names.items()
}
_OPTIMIZER: Final = (
    "lr",
    "weight_decay",
    "betas",
    "eps",
    "momentum",
    "nesterov",
    "max_coeff",
    "min_coeff",
)
_ELSEWHERE: Final = {"dtype", "grad_accumulation", "grad_reduction"}
# DeepSpeed's dotted key -> ours, for every key that rendering writes into a shared section or that
# is another name of one.
TYPED: Final[Mapping[str, str]] = {
    **_WORDS["typed"],
    **{
        f"zero_optimization.{theirs}": f"zero.{name}"
        for name in Zero.model_fields
        for theirs in (name, name.removeprefix("stage3_"))
        if name not in OFFLOADS
    },
    **{
        f"zero_optimization.{name}.{field}": f"zero.{name}.{field}"
        for name, devices in OFFLOADS.items()
        for device in devices.values()
        for field in device.model_fields
    },
    **{f"fp16.{name}": f"precision.{name}" for name in FP16.model_fields if name not in _ELSEWHERE},
    **{f"bf16.{name}": f"precision.{name}" for name in BF16.model_fields if name not in _ELSEWHERE},
    **{f"optimizer.params.{name}": f"optimizer.{name}" for name in _OPTIMIZER},
    **{f"scheduler.params.{name}": f"scheduler.{ours}" for name, ours in _SCHEDULE.items()},
}


def place_here(name: str) -> str:
    """Describe where a run config takes a DeepSpeed key; empty where the name is none."""
    if name in OWNED:
        return f"DeepSpeed's {name} is {OWNED[name]} here"
    if name in PASSED_THROUGH:
        return f"write it as deepspeed.{name}, where DeepSpeed's further keys go"
    return ""
