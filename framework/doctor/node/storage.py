"""Storage that a node writes to: run folder, temporary files, caches.

A test file is written to each of them, and removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from framework.checkpoint.names import named_folders, replaced_folders, size_of
from framework.doctor.node.findings import GIB, MIB, Check, size_text, warning
from framework.doctor.node.requirements import Requirements
from framework.errors import Problem, Severity

_PROBE_BYTES: Final = 1 * MIB
_REMOTE: Final = re.compile(
    r"nfs\d?|cifs|smb3|9p|ceph|lustre|gpfs|beegfs|afs|fuse\.(?!fuse-overlayfs).*"
)


def check_run_folder(requirements: Requirements, counts_replaced: bool = False) -> Check:
    """Check whether checkpoints can be written, and fit, by the size of the largest so far.

    Args:
        requirements: of the run.
        counts_replaced: whether to look at every file that a resume has set aside.
    """
    if requirements.checkpoints is None:
        return Check("run folder", "no run config given")
    place, problems = _write_test_file(
        requirements.checkpoints, "run-folder", "set run.output_dir to another folder"
    )
    facts = {"run_folder": str(requirements.run_folder), "run_folder_type": file_system(place)}
    if problems:
        return Check("run folder", str(requirements.run_folder), problems, facts)
    free = _free(place)
    sizes = []
    with contextlib.suppress(OSError):
        sizes = [size_of(folder) for _, folder in named_folders(requirements.checkpoints)]
    outcome = f"{requirements.run_folder}: {size_text(free)} free"
    if sizes:
        outcome += f", a checkpoint takes {size_text(max(sizes))}"
    replaced = replaced_folders(requirements.checkpoints) if counts_replaced else []
    if replaced:
        taken = size_text(sum(map(size_of, replaced)))
        outcome += f", {taken} in {len(replaced)} that a resume has set aside (*.replaced)"
    return Check("run folder", outcome, list(_about_room(requirements, free, sizes)), facts)


def _about_room(requirements: Requirements, free: int, sizes: Sequence[int]) -> Iterator[Problem]:
    """Check the free space: a checkpoint is written completely before the oldest one is removed."""
    largest = max(sizes, default=0)
    # Room for the checkpoints that are still to come, one of them before the oldest is removed.
    wanted = largest * max(1, requirements.num_kept + 1 - len(sizes))
    severity: Severity = "error" if free < largest else "warning"
    if largest and free < wanted:
        takes = f"a checkpoint of this run takes {size_text(largest)}"
        reason = f"{takes} and {wanted // largest} more must fit ({requirements.kept_by})"
    elif not largest and free < GIB:
        reason = (
            "that is little for checkpoints: weights and optimizer state take 12 to 16 bytes "
            "for each parameter"
        )
    else:
        return
    key = str(requirements.run_folder)
    value = f"{size_text(free)} free"
    fix = "make room, or set run.output_dir to a larger disk"
    yield Problem("disk-full", reason, fix, key=key, value=value, severity=severity)


def check_temporary(environment: Mapping[str, str]) -> Check:
    """Check the folder where Python and compilers put temporary files."""
    folder = Path(environment.get("TMPDIR") or tempfile.gettempdir())
    place, problems = _write_test_file(folder, "tmp", "set TMPDIR to a folder you can write to")
    free = _free(place)
    if not problems and free < 100 * MIB:
        reason = "compilers and data workers put files there"
        value = f"{size_text(free)} free"
        problems = [
            warning("tmp-full", reason, "make room, or set TMPDIR", key=str(folder), value=value)
        ]
    return Check("temporary files", f"{folder}: {size_text(free)} free", problems)


def check_home(requirements: Requirements, environment: Mapping[str, str]) -> Check:
    """Check HOME, and the caches in it that torch and Triton write to."""
    home = environment.get("HOME", "")
    if not home:
        reason = "caches of torch and Triton are kept there"
        unset = warning("home-missing", reason, "set HOME to a folder you can write to", key="HOME")
        return Check("home and caches", "HOME is not set", [unset])
    problems: list[Problem] = []
    folders = {"HOME": home, "XDG_CACHE_HOME": environment.get("XDG_CACHE_HOME")}
    if requirements.cluster.device == "cuda":  # nothing compiles for Triton on processors
        folders["TRITON_CACHE_DIR"] = environment.get("TRITON_CACHE_DIR") or f"{home}/.triton"
    for name, folder in folders.items():
        if folder:
            problems += _cache_problems(name, Path(folder))
    return Check("home and caches", home, problems)


def _cache_problems(name: str, folder: Path) -> list[Problem]:
    """Return why the folder that a variable names is none for a cache."""
    fix = f"set {name} to a folder of this host that you can write to"
    place, failures = _write_test_file(folder, "cache", fix, severity="warning", num_bytes=1)
    if failures or name != "TRITON_CACHE_DIR" or not is_remote(place):
        return list(failures)
    reason = f"it lies on {file_system(place)}, where ranks wait for each other's files"
    fix = f"set {name} to a folder on a disk of this host"
    return [warning("cache-remote", reason, fix, key=name, value=str(folder))]


def check_offload(requirements: Requirements) -> Check:
    """Check the folders to which state is offloaded."""
    if not requirements.nvme_folders:
        return Check("offload", "nothing is offloaded to disk")
    problems: list[Problem] = []
    outcome = []
    for folder in requirements.nvme_folders:
        place, failures = _write_test_file(
            folder, "nvme-path", "set nvme_path to a folder on a local drive"
        )
        outcome.append(f"{folder}: {size_text(_free(place))} free")
        problems += failures
        if not failures and is_remote(place):
            reason = "every step would wait for the network"
            fix = "set nvme_path to a local drive"
            problems.append(
                warning("nvme-path-remote", reason, fix, key=str(folder), value=file_system(place))
            )
    return Check("offload", "; ".join(outcome), problems)


def file_system(folder: Path) -> str:
    """Return the type of a folder's file system, such as ``ext4`` or ``nfs4``, or ``unknown``."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
        real = folder.resolve()
        longest = -1
        kind = "unknown"
        for line in lines:
            words = line.split()
            point = Path(re.sub(r"\\([0-7]{3})", _character, words[1]))
            if real.is_relative_to(point) and len(point.parts) > longest:
                longest = len(point.parts)
                kind = words[2]
        return kind
    except (OSError, ValueError, IndexError):
        return "unknown"


def _character(octal: re.Match[str]) -> str:
    return chr(int(octal[1], 8))


def is_remote(folder: Path) -> bool:
    """Check whether other hosts may write there as well."""
    return _REMOTE.fullmatch(file_system(folder)) is not None


def _write_test_file(
    folder: Path,
    kind: str,
    fix: str,
    *,
    severity: Severity = "error",
    num_bytes: int = _PROBE_BYTES,
) -> tuple[Path, list[Problem]]:
    """Write a test file to a folder, or to the nearest one above it that exists, and remove it.

    Args:
        folder: which need not exist.
        kind: beginning of the problem's kind, before ``-unwritable``.
        fix, severity: of the problem.
        num_bytes: size of the file.

    Returns:
        The folder that was written to, and the problem if that failed.
    """
    place = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        with tempfile.NamedTemporaryFile(prefix=".preflight-", dir=place) as file:
            file.write(b"\0" * num_bytes)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = f"{size_text(num_bytes)} cannot be written to {place}: {error.strerror or error}"
        return place, [
            Problem(f"{kind}-unwritable", reason, fix, key=str(folder), severity=severity)
        ]
    return place, []


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
