"""Every fix that the planner prints, done, passes `check`, and what it mends is gone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from deepspeed_lint.text.document import parse_scalar
from framework.cli import main
from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, Problem
from framework.plan.alternatives import with_settings
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan

GPT: dict[str, Any] = {
    "model": {"kind": "gpt", "size": "gpt2", "num_layers": 8},
    "data": {"kind": "text", "sequence_length": 512},
    "task": {"kind": "causal_lm"},
    "precision": {"dtype": "bf16"},
    "zero": {"stage": 1},
    "training": {"max_steps": 100},
}
EIGHT = {"pipe": 8}
# Name -> sections, devices, kind of the finding.
CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "idle": ({"parallel": EIGHT, "batch": {"micro_size": 2}}, 8, "pipeline-idle"),
    "idle, of a fixed batch": (
        {"parallel": EIGHT, "batch": {"global_size": 512, "micro_size": 32}},
        64,
        "pipeline-idle",
    ),
    "idle, of tensor groups": (
        {"parallel": {"pipe": 4, "tensor": 2}, "batch": {"global_size": 64, "micro_size": 64}},
        8,
        "pipeline-idle",
    ),
    "idle, of few samples": (
        {"parallel": EIGHT, "batch": {"global_size": 4, "micro_size": 1}},
        8,
        "pipeline-idle",
    ),
    "long sum": (
        {"zero": {}, "batch": {"accumulation_steps": 16}},
        2,
        "long-sum-in-half-precision",
    ),
    "slow vocabulary": (
        {
            "model": GPT["model"] | {"vocab_size": 1001, "tie_embeddings": False},
            "training": {"max_steps": 9, "loss_tile": 0},
        },
        2,
        "slow-vocabulary",
    ),
    "batch": ({"batch": {"global_size": 120}}, 7, "batch-not-divisible"),
    "batch of three numbers": (
        {"batch": {"global_size": 120, "micro_size": 8, "accumulation_steps": 2}},
        4,
        "batch-not-divisible",
    ),
    "data": (
        {"batch": {"global_size": 4000}, "model": {"kind": "lenet"}} | {"data": {"kind": "digits"}},
        2,
        "dataset-smaller-than-batch",
    ),
}


def findings(config: RunConfig, cluster: Cluster) -> list[Problem]:
    try:
        return list(make_plan(config, cluster).findings)
    except ConfigError as error:
        return list(error.problems)


def done(config: RunConfig, problem: Problem) -> RunConfig:
    """The config with the settings of the fix's first way, `set a.b: 1, c.d: 2 or ...`."""
    first = re.split(r" or |; ", problem.fix)[0]
    settings = dict(re.findall(r"((?:\w+\.)+\w+): ([\w.]+)", first))
    if not settings:
        settings = {problem.key: re.findall(r"set it to (\d+)", first)[0]}
    values = {key: parse_scalar(value, name="fix") for key, value in settings.items()}
    return with_settings(config, values)


@pytest.mark.parametrize("name", CASES)
def test_a_fix_that_is_printed_mends_the_plan(name: str) -> None:
    sections, devices, kind = CASES[name]
    values = GPT | sections
    if "lenet" in str(sections):
        values = sections
    config = config_from_values(values)
    cluster = Cluster(1, devices, "cuda")
    [problem] = [found for found in findings(config, cluster) if found.kind == kind]
    after = findings(done(config, problem), cluster)
    assert kind not in [found.kind for found in after], problem
    assert [str(found) for found in after if found.severity == "error"] == []


@pytest.mark.parametrize("gpu", ["a100-40gb", "rtx4090-24gb"])
def test_the_fix_of_a_plan_that_does_not_fit_fits(
    gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ds_configs/gpt_zero3.yaml", "model={kind: gpt, size: llama-3-8b}"]
    words += ["batch={global_size: 64, micro_size: 8}", "--num_gpus", "8", "--gpu", gpu]
    assert main(["plan", *words, "zero.stage=0"]) == 0
    line = next(each for each in capsys.readouterr().out.splitlines() if "memory-too-small" in each)
    settings = re.findall(r"((?:\w+\.)+\w+): ([\w.]+)", line.partition("; set ")[2])
    assert settings
    changed = [f"{key}={value}" for key, value in settings]
    if "zero.stage" not in dict(settings):
        changed.append("zero.stage=0")
    assert main(["check", *words, *changed]) == 0
    stated = capsys.readouterr()
    assert "fine on" in stated.out
    assert "memory-too-small" not in stated.err
