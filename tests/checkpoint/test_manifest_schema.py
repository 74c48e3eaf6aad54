"""The schema of a manifest: what a value may be, and what is left free."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from framework.checkpoint.manifest_schema import Manifest
from tests.checkpoint.small_checkpoints import CONFIG, LAYOUT

SMALL: Mapping[str, Any] = {
    "format": 2,
    "step": 10,
    "files": {"zero/weights.pt": {"num_bytes": 3, "sha256": "0" * 64}},
    "layout": LAYOUT,
    "config": CONFIG,
}


def changed(path: Sequence[str], value: Any) -> dict[str, Any]:
    manifest = copy.deepcopy(dict(SMALL))
    section = manifest
    for key in path[:-1]:
        section = section.setdefault(key, {})
    section[path[-1]] = value
    return manifest


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", 2),
        ("later", {"any": ["value"]}),
        ("layout.expert_size", 2),
        ("config.later", {"any": 1}),
        ("config.callbacks", [{"target": "my:callback"}]),
        ("config.model", {"target": "my.nets:Net", "args": {}}),
        ("config.training.ema", {"decay": 1}),
        ("pipeline", {"layers": ["a", "b"], "bounds": [0, 1, 2]}),
        ("tensor", {"weight": [1, [8, 8]]}),
        ("metrics", {"eval/loss": "nan", "train/loss": 2, "train/lr": 0.5}),
        ("base", {"sha256": "0", "init_weights": None}),
        ("saved_at", "2026-11-21T19:38:16+00:00"),
        ("versions", {"torch": None}),
        ("files", {"half a character \ud800": {"num_bytes": 0, "sha256": ""}}),
    ],
)
def test_a_value_that_a_release_may_write_is_taken(path: str, value: Any) -> None:
    Manifest.model_validate(changed(path.split("."), value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", 2.0),
        ("step", True),
        ("step", 1 << 63),
        ("files", {"a": {"num_bytes": 3, "sha256": "0", "mode": 1}}),
        ("files", {"a/../../b": {"num_bytes": 3, "sha256": "0"}}),
        ("layout.expert_size", 0),
        ("config.later", [1]),
        ("config.model", {"kind": ""}),
        ("config.training.ema", {}),
        ("config.zero.stage", 4),
        ("pipeline", {"layers": ["a", "b"], "bounds": [0, 1]}),
        ("pipeline", {"layers": ["a", "b"], "bounds": [0, 2, 1, 2]}),
        ("pipeline", {"layers": ["a"], "bounds": []}),
        ("pipeline", None),
        ("tensor", {"weight": [1, [8.0]]}),
        ("tensor", {"weight": "ab"}),
        ("metrics", {"eval/loss": "Infinity"}),
        ("metrics", {"eval/loss": True}),
        ("base", {"sha256": "0"}),
        ("best", {"metric": "eval/loss", "value": 1.0}),
        ("saved_at", "yesterday"),
        ("versions", None),
    ],
)
def test_a_value_of_another_type_is_refused(path: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        Manifest.model_validate(changed(path.split("."), value))
