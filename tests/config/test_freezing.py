"""Entries of `training.freeze`: what they match, in which steps, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from framework.config.freezing import is_frozen, length_for_freeze, refuse_bad_freeze
from framework.config.load import config_from_values
from framework.config.training import FreezeEntry
from framework.errors import ConfigError

NAMES = ["embed.weight", "0.weight", "0.bias", "head.weight"]


def entries(*values: Any) -> list[FreezeEntry]:
    return config_from_values({"training": {"freeze": list(values)}}).training.freeze


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        ("embed.*", [1, 2, 3, 4, 5]),
        ({"match": "embed.*", "until_step": 3}, [1, 2, 3]),
        ({"match": ["embed.*"], "from_step": 4}, [4, 5]),
    ],
)
def test_an_entry_freezes_in_its_steps(value: Any, steps: list[int]) -> None:
    (entry,) = entries(value)
    assert [step for step in range(1, 6) if is_frozen(entry, step)] == steps


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        (
            [{"match": ["embed.*", "hed.weight"], "until_step": 3}],
            "training.freeze.0.match = hed.weight",
        ),
        (
            ["0.*", {"match": ".*bias", "until_step": 3}],
            "it matches 0.bias, and so does training.freeze.0",
        ),
        (
            [{"match": "0.*", "until_step": 3}, {"match": ".*bias", "from_step": 5}],
            "it matches 0.bias, and so does training.freeze.1",
        ),
        ([{"match": ".*", "until_step": 3}], "nothing would be left to train in step 1"),
        (
            [{"match": "(0|embed).*", "from_step": 4}, {"match": "head.*", "from_step": 6}],
            "nothing would be left to train in step 6",
        ),
    ],
)
def test_what_does_not_fit_a_model_is_refused(values: list[Any], refusal: str) -> None:
    with pytest.raises(ConfigError) as found:
        refuse_bad_freeze(NAMES, entries(*values))
    assert refusal in str(found.value)


@pytest.mark.parametrize(
    "values",
    [
        ["0.*", "0.bias"],
        [{"match": "embed.*", "until_step": 3}, {"match": "0.*", "until_step": 5}],
        [{"match": ".*weight", "until_step": 3}, {"match": ".*bias", "from_step": 4}],
    ],
)
def test_what_fits_is_taken(values: list[Any]) -> None:
    refuse_bad_freeze(NAMES, entries(*values))


def test_steps_beyond_the_run_are_refused() -> None:
    found = entries(
        {"match": "0.*", "until_step": 9}, {"match": "embed.*", "from_step": 11}, "head.*"
    )
    assert [*length_for_freeze(found, None)] == [*length_for_freeze(found, 12)] == []
    kinds = [(problem.kind, problem.key) for problem in length_for_freeze(found, 9)]
    assert kinds == [
        ("freeze-beyond-run", "training.freeze.0.until_step"),
        ("freeze-beyond-run", "training.freeze.1.from_step"),
    ]
    assert [problem.key for problem in length_for_freeze(found, 10)] == [
        "training.freeze.1.from_step"
    ]


def test_a_config_keeps_text_as_text() -> None:
    values = ["embed.*", {"match": ["0.*", "1.*"], "from_step": 4}]
    config = config_from_values({"training": {"freeze": values}})
    assert (
        config.to_dict()["training"]["freeze"] == values == config.written()["training"]["freeze"]
    )
    assert config_from_values(config.to_dict()) == config
