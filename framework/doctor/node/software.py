"""Software of a node: versions and hashes of what it would run, and ops, found compiled or compiled
with what is here. Nothing of it is imported: torch alone would take seconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import framework
from framework.doctor.node.findings import Check, warning
from framework.doctor.node.requirements import Requirements
from framework.doctor.node.storage import file_system, is_remote
from framework.errors import Problem
from framework.launch.environment import ROOT, missing
from framework.launch.environment import requirements as pip_requirements
from framework.launch.hosts.devices import package_folder, torch_text
from framework.plan.compiled_ops import (
    Op,
    extensions_folder,
    lost_gradients,
    missing_compiler,
    path_of_compilers,
)

_NO_TRAINING_WITHOUT: Final = frozenset(
    {"torch", "deepspeed", "psutil", "filelock", "setuptools", "numpy"}
)
# A package with more Python than this is no project of somebody's own; its version says what it is.
_MOST_FILES: Final = 5000
_INSTALL: Final = "in the checkout: ./launch.sh setup train, or pip install -e '.[train]'"
_SECONDS: Final = 20
# The one library that an op is linked with; as DeepSpeed asks (op_builder/async_io.py
# `is_compatible`).
_LIBAIO: Final = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
_OLD_LOCK_SECONDS: Final = 60


def check_versions(requirements: Requirements) -> Check:
    """Python and the packages that training needs."""
    wanted = _wanted()
    absent, too_old = missing(wanted)
    problems: list[Problem] = []
    for name in (re.split("[<>=]", each)[0] for each in absent):
        is_needed = name in _NO_TRAINING_WITHOUT
        reason = (
            f"{sys.executable} has no {name}; "
            f"{'training' if is_needed else 'a part of training'} needs it"
        )
        problems.append(
            (Problem if is_needed else warning)("package-missing", reason, _INSTALL, key=name)
        )
    for sentence in too_old:
        is_needed = sentence.split()[0] in ("torch", "deepspeed")
        problems.append((Problem if is_needed else warning)("package-too-old", sentence, _INSTALL))
    cuda = torch_text("cuda")
    if (
        requirements.cluster.device == "cuda"
        and torch_text("__version__")
        and not (cuda or torch_text("hip"))
    ):
        reason = "this build computes on processors only, and GPUs are to be used"
        fix = "install a CUDA build of torch, or DS_ACCELERATOR=cpu"
        problems.append(
            Problem("torch-without-cuda", reason, fix, key="torch", value=torch_text("__version__"))
        )
    versions = {"python": platform.python_version(), "dsf-trainer": framework.__version__}
    versions |= {name: found for name in ("torch", "deepspeed") if (found := version_of(name))}
    others = sorted(re.split("[<>=]", each)[0] for each in wanted)
    all_of_them = versions | {
        name: found for name in others if name not in versions and (found := version_of(name))
    }
    versions.setdefault("torch", "none")
    stated = ", ".join(f"{name} {version}" for name, version in versions.items())
    # torch's wheels bring NCCL as a package of its own, named after the release of CUDA.
    if cuda:
        nccl = version_of(f"nvidia-nccl-cu{cuda.partition('.')[0]}")
    else:
        nccl = None
    facts = all_of_them | versions | ({"nccl": nccl} if nccl else {})
    return Check("versions", stated, problems, {"versions": facts})


def check_code(requirements: Requirements) -> Check:
    """Hashes of the framework's code, of the run config and of the modules that it names."""
    hashes = {"framework": hash_of_framework()}
    hashes |= {
        module: hash_of_files(place)
        for module in requirements.targets
        if (place := _place_of(module)) is not None
    }
    stated = ", ".join(f"{name} {value}" for name, value in hashes.items())
    if requirements.config_hash:
        config = f"config {requirements.config_hash}, "
    else:
        config = ""
    return Check(
        "code", f"{config}{stated}", (), {"code": hashes, "config": requirements.config_hash}
    )


def hash_of_framework() -> str:
    """Of the framework's code, and of the tables and scripts beside it."""
    return hash_of_files(Path(framework.__file__).parent, ".py", ".json", ".sh")


def hash_of_files(place: Path, *endings: str) -> str:
    """Of the names and contents of a folder's files, by default those of Python, or of one file;
    wherever it lies.
    """
    digest = hashlib.sha256()
    endings = endings or (".py",)
    found = sorted(file for ending in endings for file in place.rglob(f"*{ending}"))
    folder, files = (place, found[:_MOST_FILES]) if place.is_dir() else (place.parent, [place])
    for file in files:
        digest.update(str(file.relative_to(folder)).encode() + b"\0")
        try:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError:
            digest.update(b"unreadable")
    return digest.hexdigest()[:12]


