"""The committed JSON Schema is current, tells editors what the loader does, and has a sentence
everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deepspeed_lint.text.document import read_document
from framework.config import schema
from framework.config.load import config_from_values, load_config
from framework.config.run_config import RunConfig
from framework.config.schema import run_schema
from framework.errors import ConfigError
from tests.places import ROOT

COMMITTED = ROOT / "framework/config/run.schema.json"
CONFIGS = sorted((ROOT / "ds_configs").glob("*.yaml"))
VALIDATOR = jsonschema.Draft202012Validator(json.loads(COMMITTED.read_text()))


@pytest.mark.slow
def test_the_committed_schema_is_current() -> None:
    assert json.loads(COMMITTED.read_text()) == json.loads(json.dumps(run_schema())), (
        "refresh it: python -m framework.config.schema"
    )


@pytest.mark.slow
def test_the_command_builds_it_where_the_package_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file as well: `schema > run.schema.json` makes it empty before the command reads
    it.
    """
    (tmp_path / "empty").touch()
    for name in ("empty", "missing"):
        monkeypatch.setattr(schema, "PACKAGED", tmp_path / name)
        assert json.loads(schema.schema_text()) == run_schema()


@pytest.mark.slow
def test_it_is_a_valid_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(run_schema())


def test_every_key_has_its_sentence() -> None:
    schema = run_schema()
    for name, section in {"RunConfig": schema, **schema["$defs"]}.items():
        assert section["description"], name
        for key, field in section["properties"].items():
            sentence = field.get("description", "")
            assert sentence.rstrip(".").strip(), (
                f"{name}.{key} has no sentence: write one under the field"
            )
            assert "title" not in field, f"{name}.{key}"


def test_every_reference_leads_somewhere_and_nothing_is_left_over() -> None:
    schema = run_schema()
    text = json.dumps(schema)
    assert {name for name in schema["$defs"] if f'"#/$defs/{name}"' not in text} == set()
    assert "Object" not in text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    VALIDATOR.validate(read_document(path, name=path.name).value)


def test_the_resolved_default_is_valid() -> None:
    VALIDATOR.validate(RunConfig().to_dict())


@pytest.mark.parametrize(
    "values",
    [
        {"modle": {}},
        {"batch": {"global_size": "120"}},
        {"batch": {"micro_size": 1.5}},
        {"model": {"image_size": 28}},
        {"optimizer": {"kind": "adamW"}},
        {"optimizer": {"lr": 0.1}},
        {"zero": {"stage": 4}},
        {"training": None},
        {"run": {"name": "a b"}},
        {"model": {"target": "a.b"}},
        {"model": {"kind": "lenet", "target": "a:b"}},
        {"scheduler": {"kind": "one_cycle"}},
        {"zero": {"offload_optimizer": {"device": "nvme"}}},
        {"precision": {}},
        {"zero": {"allgather_bucket_size": 3}},
        {"optimizer": {"kind": "adam", "betas": [0.9]}},
    ],
    ids=str,
)
def test_an_editor_refuses_what_the_loader_refuses(values: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(values)
    with pytest.raises(ConfigError):
        config_from_values(values)


@pytest.mark.parametrize(
    "values",
    [
        {"zero": {"stage": 2, "reduce_bucket_size": 5e8}},
        {"batch": {"global_size": None}},
        {"optimizer": {"kind": "sgd"}},
        {"model": {"target": "a.b:c.d", "args": {"x": [1]}}},
        {"data": {"target": "a:b", "train_samples": 10}},
        {"scheduler": {"kind": "one_cycle", "min_lr": 0, "max_lr": 1}},
        {"deepspeed": {"timers": {}}},
    ],
    ids=str,
)
def test_an_editor_takes_what_the_loader_takes(values: dict[str, Any]) -> None:
    VALIDATOR.validate(values)
    config_from_values(values)


def test_a_json_run_config_may_name_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"$schema": "run.schema.json", "run": {"name": "a"}}')
    VALIDATOR.validate(json.loads(path.read_text()))
    assert load_config(path).run.name == "a"
    assert not VALIDATOR.is_valid({"$schema": 1})


@pytest.mark.parametrize(
    ("passed", "is_right"),
    [
        (
            {"wall_clock_breakdown": True, "flops_profiler": {"enabled": True, "module_depth": 2}},
            True,
        ),
        (
            {
                "zero_optimization": {
                    "zero_hpz_partition_size": 2,
                    "offload_optimizer": {"cpuadam_cores_perc": 0.5},
                }
            },
            True,
        ),
        (
            {
                "optimizer": {"params": {"bias_correction": False}},
                "scheduler": {"params": {"decay_mom_rate": 0.1}},
            },
            True,
        ),
        (
            {
                "tensor_parallel": {"tp": {"tp_size": 1}},
                "timers": {"throughput": {"enabled": False}},
            },
            True,
        ),
        ({"wall_clock_breakdown": "maybe"}, False),
        ({"flops_profiler": {"modul_depth": 2}}, False),
        ({"wall_clock_breakdwon": True}, False),
        ({"zero_optimization": {"stage": 2}}, False),
        ({"amp": {}}, False),
        ({"fp16": {"enabled": True}}, False),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, False),
        ({"train_batch_size": 8}, False),
        ({"torch_autocast": {"enabled": True}}, False),
    ],
    ids=json.dumps,
)
def test_an_editor_knows_the_keys_under_deepspeed(passed: dict[str, Any], is_right: bool) -> None:
    assert VALIDATOR.is_valid({"deepspeed": passed}) is is_right
