"""Software of a node: versions and hashes of its code, and the compiled ops or their compilers.

Nothing of it is imported: torch alone would take seconds.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

import deepspeed_lint
import framework
from framework.doctor.node.findings import Check, warning
from framework.doctor.node.requirements import Requirements
from framework.doctor.node.storage import file_system, is_remote
from framework.errors import Problem
from framework.hosts.devices import package_folder, torch_text
from framework.hosts.environment import ROOT, missing
from framework.hosts.environment import requirements as pip_requirements
from framework.plan.compiled_ops import Op, missing_compiler
from framework.system.cache_folders import extensions_folder, path_of_compilers

_NO_TRAINING_WITHOUT: Final = frozenset(
    {"torch", "deepspeed", "psutil", "filelock", "setuptools", "numpy"}
)
# A package with more files of Python is no user's own project, and its version identifies it.
_MOST_FILES: Final = 5000
_INSTALL: Final = "in the checkout: ./launch.sh setup train, or pip install -e '.[train]'"
_SECONDS: Final = 20
# The only library that an op is linked with is tested as DeepSpeed does (op_builder/async_io.py
# `is_compatible`).
_LIBAIO: Final = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
_OLD_LOCK_SECONDS: Final = 60
_TRAIN_EXTRA: Final = re.compile(r"extra == ['\"]train['\"]")
_NCCL: Final = re.compile(
    r"(NCCL|TORCH_NCCL)_"
    r"(ALGO|PROTO|NET|NET_PLUGIN|IB_DISABLE|P2P_DISABLE|SHM_DISABLE|CUMEM_ENABLE|"
    r"BLOCKING_WAIT|MIN_NCHANNELS|MAX_NCHANNELS|NVLS_ENABLE)"
)


def check_versions(requirements: Requirements) -> Check:
    """Check Python and the packages that training needs."""
    wanted = _training_requirements()
    problems = _package_problems(wanted)
    cuda = torch_text("cuda")
    torch = torch_text("__version__")
    if requirements.cluster.device == "cuda" and torch and not (cuda or torch_text("hip")):
        reason = "this build computes on processors only, and GPUs are to be used"
        fix = "install a CUDA build of torch, or DS_ACCELERATOR=cpu"
        problems.append(Problem("torch-without-cuda", reason, fix, key="torch", value=torch))
    versions = {"python": platform.python_version(), "dsf-trainer": framework.__version__}
    _add_versions(versions, ["torch", "deepspeed"])
    facts = dict(versions)
    _add_versions(facts, sorted(map(_package_name, wanted)))
    versions.setdefault("torch", "none")
    facts.setdefault("torch", "none")
    if cuda:
        # torch's wheels bring NCCL as a package of its own, named after the release of CUDA.
        nccl = version_of(f"nvidia-nccl-cu{cuda.partition('.')[0]}")
        if nccl:
            facts["nccl"] = nccl
    outcome = _listed(versions)
    return Check("versions", outcome, problems, {"versions": facts})


def _package_problems(wanted: Sequence[str]) -> list[Problem]:
    """Return errors for missing or old packages, and warnings where training works without them."""
    absent, too_old = missing(wanted)
    problems: list[Problem] = []
    for requirement in absent:
        name = _package_name(requirement)
        if name in _NO_TRAINING_WITHOUT:
            reason = f"{sys.executable} has no {name}; training needs it"
            problems.append(Problem("package-missing", reason, _INSTALL, key=name))
        else:
            reason = f"{sys.executable} has no {name}; a part of training needs it"
            problems.append(warning("package-missing", reason, _INSTALL, key=name))
    for package in too_old:
        if package.name in ("torch", "deepspeed"):
            problems.append(Problem("package-too-old", str(package), _INSTALL))
        else:
            problems.append(warning("package-too-old", str(package), _INSTALL))
    return problems


def _package_name(requirement: str) -> str:
    return re.split("[<>=]", requirement)[0]


def _add_versions(versions: dict[str, str], packages: Sequence[str]) -> None:
    """Add the versions of installed packages that are not there yet."""
    for name in packages:
        if name not in versions:
            version = version_of(name)
            if version:
                versions[name] = version


def check_code(requirements: Requirements) -> Check:
    """Hash the framework's code, and the modules that the run config names."""
    hashes = {"framework": hash_of_framework()}
    for module in requirements.targets:
        path = _path_of(module)
        if path is not None:
            hashes[module] = hash_of_files(path)
    outcome = _listed(hashes)
    if requirements.config_hash:
        outcome = f"config {requirements.config_hash}, {outcome}"
    return Check("code", outcome, (), {"code": hashes, "config": requirements.config_hash})


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def hash_of_framework() -> str:
    """Return a hash of the code of the framework and of the linter, and of the tables and scripts
    beside it.
    """
    hashes = [
        hash_of_files(Path(str(package.__file__)).parent, ".py", ".json", ".sh")
        for package in (framework, deepspeed_lint)
    ]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[: len(hashes[0])]


