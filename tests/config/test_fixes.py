"""`check --fix` on run configs: what is mended, what is left alone, and what stays in the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepspeed_lint.text.document import document_of
from framework.config.fixes import fixed_run_config
from framework.config.run_config import RunConfig
from framework.errors import ConfigError

YAML, JSON = Path("x.yaml"), Path("x.json")


def fixed(text: str, path: Path = YAML) -> str:
    after = fixed_run_config(text, path, name="x")
    assert fixed_run_config(after, path, name="x") == after, "a second time must find nothing"
    return after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("zero: {stge: 2}\n", "zero: {stage: 2}\n"),
        ("runn: {name: x}\n", "run: {name: x}\n"),
        ("'runn': {'nme': x}\n", "'run': {'name': x}\n"),
        ("batch:\n  global_size: '120' # quoted\n", "batch:\n  global_size: 120   # quoted\n"),
        ("checkpoint: {at_end: yes}\n", "checkpoint: {at_end: true}\n"),
        ("monitors: {csv: 'off'}\n", "monitors: {csv: false}\n"),
        ("optimizer: {kind: adamw, lr: '1e-3'}\n", "optimizer: {kind: adamw, lr: 1e-3}\n"),
        ("model: lenet\n", "model: {kind: lenet}\n"),
        ("optimizer: {kind: adagrd}\n", "optimizer: {kind: adagrad}\n"),
        # to the section that has the key: flow to flow, block to block with its comment, and one
        # that has to be made
        (
            "run: {name: x, max_epochs: 3}\ntraining: {log_every: 5}\n",
            "run: {name: x}\ntraining: {log_every: 5, max_epochs: 3}\n",
        ),
        ("run: {max_epochs: 3, name: x}\n", "run: {name: x}\ntraining:\n  max_epochs: 3\n"),
        (
            "run:\n    name: x\n    max_epochs: 3  # why\ntraining:\n    log_every: 5\n\n# end\n",
            "run:\n    name: x\ntraining:\n    log_every: 5\n    max_epochs: 3  # why\n\n# end\n",
        ),
        ("seed: 7\nrun: {name: x}\n", "run: {name: x, seed: 7}\n"),
        (
            "training: {lr: 1e-3}\noptimizer: {kind: sgd}",
            "training: {}\noptimizer: {kind: sgd, lr: 1e-3}",
        ),
        # a section that has to be made says of which kind it is, as it was while it was left out
        ("run: {name: x}\nlr: 1e-3\n", "run: {name: x}\noptimizer:\n  kind: adamw\n  lr: 1e-3\n"),
        ("{training: {lr: 1e-3}}\n", "{training: {}, optimizer: {kind: adamw, lr: 1e-3}}\n"),
        ("run: {name: x}\r\nzero:\r\n  stge: 2\r\n", "run: {name: x}\r\nzero:\r\n  stage: 2\r\n"),
        ("\ufeffzero: {stge: 2}\n", "\ufeffzero: {stage: 2}\n"),
        # a section that is left empty
        ("run:\n  max_epochs: 3\n", "run: {}\ntraining:\n  max_epochs: 3\n"),
        (
            "training:\n  lr: 1e-3\n",
            "training: {}\noptimizer:\n  kind: adamw\n  lr: 1e-3\n",
        ),
    ],
)
def test_one_safe_answer_is_given(before: str, after: str) -> None:
    assert fixed(before) == after


def test_json_run_configs_stay_json() -> None:
    before = '{\n\t"run": {"name": "x", "max_epochs": 3},\n\t"zero": {"stge": "2"}\n}\n'
    after = fixed(before, JSON)
    assert json.loads(after) == {
        "run": {"name": "x"},
        "zero": {"stage": 2},
        "training": {"max_epochs": 3},
    }
    assert after.startswith('{\n\t"run": {"name": "x"},\n\t"zero": {"stage": 2}')


@pytest.mark.parametrize(
    "text",
    [
        "run: {name: x}\n",
        "",
        "# nothing\n",
        "zero: {stge: 2, stage: 1}\n",  # which of the two?
        "precision: {dtype: fp61}\n",  # fp16 and bf16 are both near
        "optimizer: {kind: adamv}\n",  # adam or adamw
        "training: {every_epochs: 3}\n",  # evaluation has it, and checkpoint too
        "run: {max_epochs: 3}\ntraining: {max_epochs: 5}\n",  # set there already
        "zero: {zzz: 1}\n",
        "zero: {stage: 7}\n",
        "zero: {stage: two}\n",
        "optimizer: {kind: sgd, momentun: high}\n",  # mended, it would be wrong in another way
        "evaluation: &often {every_epocs: 2}\ncheckpoint: *often\n",  # stands in two places
        "deepspeed: {gradient_cliping: 1}\n",
    ],
)
def test_the_rest_is_left_alone(text: str) -> None:
    assert fixed(text) == text


def test_everything_else_stays_as_it_stood() -> None:
    before = (
        "# yaml-language-server: $schema=x\n\nrun:   {name: 'a'}   # mine\n\nzero:\n   # the stage\n   stge:   2   # "
        "two\n"
        "   reduce_bucket_size: 5e8\n\n\ntraining: {max_epochs:   3}   # last"
    )
    assert fixed(before) == before.replace("stge:   2   #", "stage:   2  #")  # in its column


def test_what_cannot_be_read_is_reported() -> None:
    with pytest.raises(ConfigError, match="config-syntax"):
        fixed_run_config("run: {", YAML, name="x")


WORDS = st.sampled_from(
    [
        "run",
        "runn",
        "name",
        "nme",
        "zero",
        "stage",
        "stge",
        "training",
        "max_epochs",
        "max_epoch",
        "batch",
        "global_size",
        "lr",
        "optimizer",
        "kind",
        "seed",
        "model",
        "lenet",
        "evaluation",
        "every_epochs",
        "at_end",
        "monitors",
        "csv",
    ]
)
LEAVES = st.sampled_from([1, 2, 7, "2", "yes", True, None, "lenet", "lenett", 0.5, "sgd", []])
SECTIONS = st.dictionaries(
    WORDS, LEAVES | st.dictionaries(WORDS, LEAVES, max_size=3), min_size=1, max_size=4
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(SECTIONS, st.booleans())
@example(values={"model": "lenet"}, is_json=False)
@example(values={"runn": {"kind": 1}}, is_json=False)
def test_any_config_keeps_its_meaning(values: dict[str, Any], is_json: bool) -> None:
    """Every changed text can be read, keeps the comment, and settles once and for all."""
    lines = [
        f"{name}: {json.dumps(section)}  # <{number}>"
        for number, (name, section) in enumerate(values.items())
    ]
    text, path = (
        (json.dumps(values, indent=1), JSON) if is_json else ("\n".join(lines) + "\n", YAML)
    )
    after = fixed(text, path)
    found = document_of(after, path, name="x").value
    assert is_json or all(f"# <{number}>" in after for number in range(len(lines)))
    # a section may also have been renamed
    made = num_kinds(found, without=values) - num_kinds(values, without=found)
    assert num_leaves(found) == num_leaves(values) + made, (
        "nothing is lost, and only the kind of a section that is made is new"
    )
    assert after == text or problems(values)


def num_kinds(values: dict[str, Any], *, without: dict[str, Any]) -> int:
    return sum(
        "kind" in section
        for name, section in values.items()
        if name not in without and isinstance(section, dict)
    )


def num_leaves(value: Any) -> int:
    return sum(map(num_leaves, value.values())) if isinstance(value, dict) else 1


def problems(values: Any) -> int:
    try:
        RunConfig.model_validate(values)
    except ValueError as error:
        return len(error.errors())  # type: ignore[attr-defined]
    return 0
