"""Ops that a run loads: found compiled, or compiled with what is here."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from framework.doctor.node.findings import Check
from framework.doctor.node.need import Need
from framework.doctor.node.storage import file_system, is_remote
from framework.errors import Problem
from framework.launch.hosts.devices import package_folder, torch_text
from framework.plan.compiled_ops import Op, extensions_folder, path_of_compilers

_SECONDS: Final = 20
# As DeepSpeed asks (op_builder/async_io.py `is_compatible`): whether a program with io_submit links.
_LIBRARY_TESTS: Final[Mapping[str, str]] = {"aio": "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"}
_PACKAGES: Final[Mapping[str, str]] = {"aio": "libaio-dev (Debian, Ubuntu) or libaio-devel (Red Hat)"}
_OLD_LOCK_SECONDS: Final = 60


def check_ops(need: Need, environment: Mapping[str, str]) -> Check:
    """The ops of this run. `environment` is that of the ranks: PATH finds the compiler there."""
    if not need.ops:
        return Check("compiled ops", "none is loaded")
    environment = {**environment, "PATH": path_of_compilers(environment)}
    folder, ready = _cached(need, environment)
    problems = list(_problems(need, environment, folder=folder, ready=ready))
    states = [f"{op.name} ({'compiled' if op.name in ready else 'to be compiled'})" for op in need.ops]
    return Check("compiled ops", f"{', '.join(states)} in {folder}", tuple(problems))


def ops_to_compile(need: Need, environment: Mapping[str, str]) -> list[str]:
    """Return the names of the ops that the first rank will compile."""
    _, ready = _cached(need, environment)
    return [op.name for op in need.ops if op.name not in ready]


def _cached(need: Need, environment: Mapping[str, str]) -> tuple[Path, set[str]]:
    """Return the folder of compiled ops, and those that are in it or came with DeepSpeed."""
    folder = extensions_folder(environment, torch_version=torch_text("__version__") or "")
    return folder, {op.name for op in need.ops if _is_built_in(op) or (folder / op.name / f"{op.name}.so").is_file()}


def _problems(need: Need, environment: Mapping[str, str], *, folder: Path, ready: set[str]) -> Iterator[Problem]:
    loaded = [op for op in need.ops if not _is_built_in(op)]
    missing = [op for op in loaded if op.name not in ready]
    path = environment.get("PATH")
    if loaded and shutil.which("ninja", path=path) is None:
        yield _lacking("ninja", loaded, "pip install ninja; torch asks for it, also for ops that are compiled already")
    compiler = environment.get("CXX") or "c++"
    if missing and shutil.which(compiler.split()[0], path=path) is None:
        yield _lacking(
            compiler, missing, "install g++ (Debian, Ubuntu: apt install g++), or build DeepSpeed's ops beforehand"
        )
    elif missing:
        yield from _libraries(missing, compiler, environment)
    if missing and not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        yield _lacking("Python.h", missing, "install Python's headers (Debian, Ubuntu: apt install python3-dev)")
    yield from _about_nvcc([op for op in loaded if op.needs_nvcc], environment)
    yield from _about_cache(folder, missing)
    for op in loaded:
        yield from _about_lock(folder / op.name / "lock")


def _lacking(what: str, ops: list[Op], fix: str) -> Problem:
    named = ", ".join(f"{op.name} ({op.reason})" for op in ops)
    return Problem(kind="op-not-loadable", key=what, reason=f"it is not here, and needed for {named}", fix=fix)


def _libraries(missing: list[Op], compiler: str, environment: Mapping[str, str]) -> Iterator[Problem]:
    for op in missing:
        if op.library is None:
            continue
        flags = (environment.get("CFLAGS", "").split(), environment.get("LDFLAGS", "").split())
        command = [*compiler.split(), *flags[0], "-x", "c++", "-", *flags[1], f"-l{op.library}", "-o", os.devnull]
        try:
            done = subprocess.run(
                command,
                input=_LIBRARY_TESTS[op.library],
                text=True,
                capture_output=True,
                check=False,
                timeout=_SECONDS,
                env=dict(environment),
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode:
            yield _lacking(
                f"lib{op.library}", [op], f"install {_PACKAGES[op.library]}, or name its place in CFLAGS and LDFLAGS"
            )


def _about_nvcc(ops: list[Op], environment: Mapping[str, str]) -> Iterator[Problem]:
    """DeepSpeed asks nvcc for its release whenever it loads an op, and refuses another major release than torch's."""
    cuda = torch_text("cuda")
    if not ops or cuda is None:
        return
    nvcc = _cuda_home(environment) / "bin" / "nvcc"
    fix = f"install the CUDA {cuda} toolkit and set CUDA_HOME, or set optimizer.implementation: torch"
    try:
        reported = subprocess.run([nvcc, "-V"], capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        yield _lacking(str(nvcc), ops, fix)
        return
    release = re.search(r"release (\d+)\.(\d+)", reported)
    if release and release[1] != cuda.partition(".")[0] and environment.get("DS_SKIP_CUDA_CHECK") != "1":
        yield Problem(
            kind="nvcc-release",
            key=str(nvcc),
            value=f"{release[1]}.{release[2]}",
            reason=f"torch is built for CUDA {cuda}, and DeepSpeed refuses to mix them",
            fix=fix,
        )


def _cuda_home(environment: Mapping[str, str]) -> Path:
    """As torch finds it (utils/cpp_extension.py `_find_cuda_home`)."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    found = shutil.which("nvcc", path=environment.get("PATH"))
    return Path(home) if home else Path(found).parent.parent if found else Path("/usr/local/cuda")


def _about_cache(folder: Path, missing: list[Op]) -> Iterator[Problem]:
    place = next(each for each in (folder, *folder.parents) if each.exists())
    if missing and not os.access(place, os.W_OK | os.X_OK):
        yield Problem(
            kind="cache-unwritable",
            key="TORCH_EXTENSIONS_DIR",
            value=str(folder),
            reason=f"{', '.join(op.name for op in missing)} would be compiled there, and {place} is not writable",
            fix="set TORCH_EXTENSIONS_DIR to a folder of this host that you can write to",
        )
    elif missing and is_remote(place):
        yield Problem(
            kind="cache-remote",
            key="TORCH_EXTENSIONS_DIR",
            value=str(folder),
            severity="warning",
            reason=f"it lies on {file_system(place)}: hosts would compile there at the same time, and locks may stay",
            fix="set TORCH_EXTENSIONS_DIR to a folder on a disk of this host",
        )


def _about_lock(lock: Path) -> Iterator[Problem]:
    """A lock that nobody will release. Older torch waits for as long as the file is there, newer asks the system who
    holds it.
    """
    try:
        age = time.time() - lock.stat().st_mtime
    except OSError:
        return
    if age < _OLD_LOCK_SECONDS or (_asks_the_system() and not _is_held(lock)):
        return
    yield Problem(
        kind="lock-stale",
        key=str(lock),
        value=f"{age / 60:.0f} minutes old",
        severity="warning",
        reason="ranks wait for it before they load the op, for ever if whoever took it is gone",
        fix=f"rm {lock} if nothing compiles there now",
    )


def _asks_the_system() -> bool:
    """Check whether this torch takes locks by flock (torch 2.15 does)."""
    folder = package_folder("torch")
    return (
        folder is not None
        and (folder / "utils" / "_filelock.py").is_file()
        and ("FileBaton" not in (folder / "utils" / "cpp_extension.py").read_text(encoding="utf-8", errors="replace"))
    )


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _is_built_in(op: Op) -> bool:
    """Check whether DeepSpeed was installed with it (DS_BUILD_...=1)."""
    folder = package_folder("deepspeed")
    try:
        text = (folder / "git_version_info_installed.py").read_text(encoding="utf-8") if folder else ""
    except OSError:
        return False
    return re.search(rf"['\"]{op.name}['\"]: True", text) is not None
