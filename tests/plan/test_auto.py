"""Keys that are `auto`: chosen once, the same on every rank, kept by a resume, refused where
nothing is known.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.resume_point import ResumeLookup
from framework.cli import main
from framework.config.load import config_from_values, load_with_source
from framework.config.run_config import AUTO_KEYS
from framework.errors import ConfigError
from framework.hosts.devices import LocalDevices
from framework.hosts.topology import HostTopology
from framework.launch.node import check_node
from framework.launch.options import LaunchOptions
from framework.load_run import load_run
from framework.plan.auto import listed_target, peaks_at_hand, resolve, target_at_hand
from framework.plan.cluster import Cluster
from framework.plan.hardware import Hardware
from framework.plan.plan import make_plan

AUTO: dict[str, Any] = {
    "model": {"kind": "gpt", "size": "llama-3-8b"},
    "data": {"kind": "text", "sequence_length": 2048},
    "task": {"kind": "causal_lm"},
    "precision": {"dtype": "bf16"},
    "zero": {"stage": "auto"},
    "batch": {"global_size": 512, "micro_size": "auto"},
    "parallel": "auto",
    "training": {"max_steps": 100},
}
CLUSTER = Cluster(4, 8, "cuda")
Capture = pytest.CaptureFixture[str]


def a100() -> Hardware:
    return listed_target("a100-80gb", devices_per_host=8)


@pytest.mark.slow
def test_a_choice_is_a_config_without_auto() -> None:
    config, settings, line = resolve(config_from_values(AUTO), CLUSTER, a100())
    assert settings.keys() == config.was_auto == set(AUTO_KEYS)
    assert not config.auto
    assert (config.zero.stage, config.batch.micro_size, config.parallel.pipe) == (
        settings["zero.stage"],
        settings["batch.micro_size"],
        settings["parallel.pipe"],
    )
    plan = make_plan(config, CLUSTER)
    assert plan.layout.global_size == 512
    assert plan.to_dict()["auto"] == settings
    shown = [f"{key}: {value}" for key, value in settings.items() if key[0] != "p" or value > 1]
    assert line.startswith(f"auto: {', '.join(shown)}: ")
    assert "samples per second; estimated for a100-80gb" in line


@pytest.mark.parametrize("keys", [("zero",), ("batch",), ("parallel",), ("zero", "parallel")])
def test_what_is_fixed_stays(keys: tuple[str, ...]) -> None:
    fixed = {
        "zero": {"stage": 1},
        "batch": {"global_size": 512, "micro_size": 2},
        "parallel": {"pipe": 1},
    }
    asked = config_from_values(
        AUTO | {name: section for name, section in fixed.items() if name not in keys}
    )
    config, settings, _ = resolve(asked, CLUSTER, a100())
    assert {key.partition(".")[0] for key in settings} == set(keys)
    for name in fixed.keys() - set(keys):
        assert getattr(config, name) == getattr(asked, name)


@pytest.mark.slow
def test_every_rank_chooses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher that is not ours each rank makes the choice, from the cluster that its
    environment tells.
    """
    monkeypatch.setenv("DSF_GPU", "a100-80gb")
    found = []
    for rank in (0, 31):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 8),
            "WORLD_SIZE": "32",
            "LOCAL_WORLD_SIZE": "8",
        }
        cluster = Cluster.from_environment(environment, device="cuda")
        found.append(
            resolve(
                config_from_values(AUTO),
                cluster,
                target_at_hand(cluster, {**os.environ, **environment}),
            )
        )
    assert found[0] == found[1]


def test_an_unresolved_config_is_no_plan() -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan(config_from_values(AUTO), CLUSTER)
    assert [problem.kind for problem in refused.value.problems] == ["auto-not-chosen"] * 6


@pytest.mark.slow
def test_without_a_device_nothing_is_started() -> None:
    with pytest.raises(ConfigError, match=r"--gpu KIND.*DSF_GPU.*\[auto-without-device\]"):
        resolve(config_from_values(AUTO), CLUSTER, Hardware())
    config, _, line = resolve(config_from_values(AUTO), CLUSTER, Hardware(), is_proposal=True)
    assert not config.auto
    assert "speed unknown: no device named" in line


@pytest.mark.slow
def test_what_cannot_be_chosen_is_refused() -> None:
    own = config_from_values({"model": {"target": "my_nets:Net"}, "zero": {"stage": "auto"}})
    with pytest.raises(
        ConfigError,
        match=r"zero.stage = auto: the memory of this run is not known.*auto-not-estimated",
    ):
        resolve(own, CLUSTER, a100())
    with pytest.raises(ConfigError, match=r"the least is .* 0.0 MiB usable; .*auto-nothing-fits"):
        resolve(config_from_values(AUTO), CLUSTER, Hardware("tiny", 2**30))


def test_processors_have_the_hosts_memory() -> None:
    target = target_at_hand(Cluster(devices_per_host=4, device="cpu"), {})
    whole = target_at_hand(Cluster(devices_per_host=1, device="cpu"), {})
    assert target.memory_bytes is not None
    assert whole.memory_bytes is not None
    assert target.memory_bytes == whole.memory_bytes // 4 > 2**20
    assert target_at_hand(Cluster(device="npu"), {}) == Hardware()


