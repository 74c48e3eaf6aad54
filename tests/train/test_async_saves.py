"""Saves that are written in the background, by real writer processes: what is published, what fails, and what is left."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.errors import StorageError
from framework.files import FileRecord, NewFile, OpenFile
from framework.train.async_checkpointer import AsyncCheckpointer
from framework.train.checkpointer import Checkpointer, clear_unfinished
from framework.train.choice import find_sound_checkpoint
from framework.train.retention import Retention
from framework.train.saved import list_checkpoints
from framework.train.writer import write_files
from tests.launched import ROOT

CONFIG = config_from_values({"run": {"name": "x"}}).to_dict()
SECONDS = 60.0  # a generous limit for what takes milliseconds


class Engine:
    """Saves two files, whose bytes are a function of the step and of the rank; the arrays change after every save."""

    def __init__(self, rank: int = 0, num_bytes: int = 100_000) -> None:
        self.rank, self.num_bytes = rank, num_bytes

    def save(self, folder: Path, tag: str, state: Mapping[str, Any], *, open_file: OpenFile = NewFile) -> dict[str, FileRecord]:
        (folder / tag).mkdir(parents=True, exist_ok=True)
        found = {}
        for number, name in enumerate((f"model{self.rank}.pt", f"optimizer{self.rank}.pt")):
            content = bytearray([state["step"] % 251, self.rank, number]) * (self.num_bytes // 3)
            stream = open_file(folder / tag / name)
            for start in range(0, len(content), 70_001):
                stream.write(memoryview(content)[start : start + 70_001])
            record = stream.close()
            content[:] = bytes(len(content))
            if record is not None:
                found[name] = record
        return found

    def train_step(self, micro_batches: Any) -> Any: ...
    def evaluate(self, batches: Any) -> Any: ...
    def load(self, folder: Any, *, moved: bool) -> Any: ...
    def close(self) -> None: ...


def options(**given: Any) -> dict[str, Any]:
    layout = {"world_size": 1, "global_size": 8, "pipe_size": 1}
    return {
        "retention": Retention(100), "is_main": True, "gather": lambda value: [value], "last_step": None,
        "position": lambda step: {"epoch": step // 4}, "description": {"layout": layout, "config": CONFIG}, **given,
    }  # fmt: skip


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., AsyncCheckpointer]]:
    made: list[AsyncCheckpointer] = []

    def build(engine: Engine | None = None, folder: Path = tmp_path, **given: Any) -> AsyncCheckpointer:
        ranks = {"rank": given.pop("rank", 0), "world_size": given.pop("world_size", 1)}
        made.append(AsyncCheckpointer(engine or Engine(), folder, **ranks, **options(**given)))
        return made[-1]

    yield build
    for checkpointer in made:
        if checkpointer._writer is not None:
            os.kill(writer(checkpointer), signal.SIGCONT)
        checkpointer.close()


def writer(checkpointer: AsyncCheckpointer) -> int:
    assert checkpointer._writer is not None
    return checkpointer._writer.pid


def stop(checkpointer: AsyncCheckpointer) -> int:
    """The writer stands still: a disk that does not answer."""
    os.kill(writer(checkpointer), signal.SIGSTOP)
    return writer(checkpointer)


def later(work: Callable[[], Any], seconds: float = 0.3) -> None:
    threading.Timer(seconds, work).start()


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.005)


def await_warning(capfd: pytest.CaptureFixture[str]) -> str:
    """Until a save is said to have failed; all that was said."""
    said: list[str] = []

    def is_said() -> bool:
        said.append(capfd.readouterr().err)
        return "[checkpoint-not-written]" in "".join(said)

    until(is_said)
    return "".join(said)


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def limit_file_size(pid: int, num_bytes: int) -> None:
    """The kernel refuses longer files to this process: a write fails as on a full disk, though with other words."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


