"""Arguments of `fit` that there are not: where what they mean is written instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from framework.config.explain import homes_of
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, Problem
from framework.text.typos import nearest

_KNOWN: Final = ("config", "model", "train_data", "eval_data", "task", "optimizer")
_MEANT: Final = {
    "collate_fn": "give the dataset a method collate_fn(samples)",
    "callbacks": "there are none; what is measured is in metrics.jsonl of the run folder",
    "loss": "write task=",
    "loss_fn": "write task=",
    "criterion": "write task=",
    "dataset": "write train_data=",
    "data": "write train_data=",
    "train_dataset": "write train_data=",
    "train_loader": "write train_data= with the dataset itself",
    "train_dataloader": "write train_data= with the dataset itself",
    "eval_dataset": "write eval_data=",
    "val_data": "write eval_data=",
    "epochs": "set training.max_epochs in the config",
    "max_epochs": "set training.max_epochs in the config",
    "steps": "set training.max_steps in the config",
    "batch_size": "set batch.global_size in the config",
    "lr": "set optimizer.lr in the config",
    "lr_scheduler": "set the section scheduler in the config",
}


def refuse_unknown_arguments(names: Iterable[str], *, further: Sequence[Any] = ()) -> None:
    """Refuse arguments that `fit` does not take, and those after the config that do not say what they are.

    Raises:
        ConfigError: kind ``unknown-argument``, for each.
    """
    if further:
        given = ", ".join(type(one).__name__ for one in further)
        raise ConfigError(
            Problem(
                kind="unknown-argument",
                key="fit",
                value=given,
                reason="only the config is taken by its place, as the first argument",
                fix="write fit(config, model=..., train_data=..., eval_data=..., task=..., optimizer=...)",
            )
        )
    problems = [
        Problem(kind="unknown-argument", key=name, reason="fit() takes no such argument", fix=_fix(name))
        for name in names
    ]
    if problems:
        raise ConfigError(problems)


def _fix(name: str) -> str:
    if name in _MEANT:
        return _MEANT[name]
    if name in RunConfig.model_fields:
        return f"set the section {name} in the config"
    if homes := list(homes_of(name, RunConfig)):
        return f"set {' or '.join(homes[:3])} in the config"
    meant = nearest(name, _KNOWN)
    return f"did you mean '{meant}'?" if meant else f"known: {', '.join(_KNOWN)}; everything else is set in the config"
