"""Every shipped config has its rendering beside it, and DeepSpeed itself accepts each one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from framework.config.load import load_with_source
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.plan.render import render
from tests.places import ROOT

CONFIGS = sorted((ROOT / "ds_configs").glob("*.yaml"))
RENDERED = ROOT / "ds_configs/rendered"
DEVICES = 8


def test_there_are_configs() -> None:
    assert {"quickstart", "zero3", "fp16", "one_cycle"} <= {path.stem for path in CONFIGS}
    assert {path.stem for path in RENDERED.glob("*.json")} == {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_rendering_is_current(path: Path) -> None:
    config, source = load_with_source(path)
    text = (
        json.dumps(
            render(make_plan(config, Cluster(devices_per_host=DEVICES), source=source)), indent=2
        )
        + "\n"
    )
    assert (RENDERED / f"{path.stem}.json").read_text() == text, (
        f"refresh it: dsf render ds_configs/{path.stem}.yaml --num_gpus {DEVICES} "
        f"> ds_configs/rendered/{path.stem}.json"
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_is_a_good_example(path: Path) -> None:
    """Named after its file, one sentence at the top, no finding on any of 1, 2, 4 and 8 devices
    that hold all its stages, parts and experts.
    """
    schema, sentence, *_ = path.read_text().splitlines()
    assert schema == "# yaml-language-server: $schema=../framework/config/run.schema.json"
    assert sentence.startswith("# ")
    assert sentence.endswith(".")
    config, source = load_with_source(path)
    assert config.run.name == path.stem
    # What naive model parallelism costs is what that config shows.
    expected = ["pipeline-idle"] if path.stem == "resnet50_model_parallel" else []
    together = prod(config.parallel.sizes().values()) * config.parallel.expert
    for devices in (n for n in (1, 2, 4, 8) if n % together == 0):
        findings = make_plan(config, Cluster(devices_per_host=devices), source=source).findings
        assert [finding.kind for finding in findings] == expected


# The parser sizes its batch arithmetic by the data-parallel group that it is told of, once it knows
# its own rank.
_ACCEPT = """
import json, sys
from pathlib import Path
from deepspeed.runtime import config
from deepspeed.runtime.config import DeepSpeedConfig

config.dist.get_rank = lambda: 0

class Ranks:
    def __init__(self, count): self.count = count
    def get_data_parallel_world_size(self): return self.count

data_parallel = json.loads(sys.argv[2])
for path in sorted(Path(sys.argv[1]).glob("*.json")):
    written = json.loads(path.read_text())
    read = DeepSpeedConfig(written, mpu=Ranks(data_parallel[path.stem]))
    assert read.train_batch_size == written["train_batch_size"], path
    assert read.gradient_clipping == written["gradient_clipping"], path
    assert read.zero_optimization_stage == written["zero_optimization"]["stage"], path
    named = written.get("optimizer", {}).get("type", "")  # none: it is made here
    assert (read.optimizer_name or "").lower() == named.lower(), path
    assert read.scheduler_name == written.get("scheduler", {}).get("type"), path
    print("accepted", path.stem)
"""


@pytest.mark.slow
def test_deepspeed_accepts_every_rendering() -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    data_parallel = {}
    for path in CONFIGS:
        parallel = load_with_source(path)[0].parallel
        # To DeepSpeed ranks that share sequences are data-parallel ones.
        data_parallel[path.stem] = DEVICES // (parallel.pipe * parallel.tensor)
    done = subprocess.run(
        [sys.executable, "-c", _ACCEPT, str(RENDERED), json.dumps(data_parallel)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("accepted ") == len(CONFIGS)
