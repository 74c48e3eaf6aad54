"""Weights of types that DeepSpeed cannot train, and the config that it is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.config.load import config_from_values
from framework.engine.initialize import _refuse_number_types
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from tests.launched import run_ranks
from tests.places import ROOT


def planned(**values: Any) -> Plan:
    return make_plan(config_from_values(values), Cluster(devices_per_host=2, device="cpu"))


@pytest.mark.parametrize("stage", range(4))
def test_complex_weights_are_refused(stage: int) -> None:
    """At stages 1 to 3 they trained as if they were real, and the imaginary parts became zero."""
    model = torch.nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"weight weight is complex64.*\[weight-type\]"):
        _refuse_number_types(planned(zero={"stage": stage}), model)
    model.requires_grad_(False)
    _refuse_number_types(planned(zero={"stage": stage}), model)


def test_doubles_are_refused_at_stage_0() -> None:
    model = torch.nn.Linear(2, 2).double()
    with pytest.raises(
        ConfigError, match=r"float64, which DeepSpeed cannot train at zero.stage 0; use .float\(\)"
    ):
        _refuse_number_types(planned(), model)
    _refuse_number_types(planned(zero={"stage": 1}), model)
    _refuse_number_types(planned(precision={"dtype": "bf16"}), model)


GROUPS = {
    "optimizer": {"kind": "adamw", "lr": 1e-3, "groups": [{"match": ".*bias", "lr": 1e-4}]},
    "scheduler": {"kind": "warmup_decay", "warmup_steps": 2},
}
PLAIN: dict[str, dict[str, Any]] = {
    "default": {},
    "groups": GROUPS,
    "groups-stage-1": GROUPS | {"zero": {"stage": 1}},
    "scheduler": {"scheduler": GROUPS["scheduler"]},
    "own-scheduler": {"optimizer": GROUPS["optimizer"], "scheduler": {"kind": "cosine"}},
    "lora": {"training": {"max_steps": 3, "lora": {"target_modules": ["fc1"]}}},
    "passed": {
        "zero": {"stage": 1},
        "deepspeed": {"zero_optimization": {"ignore_unused_parameters": True}},
    },
}
PIPELINE: dict[str, dict[str, Any]] = {
    "pipeline": GROUPS
    | {
        "parallel": {"pipe": 2},
        "batch": {"micro_size": 2, "accumulation_steps": 2},
    },
}


def written_and_given(
    cases: dict[str, dict[str, Any]], folder: Path
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Train cases on two ranks; return by name the ``ds_config.json`` of the run, and the config
    that `deepspeed.initialize` was given on rank 0.
    """
    configs = []
    for name, case in cases.items():
        common: dict[str, Any] = {
            "run": {"name": name, "output_dir": str(folder)},
            "model": {"kind": "lenet", "image_size": 28, "in_channels": 3},
            "data": {"kind": "synthetic_images", "image_size": 28, "num_classes": 10},
            "batch": {"global_size": 4},
            "training": {"max_steps": 3},
            "evaluation": {"at_end": False},
            "monitors": {"tensorboard": False, "csv": False, "progress": "off"},
            "checkpoint": {"at_end": False},
        }
        configs.append({"config": common | case})
    (folder / "cases.json").write_text(json.dumps(configs), encoding="utf-8")
    script = ROOT / "tests/jobs/given_configs.py"
    run_ranks(script, str(folder / "cases.json"), num_ranks=2, cwd=folder)
    pairs = {}
    for name in cases:
        written = json.loads((folder / name / "ds_config.json").read_text(encoding="utf-8"))
        given = json.loads((folder / name / "given.json").read_text(encoding="utf-8"))
        pairs[name] = (written, given)
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize("cases", [PLAIN, PIPELINE], ids=["plain", "pipeline"])
def test_the_written_config_is_what_deepspeed_was_given(
    cases: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    pairs = written_and_given(cases, tmp_path)
    assert pairs.keys() == cases.keys()
    for name, (written, given) in pairs.items():
        assert written == given, name
        if cases[name].get("optimizer") and "scheduler" in given:
            rates = given["scheduler"]["params"]["warmup_max_lr"]
            assert rates == pytest.approx([1e-3, 1e-4]), name
