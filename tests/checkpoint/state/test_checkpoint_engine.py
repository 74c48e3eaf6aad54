"""What a save asks of host memory, and what becomes of one that is not given it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.serialization import config as save_options

from framework.checkpoint.state import checkpoint_engine
from framework.checkpoint.state.checkpoint_engine import AtomicCheckpointEngine
from framework.system.files import NewFile
from framework.system.limits import Room


class Stream(NewFile):
    """A file that is not the disk's: what waits in memory for another process."""


def saving(monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
    def save(state: Any, stream: Any) -> None:
        stream.write(b"something")
        what()

    monkeypatch.setattr(torch, "save", save)


@pytest.mark.parametrize(
    ("num_bytes", "free", "is_pinned"),
    [
        (1 << 28, None, True),
        ((1 << 28) + 4, None, False),
        ((1 << 28) + 4, 1 << 30, False),
        (1 << 31, 1 << 36, True),
        ((1 << 31) + 4, 1 << 36, False),
    ],
)
def test_a_share_of_the_free_memory_at_most_is_locked_for_good(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_bytes: int,
    free: int | None,
    is_pinned: bool,
) -> None:
    seen: list[bool] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(
        checkpoint_engine, "room", lambda: None if free is None else Room(free, "the test's")
    )
    saving(monkeypatch, lambda: seen.append(save_options.save.use_pinned_memory_for_d2h))
    state = {
        "groups": [
            {"flat": torch.empty(num_bytes // 4, device="meta")[:3]},
            {"step": torch.zeros(1 << 10)},
        ],
        "lr": 0.1,
    }
    for open_file in (NewFile, Stream):
        files = AtomicCheckpointEngine()
        files.begin(tmp_path, open_file=open_file)
        files.save(state, str(tmp_path / f"{open_file.__name__}.pt"))
        files.end()
    assert seen == [False, is_pinned]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"
        ),
        MemoryError(),
    ],
    ids=["device", "pinned", "host", "python"],
)
def test_a_save_without_memory_fails_as_one_without_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """At its end, like every failure of storage: the other ranks wait in DeepSpeed's barrier
    meanwhile.
    """

    def fail() -> None:
        raise error

    saving(monkeypatch, fail)
    files = AtomicCheckpointEngine()
    files.begin(tmp_path)
    files.save({}, str(tmp_path / "model.pt"))
    with pytest.raises(
        OSError, match=r"no memory for a copy of what goes into model\.pt"
    ) as failed:
        files.end()
    assert failed.value.errno == errno.ENOMEM


def test_other_failures_are_not_the_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving(monkeypatch, lambda: 1 / 0)
    files = AtomicCheckpointEngine()
    files.begin(tmp_path)
    with pytest.raises(ZeroDivisionError):
        files.save({}, str(tmp_path / "model.pt"))
