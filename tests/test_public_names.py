"""The names that users import are few and frozen: adding one is a decision, removing one breaks
somebody.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import framework

NAMES = [
    "Cluster",
    "ConfigError",
    "Monitor",
    "OpenEngine",
    "Point",
    "Ratio",
    "RunConfig",
    "State",
    "Task",
    "fit",
    "import_deepspeed",
    "load",
    "load_config",
    "make_plan",
    "open_engine",
    "predict",
    "render",
]
NEED_TORCH = {"OpenEngine", "Ratio", "Task", "fit", "load", "open_engine", "predict"}


def test_the_list_is_frozen() -> None:
    assert framework.__all__ == NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEED_TORCH])
def test_each_is_there(name: str) -> None:
    assert getattr(framework, name).__name__ == name
    assert name in dir(framework)


@pytest.mark.slow
def test_those_that_need_torch_are_there() -> None:
    code = "import framework\nfor name in framework.__all__: assert getattr(framework, name).__name__ == name, name"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="trainer"):
        framework.trainer  # noqa: B018
