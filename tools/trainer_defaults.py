"""Writes `framework/imports/tables/trainer_defaults.json`: the arguments of other trainers, with
their defaults.

    python -m tools.trainer_defaults

`import` leaves out in silence what a file says as its tool would say it anyway.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

OUT: Final = Path(__file__).resolve().parents[1] / "framework/imports/tables/trainer_defaults.json"


def defaults() -> dict[str, dict[str, Any]]:
    """Tool -> argument -> default, null where it is none or no plain value; from the installed
    packages.
    """
    lightning = import_module("pytorch_lightning")
    arguments = import_module("transformers").TrainingArguments(output_dir="o", use_cpu=True)
    return {
        "transformers.TrainingArguments": {
            **arguments.to_dict(),
            "output_dir": None,
            "use_cpu": False,
        },
        "lightning.Trainer": _signature(lightning.Trainer),
        "lightning.DeepSpeedStrategy": _signature(lightning.strategies.DeepSpeedStrategy),
    }


def _signature(of: type) -> dict[str, Any]:
    parameters = inspect.signature(of).parameters
    return _plain(
        {
            name: each.default
            for name, each in parameters.items()
            if each.default is not inspect._empty
        }
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: getattr(value, "value", value) if isinstance(value, (str, int, float)) else None
        for name, value in values.items()
    }


if __name__ == "__main__":
    OUT.write_text(json.dumps(defaults(), indent=1) + "\n", encoding="utf-8")