def hash_of_files(place: Path, *endings: str) -> str:
    """Return a hash of the names and contents of files; their folder's own path does not count.

    Args:
        place: a folder, or a single file.
        endings: of the files in the folder; none: ``.py``.
    """
    digest = hashlib.sha256()
    if place.is_dir():
        folder = place
        files: list[Path] = []
        for ending in endings or (".py",):
            files += place.rglob(f"*{ending}")
        files = sorted(files)[:_MOST_FILES]
    else:
        folder = place.parent
        files = [place]
    for file in files:
        digest.update(str(file.relative_to(folder)).encode() + b"\0")
        try:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError:
            digest.update(b"unreadable")
    return digest.hexdigest()[:12]


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None.

    torch's is the one in its own files, which has the release of CUDA: its metadata may not.
    """
    if package == "torch":
        version = torch_text("__version__")
        if version:
            return version
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of NCCL that hang a run when hosts differ in them.

    Names of interfaces are not among them: they may differ.
    """
    return {name: value for name, value in sorted(environment.items()) if _NCCL.fullmatch(name)}


def _training_requirements() -> list[str]:
    """Return the requirements of the train extra, of the checkout or of the installed copy."""
    if (ROOT / "pyproject.toml").is_file():
        return pip_requirements(["train"])
    wanted = []
    for line in metadata.requires("dsf-trainer") or ():
        requirement, _, marker = line.partition(";")
        if not marker or _TRAIN_EXTRA.search(marker):
            wanted.append(requirement.strip())
    return wanted


def _path_of(module: str) -> Path | None:
    """Return the folder or file of the first part of a dotted name, as train.py would find it.

    It is None for installed packages.
    """
    name = module.partition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(name, [os.getcwd(), str(ROOT)])
    if spec is None:
        return None
    path = spec.origin
    for folder in spec.submodule_search_locations or ():
        path = folder
        break
    return Path(path) if path else None


def check_ops(requirements: Requirements, environment: Mapping[str, str]) -> Check:
    """Check the ops of this run; `environment` is that of the ranks, with the compiler on PATH."""
    environment = {**environment, "PATH": path_of_compilers(environment)}
    problems: list[Problem] = []
    if requirements.compiles:
        without_compiler = missing_compiler(requirements.cluster.device, environment)
        if without_compiler:
            problems.append(without_compiler)
    if not requirements.ops:
        return Check("compiled ops", "none is loaded", problems)
    folder, ready = _cached(requirements, environment)
    problems += _op_problems(requirements, environment, folder=folder, ready=ready)
    states = []
    for op in requirements.ops:
        state = "compiled" if op.name in ready else "to be compiled"
        states.append(f"{op.name} ({state})")
    return Check("compiled ops", f"{', '.join(states)} in {folder}", problems)


def ops_to_compile(requirements: Requirements, environment: Mapping[str, str]) -> list[str]:
    """Return the names of the ops that the first rank will compile."""
    _, ready = _cached(requirements, environment)
    return [op.name for op in requirements.ops if op.name not in ready]


def _cached(requirements: Requirements, environment: Mapping[str, str]) -> tuple[Path, set[str]]:
    """Return the folder of compiled ops, and the names of ops that need no compilation."""
    folder = extensions_folder(environment, torch_version=torch_text("__version__") or "")
    ready = set()
    for op in requirements.ops:
        if _is_built_in(op) or (folder / op.name / f"{op.name}.so").is_file():
            ready.add(op.name)
    return folder, ready


def _op_problems(
    requirements: Requirements, environment: Mapping[str, str], *, folder: Path, ready: set[str]
) -> Iterator[Problem]:
    """Yield what keeps the ops from being compiled or loaded.

    Args:
        requirements, environment: as `check_ops` has them.
        folder: of compiled ops.
        ready: names of ops that need no compilation.
    """
    loaded = [op for op in requirements.ops if not _is_built_in(op)]
    uncompiled = [op for op in loaded if op.name not in ready]
    yield from _about_ninja(loaded, environment)
    yield from _about_compiler(uncompiled, environment)
    yield from _about_nvcc([op for op in loaded if op.needs_nvcc], environment)
    yield from _about_cache(folder, uncompiled)
    for op in loaded:
        yield from _about_lock(folder / op.name / "lock")


