"""What a user's optimizer may hold in its groups, held against the reader of checkpoints."""

from __future__ import annotations

import http
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from framework.checkpoint.state.checkpoint_engine import read_file
from framework.config.load import config_from_values
from framework.errors import ConfigError
from framework.setup.components import gather_parts
from framework.setup.user_code import Objects
from framework.setup.user_optimizer import savable


class Rule:
    """An object that an optimizer may be given."""


def sgd(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], **options)


def adam(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], **options)


def with_option(value: Any) -> torch.optim.Optimizer:
    optimizer = sgd(lr=0.1)
    optimizer.param_groups[0]["rule"] = value
    return optimizer


def comes_back(optimizer: torch.optim.Optimizer, path: Path) -> bool:
    torch.save(
        {
            "optimizer": optimizer.state_dict(),
            "base_lrs": [group["lr"] for group in optimizer.param_groups],
        },
        path,
    )
    try:
        read_file(path)
    except pickle.UnpicklingError:
        return False
    return True


@pytest.mark.parametrize(
    "make",
    [
        lambda: sgd(lr=np.logspace(-4, -2, 5)[1]),
        lambda: sgd(lr=0.1, momentum=np.float32(0.5), weight_decay=np.float64(0.25)),
        lambda: adam(lr=0.1, betas=(np.float64(0.5), np.float64(0.75))),
        lambda: with_option(np.int64(3)),
    ],
)
def test_numbers_of_numpy_become_plain_and_come_back_out_of_a_checkpoint(
    make: Any, tmp_path: Path
) -> None:
    assert not comes_back(make(), tmp_path / "raw.pt")
    given = {name: value for name, value in make().param_groups[0].items() if name != "params"}
    optimizer = savable(make(), key="optimizer", value="x")
    assert {name: optimizer.param_groups[0][name] for name in given} == given
    assert comes_back(optimizer, tmp_path / "mended.pt")


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.5, "text", [1, (2.0, None)], {"a": 1}, torch.tensor(0.1)]
)
def test_any_return_value_is_left_as_it_is(value: Any) -> None:
    assert savable(with_option(value), key="optimizer", value="x").param_groups[0][
        "rule"
    ] is value or value == [
        1,
        (2.0, None),
    ]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Rule(), "Rule"),
        (lambda step: step, "<lambda>"),
        (np.zeros(2), "ndarray"),
        ([Rule()], "list"),
        (http.HTTPStatus.OK, "HTTPStatus"),
    ],
)
def test_an_object_that_would_not_come_back_is_refused(value: Any, named: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"hold rule, \S*{named}, which no checkpoint could.*\[optimizer-group-object\]",
    ):
        savable(with_option(value), key="optimizer", value="x")


def test_the_optimizers_of_a_run_are_looked_at() -> None:
    config = config_from_values({"model": {"kind": "lenet"}})
    made = gather_parts(
        config, Objects(optimizer=partial(torch.optim.SGD, lr=np.float64(0.1)))
    ).make_optimizer
    assert made is not None
    assert type(made([torch.nn.Parameter(torch.zeros(2))]).param_groups[0]["lr"]) is float
