"""The JSON Schema of DeepSpeed JSON: current, valid for every release, and as strict as `check`
about single keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deepspeed_lint.errors import UsageError
from deepspeed_lint.keys import known_releases, load_table
from deepspeed_lint.lint import lint
from deepspeed_lint.schema import deepspeed_schema
from deepspeed_lint.text.document import Document
from framework.cli import main
from tests.places import ROOT

COMMITTED = ROOT / "deepspeed_lint/deepspeed.schema.json"
RENDERED = sorted((ROOT / "ds_configs/rendered").glob("*.json"))
SCHEMA = json.loads(COMMITTED.read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
BATCH = {"train_batch_size": 8}


def test_the_committed_schema_is_current() -> None:
    assert json.loads(json.dumps(deepspeed_schema())) == SCHEMA, (
        "refresh it: dsf schema deepspeed > deepspeed_lint/deepspeed.schema.json"
    )


RELEASES = known_releases()
BETWEEN = [pytest.param(release, marks=pytest.mark.slow) for release in RELEASES[1:-1]]


@pytest.mark.parametrize("release", [RELEASES[0], *BETWEEN, RELEASES[-1]])
def test_it_is_a_valid_schema_of_every_release(release: str) -> None:
    schema = deepspeed_schema(release)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert release in schema["title"]
    for place, reference in references(schema, "#"):
        target: Any = schema
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]
        assert target, place


def references(schema: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield place, schema["$ref"]
        for name, member in schema.items():
            yield from references(member, f"{place}/{name}")
    elif isinstance(schema, list):
        for index, member in enumerate(schema):
            yield from references(member, f"{place}/{index}")


def properties(schema: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, member in schema.get("properties", {}).items():
        yield f"{place}.{name}", member
        yield from properties(member, f"{place}.{name}")
    for branch in schema.get("allOf", []):
        yield from properties(branch.get("then", {}), place)
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            yield from properties(schema[word], f"{place}.*")


def test_every_key_has_its_sentence() -> None:
    for path, member in properties(SCHEMA):
        assert member.get("description", "").rstrip(".").strip(), path


def test_every_key_of_the_table_is_there() -> None:
    found = {path.removeprefix(".") for path, _ in properties(SCHEMA)}
    keys = {
        path.replace("]", "").replace("[", "\0")
        for path in load_table()
        if not path.endswith((".*", "]"))
    }
    plain = {
        f"{head}.params.{key.rpartition('.')[2]}" if "\0" in key else key
        for key in keys
        for head in [key.split(".")[0]]
    }
    assert plain - found == {"optimizer.params.max_grad_norm"} - found


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.stem)
def test_what_we_render_is_valid(path: Path) -> None:
    VALIDATOR.validate(json.loads(path.read_text()))


@pytest.mark.parametrize(
    "values",
    [
        {"zero_optimisation": {"stage": 2}},
        {"gradient_cliping": 1.0},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stage": "2"}},
        {"zero_optimization": {"offload_optimizer": {"device": "disk"}}},
        {"zero_optimization": {"offload_optimizer": {"pipeline": True}}},
        {"zero_optimization": None},
        {"amp": {}},
        {"zero_optimization": {"max_live_parameters": -1}},
        {"zero_optimization": {"mics_shard_size": 2}},
        {"zero_optimization": {"allgather_bucket_size": -2}},
        {"bf16": {"check_overflow": True}},
        {"fp16": {"enabled": "auto"}},
        {"bfloat16": {"loss_scale": 0}},
        {"optimizer": {"params": {"lr": 0.1}}},
        {"curriculum_learning": {}},
        {"optimizer": {"type": "adamw", "params": {"learning_rate": 0.1}}},
        {"optimizer": {"type": "OneBitAdam"}},
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        {"train_batch_size": 8.5},
        {"optimizer": {"type": "Adam", "params": {"betas": ["0.9", 0.999]}}},
        {"scheduler": {"type": "WarmupLR"}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
        {"gradient_clipping": "1.0"},
        {"activation_checkpointing": {"partition": True}},
        {"timers": {"throughput": {"sync": True}}},
        {"communication_data_type": "float32"},
        {"train_batch_size": 0},
        {"pipeline": {"activation_checkpoint_interval": "x"}},
    ],
    ids=json.dumps,
)
def test_an_editor_refuses_what_check_refuses(values: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(BATCH | values)
    assert lint(Document("ds.json", BATCH | values))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"train_micro_batch_size_per_gpu": 2},
        {"zero_optimization": {"stage": 3, "max_live_parameters": 1}},
        {"bfloat16": {"enabled": True}},
        {"zero_optimization": True},
        {"communication_data_type": "FP16"},
        {
            "optimizer": {
                "type": "AdAmW",
                "params": {"lr": 1, "betas": [0.9, 0.95], "torch_adam": True},
            }
        },
        {"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9, "x": [1]}}},
        {"zero_optimization": {"overlap_comm": None}},
        {"scheduler": {"type": "StepLR", "params": {"step_size": 3}}},
        {"datastates_ckpt": {"host_cache_size": 3}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}},
        {"$schema": "deepspeed.schema.json"},
        {"autotuning": {"arg_mappings": {"train_batch_size": "--batch"}}},
        {"checkpoint": {"tag_validation": "Warn"}},
    ],
    ids=json.dumps,
)
def test_an_editor_takes_what_deepspeed_takes(values: dict[str, Any]) -> None:
    VALIDATOR.validate(BATCH | values)


def test_a_batch_size_is_needed() -> None:
    assert not VALIDATOR.is_valid({"gradient_accumulation_steps": 4})


def test_both_names_of_a_key_are_one_too_many() -> None:
    twice = {"stage": 3, "max_live_parameters": 5, "stage3_max_live_parameters": 5}
    assert not VALIDATOR.is_valid(BATCH | {"zero_optimization": twice})


def test_another_release_has_other_keys() -> None:
    old = jsonschema.Draft202012Validator(deepspeed_schema("0.18.9"))
    old.validate(BATCH | {"elasticity": {"enabled": False}})
    assert not VALIDATOR.is_valid(BATCH | {"elasticity": {"enabled": False}})
    with pytest.raises(UsageError, match="no table of DeepSpeed"):
        deepspeed_schema("7.0")


def test_the_command_prints_the_committed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "deepspeed"]) == 0
    assert capsys.readouterr().out == COMMITTED.read_text()
    assert main(["schema", "deepspeed", "--deepspeed", "0.18.9"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "DeepSpeed 0.18.9 config"
    assert main(["schema", "--deepspeed", "0.18.9"]) == 64
