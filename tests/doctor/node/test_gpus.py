"""Devices, with a stand-in for nvidia-smi that prints what the real one prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from framework.doctor.node.gpus import _about_use, check_devices
from framework.doctor.node.requirements import Requirements
from framework.hosts import devices
from framework.plan.cluster import Cluster
from tests.doctor.node.broken import programs

SMI = """
case "$*" in
  -L) echo 'GPU 0: NVIDIA H100 (UUID: GPU-a)'; echo 'GPU 1: NVIDIA H100 (UUID: GPU-b)';;
  --query-gpu=*) cat "$0.gpus";;
  --query-compute-apps=*) cat "$0.apps";;
esac
"""
FINE = [
    "0, GPU-a, NVIDIA H100 80GB HBM3, 580.82.07, 81559, 4, 0, No",
    "1, GPU-b, NVIDIA H100 80GB HBM3, 580.82.07, 81559, 4, [N/A], [N/A]",
]


def look(
    folder: Path, gpus: list[str], apps: str = "", *, ranks: int = 2, **environment: str
) -> list[tuple[str, str]]:
    path = programs(folder, "cat", nvidia_smi=SMI)
    (folder / "nvidia-smi.gpus").write_text("\n".join(gpus) + "\n")
    (folder / "nvidia-smi.apps").write_text(apps)
    need = Requirements(Cluster(devices_per_host=ranks, device="cuda"))
    before = os.environ["PATH"]
    os.environ["PATH"] = path
    try:
        return [
            (each.kind, each.key)
            for each in check_devices(need, {"PATH": path, **environment}).problems
        ]
    finally:
        os.environ["PATH"] = before


def test_gpus_without_problems(tmp_path: Path) -> None:
    assert look(tmp_path, FINE) == []


def test_more_ranks_than_devices(tmp_path: Path) -> None:
    assert look(tmp_path, FINE, ranks=4) == [("too-few-devices", "devices")]
    assert look(tmp_path / "one", FINE, CUDA_VISIBLE_DEVICES="1") == [
        ("too-few-devices", "devices")
    ]
    assert look(tmp_path / "odd", FINE, CUDA_VISIBLE_DEVICES="GPU-a") == [
        ("visible-devices", "CUDA_VISIBLE_DEVICES")
    ]


def test_no_device_where_gpus_are_planned() -> None:
    need = Requirements(Cluster(device="cuda"))
    assert [each.kind for each in check_devices(need, {"DS_ACCELERATOR": "cpu"}).problems] == [
        "too-few-devices"
    ]


def test_devices_that_are_not_counted_are_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "framework.doctor.node.gpus.find_devices",
        lambda environment: devices.LocalDevices("cuda", 0),
    )
    found = check_devices(Requirements(Cluster(device="cuda")), {})
    assert (found.outcome, found.problems) == ("1 rank on cuda devices, which are not counted", ())


def test_gpus_that_torch_cannot_use_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 0)
    monkeypatch.setattr(devices, "count_amd_gpus", lambda environment: 8)
    monkeypatch.setattr(devices, "torch_text", lambda name: None)
    (problem,) = check_devices(Requirements(Cluster(device="cpu")), {}).problems
    assert (problem.kind, problem.severity) == ("gpus-unused", "warning")
    assert not check_devices(
        Requirements(Cluster(device="cpu")), {"DS_ACCELERATOR": "cpu"}
    ).problems


def test_another_process_computes_there(tmp_path: Path) -> None:
    assert look(tmp_path, FINE, "GPU-b, 4711, python, 30000\n") == [("gpu-busy", "GPU 1")]
    only = look(
        tmp_path / "other", FINE, "GPU-b, 4711, python, 30000\n", ranks=1, CUDA_VISIBLE_DEVICES="0"
    )
    assert only == []  # this run does not take that one


def test_the_devices_of_the_ranks_are_the_lowest(tmp_path: Path) -> None:
    busy = "GPU-b, 4711, python, 30000\n"
    assert look(tmp_path, FINE, busy, ranks=1, CUDA_VISIBLE_DEVICES="1,0") == []


def test_memory_without_a_known_process(tmp_path: Path) -> None:
    assert look(tmp_path, [FINE[0].replace(" 4,", " 40000,"), FINE[1]]) == [
        ("gpu-memory-used", "GPU 0")
    ]


def test_memory_of_this_process_is_no_finding(tmp_path: Path) -> None:
    gpus = [FINE[0].replace(" 4,", " 40000,"), FINE[1]]
    assert look(tmp_path, gpus, f"GPU-a, {os.getpid()}, python, 39000\n") == []


def test_many_processes_are_counted() -> None:
    gpu = {"index": "0", "uuid": "GPU-a", "memory.used": "40000"}
    processes = [
        {"gpu_uuid": "GPU-a", "pid": str(10**7 + number), "process_name": "python"}
        for number in range(5)
    ]
    (problem,) = _about_use(gpu, processes)
    listed = ", ".join(f"python (pid {10**7 + number})" for number in range(3))
    assert problem.reason == f"in use by {listed} and 2 more"


@pytest.mark.parametrize(
    "row", [FINE[0].replace(", 0, No", ", 3, No"), FINE[0].replace(", 0, No", ", 0, Yes")]
)
def test_memory_errors(tmp_path: Path, row: str) -> None:
    assert look(tmp_path, [row, FINE[1]]) == [("gpu-memory-errors", "GPU 0")]


def test_a_driver_older_than_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed torch does not matter: any CUDA of these years is newer than that driver."""
    monkeypatch.setattr("framework.doctor.node.gpus.torch_text", lambda name: "12.8")
    assert look(tmp_path, [row.replace("580.82.07", "470.57.02") for row in FINE]) == [
        ("driver-too-old", "driver")
    ]


def test_an_nvidia_smi_that_fails_is_no_finding(tmp_path: Path) -> None:
    assert look(tmp_path, ["NVIDIA-SMI has failed"]) == []
