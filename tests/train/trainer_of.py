"""Trainers for tests, built of flat options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from framework.train.hooks import Hooks
from framework.train.trainer import RunStart, Trainer


def trainer_of(engine: Any, *, start_step: int = 0, **options: Any) -> Trainer:
    """A Trainer; options may be fields of `Hooks` and `RunStart`."""
    of_hooks: dict[str, Any] = {}
    of_start: dict[str, Any] = {"step": start_step}
    for values, kind in ((of_hooks, Hooks), (of_start, RunStart)):
        for field in fields(kind):
            if field.name in options:
                values[field.name] = options.pop(field.name)
    return Trainer(engine, start=RunStart(**of_start), hooks=Hooks(**of_hooks), **options)
