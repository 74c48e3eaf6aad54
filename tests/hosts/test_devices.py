"""Which devices are found, with a stand-in for nvidia-smi and for /dev."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.errors import ConfigError
from framework.hosts import devices
from framework.hosts.devices import (
    LocalDevices,
    count_gpus,
    devices_of_ranks,
    find_devices,
    unused_gpus,
    usable_cores,
    visible_variable,
)


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


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("cuda", "CUDA_VISIBLE_DEVICES"),
        ("npu", "ASCEND_RT_VISIBLE_DEVICES"),
        ("xpu", "ZE_AFFINITY_MASK"),
        ("hpu", "HABANA_VISIBLE_MODULES"),
        ("unknown", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_every_kind_hides_devices_by_a_variable_of_its_own(kind: str, name: str) -> None:
    assert visible_variable(kind) == name


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


def test_a_requested_accelerator_wins(machine) -> None:
    machine(gpus=4)
    assert find_devices({"DS_ACCELERATOR": "cpu"}) == LocalDevices("cpu", 0)
    assert find_devices({"DS_ACCELERATOR": "cuda"}) == LocalDevices("cuda", 4)
    assert find_devices({"DS_ACCELERATOR": "xpu"}) == LocalDevices("xpu", 0)
    assert find_devices({"DS_ACCELERATOR": "mlu"}) == LocalDevices("unknown", 0)
    with pytest.raises(ConfigError, match=r"sees no npu device.*\[no-device\]"):
        find_devices({"DS_ACCELERATOR": "npu"})


def test_nvidia_smi_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'GPU 0: A (UUID: GPU-1)'\necho '  MIG 1g (UUID: MIG-1)'\necho 'GPU 1: B (UUID: GPU-2)'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert count_gpus() == 2


@pytest.mark.parametrize(
    ("chosen", "num_ranks", "numbers"),
    [(None, 2, [0, 1]), ((3, 1, 0), 2, [0, 1]), ((3, 1, 0), 3, [0, 1, 3])],
)
def test_ranks_have_the_devices_that_the_launcher_gives_them(
    chosen: tuple[int, ...] | None, num_ranks: int, numbers: list[int]
) -> None:
    assert devices_of_ranks(chosen, num_ranks) == numbers
    if chosen is not None and num_ranks == len(chosen):
        runner = pytest.importorskip("deepspeed.launcher.runner")
        include = "localhost:" + ",".join(map(str, chosen))
        assert runner.parse_inclusion_exclusion({"localhost": 8}, include, "") == {
            "localhost": numbers
        }


def test_a_broken_driver_means_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' ; exit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert count_gpus() == 0
    # a warning, and the reason of an error where GPUs are requested, has the program's message
    monkeypatch.setattr(devices, "count_amd_gpus", lambda environment: 0)
    warning = unused_gpus(LocalDevices("cpu", 0), {})
    assert warning is not None
    assert (warning.kind, warning.severity) == ("gpus-unused", "warning")
    assert "NVIDIA-SMI has failed" in warning.reason
    assert unused_gpus(LocalDevices("cpu", 0), {"DS_ACCELERATOR": "cpu"}) is None
    monkeypatch.setattr(devices, "_DEV", tmp_path)
    with pytest.raises(ConfigError, match=r"nvidia-smi fails: NVIDIA-SMI has.*\[no-device\]"):
        find_devices({"DS_ACCELERATOR": "cuda"})


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make a machine of two AMD GPUs and a processor, with `visible` in /dev, and a torch with the
    platform that it is built for.
    """
    monkeypatch.setattr(devices, "_DEV", tmp_path / "dev")
    monkeypatch.setattr(devices, "_KFD_NODES", tmp_path / "nodes")
    monkeypatch.setenv("PATH", str(tmp_path))

    def has(*visible: int, torch: str = "hip", kfd: bool = True) -> None:
        (tmp_path / "dev/dri").mkdir(parents=True)
        if kfd:
            (tmp_path / "dev/kfd").touch()
        for number in visible:
            (tmp_path / f"dev/dri/renderD{number}").touch()
        for number, (simd, minor) in enumerate([(0, 0), (1216, 128), (1216, 129)]):
            (tmp_path / f"nodes/{number}").mkdir(parents=True)
            text = f"cpu_cores_count 0\nsimd_count {simd}\ndrm_render_minor {minor}\n"
            (tmp_path / f"nodes/{number}/properties").write_text(text)
        monkeypatch.setattr(devices, "torch_text", lambda name: "x" if name == torch else None)
        monkeypatch.setattr(devices, "package_folder", lambda name: None)

    return has


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, LocalDevices("cuda", 2)),
        ({"DS_ACCELERATOR": "cuda"}, LocalDevices("cuda", 2)),
        ({"DS_ACCELERATOR": "cpu"}, LocalDevices("cpu", 0)),
        ({"CUDA_VISIBLE_DEVICES": "1"}, LocalDevices("cuda", 1, (1,))),
        ({"ROCR_VISIBLE_DEVICES": "1"}, LocalDevices("cuda", 1)),
        ({"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": ""}, LocalDevices("cuda", 2)),
        ({"HIP_VISIBLE_DEVICES": "-1"}, LocalDevices("cpu", 0)),
    ],
    ids=str,
)
def test_amds_gpus_are_cuda_to_a_torch_for_rocm(
    amd, environment: dict[str, str], expected: LocalDevices
) -> None:
    amd(128, 129)
    assert find_devices(environment) == expected
    assert unused_gpus(find_devices(environment), environment) is None


def test_a_container_counts_what_it_was_given(amd) -> None:
    amd(129)
    assert find_devices({}) == LocalDevices("cuda", 1)


def test_gpus_that_torch_is_not_built_for_are_reported(amd) -> None:
    amd(128, 129, torch="cuda")
    assert find_devices({}) == LocalDevices("cpu", 0)
    problem = unused_gpus(LocalDevices("cpu", 0), {})
    assert problem is not None
    assert str(problem).startswith(
        "2 AMD GPUs here, and this torch computes on processors only; install a ROCm build"
    )
    assert unused_gpus(LocalDevices("cpu", 0), {"DS_ACCELERATOR": "cpu"}) is None
    assert unused_gpus(LocalDevices("cuda", 1), {}) is None


def test_accelerators_that_cannot_be_counted_need_a_number(
    amd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """DeepSpeed would take them; two ranks on processors would be a silent surprise."""
    amd(128, torch="xpu", kfd=False)
    assert find_devices({}) == LocalDevices("xpu", 0)
    monkeypatch.setattr(devices, "torch_text", lambda name: None)
    assert find_devices({}) == LocalDevices("cpu", 0), "the display of a laptop"
    with pytest.raises(ConfigError, match="no-device"):
        find_devices({"DS_ACCELERATOR": "cuda"})
    (tmp_path / "dev/dxg").touch()
    assert find_devices({"DS_ACCELERATOR": "cuda"}) == LocalDevices("cuda", 0)
    (tmp_path / "dev/accel").mkdir()
    (tmp_path / "dev/accel/accel0").touch()
    monkeypatch.setattr(devices, "package_folder", lambda name: tmp_path)
    assert find_devices({}) == LocalDevices("hpu", 0)


def test_there_is_at_least_one_core() -> None:
    assert usable_cores() >= 1
