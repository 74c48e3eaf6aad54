"""A run config and a DeepSpeed JSON describe one run together; a contradiction names both
places.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from framework.config.load import load_with_source
from framework.config.run_config import RunConfig
from framework.errors import ConfigError
from framework.imports.deepspeed import with_deepspeed_config
from framework.load_run import load_run
from framework.system.parent_watch import identity
from tests.places import ROOT

DS = {
    "train_batch_size": 60,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}},
    "wall_clock_breakdown": True,
}


def merged(tmp_path: Path, run: str, ds: dict[str, Any] | None = None) -> RunConfig:
    (tmp_path / "run.yaml").write_text(run)
    (tmp_path / "ds.json").write_text(json.dumps(DS if ds is None else ds, indent=2))
    config, source = load_with_source(tmp_path / "run.yaml")
    return with_deepspeed_config(config, tmp_path / "ds.json", source=source)


def test_each_states_what_the_other_leaves_open(tmp_path: Path) -> None:
    config = merged(
        tmp_path,
        "run: {name: x}\noptimizer: {kind: adamw, lr: 0.5}\nzero: {reduce_bucket_size: 10}\n",
    )
    assert (config.run.name, config.batch.global_size, config.precision.dtype) == ("x", 60, "bf16")
    assert (
        config.zero.stage,
        config.zero.reduce_bucket_size,
        config.zero.allgather_bucket_size,
    ) == (
        2,
        10,
        500_000_000,
    )
    optimizer = config.optimizer.model_dump()
    assert (optimizer["lr"], optimizer["eps"], optimizer["implementation"]) == (
        0.5,
        1e-6,
        "deepspeed",
    )
    assert config.deepspeed == {"wall_clock_breakdown": True}


def test_sections_that_the_json_does_not_have_stay(tmp_path: Path) -> None:
    config = merged(
        tmp_path,
        "optimizer: {kind: sgd, lr: 0.5}\nprecision: {dtype: bf16}\n",
        {"train_batch_size": 60},
    )
    assert (config.optimizer.model_dump()["kind"], config.precision.dtype) == ("sgd", "bf16")
    assert merged(tmp_path, "{}", {"train_batch_size": 60}) == RunConfig.model_validate(
        {"batch": {"global_size": 60}}
    )


def test_saying_the_same_twice_is_fine(tmp_path: Path) -> None:
    assert (
        merged(
            tmp_path, "zero: {stage: 2}\nbatch: {global_size: 60}\nprecision: {dtype: bf16}\n"
        ).zero.stage
        == 2
    )


@pytest.mark.parametrize(
    ("run", "key"),
    [
        ("zero: {stage: 3}", "zero.stage"),
        ("batch: {global_size: 64}", "batch.global_size"),
        ("optimizer: {kind: sgd}", "optimizer.kind"),
        ("precision: {dtype: fp32}", "precision.dtype"),
        ("optimizer: {kind: adamw, eps: 0.1}", "optimizer.eps"),
        ("optimizer: {target: 'a:b'}", "optimizer.target"),
        ("deepspeed: {wall_clock_breakdown: false}", "deepspeed.wall_clock_breakdown"),
    ],
)
def test_a_contradiction_names_both_places(tmp_path: Path, run: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        merged(tmp_path, run)
    (problem,) = caught.value.problems
    assert (problem.kind, problem.key) == ("deepspeed-config-clash", key)
    assert (Path(problem.file).name, problem.line) == ("run.yaml", 1)
    assert f"{tmp_path / 'ds.json'}:" in problem.reason


def test_a_removed_section_that_is_on_is_no_run_without_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        merged(tmp_path, "{}", {"train_batch_size": 60, "amp": {"enabled": True}})
    assert [(problem.kind, problem.key, problem.line) for problem in caught.value.problems] == [
        ("removed-key", "amp", 3)
    ]


def test_what_is_left_out_of_the_run_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("{}\n")
    ds = {
        "train_batch_size": 60,
        "amp": {"enabled": False},
        "fp16": {"enabled": False, "hysteresis": 3},
    }
    (tmp_path / "ds.json").write_text(json.dumps(ds, indent=1))
    load_run(
        str(tmp_path / "run.yaml"), [], deepspeed_config=str(tmp_path / "ds.json")
    ).print_notes()
    amp, hysteresis = capsys.readouterr().err.splitlines()
    assert amp.startswith(f"note: {tmp_path / 'ds.json'}:3: amp: left out of this run: ")
    assert hysteresis.startswith(
        f"note: {tmp_path / 'ds.json'}:8: fp16.hysteresis: left out of this run: 3 (fp16 is not enabled)"
    )


def test_train_py_takes_deepspeeds_own_options(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("zero: {stage: 1}\n")
    (tmp_path / "ds.json").write_text(json.dumps(DS))
    command = [
        sys.executable,
        ROOT / "train.py",
        "--deepspeed",
        "--deepspeed_config",
        "ds.json",
        "--config",
        "run.yaml",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 78
    assert done.stderr.startswith(
        "run.yaml:1: zero.stage = 1: zero_optimization.stage in ds.json:1 amounts to 2"
    )


@pytest.mark.parametrize(
    ("environment", "is_reported"),
    [({}, True), ({"RANK": "1"}, False), ({"DSF_AGENT": identity(os.getpid())}, False)],
)
def test_a_start_without_our_launcher_reports_once_what_is_left_out(
    tmp_path: Path, environment: dict[str, str], is_reported: bool
) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 60, "amp": {"enabled": false}}')
    (tmp_path / "run.yaml").write_text("run: {name: x}\n")
    command = [
        sys.executable,
        ROOT / "train.py",
        "--deepspeed_config",
        "ds.json",
        "--config",
        "run.yaml",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"WORLD_SIZE": "7", "RANK": "0"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 78, "60 samples do not go to 7 ranks"
    assert ("ds.json:1: amp: left out of this run" in done.stderr) is is_reported


def test_deepspeeds_base64_text_is_read_as_a_file_is() -> None:
    # "?" makes a "/" of the common alphabet
    for text in (json.dumps(DS), json.dumps({**DS, "comment": "?" * 4})):
        encoded = base64.urlsafe_b64encode(text.encode()).decode()
        config = with_deepspeed_config(RunConfig(), encoded)
        assert (config.batch.global_size, config.zero.stage) == (60, 2)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("nowhere.json", "config-not-found"),
        ("a\0b", "config-not-found"),
        ("a/" * 5000, "config-unreadable"),
        (base64.urlsafe_b64encode(b"[1]").decode(), "config-not-found"),
        (base64.urlsafe_b64encode(b"{\xff").decode(), "config-not-found"),
        (base64.urlsafe_b64encode(b'{"train_batch_size": ').decode(), "config-syntax"),
        (base64.urlsafe_b64encode(b"{a:" * 100_000).decode(), "config-too-deep"),
        (base64.urlsafe_b64encode(b"{ " + b" " * 1_000_000).decode(), "config-too-large"),
        ("A" * 5_000_000, "config-unreadable"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_neither_file_nor_base64_is_one_line(given: str, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_deepspeed_config(RunConfig(), given)
    (problem,) = caught.value.problems
    assert problem.kind == kind
    assert len(str(problem)) < 600
