"""Folders of adapters as a start: what does not fit is refused before anything is built."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint import resume_point
from framework.checkpoint.adapter_files import DESCRIPTION, WEIGHTS, adapter_problems
from framework.config.groups import peft_name
from framework.config.load import config_from_values
from framework.errors import ConfigError
from framework.load_run import load_run
from framework.plan.work import trained_shapes

_MODEL = {"kind": "gpt", "size": "tiny", "num_layers": 1, "hidden_size": 8, "num_heads": 2}
_LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["query"], "modules_to_save": ["mlp_norm"]}
_SHAPES = {
    "blocks.0.attention.query.lora_A.weight": [4, 8],
    "blocks.0.attention.query.lora_B.weight": [8, 4],
    "blocks.0.mlp_norm.weight": [8],
    "blocks.0.mlp_norm.bias": [8],
}


def written(
    folder: Path, shapes: dict[str, list[int]] | None = None, **described: Any
) -> dict[str, Any]:
    """A folder as peft writes it, without its numbers; and the section that starts from it."""
    header = {
        f"base_model.model.{name}": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in (_SHAPES if shapes is None else shapes).items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)
    peft = {"peft_type": "LORA", "bias": "none", "peft_version": "0.21.2", **_LORA}
    (folder / DESCRIPTION).write_text(json.dumps(peft | described), encoding="utf-8")
    return _LORA | {"init_adapter": str(folder)}


def problems(lora: dict[str, Any]) -> list[str]:
    config = config_from_values({"model": _MODEL, "training": {"lora": lora}})
    found = adapter_problems(config.training.lora, partial(trained_shapes, config))
    return [str(problem) for problem in found]


def test_what_fits_is_taken(tmp_path: Path) -> None:
    assert problems(written(tmp_path)) == []
    assert problems(_LORA) == []
    buffers = _SHAPES | {"blocks.0.mlp_norm.running_mean": [8]}
    assert problems(written(tmp_path, buffers, lora_dropout=0.3, task_type="CAUSAL_LM")) == []


@pytest.mark.parametrize(
    ("described", "stated"),
    [
        ({"r": 8}, "have r: 8; set training.lora.r: 8"),
        ({"lora_alpha": 8}, "have lora_alpha: 8; set training.lora.lora_alpha: 8"),
        ({"use_rslora": True}, "set training.lora.use_rslora: true"),
        ({"use_dora": True}, "set training.lora.use_dora: true"),
        ({"peft_type": "IA3"}, "its peft_type is IA3"),
        ({"rank_pattern": {"query": 2}}, "they have rank_pattern: "),
        ({"bias": "all"}, "they have bias: all, which training.lora has not"),
        ({"init_lora_weights": "pissa_niter_16"}, "which changes the weights below adapters"),
    ],
)
def test_other_options_are_refused(tmp_path: Path, described: Any, stated: str) -> None:
    (found,) = problems(written(tmp_path, **described))
    assert stated in found
    assert "[adapter-differs]" in found


@pytest.mark.parametrize(
    ("shapes", "lora", "stated"),
    [
        ({}, {"target_modules": ["query", "up"]}, "has no adapters for up; leave it out"),
        (
            {"blocks.0.attention.value.lora_A.weight": [4, 8]},
            {},
            "adapters for blocks.0.attention.value, which it does not name; name value as well",
        ),
        ({}, {"modules_to_save": []}, "holds blocks.0.mlp_norm.bias whole and 1 more, which"),
        ({}, {"modules_to_save": ["mlp_norm", "attention_norm"]}, "not hold attention_norm whole"),
        (
            {"blocks.0.attention.query.lora_A.weight": [4, 16]},
            {},
            "lora_A.weight has shape (4, 16), and (4, 8) in this model: they belong to another",
        ),
        (
            {"blocks.1.attention.query.lora_A.weight": [4, 8]},
            {},
            "it has blocks.1.attention.query.lora_A.weight, which this model has not",
        ),
    ],
)
def test_other_modules_and_shapes_are_refused(
    tmp_path: Path, shapes: Any, lora: Any, stated: str
) -> None:
    (found,) = problems(written(tmp_path, _SHAPES | shapes) | lora)
    assert stated in found
    assert "[adapter-differs]" in found


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    lora = written(tmp_path, {name: shape for name, shape in _SHAPES.items() if "_B" not in name})
    (found,) = problems(lora)
    assert "it lacks blocks.0.attention.query.lora_B.weight" in found


def test_what_is_no_folder_of_adapters_is_refused(tmp_path: Path) -> None:
    def stated(folder: Path) -> str:
        (found,) = problems(_LORA | {"init_adapter": str(folder)})
        return found

    assert "there is no folder at that path" in stated(tmp_path / "none")
    assert "the folder holds no adapters" in stated(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    assert "a pickle, which could be a program" in stated(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    assert f"dsf export {tmp_path} FOLDER --adapter" in stated(tmp_path)
    written(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"cut")
    assert "is damaged, or no file of peft's" in stated(tmp_path)
    header = b'{"a": {"shape": 3}}'
    (tmp_path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    assert "is damaged, or no file of peft's" in stated(tmp_path)


def test_a_pattern_that_is_none_is_refused_by_its_own_rule(tmp_path: Path) -> None:
    lora = written(tmp_path) | {"target_modules": "[query"}
    assert problems(lora) == []
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({"model": _MODEL, "training": {"lora": lora}}), encoding="utf-8")
    with pytest.raises(ConfigError, match="bad-pattern"):
        load_run(str(config)).plan_with_data()


def test_a_run_that_resumes_needs_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = _LORA | {"init_adapter": str(tmp_path / "gone")}
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({"model": _MODEL, "training": {"lora": lora}}), encoding="utf-8")
    settings = ["data.kind=text", "data.sequence_length=16", "task.kind=causal_lm"]
    with pytest.raises(ConfigError, match="adapter-not-found"):
        load_run(str(config), settings).plan_with_data()
    monkeypatch.setattr(resume_point.ResumeLookup, "manifest", lambda lookup: {"step": 3})
    load_run(str(config), settings).plan_with_data()


def test_names_are_those_of_peft() -> None:
    names = {
        "a.base_layer.weight": "base_model.model.a.weight",
        "a.lora_A.default.weight": "base_model.model.a.lora_A.weight",
        "a.lora_embedding_A.default": "base_model.model.a.lora_embedding_A",
        "a.lora_magnitude_vector.default.weight": "base_model.model.a.lora_magnitude_vector",
    }
    assert {name: peft_name(name) for name in names} == names
