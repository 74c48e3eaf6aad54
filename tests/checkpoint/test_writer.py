"""Writer processes of several ranks: what is published, and when; what another run or a dead
process leaves counts for nothing.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint import async_checkpointer
from framework.checkpoint.async_checkpointer import AsyncCheckpointer
from framework.checkpoint.checkpointer import clear_unfinished
from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.resume_point import find_sound_checkpoint
from framework.checkpoint.writer import Writer, write_files
from framework.errors import StorageError
from framework.system.json_lines import MessageSocket
from tests.checkpoint.background_saves import (
    SECONDS,
    Ranks,
    await_warning,
    is_dead,
    later,
    limit_file_size,
    make,
    orders_of,
    records,
    stop,
    writer,
)
from tests.checkpoint.small_checkpoints import names, steps
from tests.places import ROOT
from tests.until import until

__all__ = ["make"]  # a fixture


class TestRanks:
    def test_it_is_published_when_all_have_written_and_not_before(
        self, make: Any, tmp_path: Path
    ) -> None:
        ranks = Ranks(make)
        pid = stop(ranks.all[1])
        assert ranks.do(lambda one: one.save(4)) == [True, True]
        until(lambda: records(tmp_path, rank=0))
        time.sleep(0.1)
        assert steps(tmp_path) == []
        os.kill(pid, signal.SIGCONT)
        until(lambda: steps(tmp_path) == [4])
        ranks.do(lambda one: one.finish())
        (found,) = list_checkpoints(tmp_path)
        assert sorted(found.manifest["files"]) == [
            "model0.pt",
            "model1.pt",
            "optimizer0.pt",
            "optimizer1.pt",
        ]
        assert found.damage() == []
        assert names(tmp_path) == ["global_step4", "latest"]

    def test_a_record_is_not_asked_for_before_it_is_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An NFS client keeps for up to a minute that a name is not there."""
        (tmp_path / ".saving").mkdir()
        order = {"folder": str(tmp_path), "ticket": "t", "world_size": 3}
        ours, theirs = socket.socketpair()
        with theirs, ours:
            waiting = Writer(MessageSocket(ours), 0)._await_records(order)
            asked: list[Path] = []
            read = Path.read_text
            monkeypatch.setattr(
                Path,
                "read_text",
                lambda path, **options: asked.append(path) or read(path, **options),
            )
            for rank in (2, 0, 1):
                path = tmp_path / ".saving" / f"written-by-rank{rank}-t.json"
                write = partial(path.write_text, '{"failure": "", "files": {}}', encoding="utf-8")
                later(write, 0.1)
                assert next(waiting) == {"failure": "", "files": {}}
                assert asked.pop() == path
                assert asked == []
            assert next(waiting, None) is None

    @pytest.mark.parametrize("slow", ["writing", "publishing"])
    def test_a_slow_disk_keeps_no_rank_in_a_collective(
        self, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
    ) -> None:
        """However long it takes: a collective without its other ranks ends the run after ten
        minutes.
        """
        monkeypatch.setattr(async_checkpointer, "_BEAT_SECONDS", 0.05)
        ranks = Ranks(make)
        first, second = stop(ranks.all[0]), stop(ranks.all[1])
        assert ranks.do(lambda one: one.save(4)) == [True, True]
        # the first has written, and stands still before it could give the checkpoint its name
        if slow == "publishing":
            os.kill(first, signal.SIGCONT)
            until(lambda: records(tmp_path, rank=0))
            time.sleep(0.1)
            stop(ranks.all[0])
        os.kill(second, signal.SIGCONT)
        until(lambda: records(tmp_path, rank=1))
        ranks.waits.clear()
        met: list[int] = []

        def answer() -> None:
            with suppress(AssertionError):
                until(lambda: len(ranks.waits) > 10)
            met.append(len(ranks.waits))
            os.kill(first, signal.SIGCONT)

        later(answer, 0.0)
        ranks.do(lambda one: one.finish())
        assert steps(tmp_path) == [4]
        assert met[0] > 10, "they have come and gone while the disk did not answer"
        assert max(ranks.waits) < SECONDS

    def test_another_ranks_failure_is_every_ranks_and_reported_at_once(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        ranks = Ranks(make)
        limit_file_size(writer(ranks.all[1]), 50_000)
        ranks.do(lambda one: one.save(1))
        stated = await_warning(capfd)
        limit_file_size(writer(ranks.all[1]), resource.RLIM_INFINITY)
        ranks.do(lambda one: one.save(2))
        ranks.do(lambda one: one.finish())
        stated += capfd.readouterr().err
        assert stated.count("[checkpoint-not-written]") == 1
        assert "global_step1: the checkpoint cannot be written (File too large)" in stated
        assert steps(tmp_path) == [2]

    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_killed_writer_of_either_rank(
        self, make: Any, tmp_path: Path, victim: int, capfd: pytest.CaptureFixture[str]
    ) -> None:
        ranks = Ranks(make)
        pid = stop(ranks.all[victim])
        ranks.do(lambda one: one.save(1))
        os.kill(pid, signal.SIGKILL)

        def go_on(one: AsyncCheckpointer) -> bool:
            written = one.save(2)
            one.finish()  # in the thread that started the fresh writer, which lives as long
            return written

        assert ranks.do(go_on) == [True, True]
        stated = capfd.readouterr().err
        assert stated.count("[checkpoint-not-written]") == 1
        assert "was killed by signal 9" in stated
        assert steps(tmp_path) == [2]

    @pytest.mark.slow
    def test_what_a_slow_disk_has_taken_after_all_stays_written(
        self,
        make: Any,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """The writer finds its rank gone when it wants to say so: that is no reason to take back
        what it has recorded.
        """
        monkeypatch.setattr(async_checkpointer, "_LAST_SECONDS", 0.2)
        monkeypatch.setattr("framework.system.child._END_SECONDS", SECONDS)
        ranks = Ranks(make)
        pid = stop(ranks.all[1])
        ranks.do(lambda one: one.save(4))
        until(lambda: records(tmp_path, rank=0))
        later(lambda: os.kill(pid, signal.SIGCONT), 1.0)
        ranks.all[1].close()
        until(lambda: steps(tmp_path) == [4])
        assert capfd.readouterr().err == ""

    def test_the_last_save_is_an_error_on_every_rank(self, make: Any, tmp_path: Path) -> None:
        ranks = Ranks(make, last_step=1)
        limit_file_size(writer(ranks.all[1]), 10)
        reported = ranks.do(lambda one: one.save(1))
        assert [type(error) for error in reported] == [StorageError, StorageError]
        assert names(tmp_path) == []


def test_what_a_disk_refuses_in_the_words_of_a_connection_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has one name for both: some network file systems say ESHUTDOWN when they have lost
    their server.
    """

    def refuse(order: Any, memory: Any) -> None:
        raise OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN))

    monkeypatch.setattr("framework.checkpoint.writer.write_files", refuse)
    (tmp_path / ".saving").mkdir()
    memory = os.memfd_create("staged")
    os.ftruncate(memory, 16)
    near, far = socket.socketpair()
    with near, far:
        order = {
            "tag": "global_step1",
            "rank": 1,
            "folder": str(tmp_path),
            "ticket": "t",
            "warns": False,
        }
        Writer(MessageSocket(near), memory)._save(order)
        assert MessageSocket(far).receive(SECONDS) == {
            "state": "failed",
            "failure": os.strerror(errno.ESHUTDOWN),
        }
    os.close(memory)
    (record,) = records(tmp_path, rank=1)
    assert os.strerror(errno.ESHUTDOWN) in record.read_text()


class TestIdentity:
    @pytest.mark.slow
    def test_what_another_run_has_written_counts_for_nothing(
        self, make: Any, tmp_path: Path
    ) -> None:
        """A writer of an earlier run that a file system held up: it leaves its record for the same
        rank and step.
        """
        earlier, ranks = Ranks(make), Ranks(make)
        orders = orders_of(earlier.all[1])
        earlier.do(lambda one: one.save(4))
        earlier.do(lambda one: one.finish())
        pid = stop(ranks.all[1])
        ranks.do(lambda one: one.save(4))
        write_files({**orders[0], "files": []}, memoryview(b""))
        until(lambda: records(tmp_path, rank=0))
        time.sleep(0.3)
        assert (tmp_path / ".saving/global_step4/model0.pt").exists(), (
            "published without the files of rank 1"
        )
        os.kill(pid, signal.SIGCONT)
        ranks.do(lambda one: one.finish(is_final=True))
        (found,) = list_checkpoints(tmp_path)
        assert sorted(found.manifest["files"]) == [
            "model0.pt",
            "model1.pt",
            "optimizer0.pt",
            "optimizer1.pt",
        ]
        assert found.damage() == []

    def test_every_save_has_one_of_its_own(self, make: Any) -> None:
        ranks = Ranks(make)
        orders = [orders_of(one) for one in ranks.all]
        for step in (1, 2):
            ranks.do(lambda one, step=step: one.save(step))
        ranks.do(lambda one: one.finish())
        first, second = zip(
            *([order["ticket"] for order in reported] for reported in orders), strict=True
        )
        assert len({*first}) == len({*second}) == 1
        assert first != second

    def test_a_writer_that_dies_after_its_work_takes_nothing_back(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """All was written and rank 0 has published; that a rank's writer said no more of it changes
        nothing.
        """
        ranks = Ranks(make)
        orders, pid = orders_of(ranks.all[1]), stop(ranks.all[1])
        ranks.do(lambda one: one.save(4))
        staged = ranks.all[1]._staged
        with (
            mmap.mmap(staged.descriptor, os.fstat(staged.descriptor).st_size) as mapped,
            memoryview(mapped) as memory,
        ):
            write_files(orders[0], memory)
        until(lambda: steps(tmp_path) == [4])
        os.kill(pid, signal.SIGKILL)
        assert ranks.do(lambda one: one.finish(is_final=True)) == [None, None]
        assert capfd.readouterr().err == ""
        (found,) = list_checkpoints(tmp_path)
        assert found.damage() == []


def test_the_memory_is_free_when_a_save_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("framework.checkpoint.writer.write_new", full)
    memory = memoryview(bytearray(60 << 20))
    files = [("a", 0, 30 << 20), ("b", 30 << 20, 30 << 20)]
    with pytest.raises(OSError, match="No space left") as caught:
        write_files(
            {
                "folder": str(tmp_path),
                "tag": "global_step1",
                "ticket": "a",
                "rank": 0,
                "files": files,
            },
            memory,
        )
    assert caught.value.errno == 28
    del caught
    memory.release()  # a BufferError while a reader still has it


PARENT = """
import signal, os, sys
from pathlib import Path
from tests.checkpoint.background_saves import options, rank_files, stop, writer
from tests.fake_engine import SavingEngine
from framework.checkpoint.async_checkpointer import AsyncCheckpointer
engine = SavingEngine(rank_files(num_bytes=3_000_000))
checkpointer = AsyncCheckpointer(engine, Path(sys.argv[1]), options(), rank=0, world_size=1)
checkpointer.save(1)
checkpointer.finish()
if sys.argv[2] == "stopped":
    stop(checkpointer)
checkpointer.save(2)
print(writer(checkpointer), flush=True)
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("writer_is", ["stopped", "running"])
def test_a_killed_run_takes_its_writer_along_and_leaves_whole_checkpoints(
    tmp_path: Path, writer_is: str
) -> None:
    shared = set(Path("/dev/shm").iterdir())
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), writer_is],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(60)
    until(lambda: is_dead(pid))
    assert not any("dsf-save" in path.name for path in set(Path("/dev/shm").iterdir()) - shared)
    removed = clear_unfinished(tmp_path)
    found, refused = find_sound_checkpoint("auto", run_checkpoints=tmp_path)
    assert found is not None
    assert refused == []
    assert found.step in ((1,) if writer_is == "stopped" else (1, 2))
    if writer_is == "stopped":
        assert removed, "what it had begun"
    assert not [name for name in names(tmp_path) if name.startswith(".")]
