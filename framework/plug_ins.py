"""Everything that a package needs to register kinds and commands (docs/plug-ins.md): the bases of
kinds, and the types of their fields.
"""

from __future__ import annotations

from framework.commands.command import Command
from framework.config.base import (
    Count,
    EvenCount,
    Fraction,
    ModelKind,
    NonNegative,
    Positive,
    PositiveCount,
    Section,
)
from framework.config.data import DataKind, ImageShape
from framework.config.optimizer import OptimizerKind, SchedulerKind
from framework.config.training import MonitorKind, TaskKind

__all__ = [
    "Command",
    "Count",
    "DataKind",
    "EvenCount",
    "Fraction",
    "ImageShape",
    "ModelKind",
    "MonitorKind",
    "NonNegative",
    "OptimizerKind",
    "Positive",
    "PositiveCount",
    "SchedulerKind",
    "Section",
    "TaskKind",
]
