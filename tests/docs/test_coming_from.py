"""The page "where is what I know" leaves out no argument of the installed packages, and names our
keys alone.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from importlib import import_module

import pytest

from framework.config.deepspeed_words import PASSED_THROUGH
from framework.config.other_words import answers, value_rows
from framework.config.run_config import RunConfig
from tools.docs_site.coming_from import coming_from_page, json_keys, keys_of
from tools.docs_site.reference import config_keys


def arguments_of(call: Callable[..., object]) -> set[str]:
    return set(inspect.signature(call).parameters) - {"self"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "module", "name"),
    [
        ("Hugging Face TrainingArguments", "transformers", "TrainingArguments"),
        ("Lightning Trainer", "pytorch_lightning", "Trainer"),
        ("Lightning ModelCheckpoint", "pytorch_lightning.callbacks", "ModelCheckpoint"),
        ("Lightning EarlyStopping", "pytorch_lightning.callbacks", "EarlyStopping"),
        ("accelerate Accelerator", "accelerate", "Accelerator"),
        ("deepspeed.initialize", "deepspeed", "initialize"),
        ("PipelineModule", "deepspeed.pipe", "PipelineModule"),
    ],
)
def test_every_argument_of_the_installed_package_has_an_answer(
    tool: str, module: str, name: str
) -> None:
    pytest.importorskip(module.partition(".")[0], reason=f"{module} comes with the dev extra")
    thing = getattr(import_module(module), name)
    is_dataclass = dataclasses.is_dataclass(thing)
    theirs = (
        {field.name for field in dataclasses.fields(thing)} if is_dataclass else arguments_of(thing)
    )
    assert sorted(theirs - set(answers()[tool])) == [], (
        "give it an answer in framework/config/other_words.yaml"
    )
    assert sorted(set(answers()[tool]) - theirs) == [], "the package has no such argument any more"


def test_every_answer_is_a_key_of_ours_or_a_reason() -> None:
    ours = (
        set(config_keys())
        | set(RunConfig.model_fields)
        | {f"deepspeed.{name}" for name in PASSED_THROUGH}
        | {"deepspeed"}
    )
    tables = answers()
    assert len(tables) == 10
    unknown = {
        key for rows in tables.values() for answer in rows.values() for key in keys_of(answer)
    } - ours
    assert sorted(unknown) == []
    reasons = [
        answer for rows in tables.values() for answer in rows.values() if not keys_of(answer)
    ]
    assert all(len(answer) > 25 for answer in reasons)
    assert set(value_rows()) <= ours


def test_every_key_of_the_json_has_an_answer() -> None:
    found = dict(json_keys())
    assert len(found) > 50
    assert found["zero_optimization"] == "zero"
    assert found["flops_profiler"] == "deepspeed.flops_profiler"
    assert found["amp"].startswith("cannot: DeepSpeed removed it in 0.19")
    page = coming_from_page()
    assert [name for name in found if f"| `{name}` |" not in page] == []
