"""Ops that a run loads, on machines without a compiler or its libraries."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from framework.doctor.node.requirements import Requirements
from framework.doctor.node.software import check_ops
from framework.hosts.devices import package_folder, torch_text
from framework.plan.cluster import Cluster, Device
from framework.plan.compiled_ops import Op, needed_ops
from framework.system.cache_folders import extensions_folder
from tests.doctor.node.broken import findings, programs

CPU_ADAM = Op("cpu_adam", "optimizer.implementation is deepspeed")


def kinds(op: Op, environment: dict[str, str], *, device: str = "cpu") -> list[tuple[str, str]]:
    need = Requirements(Cluster(device=device), (op,))  # type: ignore[arg-type]
    return [
        (each.kind, each.key.rpartition("/")[2]) for each in check_ops(need, environment).problems
    ]


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    return {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}


def compiled(cache: dict[str, str], name: str) -> Path:
    folder = Path(cache["TORCH_EXTENSIONS_DIR"], name)
    folder.mkdir(parents=True)
    (folder / f"{name}.so").touch()
    return folder


def test_no_compiler(tmp_path: Path, cache: dict[str, str]) -> None:
    path = {"PATH": programs(tmp_path / "bin", "ninja")}
    assert kinds(CPU_ADAM, cache | path) == [("op-not-loadable", "c++")]
    assert kinds(CPU_ADAM, cache | path | {"CXX": "clang++-99"}) == [
        ("op-not-loadable", "clang++-99")
    ]
    compiled(cache, "cpu_adam")
    assert kinds(CPU_ADAM, cache | path) == []


def test_no_compiler_for_graphs(tmp_path: Path, cache: dict[str, str]) -> None:
    """It counts without ops to compile, too: `training.compile` needs C++ on processors, and C
    beside Triton.
    """

    def found(device: Device, name: str, **environment: str) -> list[str]:
        need = Requirements(Cluster(device=device), compiles=True)
        path = {"PATH": programs(tmp_path / f"{device}{len(environment)}", name)}
        return [each.kind for each in check_ops(need, cache | path | environment).problems]

    assert found("cpu", "gcc") == found("cuda", "nproc") == ["compiler-missing"]
    assert found("cpu", "g++") == found("cuda", "gcc") == []
    assert found("cpu", "nproc", CXX="icpx -O3") == ["compiler-missing"]
    assert found("cpu", "bash", CXX="bash -O3") == []


def test_no_ninja_also_breaks_what_is_compiled(
    tmp_path: Path, cache: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "none"))  # this Python's own
    compiled(cache, "cpu_adam")
    assert kinds(CPU_ADAM, cache | {"PATH": programs(tmp_path / "bin", "c++")}) == [
        ("op-not-loadable", "ninja")
    ]


@pytest.mark.slow
def test_a_machine_without_a_compiler_is_refused(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", "bash", "nproc")
    found = findings("--num_gpus", "2", PATH=path, TORCH_EXTENSIONS_DIR=str(tmp_path / "cache"))
    assert found["op-not-loadable"]["severity"] == "error"
    assert "deepspeed_shm_comm" in found["op-not-loadable"]["found"]


def test_libaio_is_linked_as_deepspeed_does(tmp_path: Path, cache: dict[str, str]) -> None:
    """The library is missing on this machine, or is made here; `pin_memory` comes before it and is
    no matter here.
    """
    op = Op("async_io", "zero.offload_optimizer.device is nvme", library="aio")
    environment = cache | {"PATH": f"{programs(tmp_path / 'bin', 'ninja')}:{os.environ['PATH']}"}
    hidden = environment | {"CFLAGS": f"-nostdinc -I{tmp_path}"}  # also where libaio is installed
    assert kinds(op, hidden) == [("op-not-loadable", "libaio")]
    (tmp_path / "libaio.h").write_text('extern "C" int io_submit(int, long, void *);\n')
    (tmp_path / "aio.cpp").write_text('extern "C" int io_submit(int, long, void *) { return 0; }\n')
    subprocess.run(
        ["c++", "-shared", "-fPIC", "-o", tmp_path / "libaio.so", tmp_path / "aio.cpp"], check=True
    )
    assert kinds(op, environment | {"CFLAGS": f"-I{tmp_path}", "LDFLAGS": f"-L{tmp_path}"}) == []


@pytest.mark.skipif(torch_text("cuda") is None, reason="torch is built without CUDA")
def test_nvcc_prints_its_release(tmp_path: Path, cache: dict[str, str]) -> None:
    op = Op("fused_adam", "optimizer.implementation is deepspeed", needs_nvcc=True)
    compiled(cache, "fused_adam")
    path, home = programs(tmp_path / "bin", "ninja"), tmp_path / "cuda"
    environment = cache | {"PATH": path, "CUDA_HOME": str(home)}
    assert kinds(op, environment, device="cuda") == [("op-not-loadable", "nvcc")]
    programs(home / "bin", nvcc="echo 'Cuda compilation tools, release 8.0, V8.0.61'")
    assert kinds(op, environment, device="cuda") == [("nvcc-release", "nvcc")]
    assert kinds(op, environment | {"DS_SKIP_CUDA_CHECK": "1"}, device="cuda") == []
    programs(home / "bin", nvcc=f"echo 'Cuda compilation tools, release {torch_text('cuda')}, V1'")
    assert kinds(op, environment, device="cuda") == []


def test_a_lock_that_is_held(tmp_path: Path, cache: dict[str, str]) -> None:
    """This torch reads the lock from the system; a file that is left behind is no lock."""
    lock = compiled(cache, "cpu_adam") / "lock"
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)
    environment = cache | {"PATH": programs(tmp_path / "bin", "ninja")}
    assert kinds(CPU_ADAM, environment) == []
    with lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert kinds(CPU_ADAM, environment) == [("lock-stale", "lock")]


def test_ops_bear_deepspeeds_names() -> None:
    folder = package_folder("deepspeed")
    assert folder is not None
    sources = [
        path.read_text(encoding="utf-8") for path in (folder / "ops" / "op_builder").rglob("*.py")
    ]
    known = {
        name
        for text in sources
        for name in re.findall(r'^    NAME = "([a-z_]+)"', text, re.MULTILINE)
    }
    offload = {"offload_optimizer": {"device": "nvme"}, "zero_quantized_weights": True}
    for kind in ("AdamW", "Adagrad", "Lion"):
        for zero in ({}, offload):
            ops = needed_ops({"optimizer": {"type": kind}, "zero_optimization": zero}, device="cpu")
            assert {op.name for op in ops} <= known


@pytest.mark.parametrize(
    ("kind", "params", "device", "expected"),
    [
        ("AdamW", {"torch_adam": True}, "none", []),
        ("AdamW", {}, "none", ["fused_adam"]),
        ("Adam", {}, "cpu", ["cpu_adam"]),
        ("SGD", {}, "cpu", []),
        ("Adagrad", {}, "none", []),
        ("Adagrad", {}, "cpu", ["cpu_adagrad"]),
        ("Lion", {}, "none", ["fused_lion"]),
        ("Lion", {}, "cpu", ["cpu_lion"]),
        ("Adam", {"torch_adam": True}, "nvme", ["pin_memory", "async_io"]),
    ],
)
def test_which_ops_a_run_loads(
    kind: str, params: dict[str, bool], device: str, expected: list[str]
) -> None:
    config = {
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"offload_optimizer": {"device": device}},
    }
    assert [op.name for op in needed_ops(config, device="cuda")] == expected
    assert [op.name for op in needed_ops(config, device="cpu")] == ["deepspeed_shm_comm", *expected]
    assert needed_ops(config, device="npu") == ()


@pytest.mark.slow
def test_the_folder_is_that_of_training() -> None:
    import torch

    assert extensions_folder(
        os.environ, torch_version=torch_text("__version__") or ""
    ) == extensions_folder(os.environ, torch_version=torch.__version__)
