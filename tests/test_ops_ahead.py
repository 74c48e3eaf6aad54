"""The compiler of the ops that tests need, which keeps what it made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT

_REAL = shutil.which("c++")
pytestmark = pytest.mark.skipif(_REAL is None, reason="needs a C++ compiler")


class Compiler:
    """The compiler of the tests, with a folder of its own for what it keeps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "calls"
        programs = folder / "programs"
        programs.mkdir()
        counting = programs / "c++"
        counting.write_text(
            f'#!/bin/sh\ncase "$*" in *" -c "*) echo called >>{self._log} ;; esac\n'
            f'exec {_REAL} "$@"\n',
            encoding="utf-8",
        )
        counting.chmod(0o755)
        own = (str(ROOT / "tests/compiler"), str(programs))
        self._path = os.pathsep.join((*own, os.environ["PATH"]))

    def compile(self, packages: Path, source: str, *, op: str = "one") -> Path:
        """Compile a source as ninja calls it for an op, and return the object."""
        sources = packages / "deepspeed/ops/csrc"
        built = packages / f"built-{op}"
        built.mkdir(exist_ok=True)
        words = ["-MMD", "-MF", "x.o.d", f"-DTORCH_EXTENSION_NAME={op}", f"-I{sources}/includes"]
        words += ["-g", "-c", f"{sources}/{source}", "-o", "x.o"]
        environment = {"PATH": self._path, "XDG_CACHE_HOME": str(self._folder / "cache")}
        command = [sys.executable, str(ROOT / "tests/compiler/c++"), *words]
        subprocess.run(command, cwd=built, env=environment, check=True)
        return built / "x.o"

    def num_calls(self) -> int:
        """Return how often the real compiler has compiled."""
        return len(self._log.read_text(encoding="utf-8").splitlines())


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path)


def environment(folder: Path, *, torch: str = "1", header: str = "#define VALUE 3\n") -> Path:
    """Write a folder of packages with sources of DeepSpeed, and return it."""
    includes = folder / "deepspeed/ops/csrc/includes"
    includes.mkdir(parents=True)
    (folder / "torch").mkdir()
    (folder / "torch/version.py").write_text(f"__version__ = {torch}\n", encoding="utf-8")
    (includes / "value.h").write_text(header, encoding="utf-8")
    (includes.parent / "plain.cpp").write_text(
        '#include "value.h"\nint value() { return VALUE; }\n', encoding="utf-8"
    )
    (includes.parent / "bindings.cpp").write_text(
        "// PYBIND11_MODULE\nint TORCH_EXTENSION_NAME() { return 1; }\n", encoding="utf-8"
    )
    return folder


@pytest.mark.slow
def test_another_environment_takes_what_was_compiled(compiler: Compiler, tmp_path: Path) -> None:
    first, second = environment(tmp_path / "first"), environment(tmp_path / "second")
    made = compiler.compile(first, "plain.cpp").read_bytes()
    taken = compiler.compile(second, "plain.cpp")
    assert compiler.num_calls() == 1
    assert taken.read_bytes() == made
    dependencies = (second / "built-one/x.o.d").read_text(encoding="utf-8")
    sources = dependencies.replace("\\", "").split()
    csrc = second / "deepspeed/ops/csrc"
    assert sources == ["x.o:", f"{csrc}/plain.cpp", f"{csrc}/includes/value.h"]
    compiler.compile(second, "plain.cpp", op="two")
    assert compiler.num_calls() == 1


@pytest.mark.slow
def test_what_differs_is_compiled(compiler: Compiler, tmp_path: Path) -> None:
    first = compiler.compile(environment(tmp_path / "first"), "plain.cpp").read_bytes()
    changed = environment(tmp_path / "changed", header="#define VALUE 4\n")
    assert compiler.compile(changed, "plain.cpp").read_bytes() != first
    compiler.compile(environment(tmp_path / "newer", torch="2"), "plain.cpp")
    assert compiler.num_calls() == 3


@pytest.mark.slow
def test_bindings_have_the_name_of_their_op(compiler: Compiler, tmp_path: Path) -> None:
    packages = environment(tmp_path / "packages")
    first = compiler.compile(packages, "bindings.cpp").read_bytes()
    other = compiler.compile(packages, "bindings.cpp", op="two").read_bytes()
    assert b"_Z3onev" in first
    assert b"_Z3twov" in other


@pytest.mark.slow
def test_a_source_that_does_not_compile_is_not_kept(compiler: Compiler, tmp_path: Path) -> None:
    packages = environment(tmp_path / "packages", header="#error no value\n")
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            compiler.compile(packages, "plain.cpp")
    assert compiler.num_calls() == 2
