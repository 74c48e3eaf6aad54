"""dsf-trainer: describe a training run once, check it on a laptop, train it with DeepSpeed.

The public names are imported on first use, so that `check`, `plan` and `render` never load torch.
The sections of a run config, which `framework.sections` lists, are public here as well.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework import sections
    from framework.commands.predict import predict
    from framework.config.load import load_config
    from framework.errors import ConfigError
    from framework.imports.deepspeed import import_deepspeed
    from framework.own_loop import OpenEngine, open_engine
    from framework.plan.cluster import Cluster
    from framework.plan.plan import make_plan
    from framework.plan.render import render
    from framework.sections import *  # noqa: F403
    from framework.sections import RunConfig
    from framework.setup.trained import load
    from framework.tasks.task import Ratio, Task
    from framework.train.callbacks import State
    from framework.train.monitors.base import Monitor, Point
    from framework.training import fit

__version__ = "0.1.0"
__all__: list[str] = [
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
if TYPE_CHECKING:
    __all__ += sections.__all__  # type: ignore[has-type]

_HOME = {
    "Cluster": "framework.plan.cluster",
    "ConfigError": "framework.errors",
    "Monitor": "framework.train.monitors.base",
    "OpenEngine": "framework.own_loop",
    "Point": "framework.train.monitors.base",
    "Ratio": "framework.tasks.task",
    "RunConfig": "framework.sections",
    "State": "framework.train.callbacks",
    "Task": "framework.tasks.task",
    "fit": "framework.training",
    "import_deepspeed": "framework.imports.deepspeed",
    "load": "framework.setup.trained",
    "load_config": "framework.config.load",
    "make_plan": "framework.plan.plan",
    "open_engine": "framework.own_loop",
    "predict": "framework.commands.predict",
    "render": "framework.plan.render",
}


_SECTIONS = "framework.sections"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name[:1].isupper():
        sections = importlib.import_module(_SECTIONS)
        if name in sections.__all__:
            return getattr(sections, name)
    raise AttributeError(f"module 'framework' has no attribute {name!r}")


def __dir__() -> list[str]:
    sections = importlib.import_module(_SECTIONS)
    return sorted({*globals(), *__all__, *sections.__all__})
