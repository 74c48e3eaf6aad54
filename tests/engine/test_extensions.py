"""Compiled ops have a folder for each environment and each ninja: sharing one, they would be
compiled at every start.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sysconfig
from inspect import unwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import cpuinfo
import pytest
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
from deepspeed.utils import numa
from torch._inductor.exc import InductorError
from torch.utils import cpp_extension

import framework.engine
from framework.engine.compiler_errors import failure_of_compiler, failure_of_torch_compile
from framework.engine.extensions import (
    announcing_compilers,
    keep_answers_about_processors,
    refusing_what_does_not_compile,
    use_own_cache,
)
from framework.errors import ConfigError

SCRIPTS = sysconfig.get_path("scripts")


def cache(monkeypatch: pytest.MonkeyPatch, path: str) -> str:
    with monkeypatch.context() as patch:
        patch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        patch.setenv("PATH", path)
        use_own_cache()
        assert os.environ["PATH"].split(os.pathsep)[0] == sysconfig.get_path("scripts"), (
            "where torch looks for ninja"
        )
        return os.environ.pop("TORCH_EXTENSIONS_DIR")


def test_each_ninja_has_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("own", "system", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ninja").write_text("#!/bin/sh\n")
        (tmp_path / name / "ninja").chmod(0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "none"))
    first, second = (cache(monkeypatch, str(tmp_path / name)) for name in ("system", "other"))
    assert first != second
    assert first == cache(monkeypatch, f"{tmp_path / 'system'}:{tmp_path / 'other'}")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "own"))
    assert cache(monkeypatch, str(tmp_path / "system")) not in (first, second)


def test_it_does_not_matter_whether_the_environment_is_active(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without its programs on PATH the op was compiled again, for minutes and without a word."""
    assert (
        cache(monkeypatch, f"{SCRIPTS}:/usr/bin")
        == cache(monkeypatch, "/usr/bin")
        == cache(monkeypatch, f"/usr/bin:{SCRIPTS}")
    )


def test_torchs_library_is_found_in_a_path_with_a_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words for the linker are joined by blanks. torch leaves its own library without quotes
    for an extension, and its inductor quotes the same name: to it quotes of ours would be a part of
    the path.
    """
    path, words = "/my project/torch/lib", list[str]()

    def build(builder: object) -> None:
        flags = cpp_extension._prepare_ldflags([], False, False, False, False)
        words.extend(shlex.split(" ".join(flags)))

    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", path)
    monkeypatch.setattr(OpBuilder, "jit_load", build)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    use_own_cache()
    with announcing_compilers():
        OpBuilder.jit_load(SimpleNamespace(name="shm_comm"))
        assert path == cpp_extension.TORCH_LIB_PATH
    assert f"-L{path}" in words


BUILT = """Error building extension 'shm_comm': [1/2] c++ -MMD -c shm.cpp -o shm.o
FAILED: [code=1] shm.o
c++ -MMD -c shm.cpp -o shm.o
shm.cpp:3:10: fatal error: Python.h: No such file or directory
    3 | #include <Python.h>
compilation terminated.
ninja: build stopped: subcommand failed.
"""


def test_a_compilers_own_words_are_the_reason() -> None:
    problem = failure_of_compiler(RuntimeError(BUILT))
    assert str(problem).startswith(
        "shm_comm: it does not compile: shm.cpp:3:10: fatal error: Python.h: No such file or directory; repair that"
    )
    assert str(problem).endswith("[op-not-loadable]")
    assert failure_of_compiler(RuntimeError("something else")) is None
    with (
        pytest.raises(ConfigError, match=r"fatal error: Python\.h"),
        refusing_what_does_not_compile(),
    ):
        raise RuntimeError(BUILT)
    with pytest.raises(RuntimeError, match="something else"), refusing_what_does_not_compile():
        raise RuntimeError("something else")


def test_a_compiler_that_does_not_run_is_named() -> None:
    """As torch asks it for its version before it builds an op."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        cpp_extension.check_compiler_ok_for_platform("/bin/false")
    problem = failure_of_compiler(caught.value)
    assert str(problem).startswith(
        "compiler = /bin/false: the compiler does not run: /bin/false --version ended with 1; repair that"
    )
    other = subprocess.CalledProcessError(1, ["nvidia-smi", "-L"])
    assert failure_of_compiler(other) is None


LINKED = """C++ compile error

Command:
g++ /tmp/torchinductor_root/c4/c4int.main.cpp -D TORCH_INDUCTOR_CPP_WRAPPER -Werror=error -ltorch -L'/my project/lib'

Output:
/usr/bin/ld: cannot find -ltorch: No such file or directory
collect2: error: ld returned 1 exit status
"""


def test_what_torch_compile_cannot_compile_is_not_the_batchs() -> None:
    problem = failure_of_torch_compile(InductorError(RuntimeError(LINKED), None))
    assert str(problem).startswith(
        "training.compile: torch.compile cannot make code of the model: "
        "/usr/bin/ld: cannot find -ltorch: No such file or directory; "
    )
    assert str(problem).endswith("[compile-failed]")
    assert "LoweringException: no such operator; " in str(
        failure_of_torch_compile(
            InductorError(type("LoweringException", (Exception,), {})("no such operator"), None)
        )
    )
    assert failure_of_torch_compile(RuntimeError(LINKED)) is None


def test_torch_does_not_remark_on_cuda() -> None:
    """Every rank of a machine with nvcc and without a GPU wrote it on the first screen."""
    assert framework.engine.__doc__
    logger = logging.getLogger("torch.utils.cpp_extension")
    with TestCase().assertLogs(logger, logging.WARNING) as logs:
        logger.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local")
        logger.warning("another remark")
    assert [record.getMessage() for record in logs.records] == ["another remark"]


def test_the_users_own_folder_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    use_own_cache()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/somewhere"


@pytest.mark.slow
def test_processors_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    ask_all, ask_nodes = cpuinfo.get_cpu_info, numa.get_numa_cores

    def counted_all() -> Any:
        calls.append("cpuinfo")
        return ask_all()

    def counted_nodes() -> Any:
        calls.append("numactl")
        return ask_nodes()

    monkeypatch.setattr(cpuinfo, "get_cpu_info", counted_all)
    monkeypatch.setattr(numa, "get_numa_cores", counted_nodes)
    monkeypatch.setattr(OpBuilder, "cpu_arch", unwrap(OpBuilder.cpu_arch))
    expected = CPUAdamBuilder().cxx_args(), numa.get_numa_cores()
    assert len(calls) > 2
    calls.clear()
    keep_answers_about_processors()
    for _ in range(3):
        assert (CPUAdamBuilder().cxx_args(), numa.get_numa_cores()) == expected
    assert sorted(calls) == ["cpuinfo", "numactl"]
