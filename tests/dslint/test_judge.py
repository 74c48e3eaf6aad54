"""Run configs and DeepSpeed JSON are told apart by their sections."""

from __future__ import annotations

from typing import Any

import pytest

from framework.config.run_config import RunConfig
from framework.dslint.keys import load_table
from framework.dslint.readers import IN_BOTH, OURS, assumption, foreign_problem, is_run_config
from framework.text.document import Document


def test_the_sections_that_tell_a_run_config_are_all_of_its_own() -> None:
    """They are written out there, so that a check of DeepSpeed JSON need not build the models."""
    assert set(RunConfig.model_fields) - IN_BOTH == OURS
    assert not OURS & set(load_table().children())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"run": {"name": "x"}}, True),
        ({"optimizer": {"kind": "sgd"}}, True),
        ({"optimizer": {"target": "a:b"}}, True),
        ({"optimizer": {"type": "Adam"}, "checkpoint": {}}, False),
        ({"train_batch_size": 8}, False),
        ({}, False),
        ([], False),
        # most of its keys decide
        ({"train_batch_size": 8, "gradient_clipping": 1.0, "run": {}}, False),
        ({"run": {}, "zero": {}, "train_batch_size": 8}, True),
        ({"data": {}, "zero_optimization": {}}, False),
        ({"optimizer": {"type": "Adam", "kind": "adamw"}}, False),
    ],
)
def test_what_is_a_run_config(values: Any, expected: bool) -> None:
    assert is_run_config(values) is expected


def test_what_a_file_was_taken_for_is_said_where_it_has_keys_of_both_kinds() -> None:
    (note,) = assumption(
        Document("x.json", {"train_batch_size": 8, "gradient_clipping": 1.0, "data": {}}), as_run_config=False
    )
    assert (note.key, note.severity, "taken for DeepSpeed JSON" in note.reason) == ("data", "note", True)
    (note,) = assumption(Document("x.json", {"run": {}, "zero": {}, "train_batch_size": 8}), as_run_config=True)
    assert (note.key, "taken for a run config" in note.reason) == ("train_batch_size", True)
    assert not list(assumption(Document("x.json", {"run": {}, "optimizer": {}}), as_run_config=True))
    assert not list(assumption(Document("x.json", {"train_batch_size": 8, "optimizer": {}}), as_run_config=False))


def test_accelerates_own_config_is_told_as_that() -> None:
    found = foreign_problem(
        Document("a.yaml", {"compute_environment": "LOCAL_MACHINE", "deepspeed_config": {"zero_stage": 2}})
    )
    assert found is not None
    assert "zero_stage is zero.stage" in found.fix
    found = foreign_problem(Document("a.yaml", {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}))
    assert found is not None
    assert "check or import ds.json" in found.fix
    assert foreign_problem(Document("a.yaml", {"run": {}, "deepspeed_config": {}})) is None


@pytest.mark.parametrize("dash", ["-", "_"])
def test_a_config_of_gpt_neox_is_one_line(dash: str) -> None:
    values = {
        "pipe_parallel_size": 1,
        "num_layers": 2,
        "optimizer": {"type": "Adam"},
        "train_micro_batch_size_per_gpu": 4,
    }
    found = foreign_problem(Document("x.yml", {name.replace("_", dash): value for name, value in values.items()}))
    assert found is not None
    assert found.kind == "gpt-neox-config"
    assert foreign_problem(Document("x.json", {"num_layers": 2, "train_batch_size": 4})) is None
