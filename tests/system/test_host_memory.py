"""Memory that can be taken, by the files of a made-up system; and a save that needs more."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from framework.checkpoint import save_stream as staged_files
from framework.checkpoint.save_stream import StagedFiles
from framework.system.limits import Room, host_memory_bytes, room

GB = 10**9
# Four times the margin of one GiB: 5 % of them, and so that margin is the smaller one.
HOST = f"MemTotal: {400 * GB // 1024} kB\nMemFree: 5 kB\nMemAvailable: {100 * GB // 1024} kB\nHugePages_Total: 0\n"
MARGIN = 1 << 30


def system(
    folder: Path, *, cgroup: str = "", files: dict[str, str] | None = None, meminfo: str = HOST
) -> Path:
    for name, text in {
        "proc/meminfo": meminfo,
        "proc/self/cgroup": cgroup,
        **(files or {}),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def version_2(group: str, *, most: str, used: int, of_files: int) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {of_files}\nactive_file 0\nshmem 7\n"
    return {
        f"sys/fs/cgroup{group}/memory.{name}": text
        for name, text in (("max", f"{most}\n"), ("current", f"{used}\n"), ("stat", stat))
    }


def test_the_host_has_less_than_it_seems_to(tmp_path: Path) -> None:
    found = room(system=system(tmp_path))
    assert found is not None
    assert abs(found.num_bytes - (100 * GB - MARGIN)) < 2048
    assert found.limit == "this host's memory"


def test_without_a_source(tmp_path: Path) -> None:
    assert room(system=tmp_path) is None
    assert room(system=system(tmp_path, meminfo="nothing here")) is None


@pytest.mark.parametrize("is_namespace", [True, False])
def test_the_tightest_group_counts_and_what_the_kernel_can_drop_is_room(
    is_namespace: bool, tmp_path: Path
) -> None:
    """A pod's limit may stand above the group of its container; without a namespace the host's path
    is not there.
    """
    files = version_2(
        "" if is_namespace else "/pods/one", most=str(64 * GB), used=60 * GB, of_files=20 * GB
    )
    files |= version_2("/pods", most="max", used=0, of_files=0)
    found = room(
        system=system(
            tmp_path, cgroup=f"0::/{'' if is_namespace else 'pods/one/container'}\n", files=files
        )
    )
    assert found == Room(24 * GB - MARGIN, "the container's limit (64.0 GB)")


def test_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/a"
    files = {
        f"{group}/memory.limit_in_bytes": f"{2 * GB}\n",
        f"{group}/memory.usage_in_bytes": f"{GB}\n",
        f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GB // 4}\ntotal_active_file {GB // 4}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        "sys/fs/cgroup/memory/memory.stat": "",
    }
    found = room(
        system=system(tmp_path, cgroup="5:devices:/\n4:cpu,memory:/docker/a\n0::/x\n", files=files)
    )
    assert found == Room(GB + GB // 2 - GB // 10, "the container's limit (2.0 GB)")
    assert host_memory_bytes(system=tmp_path) == 2 * GB


def test_a_group_above_limits_the_memory_of_the_host(tmp_path: Path) -> None:
    files = version_2("/pods", most=str(GB), used=0, of_files=0)
    files |= version_2("/pods/one", most=str(2 * GB), used=0, of_files=0)
    assert host_memory_bytes(system=system(tmp_path, cgroup="0::/pods/one\n", files=files)) == GB


@pytest.mark.parametrize("kept_bytes", [0, 30 << 20])
def test_a_save_for_which_there_is_no_room_gives_back_what_it_took(
    kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that touches memory that is not there is killed, and the run with it."""
    staged = StagedFiles()
    if kept_bytes:
        staged.open(Path("first")).write(bytes(kept_bytes))
    staged.clear()
    kept = os.fstat(staged.descriptor).st_size
    monkeypatch.setattr(
        staged_files,
        "room",
        lambda: Room((150 << 20) - os.fstat(staged.descriptor).st_blocks * 512, "its limit"),
    )
    staged.open(Path("second")).write(bytes(70 << 20))
    with pytest.raises(OSError, match=r"its limit has 0\.0. GB left") as caught:
        staged.open(Path("third")).write(bytes(200 << 20))
    assert caught.value.errno == errno.ENOMEM
    assert os.fstat(staged.descriptor).st_size == kept
    assert os.fstat(staged.descriptor).st_blocks * 512 == kept
    staged.clear()
    staged.open(Path("fourth")).write(b"1" * (100 << 20))
    assert os.pread(staged.descriptor, 1, (100 << 20) - 1) == b"1"
    staged.close()