def version_of(package: str) -> str | None:
    """Of what is installed; None where it is not. torch itself tells for which CUDA it is, its
    metadata may not.
    """
    if package == "torch" and (own := torch_text("__version__")):
        return own
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of NCCL and its kind that hang a run when hosts differ in them; names of interfaces
    may differ.
    """
    chosen = re.compile(
        r"(NCCL|TORCH_NCCL)_(ALGO|PROTO|NET|NET_PLUGIN|IB_DISABLE|P2P_DISABLE|SHM_DISABLE|CUMEM_ENABLE|"
        r"BLOCKING_WAIT|MIN_NCHANNELS|MAX_NCHANNELS|NVLS_ENABLE)"
    )
    return {name: value for name, value in sorted(environment.items()) if chosen.fullmatch(name)}


def _wanted() -> list[str]:
    """Requirements of the train extra: of the checkout, or as the installed copy states them."""
    if (ROOT / "pyproject.toml").is_file():
        return pip_requirements(["train"])
    stated = (line.partition(";") for line in metadata.requires("dsf-trainer") or ())
    extra = re.compile(r"extra == ['\"]train['\"]")
    return [
        requirement.strip()
        for requirement, _, marker in stated
        if not marker or extra.search(marker)
    ]


def _place_of(module: str) -> Path | None:
    """The folder or file of the first part of a dotted name, as train.py would look for it; None if
    it is installed.
    """
    spec = importlib.machinery.PathFinder.find_spec(
        module.partition(".")[0], [os.getcwd(), str(ROOT)]
    )
    folders = (spec and spec.submodule_search_locations) or []
    place = next(iter(folders), spec.origin if spec else None)
    if place:
        return Path(place)
    return None


def check_ops(requirements: Requirements, environment: Mapping[str, str]) -> Check:
    """The ops of this run. `environment` is that of the ranks: PATH finds the compiler there."""
    environment = {**environment, "PATH": path_of_compilers(environment)}
    problems = []
    if requirements.compiles:
        of_compiler = (
            missing_compiler(requirements.cluster.device, environment),
            lost_gradients(version_of("torch") or ""),
        )
        problems += [problem for problem in of_compiler if problem]
    if not requirements.ops:
        return Check("compiled ops", "none is loaded", problems)
    folder, ready = _cached(requirements, environment)
    problems += list(_problems(requirements, environment, folder=folder, ready=ready))
    states = [
        f"{op.name} ({'compiled' if op.name in ready else 'to be compiled'})"
        for op in requirements.ops
    ]
    return Check("compiled ops", f"{', '.join(states)} in {folder}", problems)


def ops_to_compile(requirements: Requirements, environment: Mapping[str, str]) -> list[str]:
    """Return the names of the ops that the first rank will compile."""
    _, ready = _cached(requirements, environment)
    return [op.name for op in requirements.ops if op.name not in ready]


def _cached(requirements: Requirements, environment: Mapping[str, str]) -> tuple[Path, set[str]]:
    """The folder of compiled ops, and those that are in it or came with DeepSpeed."""
    folder = extensions_folder(environment, torch_version=torch_text("__version__") or "")
    return folder, {
        op.name
        for op in requirements.ops
        if _is_built_in(op) or (folder / op.name / f"{op.name}.so").is_file()
    }


def _problems(
    requirements: Requirements, environment: Mapping[str, str], *, folder: Path, ready: set[str]
) -> Iterator[Problem]:
    loaded = [op for op in requirements.ops if not _is_built_in(op)]
    missing = [op for op in loaded if op.name not in ready]
    path = environment.get("PATH")
    if loaded and shutil.which("ninja", path=path) is None:
        yield _lacking(
            "ninja",
            loaded,
            "pip install ninja; torch asks for it, also for ops that are compiled already",
        )
    compiler = environment.get("CXX") or "c++"
    if missing and shutil.which(compiler.split()[0], path=path) is None:
        yield _lacking(
            compiler,
            missing,
            "install g++ (Debian, Ubuntu: apt install g++), or build DeepSpeed's ops beforehand",
        )
    elif missing:
        yield from _libraries(missing, compiler, environment)
    if missing and not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        yield _lacking(
            "Python.h",
            missing,
            "install Python's headers (Debian, Ubuntu: apt install python3-dev)",
        )
    yield from _about_nvcc([op for op in loaded if op.needs_nvcc], environment)
    yield from _about_cache(folder, missing)
    for op in loaded:
        yield from _about_lock(folder / op.name / "lock")


def _lacking(what: str, ops: list[Op], fix: str) -> Problem:
    named = ", ".join(f"{op.name} ({op.reason})" for op in ops)
    return Problem("op-not-loadable", f"it is not here, and needed for {named}", fix, key=what)


def _libraries(
    missing: list[Op], compiler: str, environment: Mapping[str, str]
) -> Iterator[Problem]:
    before, after = (environment.get(name, "").split() for name in ("CFLAGS", "LDFLAGS"))
    run = partial(
        subprocess.run,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=dict(environment),
        check=True,
    )
    for op in (op for op in missing if op.library):
        command = [
            *compiler.split(),
            *before,
            "-x",
            "c++",
            "-",
            *after,
            f"-l{op.library}",
            "-o",
            os.devnull,
        ]
        try:
            run(command, input=_LIBAIO)
        except subprocess.CalledProcessError:
            package = "libaio-dev (Debian, Ubuntu) or libaio-devel (Red Hat)"
            yield _lacking(
                f"lib{op.library}",
                [op],
                f"install {package}, or name its place in CFLAGS and LDFLAGS",
            )
        except (OSError, subprocess.TimeoutExpired):
            continue


def _about_nvcc(ops: list[Op], environment: Mapping[str, str]) -> Iterator[Problem]:
    """DeepSpeed asks nvcc for its release whenever it loads an op, and refuses another major
    release than torch's.
    """
    cuda = torch_text("cuda")
    if not ops or cuda is None:
        return
    nvcc = _cuda_home(environment) / "bin" / "nvcc"
    fix = (
        f"install the CUDA {cuda} toolkit and set CUDA_HOME, or set optimizer.implementation: torch"
    )
    try:
        reported = subprocess.run(
            [nvcc, "-V"], capture_output=True, text=True, timeout=_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        yield _lacking(str(nvcc), ops, fix)
        return
    release = re.search(r"release (\d+)\.(\d+)", reported)
    if (
        release
        and release[1] != cuda.partition(".")[0]
        and environment.get("DS_SKIP_CUDA_CHECK") != "1"
    ):
        reason = f"torch is built for CUDA {cuda}, and DeepSpeed refuses to mix them"
        yield Problem(
            "nvcc-release", reason, fix, key=str(nvcc), value=f"{release[1]}.{release[2]}"
        )


def _cuda_home(environment: Mapping[str, str]) -> Path:
    """As torch finds it (utils/cpp_extension.py `_find_cuda_home`)."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    found = shutil.which("nvcc", path=environment.get("PATH"))
    if home:
        return Path(home)
    if found:
        return Path(found).parent.parent
    return Path("/usr/local/cuda")


