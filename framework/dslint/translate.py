"""A problem of the rendered DeepSpeed JSON in the words of the run config that it was rendered from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from framework.config.deepspeed_words import OWNED, TYPED
from framework.config.run_config import RunConfig
from framework.dslint.keys import load_table
from framework.errors import MISSING, Problem

# Settings whose value has another name as well.
_SETTINGS: Final[Mapping[str, str]] = {
    "fp16.enabled: false": "precision.dtype: fp32",
    "bf16.enabled: false": "precision.dtype: fp32",
    "torch_autocast.enabled: false": "precision.dtype: fp32",
    "fp16.enabled: true": "precision.dtype: fp16",
    "bf16.enabled: true": "precision.dtype: bf16",
    "torch_autocast.enabled: true": "precision.dtype: autocast",
    'torch_autocast.dtype: "bfloat16"': "precision.compute_dtype: bf16",
    'optimizer.type: "AdamW"': "optimizer.kind: adamw",
    "optimizer.params.torch_adam: false": "optimizer.implementation: deepspeed",
    "optimizer.params.torch_adam: true": "optimizer.implementation: torch",
    "remove pipeline": "set parallel.pipe: 1",
    "remove fp16": "set precision.dtype: fp32",
    "remove bf16": "set precision.dtype: fp32",
    "remove zero_optimization.offload_param": "set zero.offload_param: {device: none}",
}
_PRECISIONS: Final = frozenset({"fp16", "bf16", "bfloat16", "torch_autocast"})
_KEY: Final = re.compile(r"(?<![\w.])[a-z_0-9]+(?:\.[a-z_0-9]+)*(?![\w(])")


def to_run_config_keys(problem: Problem, config: RunConfig) -> Problem:
    """The same problem with every DeepSpeed key under the name that a run config gives it."""
    key = own_key(problem.key, config)
    value = _value(config, key) if key.partition(".")[0] != "deepspeed" else problem.value
    fix = problem.fix
    for theirs, ours in _SETTINGS.items():
        fix = fix.replace(theirs, ours)
    reason, fix = (_KEY.sub(lambda found: _named(found[0], config), text) for text in (problem.reason, fix))
    return replace(problem, key=key, value=value, reason=reason, fix=fix, file="", line=0, column=0)


def own_key(path: str, config: RunConfig) -> str:
    """Return the key of the run config that stands for a path of the JSON."""
    if _is_passed(path, config):
        return f"deepspeed.{path}"
    if path in TYPED:
        return TYPED[path]
    if path in _PRECISIONS:
        return "precision.dtype"
    inner = next((ours for theirs, ours in TYPED.items() if path.startswith(f"{theirs}.")), None)
    return inner or OWNED.get(path.partition(".")[0], f"deepspeed.{path}")


def _is_passed(path: str, config: RunConfig) -> bool:
    """Check whether the key, or a section around it that only `deepspeed:` gives, is written there."""
    values: Any = config.deepspeed
    for part in path.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
        if not isinstance(values, Mapping):
            return True
    return True


def _named(word: str, config: RunConfig) -> str:
    """A word of a sentence, where it is a key of DeepSpeed; a name that stands alone is one only at the top level."""
    top = word.partition(".")[0]
    if word in TYPED or (word in OWNED and "_" in word):
        return own_key(word, config)
    if "." in word and load_table().get(word) is not None:
        return own_key(word, config) if word in TYPED else f"deepspeed.{word}"
    return f"deepspeed.{word}" if "_" in word and top == word and load_table().get(word) is not None else word


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config.to_dict()
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value
