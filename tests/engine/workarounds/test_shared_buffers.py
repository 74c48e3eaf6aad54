"""What dead runs left in shared memory goes; what a living one uses, or may be about to use,
stays.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from framework.engine.workarounds import shared_buffers
from framework.engine.workarounds.shared_buffers import (
    refuse_small_memory,
    remove_dead_buffers,
    remove_own_buffers,
)
from framework.errors import ConfigError

UID = os.getuid()


def buffer(
    folder: Path, *, uid: int = UID, port: int = 29500, rank: int = 0, age_seconds: float = 600
) -> Path:
    path = folder / f"deepspeed_allreduce_buffer_{uid}_127.0.0.1_{port}_{rank}"
    path.write_bytes(bytes(4096))
    os.utime(path, (time.time() - age_seconds,) * 2)
    return path


HOST = {
    "WORLD_SIZE": "2",
    "LOCAL_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def leave_free(monkeypatch: pytest.MonkeyPatch, *mebibytes: int) -> None:
    """What is free in shared memory, each time that it is asked for, and from then on."""
    left = [*mebibytes]
    monkeypatch.setattr(
        shared_buffers.os,
        "statvfs",
        lambda _: SimpleNamespace(f_bavail=left.pop(0) if left[1:] else left[0], f_frsize=1 << 20),
    )


def test_shared_memory_that_is_too_small_is_refused_before_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's op ends the ranks by SIGSEGV there."""
    for free in (0, 64, 131):
        leave_free(monkeypatch, free)
        with pytest.raises(
            ConfigError, match=rf"{free} MiB are free .* takes 132 for 2 ranks .*\[shm-small\]"
        ):
            refuse_small_memory(HOST, folder=tmp_path)
    leave_free(monkeypatch, 132)
    refuse_small_memory(HOST, folder=tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"WORLD_SIZE": "4"}, {"LOCAL_SIZE": ""}, {"LOCAL_SIZE": "x", "WORLD_SIZE": "x"}],
    ids=str,
)
def test_where_the_op_makes_no_buffers_none_are_asked_for(
    change: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_free(monkeypatch, 0)
    refuse_small_memory(HOST | change, folder=tmp_path)


def test_what_the_start_before_left_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer(tmp_path).write_bytes(bytes(4 << 20))
    leave_free(monkeypatch, 128)
    refuse_small_memory(HOST, folder=tmp_path)


def test_other_ranks_wait_for_what_the_first_one_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_free(monkeypatch, 0, 0, 200)
    refuse_small_memory(HOST | {"LOCAL_RANK": "1"}, folder=tmp_path)


def test_leftovers_of_the_dead_go(tmp_path: Path) -> None:
    dead = [buffer(tmp_path), buffer(tmp_path, rank=1), buffer(tmp_path, port=1)]
    others = [
        buffer(tmp_path, uid=UID + 1),
        tmp_path / "deepspeed_allreduce_buffer",
        tmp_path / "sem.other",
    ]
    for path in others:
        path.touch()
    assert sorted(remove_dead_buffers(folder=tmp_path)) == sorted(dead)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_what_a_process_has_mapped_stays(tmp_path: Path) -> None:
    path = buffer(tmp_path)
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0):
        assert remove_dead_buffers(folder=tmp_path) == []
    assert remove_dead_buffers(folder=tmp_path) == [path]


def test_what_has_just_been_made_stays(tmp_path: Path) -> None:
    path = buffer(tmp_path, age_seconds=5)
    assert remove_dead_buffers(folder=tmp_path) == []
    assert remove_dead_buffers(folder=tmp_path, now=time.time() + 120) == [path]


def test_a_link_is_no_buffer(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    link = tmp_path / f"deepspeed_allreduce_buffer_{UID}_x_1_0"
    link.symlink_to("precious")
    os.utime(link, (0, 0), follow_symlinks=False)
    assert remove_dead_buffers(folder=tmp_path) == []
    assert (tmp_path / "precious").exists()


def test_processes_that_cannot_be_read_are_no_error(tmp_path: Path) -> None:
    for name in ("1", "2", "self"):
        (tmp_path / "proc" / name).mkdir(parents=True)
    (tmp_path / "proc" / "2" / "maps").mkdir()
    path = buffer(tmp_path)
    assert remove_dead_buffers(folder=tmp_path, processes=tmp_path / "proc") == [path]


@pytest.mark.parametrize("port", [29500, 29501])
def test_a_run_removes_its_own(port: int, tmp_path: Path) -> None:
    path = buffer(tmp_path, port=29500, age_seconds=0)
    remove_own_buffers({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, folder=tmp_path)
    assert path.exists() == (port != 29500)