def _about_ninja(ops: list[Op], environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield that ninja is missing, if any op is to be loaded."""
    if ops and shutil.which("ninja", path=environment.get("PATH")) is None:
        fix = "pip install ninja; torch asks for it, also for ops that are compiled already"
        yield _lacking("ninja", ops, fix)


def _about_compiler(ops: list[Op], environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what is missing to compile these ops: a compiler, a library, Python's headers."""
    if not ops:
        return
    compiler = environment.get("CXX", "").strip() or "c++"
    if shutil.which(compiler.split()[0], path=environment.get("PATH")) is None:
        fix = "install g++ (Debian, Ubuntu: apt install g++), or build DeepSpeed's ops beforehand"
        yield _lacking(compiler, ops, fix)
    else:
        yield from _libraries(ops, compiler, environment)
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        fix = "install Python's headers (Debian, Ubuntu: apt install python3-dev)"
        yield _lacking("Python.h", ops, fix)


def _lacking(what: str, ops: list[Op], fix: str) -> Problem:
    named = ", ".join(f"{op.name} ({op.reason})" for op in ops)
    return Problem("op-not-loadable", f"it is not here, and needed for {named}", fix, key=what)


def _libraries(ops: list[Op], compiler: str, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Compile and link a program with the library of each op that needs one: libaio is the only
    one (`plan/compiled_ops.py`).
    """
    for op in ops:
        if not op.library:
            continue
        command = compiler.split()
        command += environment.get("CFLAGS", "").split()
        command += ["-x", "c++", "-"]
        command += environment.get("LDFLAGS", "").split()
        command += [f"-l{op.library}", "-o", os.devnull]
        try:
            subprocess.run(
                command,
                input=_LIBAIO,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                env=dict(environment),
                check=True,
            )
        except subprocess.CalledProcessError:
            package = "libaio-dev (Debian, Ubuntu) or libaio-devel (Red Hat)"
            fix = f"install {package}, or name its place in CFLAGS and LDFLAGS"
            yield _lacking(f"lib{op.library}", [op], fix)
        except (OSError, subprocess.TimeoutExpired):
            continue


def _about_nvcc(ops: list[Op], environment: Mapping[str, str]) -> Iterator[Problem]:
    """Check nvcc's release, as DeepSpeed does whenever it loads an op.

    DeepSpeed refuses another major release than torch's.
    """
    cuda = torch_text("cuda")
    if not ops or cuda is None:
        return
    nvcc = _cuda_home(environment) / "bin" / "nvcc"
    fix = (
        f"install the CUDA {cuda} toolkit and set CUDA_HOME, or set optimizer.implementation: torch"
    )
    try:
        output = subprocess.run(
            [nvcc, "-V"], capture_output=True, text=True, timeout=_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        yield _lacking(str(nvcc), ops, fix)
        return
    release = re.search(r"release (\d+)\.(\d+)", output)
    if release is None or environment.get("DS_SKIP_CUDA_CHECK") == "1":
        return
    if release[1] != cuda.partition(".")[0]:
        reason = f"torch is built for CUDA {cuda}, and DeepSpeed refuses to mix them"
        value = f"{release[1]}.{release[2]}"
        yield Problem("nvcc-release", reason, fix, key=str(nvcc), value=value)


def _cuda_home(environment: Mapping[str, str]) -> Path:
    """Return CUDA's folder, as torch finds it (utils/cpp_extension.py `_find_cuda_home`)."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    if home:
        return Path(home)
    if nvcc:
        return Path(nvcc).parent.parent
    return Path("/usr/local/cuda")


def _about_cache(folder: Path, uncompiled: list[Op]) -> Iterator[Problem]:
    """Yield a problem if the folder of compiled ops is not writable, or lies on shared storage."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    key = "TORCH_EXTENSIONS_DIR"
    value = str(folder)
    if uncompiled and not os.access(place, os.W_OK | os.X_OK):
        names = ", ".join(op.name for op in uncompiled)
        reason = f"{names} would be compiled there, and {place} is not writable"
        fix = "set TORCH_EXTENSIONS_DIR to a folder of this host that you can write to"
        yield Problem("cache-unwritable", reason, fix, key=key, value=value)
    elif uncompiled and is_remote(place):
        reason = (
            f"it lies on {file_system(place)}: hosts would compile there at the same time, "
            "and locks may stay"
        )
        fix = "set TORCH_EXTENSIONS_DIR to a folder on a disk of this host"
        yield warning("cache-remote", reason, fix, key=key, value=value)


def _waits_for_files() -> bool:
    """Check whether torch waits as long as the file of a lock exists: 2.15 takes locks by flock."""
    torch = package_folder("torch")
    if not torch or not (torch / "utils/_filelock.py").is_file():
        return True
    text = (torch / "utils/cpp_extension.py").read_text(encoding="utf-8", errors="replace")
    return "FileBaton" in text


def _about_lock(lock: Path) -> Iterator[Problem]:
    """Warn of a lock that no process will release.

    Older releases of torch wait as long as the file exists, newer ones until it is not held.
    """
    try:
        age = time.time() - lock.stat().st_mtime
    except OSError:
        return
    if age >= _OLD_LOCK_SECONDS and (_waits_for_files() or _is_held(lock)):
        reason = (
            "ranks wait for it before they load the op, for ever if the process that took it is "
            "gone"
        )
        fix = f"rm {lock} if nothing compiles there now"
        yield warning("lock-stale", reason, fix, key=str(lock), value=f"{age / 60:.0f} minutes old")


def _is_held(lock: Path) -> bool:
    """Check whether a process holds the lock, by taking it for a moment."""
    with suppress(OSError):
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _is_built_in(op: Op) -> bool:
    """Check whether DeepSpeed was installed with this op (DS_BUILD_...=1)."""
    folder = package_folder("deepspeed")
    if folder is None:
        return False
    try:
        text = (folder / "git_version_info_installed.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(rf"['\"]{op.name}['\"]: True", text) is not None
