"""A checkpoint that is verified in shares: every byte is read once, and the ranks keep meeting
while they read.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint import verification
from framework.checkpoint import verification as shared_verification
from framework.checkpoint.manifest import SavedCheckpoint, list_checkpoints
from framework.checkpoint.resume_point import find_sound_checkpoint
from framework.checkpoint.verification import SharedVerification, share_of
from framework.system.files import FileRecord, hash_file
from tests.checkpoint.test_every_fault import before


class Ranks:
    """Threads that stand for ranks, and their two collectives."""

    def __init__(self, count: int, *, per_host: int = 0) -> None:
        self.count, self.num_meetings, self.stated = count, 0, list[str]()
        self._per_host, self._barrier, self._values = (
            per_host or count,
            threading.Barrier(count),
            [None] * count,
        )

    def run(self, work: Callable[[int, SharedVerification], Any]) -> list[Any]:
        """What each rank returns."""
        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(lambda rank: work(rank, self._shared(rank)), range(self.count)))

    def _shared(self, rank: int) -> SharedVerification:
        return SharedVerification(
            rank=rank,
            gather=lambda value: self._gather(rank, value),
            from_rank0=lambda value: self._gather(rank, value)[0],
            print_line=self.stated.append,
        )

    def _gather(self, rank: int, value: Any) -> list[Any]:
        if value == socket.gethostname():
            value = f"host{rank // self._per_host}"
        self._values[rank] = value
        self._barrier.wait(30)
        everyone = list(self._values)
        self._barrier.wait(30)
        if rank == 0:
            self.num_meetings += 1
        return everyone


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was read."""
    found: Counter[str] = Counter()

    def count(path: Path, **options: Any) -> FileRecord:
        found[path.name] += 1
        return hash_file(path, **options)

    monkeypatch.setattr(verification, "hash_file", count)
    return found


@pytest.fixture
def newest(tmp_path: Path) -> SavedCheckpoint:
    before(tmp_path)
    return list_checkpoints(tmp_path)[-1]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_whole_and_even(count: int) -> None:
    records = {
        f"file{number}": FileRecord(size, "")
        for number, size in enumerate([90, 50, 40, 40, 30, 20, 10, 10, 5, 5])
    }
    shares = [share_of(records, index=index, count=count) for index in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(records)
    loads = [sum(record.num_bytes for record in share.values()) for share in shares]
    assert max(loads) <= max(90, 1.1 * 300 / count)


@pytest.mark.parametrize(
    ("per_host", "on_every_host", "times"),
    [(4, False, 1), (2, False, 1), (2, True, 2), (1, True, 4)],
)
def test_every_file_is_read_once_and_damage_reported_to_all(
    per_host: int, on_every_host: bool, times: int, newest: SavedCheckpoint, reads: Counter[str]
) -> None:
    data = bytearray((newest.path / "weights.pt").read_bytes())
    data[10] ^= 1
    (newest.path / "weights.pt").write_bytes(data)
    (newest.path / "stranger").touch()
    reported = Ranks(4, per_host=per_host).run(
        lambda _, shared: shared.verify(newest, on_every_host=on_every_host)
    )
    assert dict(reads) == dict.fromkeys(newest.records, times)
    assert reported == [newest.damage()] * 4
    assert len(reported[0]) == 2


def test_ranks_meet_while_they_read(
    newest: SavedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one long wait for the slowest the process group would give up."""
    monkeypatch.setattr(shared_verification, "_BEAT_SECONDS", 0.01)
    ranks = Ranks(2)

    def read_after_three_meetings(path: Path, **options: Any) -> FileRecord:
        deadline = time.monotonic() + 60
        while ranks.num_meetings < 4:
            assert time.monotonic() < deadline, "the ranks do not meet"
            options["on_read"](1)
        return hash_file(path, **options)

    monkeypatch.setattr(verification, "hash_file", read_after_three_meetings)
    assert ranks.run(lambda _, shared: shared.verify(newest)) == [[], []]
    assert ranks.stated[0].startswith(f"{newest.path}: 0.0 of 0.0 GB are verified")


def test_rank_0_asks_for_one_after_the_other(newest: SavedCheckpoint, reads: Counter[str]) -> None:
    (newest.path / "weights.pt").write_bytes(b"1")

    def work(rank: int, shared: SharedVerification) -> int:
        if rank:
            shared.help()
            return 0
        found, damaged = find_sound_checkpoint(
            "auto", run_checkpoints=newest.folder, damage_of=shared.ask
        )
        shared.end()
        assert found is not None
        assert len(damaged) == 1
        return found.step

    assert Ranks(3).run(work) == [10, 0, 0]
    assert reads == Counter(newest.records.keys()) + Counter(newest.records.keys()) - Counter(
        ["weights.pt"]
    )