def test_nvidias_driver_names_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\necho "NVIDIA H100 80GB HBM3, 81559"\necho "NVIDIA H100 80GB HBM3, 81559"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    target = target_at_hand(Cluster(devices_per_host=2, device="cuda"), {})
    assert (target.name, target.memory_bytes) == ("h100-80gb", 81559 * 2**20)
    assert target.machine is not None
    program.write_text('#!/bin/sh\necho "NVIDIA Future 9000, 1000000"\n')
    target = target_at_hand(Cluster(device="cuda"), {})
    assert (target.name, target.memory_bytes, target.machine) == (
        "NVIDIA Future 9000",
        10**6 * 2**20,
        None,
    )


@pytest.mark.slow
def test_a_resumed_run_keeps_its_choice() -> None:
    config = config_from_values(AUTO)
    saved = {
        "layout": {"world_size": 32, "pipe_size": 2, "micro_size": 1},
        "config": {"zero": {"stage": 1}},
    }
    before = dict.fromkeys(AUTO_KEYS, 1) | {"parallel.pipe": 2}
    kept, settings, line = resolve(config, CLUSTER, Hardware(), saved=saved)
    assert settings == before
    assert kept.zero.stage == 1
    assert line.endswith("as in the checkpoint")
    settings = resolve(config, Cluster(2, 8, "cuda"), a100(), saved=saved)[1]
    assert settings != before
    indivisible = saved | {"layout": {"world_size": 32, "pipe_size": 2, "micro_size": 3}}
    assert resolve(config, CLUSTER, a100(), saved=indivisible)[1]["batch.micro_size"] != 3
    assert resolve(config, CLUSTER, a100(), saved={"layout": "damaged"})[0].auto == frozenset()


def test_a_fresh_run_reads_no_checkpoint(tmp_path: Path) -> None:
    run = {"run": {"output_dir": str(tmp_path)}}
    assert ResumeLookup(config_from_values(run)).manifest() == {}
    assert (
        ResumeLookup(config_from_values(run | {"checkpoint": {"resume": "auto"}})).manifest() == {}
    )
    assert (
        ResumeLookup(
            config_from_values(run | {"checkpoint": {"resume": str(tmp_path / "none")}})
        ).manifest()
        == {}
    )


def test_a_launcher_hands_out_plain_settings(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    file = tmp_path / "run.yaml"
    file.write_text("zero: {stage: auto}\nbatch: {global_size: 120, micro_size: auto}\n")
    assert main(["launch", str(file), "parallel=auto", "--num_gpus", "2", "--dry_run"]) == 0
    stated = capsys.readouterr()
    words = stated.out.partition("train.py ")[2].split()
    assert set(words[2:]) == {
        "parallel=auto",
        "zero.stage=0",
        "batch.micro_size=60",
        *(f"parallel.{name}=1" for name in ("pipe", "tensor", "sequence", "expert")),
    }
    assert stated.err.startswith("auto: batch.micro_size: 60, ") or stated.err.startswith(
        "auto: zero.stage: 0, "
    )
    config, _ = load_with_source(file, words[2:])
    assert (config.auto, config.was_auto) == (
        frozenset(),
        set(AUTO_KEYS),
    )


def test_who_starts_others_leaves_the_choice_to_them(tmp_path: Path) -> None:
    """Over ssh the devices are elsewhere: each host chooses by its own, and compares with the
    others.
    """
    file = tmp_path / "run.yaml"
    file.write_text("zero: {stage: auto}\n")
    topology = HostTopology(2, 2, 0, "127.0.0.1", 1, {"slots": "--num_gpus"})
    assert check_node(
        LaunchOptions(str(file)), [], topology, LocalDevices("unknown", 0)
    ).config.auto == {"zero.stage"}
    here = check_node(LaunchOptions(str(file)), [], topology, LocalDevices("cpu", 0))
    assert (here.config.zero.stage, here.overrides) == (0, ("zero.stage=0",))


def test_commands_choose(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("zero: {stage: auto}\n")
    assert main(["check", str(file), "--num_gpus", "2"]) == 0
    assert "; auto: zero.stage: 0: " in capsys.readouterr().out
    assert main(["render", str(file), "--num_gpus", "2"]) == 78
    assert "[auto-without-device]" in capsys.readouterr().err
    assert main(["render", str(file), "--num_gpus", "2", "--gpu", "a100-40gb"]) == 0
    stated = capsys.readouterr()
    assert json.loads(stated.out)["zero_optimization"]["stage"] in range(4)
    assert stated.err.startswith("auto: zero.stage: ")
    assert main(["plan", str(file), "--num_gpus", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["auto"] == {"zero.stage": 0}


def test_a_deepspeed_json_beside_it_keeps_auto(tmp_path: Path) -> None:
    file, beside = tmp_path / "run.yaml", tmp_path / "ds.json"
    file.write_text("zero: {stage: auto}\n")
    beside.write_text('{"train_batch_size": 8, "gradient_clipping": 0.5}')
    run = load_run(str(file), deepspeed_config=str(beside))
    assert run.config.auto == {"zero.stage"}
    assert run.config.training.clip_grad_norm == 0.5


def test_peaks_of_the_devices_at_hand_are_listed_ones_or_none() -> None:
    cluster = Cluster(1, 8, "cuda")
    assert peaks_at_hand(cluster, {"DSF_GPU": "h100-80gb"})["bf16"] == 989e12
    assert peaks_at_hand(cluster, {"DSF_GPU": "no-such-gpu"}) == {}
    assert peaks_at_hand(Cluster(1, 2, "cpu"), {}) == {}
