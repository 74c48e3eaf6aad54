"""The run config that a checkpoint was trained with, in a form that can be compared with another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework.config.run_config import RunConfig


def completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved config with the keys that an older version did not know at their defaults, which it trained with."""
    try:
        return RunConfig.model_validate(dict(config)).to_dict()
    except ValueError:  # it knew a key that is gone: the comparison will name it
        return config


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys -> values; lists are values."""
    if not isinstance(values, Mapping):
        return {prefix: values}
    return {
        key: value
        for name, part in values.items()
        for key, value in flat(part, f"{prefix}.{name}" if prefix else str(name)).items()
    }