class TestWriting:
    def test_what_is_published_is_what_a_save_at_once_would_have_written(self, make: Any, tmp_path: Path) -> None:
        Checkpointer(Engine(), tmp_path / "sync", **options()).save(7, {"train/loss": 0.5, "eval/loss": float("nan")})  # type: ignore[arg-type]
        checkpointer = make(folder=tmp_path / "async")
        assert checkpointer.save(7, {"train/loss": 0.5, "eval/loss": float("nan")})
        checkpointer.finish()
        (sync,), (found,) = list_checkpoints(tmp_path / "sync"), list_checkpoints(tmp_path / "async")
        assert found.manifest == sync.manifest
        assert list(found.manifest) == list(sync.manifest)
        assert found.damage() == []
        assert names(tmp_path / "async") == names(tmp_path / "sync") == ["global_step7", "latest"]

    def test_training_does_not_wait(self, make: Any, tmp_path: Path) -> None:
        checkpointer = make()
        stop(checkpointer)
        assert checkpointer.save(1), "though nothing is written"
        assert steps(tmp_path) == []
        os.kill(writer(checkpointer), signal.SIGCONT)
        until(lambda: steps(tmp_path) == [1])  # published without another word from the ranks

    def test_the_next_save_waits_for_the_one_before_and_says_so_once(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        checkpointer = make()
        for step in (1, 2, 3):
            pid = stop(checkpointer)
            later(lambda pid=pid: os.kill(pid, signal.SIGCONT))
            assert checkpointer.save(step)
        checkpointer.finish()
        assert steps(tmp_path) == [1, 2, 3]
        said = capfd.readouterr().err
        assert said.count("[checkpoint-waits]") == 1
        assert "step 2 is to be saved while step 1 is still being written" in said

    def test_memory_is_used_again_and_grows(self, make: Any, tmp_path: Path) -> None:
        engine = Engine(num_bytes=300)
        checkpointer = make(engine)
        sizes = []
        for step, num_bytes in enumerate((300, 300, 40 << 20, 3000, 0)):
            engine.num_bytes = num_bytes
            checkpointer.save(step)
            sizes.append(os.fstat(checkpointer._staged.descriptor).st_size)
        checkpointer.finish()
        assert sizes[0] == sizes[1] < sizes[2] == sizes[3] == sizes[4]
        found = list_checkpoints(tmp_path)
        assert [checkpoint.damage() for checkpoint in found] == [[]] * 5
        assert (found[3].path / "model0.pt").read_bytes() == bytes([3, 0, 0]) * 1000

    def test_a_rank_may_have_nothing_to_write(self, make: Any, tmp_path: Path) -> None:
        class Idle(Engine):
            def save(self, folder: Path, tag: str, state: Any, **_: Any) -> dict[str, FileRecord]:
                (folder / tag).mkdir()
                return {}

        checkpointer = make(Idle())
        checkpointer.save(3)
        checkpointer.finish()
        assert steps(tmp_path) == [3]

    def test_retention_and_the_best(self, make: Any, tmp_path: Path) -> None:
        checkpointer = make(retention=Retention(1, best="eval/accuracy"))
        for step, accuracy in ((10, 0.2), (20, 0.9), (30, 0.1), (40, 0.3)):
            checkpointer.save(step, {"eval/accuracy": accuracy})
        checkpointer.finish()
        assert steps(tmp_path) == [20, 40]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
    def test_what_asks_the_run_to_stop_does_not_stop_a_save(self, make: Any, tmp_path: Path, number: signal.Signals) -> None:
        checkpointer = make()
        checkpointer.save(1)
        checkpointer.finish()  # it is up
        pid = stop(checkpointer)
        checkpointer.save(2)
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        checkpointer.finish()
        assert writer(checkpointer) == pid
        assert steps(tmp_path) == [1, 2]

    def test_closing_lets_a_save_become_whole(self, make: Any, tmp_path: Path) -> None:
        checkpointer = make()
        pid = stop(checkpointer)
        checkpointer.save(1)
        later(lambda: os.kill(pid, signal.SIGCONT))
        checkpointer.close()
        assert steps(tmp_path) == [1]
        assert not Path(f"/proc/{pid}").exists()


class TestFailing:
    def test_a_disk_that_refuses_is_told_at_once_and_once(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        checkpointer = make()
        checkpointer.save(1)
        checkpointer.finish()
        limit_file_size(writer(checkpointer), 150_000)
        checkpointer._engine.num_bytes = 600_000
        assert checkpointer.save(2)
        said = await_warning(capfd)  # though the ranks have not met again
        assert f"{tmp_path}/global_step2: the checkpoint cannot be written (File too large)" in said
        assert "training goes on" in said
        limit_file_size(writer(checkpointer), resource.RLIM_INFINITY)
        checkpointer.save(3)
        checkpointer.finish()
        assert steps(tmp_path) == [1, 3]
        assert capfd.readouterr().err == ""
        assert names(tmp_path) == ["global_step1", "global_step3", "latest"]

    def test_a_writer_that_is_killed_is_replaced(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        checkpointer = make()
        checkpointer.save(1)
        checkpointer.finish()
        first = stop(checkpointer)
        checkpointer.save(2)
        os.kill(first, signal.SIGKILL)
        assert checkpointer.save(3)
        assert writer(checkpointer) != first
        said = capfd.readouterr().err
        assert "global_step2: the checkpoint cannot be written (the process that writes checkpoints was killed by signal 9)" in said
        assert said.count("[checkpoint-not-written]") == 1
        checkpointer.finish()
        assert steps(tmp_path) == [1, 3]
        os.kill(writer(checkpointer), signal.SIGKILL)  # while it has nothing to do: nobody need know
        until(lambda: is_dead(writer(checkpointer)))
        checkpointer.save(4)
        checkpointer.finish()
        assert steps(tmp_path) == [1, 3, 4]
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize("how", ["disk", "killed"])
    def test_the_last_save_of_a_run_must_succeed(
        self, make: Any, tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        checkpointer = make(last_step=2)
        checkpointer.save(1)
        checkpointer.finish()
        if how == "disk":
            limit_file_size(writer(checkpointer), 10)
        else:
            pid = stop(checkpointer)
            later(lambda: os.kill(pid, signal.SIGKILL))
        with pytest.raises(StorageError, match=r"global_step2: the checkpoint cannot be written .*\[checkpoint-not-written\]"):
            checkpointer.save(2)
        assert capfd.readouterr().err == "", "an error, and no warning beside it"
        assert names(tmp_path) == ["global_step1", "latest"]

    def test_so_must_the_save_before_a_stop(self, make: Any) -> None:
        checkpointer = make()
        limit_file_size(writer(checkpointer), 10)
        checkpointer.save(1)
        with pytest.raises(StorageError, match="checkpoint-not-written"):
            checkpointer.finish(is_final=True)

    def test_a_folder_that_cannot_be_made_is_told_before_anything_is_copied(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        checkpointer = make(folder=tmp_path / "file")
        assert checkpointer.save(1) is False
        assert "cannot be written (Not a directory)" in capfd.readouterr().err

    def test_files_that_somebody_took_away(self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        checkpointer = make()
        pid = stop(checkpointer)
        checkpointer.save(1)
        (tmp_path / ".saving" / "global_step1").rmdir()
        os.kill(pid, signal.SIGCONT)
        checkpointer.finish()
        assert "cannot be written (No such file or directory)" in capfd.readouterr().err
        assert steps(tmp_path) == []

    @pytest.mark.parametrize("state", ["full", "read-only"])
    def test_a_real_disk(self, make: Any, tmp_path: Path, state: str, capfd: pytest.CaptureFixture[str]) -> None:
        mounted = tmp_path / "disk"
        mounted.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", mounted], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"a small file system cannot be mounted here (it needs root): {done.stderr.decode().strip()}")
        try:
            engine = Engine()
            checkpointer = make(engine, folder=mounted)
            checkpointer.save(1)
            checkpointer.finish()
            if state == "full":
                engine.num_bytes = 1_500_000
                checkpointer.save(2)
            else:
                pid = stop(checkpointer)
                checkpointer.save(2)
                subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
                os.kill(pid, signal.SIGCONT)
            checkpointer.finish()
            reason = {"full": "No space left on device", "read-only": "Read-only file system"}[state]
            said = capfd.readouterr().err
            assert f"global_step2: the checkpoint cannot be written ({reason})" in said
            assert said.count("[checkpoint-not-written]") == 1
            if state == "read-only":
                subprocess.run(["mount", "-o", "remount,rw", mounted], check=True)
            engine.num_bytes = 100_000
            checkpointer.save(3)
            checkpointer.finish()
            assert steps(mounted) == [1, 3]
            assert names(mounted) == ["global_step1", "global_step3", "latest"]
        finally:
            subprocess.run(["umount", mounted], check=True)


class Ranks:
    """Two ranks, each a thread with a writer process of its own; what they gather meets at a barrier."""

    def __init__(self, make: Any, **given: Any) -> None:
        self._values: list[Any] = [None, None]
        self._barrier = threading.Barrier(2, timeout=SECONDS)
        self.all = [make(Engine(rank), rank=rank, world_size=2, is_main=rank == 0, gather=self._gather(rank), **given)
                    for rank in (0, 1)]  # fmt: skip

    def _gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather

    def do(self, work: Callable[[AsyncCheckpointer], Any]) -> list[Any]:
        """On both ranks at the same time; a rank's StorageError is its result."""

        def one(checkpointer: AsyncCheckpointer) -> Any:
            try:
                return work(checkpointer)
            except StorageError as error:
                return error

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(one, self.all))


class TestRanks:
    def test_it_is_published_when_all_have_written_and_not_before(self, make: Any, tmp_path: Path) -> None:
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
        assert sorted(found.manifest["files"]) == ["model0.pt", "model1.pt", "optimizer0.pt", "optimizer1.pt"]
        assert found.damage() == []
        assert names(tmp_path) == ["global_step4", "latest"]

    def test_another_ranks_failure_is_everybodys_and_told_at_once(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        ranks = Ranks(make)
        limit_file_size(writer(ranks.all[1]), 50_000)
        ranks.do(lambda one: one.save(1))
        said = await_warning(capfd)
        limit_file_size(writer(ranks.all[1]), resource.RLIM_INFINITY)
        ranks.do(lambda one: one.save(2))
        ranks.do(lambda one: one.finish())
        said += capfd.readouterr().err
        assert said.count("[checkpoint-not-written]") == 1
        assert "global_step1: the checkpoint cannot be written (File too large)" in said
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
        said = capfd.readouterr().err
        assert said.count("[checkpoint-not-written]") == 1
        assert "was killed by signal 9" in said
        assert steps(tmp_path) == [2]

    def test_the_last_save_is_an_error_on_every_rank(self, make: Any, tmp_path: Path) -> None:
        ranks = Ranks(make, last_step=1)
        limit_file_size(writer(ranks.all[1]), 10)
        told = ranks.do(lambda one: one.save(1))
        assert [type(error) for error in told] == [StorageError, StorageError]
        assert names(tmp_path) == []


def records(folder: Path, *, rank: int) -> list[Path]:
    """What a rank's writer has left beside the files of the save that is under way."""
    return list((folder / ".saving").glob(f"written-by-rank{rank}*.json"))


def orders_of(checkpointer: AsyncCheckpointer) -> list[Mapping[str, Any]]:
    """What its writer is told to do from here on."""
    orders, begin = [], checkpointer._begin

    def note(order: dict[str, Any]) -> None:
        orders.append(order)
        begin(order)

    checkpointer._begin = note  # type: ignore[method-assign]
    return orders


class TestIdentity:
    def test_what_another_run_has_written_counts_for_nothing(self, make: Any, tmp_path: Path) -> None:
        """A writer of an earlier run that a file system held up: it leaves its record for the same rank and step."""
        earlier, ranks = Ranks(make), Ranks(make)
        orders = orders_of(earlier.all[1])
        earlier.do(lambda one: one.save(4))
        earlier.do(lambda one: one.finish())
        pid = stop(ranks.all[1])
        ranks.do(lambda one: one.save(4))
        write_files({**orders[0], "files": []}, memoryview(b""))
        until(lambda: records(tmp_path, rank=0))
        time.sleep(0.3)
        assert (tmp_path / ".saving/global_step4/model0.pt").exists(), "published without the files of rank 1"
        os.kill(pid, signal.SIGCONT)
        ranks.do(lambda one: one.finish(is_final=True))
        (found,) = list_checkpoints(tmp_path)
        assert sorted(found.manifest["files"]) == ["model0.pt", "model1.pt", "optimizer0.pt", "optimizer1.pt"]
        assert found.damage() == []

    def test_every_save_has_one_of_its_own(self, make: Any) -> None:
        ranks = Ranks(make)
        orders = [orders_of(one) for one in ranks.all]
        for step in (1, 2):
            ranks.do(lambda one, step=step: one.save(step))
        ranks.do(lambda one: one.finish())
        first, second = zip(*([order["ticket"] for order in told] for told in orders), strict=True)
        assert len({*first}) == len({*second}) == 1
        assert first != second

    def test_a_writer_that_dies_after_its_work_takes_nothing_back(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """All was written and rank 0 has published; that a rank's writer said no more of it changes nothing."""
        ranks = Ranks(make)
        orders, pid = orders_of(ranks.all[1]), stop(ranks.all[1])
        ranks.do(lambda one: one.save(4))
        staged = ranks.all[1]._staged
        with mmap.mmap(staged.descriptor, os.fstat(staged.descriptor).st_size) as mapped, memoryview(mapped) as memory:
            write_files(orders[0], memory)
        until(lambda: steps(tmp_path) == [4])
        os.kill(pid, signal.SIGKILL)
        assert ranks.do(lambda one: one.finish(is_final=True)) == [None, None]
        assert capfd.readouterr().err == ""
        (found,) = list_checkpoints(tmp_path)
        assert found.damage() == []


def test_the_memory_is_free_when_a_save_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("framework.train.writer.write_new", full)
    memory = memoryview(bytearray(60 << 20))
    files = [("a", 0, 30 << 20), ("b", 30 << 20, 30 << 20)]
    with pytest.raises(OSError, match="No space left") as caught:
        write_files({"folder": str(tmp_path), "tag": "global_step1", "ticket": "a", "rank": 0, "files": files}, memory)
    assert caught.value.errno == 28
    del caught
    memory.release()  # a BufferError while somebody still reads it


PARENT = """
import signal, os, sys
from pathlib import Path
from tests.train.test_async_saves import Engine, options, stop, writer
from framework.train.async_checkpointer import AsyncCheckpointer
checkpointer = AsyncCheckpointer(Engine(num_bytes=3_000_000), Path(sys.argv[1]), rank=0, world_size=1, **options())
checkpointer.save(1)
checkpointer.finish()
if sys.argv[2] == "stopped":
    stop(checkpointer)
checkpointer.save(2)
print(writer(checkpointer), flush=True)
signal.pause()
"""


SCARCE = """
import os, resource, sys
from pathlib import Path
from framework.train.staged_files import StagedFiles
staged = StagedFiles()
staged.open(Path("a")).write(bytes(int(sys.argv[1])))
before = os.fstat(staged.descriptor).st_size
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
data = bytes([7]) * (40 << 20)
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (8 << 20), hard))
staged.clear()
try:
    staged.open(Path("a")).write(data)
except OSError as error:
    print(error.strerror, os.fstat(staged.descriptor).st_size == before)
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
staged.clear()
staged.open(Path("a")).write(data)
print(os.pread(staged.descriptor, len(data) + 1, 0)[:len(data)] == data)
"""


@pytest.mark.parametrize("num_bytes", [0, 1 << 20])
def test_a_save_that_finds_no_memory_fails_alone(num_bytes: int) -> None:
    """In a process of its own, whose memory is limited for a moment."""
    done = subprocess.run([sys.executable, "-c", SCARCE, str(num_bytes)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["Cannot allocate memory True", "True"], done.stderr


@pytest.mark.parametrize("writer_is", ["stopped", "running"])
def test_a_killed_run_takes_its_writer_along_and_leaves_whole_checkpoints(tmp_path: Path, writer_is: str) -> None:
    shared = set(Path("/dev/shm").iterdir())
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), writer_is], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until(lambda: is_dead(pid))
    assert not any("dsframework" in path.name for path in set(Path("/dev/shm").iterdir()) - shared)
    removed = clear_unfinished(tmp_path)
    found, refused = find_sound_checkpoint("auto", run_checkpoints=tmp_path)
    assert found is not None
    assert refused == []
    assert found.step in ((1,) if writer_is == "stopped" else (1, 2))
    if writer_is == "stopped":
        assert removed, "what it had begun"
    assert not [name for name in names(tmp_path) if name.startswith(".")]
