"""What people forget or misname when they call `fit`: refused before anything is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import framework
from framework.errors import ConfigError
from framework.setup.run_callbacks import check_events


async def a_coroutine(state: Any) -> None: ...


TABLE = TensorDataset(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))


@pytest.mark.parametrize(
    ("given", "stated"),
    [
        (
            {"train_data": TABLE},
            "model: train_data was handed over, and no model; hand over model=..., or name one",
        ),
        (
            {"eval_data": TABLE, "model": torch.nn.Linear(3, 2)},
            "eval_data: it was handed over without train_data",
        ),
        (
            {"precision": 1},
            "precision: fit() takes no such argument; set the section precision in the config [unknown-argument]",
        ),
        (
            {"scheduler": 1},
            "scheduler = builtins.int: calling it with an optimizer failed: TypeError: 'int' object is not callable",
        ),
        ({"callback": []}, "callback: fit() takes no such argument; did you mean 'callbacks'?"),
        (
            {"callbacks": [dict]},
            "callbacks.0 = builtins.dict: it is a class; hand over an object of it",
        ),
        (
            {"callbacks": [print]},
            "callbacks.0 = builtins.print: it has no method of an event; give it one of on_start",
        ),
        (
            {"callbacks": [SimpleNamespace(on_evaluation=lambda: None)]},
            "on_evaluation cannot be called with one argument, the state; write def on_evaluation(",
        ),
        (
            {"callbacks": [SimpleNamespace(on_save=a_coroutine)]},
            "on_save is a coroutine, and nothing awaits it",
        ),
        ({"collate_fn": len}, "give the dataset a method collate_fn(samples)"),
        ({"epochs": 3}, "set training.max_epochs in the config"),
        ({"seed": 3}, "set run.seed in the config"),
        ({"train_dta": TABLE}, "did you mean 'train_data'?"),
        ({"frobnicate": 1}, "known: config, model, train_data"),
    ],
)
def test_it_is_refused_in_one_line(given: dict[str, Any], stated: str) -> None:
    with pytest.raises(ConfigError) as caught:
        framework.fit({}, **given)
    assert stated in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_a_method_that_is_almost_an_event_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Late:
        def on_evaluations(self, state: Any) -> None: ...
        def on_step(self, state: Any) -> None: ...

    check_events(Late(), "callbacks.0", "late")
    assert (
        "on_evaluations is no event; is on_evaluation meant? [callback-event]"
        in capsys.readouterr().err
    )


def test_what_does_not_state_what_it_is_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^fit = Linear, list: only the config is taken by its place.*\[unknown-argument\]$",
    ):
        framework.fit({}, torch.nn.Linear(3, 2), [])  # type: ignore[arg-type]
