"""Trains on a small file system that fills up, turns read-only or fails on one rank: disk_full.py
MOUNTED RESULTS.

Before each save rank 0 brings the disk into a state, and after it writes down what became of the
save.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import framework
from framework.checkpoint.checkpointer import Checkpointer
from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.resume_point import find_sound_checkpoint
from framework.engine.distributed import barrier, process_group, rank
from framework.errors import FrameworkError
from framework.system import files

SAVE_EVERY = 2
# What each save meets: bytes left on the disk (None: all), a read-only folder, or one rank whose
# n-th write fails.
CYCLES: list[tuple[str, int | None]] = [
    ("free", None),
    ("free", 0),
    ("free", 0),
    ("free", None),
    ("free", 4096),
    ("free", 65_536),
    ("free", 262_144),
    ("free", 524_288),
    ("free", 786_432),
    ("free", 1_048_576),
    ("stays-full", 0),
    ("stays-full", 0),
    ("free", None),
    ("read-only", None),
    ("read-only", None),
    ("free", None),
    ("rank1-write", 0),
    ("rank1-write", 3),
    ("rank0-write", 0),
    ("rank0-write", 5),
    ("free", 8192),
    ("free", None),
]


class Disk:
    """A mounted file system, filled by one file. Rank 0 only."""

    def __init__(self, mounted: Path) -> None:
        self._mounted, self._fill = mounted, mounted / "fill"

    def leave(self, num_bytes: int | None) -> None:
        """Fill the disk until this many bytes are left."""
        self._fill.unlink(missing_ok=True)
        if num_bytes is not None:
            facts = os.statvfs(self._mounted)
            with self._fill.open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, facts.f_bavail * facts.f_frsize - num_bytes)

    def bind_read_only(self, folder: Path) -> None:
        """A folder through which nothing can be written, as after `mount -o remount,ro`."""
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)

    def unbind(self, folder: Path) -> None:
        subprocess.run(["umount", folder], check=True)


class FailingWrites:
    """The n-th write of checkpoint files fails on this rank."""

    def __init__(self, number: int) -> None:
        self._number, self._real = number, files.NewFile.write

    def __enter__(self) -> None:
        files.NewFile.write = self._write  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        files.NewFile.write = self._real  # type: ignore[method-assign]

    @property
    def _write(self) -> Callable[..., int]:
        def write(stream: files.NewFile, data: bytes) -> int:
            self._number -= 1
            if self._number < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self._real(stream, data)

        return write


def save_in(
    disk: Disk, reported: list[dict[str, Any]], cycles: list[tuple[str, int | None]]
) -> Callable[..., Any]:
    """Checkpointer.save, on a disk in the state of the step's cycle."""
    real = Checkpointer.save

    def save(self: Checkpointer, step: int, *more: Any, **options: Any) -> Any:
        state, value = cycles[step // SAVE_EVERY - 1]
        folder = self._folder
        if rank() == 0 and state == "read-only":
            disk.bind_read_only(folder)
        elif rank() == 0:
            disk.leave(value if "free" in state or "full" in state else None)
        barrier()
        try:
            if state == f"rank{rank()}-write":
                with FailingWrites(value or 0):
                    written = real(self, step, *more, **options)
            else:
                written = real(self, step, *more, **options)
        except FrameworkError as error:
            reported.append({"step": step, "state": state, "value": value, "raised": str(error)})
            raise
        finally:
            if rank() == 0 and state == "read-only":
                disk.unbind(folder)
        if rank() == 0:
            sound, damaged = find_sound_checkpoint("auto", run_checkpoints=folder)
            reported.append(
                {
                    "step": step,
                    "state": state,
                    "value": value,
                    "written": bool(written),
                    "damaged": damaged,
                    "sound": sound.step if sound else 0,
                    "there": [found.step for found in list_checkpoints(folder)],
                    "hidden": sorted(path.name for path in folder.glob(".*")),
                }
            )
            if state != "stays-full":
                disk.leave(None)
        barrier()
        return written

    return save


def config(name: str, mounted: Path, num_cycles: int) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": str(mounted)},
        "model": {"kind": "mlp", "hidden_sizes": [64], "dropout": 0.3},
        "batch": {"global_size": 120},
        "zero": {"stage": 2},
        "training": {"max_steps": num_cycles * SAVE_EVERY, "log_every": 1},
        "evaluation": {"every_steps": 9},
        "checkpoint": {"every_steps": SAVE_EVERY, "keep_last": 2},
        "monitors": {"tensorboard": True, "progress": "off"},
    }


def main() -> None:
    mounted, results = Path(sys.argv[1]), Path(sys.argv[2])
    disk, real = Disk(mounted), Checkpointer.save
    cases = {"fills-up": CYCLES, "last-fails": [("free", None), ("free", None), ("free", 0)]}
    outcome: dict[str, Any] = {}
    with process_group(None):
        for name, cycles in cases.items():
            reported: list[dict[str, Any]] = []
            Checkpointer.save = save_in(disk, reported, cycles)  # type: ignore[method-assign]
            ended: dict[str, Any] = {"error": "", "exit_code": 0}
            try:
                ended["step"] = framework.fit(config(name, mounted, len(cycles))).step
            except FrameworkError as error:
                ended |= {"error": str(error), "exit_code": error.exit_code}
            Checkpointer.save = real  # type: ignore[method-assign]
            outcome[name] = {"saves": reported, **ended}
            if rank() == 0:
                disk.leave(None)
            barrier()
    results.with_suffix(f".{os.environ['RANK']}.json").write_text(
        json.dumps(outcome, indent=1), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