def _about_cache(folder: Path, missing: list[Op]) -> Iterator[Problem]:
    place = next(each for each in (folder, *folder.parents) if each.exists())
    about: dict[str, Any] = {"key": "TORCH_EXTENSIONS_DIR", "value": str(folder)}
    if missing and not os.access(place, os.W_OK | os.X_OK):
        reason = (
            f"{', '.join(op.name for op in missing)} would be compiled there, and {place} is "
            "not writable"
        )
        fix = "set TORCH_EXTENSIONS_DIR to a folder of this host that you can write to"
        yield Problem("cache-unwritable", reason, fix, **about)
    elif missing and is_remote(place):
        reason = (
            f"it lies on {file_system(place)}: hosts would compile there at the same time, "
            "and locks may stay"
        )
        yield warning(
            "cache-remote",
            reason,
            "set TORCH_EXTENSIONS_DIR to a folder on a disk of this host",
            **about,
        )


def _about_lock(lock: Path) -> Iterator[Problem]:
    """A lock that nobody will release: older torch waits while the file is there, newer asks who
    holds it.
    """
    try:
        age = time.time() - lock.stat().st_mtime
    except OSError:
        return
    torch = package_folder("torch")
    if torch and (torch / "utils/_filelock.py").is_file():  # 2.15 takes locks by flock
        text = (torch / "utils/cpp_extension.py").read_text(encoding="utf-8", errors="replace")
        if "FileBaton" in text or _is_held(lock):
            age = age
        else:
            age = 0
    if age >= _OLD_LOCK_SECONDS:
        reason = "ranks wait for it before they load the op, for ever if whoever took it is gone"
        fix = f"rm {lock} if nothing compiles there now"
        yield warning("lock-stale", reason, fix, key=str(lock), value=f"{age / 60:.0f} minutes old")


def _is_held(lock: Path) -> bool:
    with suppress(OSError):
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _is_built_in(op: Op) -> bool:
    """Check whether DeepSpeed was installed with it (DS_BUILD_...=1)."""
    folder = package_folder("deepspeed")
    with suppress(OSError):
        if folder:
            text = (folder / "git_version_info_installed.py").read_text(encoding="utf-8")
        else:
            text = ""
        return re.search(rf"['\"]{op.name}['\"]: True", text) is not None
    return False
