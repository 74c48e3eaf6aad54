"""dsf-trainer: describe a training run once, check it on a laptop, train it with DeepSpeed.

The public names are imported on first use, so that `check`, `plan` and `render` never load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.commands.predict import predict
    from framework.config.load import load_config
    from framework.config.run_config import RunConfig
    from framework.errors import ConfigError
    from framework.imports.deepspeed import import_deepspeed
    from framework.own_loop import OpenEngine, open_engine
    from framework.plan.cluster import Cluster
    from framework.plan.plan import make_plan
    from framework.plan.render import render
    from framework.setup.trained import load
    from framework.tasks.task import Ratio, Task
    from framework.train.callbacks import State
    from framework.train.monitors.base import Monitor, Point
    from framework.training import fit

__version__ = "0.1.0"
__all__ = [
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

_HOME = {
    "Cluster": "framework.plan.cluster",
    "ConfigError": "framework.errors",
    "Monitor": "framework.train.monitors.base",
    "OpenEngine": "framework.own_loop",
    "Point": "framework.train.monitors.base",
    "Ratio": "framework.tasks.task",
    "RunConfig": "framework.config.run_config",
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'framework' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
