"""Run configs and DeepSpeed JSON are told apart by their sections."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_lint.keys import load_table
from deepspeed_lint.text.document import Document
from framework.config.run_config import RunConfig
from framework.imports.kind_of_file import IN_BOTH, OURS, assumption, foreign_problem, is_run_config


def test_the_sections_that_mark_a_run_config_are_all_of_its_own() -> None:
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


def test_what_a_file_was_taken_for_is_reported_where_it_has_keys_of_both_kinds() -> None:
    (note,) = assumption(
        Document("x.json", {"train_batch_size": 8, "gradient_clipping": 1.0, "data": {}}),
        as_run_config=False,
    )
    assert (note.key, note.severity, "taken for DeepSpeed JSON" in note.reason) == (
        "data",
        "note",
        True,
    )
    (note,) = assumption(
        Document("x.json", {"run": {}, "zero": {}, "train_batch_size": 8}), as_run_config=True
    )
    assert (note.key, "taken for a run config" in note.reason) == ("train_batch_size", True)
    assert not list(
        assumption(Document("x.json", {"run": {}, "optimizer": {}}), as_run_config=True)
    )
    assert not list(
        assumption(
            Document("x.json", {"train_batch_size": 8, "optimizer": {}}), as_run_config=False
        )
    )


def test_configs_of_other_trainers_are_reported_as_that() -> None:
    def kind_of(values: dict[str, Any]) -> str | None:
        found = foreign_problem(Document("a.yaml", values))
        assert found is None or "`import`" in found.fix
        return found and found.kind

    assert (
        kind_of({"compute_environment": "LOCAL_MACHINE", "deepspeed_config": {"zero_stage": 2}})
        == "accelerate-config"
    )
    assert kind_of({"output_dir": "out", "learning_rate": 1e-4}) == "trainer-config"
    assert (
        kind_of({"trainer": {"max_epochs": 3, "devices": 2}, "model": {"class_path": "a.B"}})
        == "trainer-config"
    )
    assert kind_of({"run": {}, "deepspeed_config": {}}) is None
    assert kind_of({"train_batch_size": 8, "learning_rate": 1e-4, "output_dir": "out"}) is None, (
        "stray keys of a JSON"
    )


@pytest.mark.parametrize("dash", ["-", "_"])
def test_a_config_of_gpt_neox_is_one_line(dash: str) -> None:
    values = {
        "pipe_parallel_size": 1,
        "num_layers": 2,
        "optimizer": {"type": "Adam"},
        "train_micro_batch_size_per_gpu": 4,
    }
    found = foreign_problem(
        Document("x.yml", {name.replace("_", dash): value for name, value in values.items()})
    )
    assert found is not None
    assert found.kind == "gpt-neox-config"
    assert foreign_problem(Document("x.json", {"num_layers": 2, "train_batch_size": 4})) is None
