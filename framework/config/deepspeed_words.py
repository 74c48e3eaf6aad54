"""DeepSpeed's keys and the keys of a run config with the same meaning: for users who write
DeepSpeed's names in a run config.
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
from framework.config.zero import OF_THE_ENGINE, OFFLOADS, Zero

_WORDS: Final[dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
# DeepSpeed key -> the section of a run config that decides it.
OWNED: Final[Mapping[str, str]] = _WORDS["owned"]
# Top-level keys that DeepSpeed 0.19.8 reads and no section decides (runtime/config.py,
# runtime/constants.py).
PASSED_THROUGH: Final = frozenset(_WORDS["passed_through"])
# DeepSpeed's sections that rendering writes, and that may have further keys.
SHARED: Final = frozenset(
    {
        "fp16",
        "bf16",
        "torch_autocast",
        "data_types",
        "compile",
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
OUTSIDE_OF_PRECISION: Final = {"dtype", "grad_accumulation", "grad_reduction", "states", "fp8"}
"""Keys of a precision that DeepSpeed has outside of its section `fp16` or `bf16`, by others' names,
or not at all.
"""


def _typed_keys() -> dict[str, str]:
    keys: dict[str, str] = dict(_WORDS["typed"])
    keys |= _keys_of_zero()
    for dtype, section in (("fp16", FP16), ("bf16", BF16)):
        for name in section.model_fields:
            if name not in OUTSIDE_OF_PRECISION:
                keys[f"{dtype}.{name}"] = f"precision.{name}"
    for name in _OPTIMIZER:
        keys[f"optimizer.params.{name}"] = f"optimizer.{name}"
    for _, parameters in SCHEDULES.values():
        for field, parameter in parameters.items():
            keys[f"scheduler.params.{parameter}"] = f"scheduler.{field}"
    return keys


def _keys_of_zero() -> dict[str, str]:
    keys = {}
    for name in Zero.model_fields:
        if name not in OFFLOADS and name not in OF_THE_ENGINE:
            keys[f"zero_optimization.{name}"] = f"zero.{name}"
            # DeepSpeed takes its stage 3 keys without the prefix too
            keys[f"zero_optimization.{name.removeprefix('stage3_')}"] = f"zero.{name}"
    for name, devices in OFFLOADS.items():
        for device in devices.values():
            for field in device.model_fields.keys() - {"zenflow"}:
                keys[f"zero_optimization.{name}.{field}"] = f"zero.{name}.{field}"
    return keys


# DeepSpeed's dotted key -> ours, for every key that rendering writes into a shared section, and for
# other names of such keys.
TYPED: Final[Mapping[str, str]] = _typed_keys()


def place_here(name: str) -> str:
    """Describe where a run config takes a DeepSpeed key; empty if the name is no such key."""
    if name in OWNED:
        return f"DeepSpeed's {name} is {OWNED[name]} here"
    if name in PASSED_THROUGH:
        return place_of_further(name)
    return ""


def place_of_further(key: str) -> str:
    """Describe where a DeepSpeed key goes that has no key of its own; `key` may be dotted."""
    return f"write it as deepspeed.{key}, where DeepSpeed's further keys go"
