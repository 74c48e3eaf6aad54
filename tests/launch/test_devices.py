"""Which devices are found, with a stand-in for nvidia-smi and for /dev."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.errors import ConfigError
from framework.launch import devices
from framework.launch.devices import LocalDevices, count_gpus, find_devices, usable_cores


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def has(*, gpus: int = 0, npus: int = 0) -> None:
        monkeypatch.setattr(devices, "count_gpus", lambda: gpus)
        monkeypatch.setattr(devices, "count_npus", lambda: npus)

    return has


def test_cpu_where_there_is_nothing_else(machine) -> None:
    machine()
    assert find_devices({}) == LocalDevices("cpu", 0)
    assert find_devices({"CUDA_VISIBLE_DEVICES": "0"}) == LocalDevices("cpu", 0)


def test_every_gpu(machine) -> None:
    machine(gpus=8)
    assert find_devices({}) == LocalDevices("cuda", 8)


def test_ascend_comes_first(machine) -> None:
    machine(gpus=1, npus=8)
    assert find_devices({}) == LocalDevices("npu", 8)
    assert find_devices({"ASCEND_RT_VISIBLE_DEVICES": "6,7"}) == LocalDevices("npu", 2, (6, 7))


def test_only_the_visible_ones(machine) -> None:
    machine(gpus=4)
    assert find_devices({"CUDA_VISIBLE_DEVICES": "3, 1"}) == LocalDevices("cuda", 2, (3, 1))


@pytest.mark.parametrize("hidden", ["", "-1", " "])
def test_hidden_gpus_leave_the_cpu(machine, hidden: str) -> None:
    machine(gpus=4)
    assert find_devices({"CUDA_VISIBLE_DEVICES": hidden}) == LocalDevices("cpu", 0)


@pytest.mark.parametrize("text", ["4", "0,0", "GPU-3f1c", "0,MIG-1", "0,-1", "x", "99999999999"])
def test_refuses_what_the_launcher_cannot_follow(machine, text: str) -> None:
    machine(gpus=4)
    with pytest.raises(ConfigError, match=r"environment: CUDA_VISIBLE_DEVICES = .* from 0 to 3"):
        find_devices({"CUDA_VISIBLE_DEVICES": text})


def test_an_asked_accelerator_wins(machine) -> None:
    machine(gpus=4)
    assert find_devices({"DS_ACCELERATOR": "cpu"}) == LocalDevices("cpu", 0)
    assert find_devices({"DS_ACCELERATOR": "cuda"}) == LocalDevices("cuda", 4)
    assert find_devices({"DS_ACCELERATOR": "xpu"}) == LocalDevices("xpu", 0)
    assert find_devices({"DS_ACCELERATOR": "mlu"}) == LocalDevices("unknown", 0)
    with pytest.raises(ConfigError, match=r"sees no npu device.*\[no-device\]"):
        find_devices({"DS_ACCELERATOR": "npu"})


def test_nvidia_smi_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: GPU-1)'\necho '  MIG 1g (UUID: MIG-1)'\necho 'GPU 1: B (UUID: GPU-2)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert count_gpus() == 2


def test_a_broken_driver_means_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' ; exit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert count_gpus() == 0


def test_there_is_at_least_one_core() -> None:
    assert usable_cores() >= 1
