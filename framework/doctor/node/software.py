"""Versions and hashes of what a node would run. Nothing of it is imported: torch alone would take seconds."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

import framework
from framework.doctor.node.findings import Check
from framework.doctor.node.need import Need
from framework.errors import Problem, Severity
from framework.launch.environment import ROOT, missing, requirements
from framework.launch.hosts.devices import torch_text

_NO_TRAINING_WITHOUT: Final = frozenset({"torch", "deepspeed", "psutil", "filelock", "setuptools", "numpy"})
# A package with more Python than this is no project of somebody's own; its version says what it is.
_MOST_FILES: Final = 5000
_INSTALL: Final = "in the checkout: ./launch.sh setup train, or pip install -e '.[train]'"


def check_versions(need: Need) -> Check:
    """Python and the packages that training needs."""
    wanted = _wanted()
    absent, too_old = missing(wanted)
    problems = [_absent(re.split("[<>=]", each)[0]) for each in absent]
    for sentence in too_old:
        severity: Severity = "error" if sentence.split()[0] in ("torch", "deepspeed") else "warning"
        problems.append(Problem(kind="package-too-old", reason=sentence, fix=_INSTALL, severity=severity))
    cuda = torch_text("cuda")
    if need.cluster.device == "cuda" and torch_text("__version__") and not (cuda or torch_text("hip")):
        problems.append(
            Problem(
                kind="torch-without-cuda",
                key="torch",
                value=torch_text("__version__"),
                reason="this build computes on processors only, and GPUs are to be used",
                fix="install a CUDA build of torch, or DS_ACCELERATOR=cpu",
            )
        )
    versions = {"python": platform.python_version(), "dsf-trainer": framework.__version__}
    versions |= {name: found for name in ("torch", "deepspeed") if (found := version_of(name))}
    others = sorted(re.split("[<>=]", each)[0] for each in wanted)
    all_of_them = versions | {name: found for name in others if name not in versions and (found := version_of(name))}
    versions.setdefault("torch", "none")
    stated = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Check("versions", stated, tuple(problems), {"versions": all_of_them | versions | _of_nccl()})


def check_code(need: Need) -> Check:
    """Hashes of the framework's code, of the run config and of the modules that it names."""
    hashes = {"framework": hash_of_files(Path(framework.__file__).parent)}
    for module in need.targets:
        place = _place_of(module)
        if place is not None:
            hashes[module] = hash_of_files(place)
    stated = ", ".join(f"{name} {value}" for name, value in hashes.items())
    config = f"config {need.config_hash}, " if need.config_hash else ""
    return Check("code", f"{config}{stated}", (), {"code": hashes, "config": need.config_hash})


def hash_of_files(place: Path) -> str:
    """Of the names and contents of a folder's Python files, or of one file; the same wherever it lies."""
    digest = hashlib.sha256()
    files = sorted(place.rglob("*.py"))[:_MOST_FILES] if place.is_dir() else [place]
    for file in files:
        digest.update(str(file.relative_to(place) if file != place else file.name).encode() + b"\0")
        try:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError:
            digest.update(b"unreadable")
    return digest.hexdigest()[:12]


def version_of(package: str) -> str | None:
    """Of what is installed; None where it is not. torch itself tells for which CUDA it is, its metadata may not."""
    if package == "torch" and (own := torch_text("__version__")):
        return own
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of NCCL and its kind that hang a run when hosts differ in them; names of interfaces may differ."""
    chosen = re.compile(
        r"(NCCL|TORCH_NCCL)_(ALGO|PROTO|NET|NET_PLUGIN|IB_DISABLE|P2P_DISABLE|SHM_DISABLE|CUMEM_ENABLE|"
        r"BLOCKING_WAIT|MIN_NCHANNELS|MAX_NCHANNELS|NVLS_ENABLE)"
    )
    return {name: value for name, value in sorted(environment.items()) if chosen.fullmatch(name)}


def _wanted() -> list[str]:
    """Requirements of the train extra: of the checkout, or as the installed copy states them."""
    if (ROOT / "pyproject.toml").is_file():
        return requirements(["train"])
    return list(_stated(metadata.requires("dsf-trainer") or ()))


def _stated(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        requirement, _, marker = line.partition(";")
        if not marker or re.search(r"extra == ['\"]train['\"]", marker):
            yield requirement.strip()


def _absent(name: str) -> Problem:
    needed = name in _NO_TRAINING_WITHOUT
    reason = "training needs it" if needed else "a part of training needs it"
    return Problem(
        kind="package-missing",
        key=name,
        reason=f"{sys.executable} has no {name}; {reason}",
        fix=_INSTALL,
        severity="error" if needed else "warning",
    )


def _of_nccl() -> dict[str, str]:
    """torch's wheels bring NCCL as a package of its own, named after the release of CUDA."""
    major = (torch_text("cuda") or "").partition(".")[0]
    found = version_of(f"nvidia-nccl-cu{major}") if major else None
    return {"nccl": found} if found else {}


def _place_of(module: str) -> Path | None:
    """The folder or file of the first part of a dotted name, as train.py would look for it; None for installed
    packages.
    """
    top = module.partition(".")[0]
    places: Sequence[str] = [os.getcwd(), str(ROOT)]
    spec = importlib.machinery.PathFinder.find_spec(top, list(places))
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None
