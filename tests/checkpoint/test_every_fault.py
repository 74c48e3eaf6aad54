"""Each call of a save to the disk may fail, or be the last thing the process does: a checkpoint to
go on from is always there.

The operating system's calls that change a file system are counted. Then the save is repeated once
for every call and every way it can go wrong: the process ends before it, or after it; it fails with
EIO or ENOSPC; a write is cut short. Each time a new start must find the new checkpoint or the one
before, undamaged, and clear away the rest. Saves in the background run here as well, with the
writer in this process, so that its calls are counted too.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest

from framework.checkpoint import async_checkpointer
from framework.checkpoint.async_checkpointer import AsyncCheckpointer
from framework.checkpoint.checkpointer import Checkpointer, Retention, SaveOptions, clear_unfinished
from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.resume_point import find_sound_checkpoint
from framework.checkpoint.writer import Writer
from framework.config.load import config_from_values
from framework.errors import StorageError
from tests.fake_engine import SavingEngine

CALLS = ("open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")
FAULTS = ("end-before", "end-after", "EIO", "ENOSPC", "short")
CONFIG = config_from_values({}).to_dict()
LAYOUT = {
    "world_size": 1,
    "data_parallel_size": 1,
    "global_size": 8,
    "micro_size": 8,
    "accumulation_steps": 1,
    "pipe_size": 1,
}


class Ended(BaseException):
    """The process is gone: nothing after it runs, no handler sees it."""


class Faults:
    """Counts calls, and lets one of them go wrong."""

    def __init__(self, *, at: int = -1, fault: str = "") -> None:
        self.count, self.at, self.fault, self.log = 0, at, fault, list[str]()
        self.is_over = False

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            # lines of the log: after a failure they wait for a while
            if current_thread().name == "file-writer":
                return real(*arguments, **options)
            # a handler that runs after the end would do what a killed process cannot
            if self.is_over:
                raise Ended
            if name == "open" and not (
                len(arguments) > 1 and arguments[1] & (os.O_CREAT | os.O_WRONLY)
            ):
                return real(*arguments, **options)
            number, self.count = self.count, self.count + 1
            self.log.append(name)
            return (
                self._go_wrong(name, real, arguments, options)
                if number == self.at
                else real(*arguments, **options)
            )

        return call

    def _go_wrong(self, name: str, real: Callable[..., Any], arguments: Any, options: Any) -> Any:
        if self.fault in ("EIO", "ENOSPC"):
            raise OSError(getattr(errno, self.fault), os.strerror(getattr(errno, self.fault)))
        if self.fault == "short" and name == "write":
            return real(arguments[0], arguments[1][: len(arguments[1]) // 2])
        if self.fault == "short":  # other calls know no half
            return real(*arguments, **options)
        if self.fault == "end-after":
            with suppress(OSError):
                real(*arguments, **options)
        self.is_over = True
        raise Ended


@contextmanager
def faults(monkeypatch: pytest.MonkeyPatch, **how: Any) -> Iterator[Faults]:
    found = Faults(**how)
    with monkeypatch.context() as patch:
        for name in CALLS:
            # Flushing itself is left out: no test can see what a disk would have lost, and it takes
            # most of the time.
            real = (lambda descriptor: None) if name == "fsync" else getattr(os, name)
            patch.setattr(os, name, found.wrap(name, real))
        yield found


def two_files(step: int) -> Mapping[str, bytes]:
    return {name: f"{name} {step};".encode() * 150 for name in ("weights.pt", "optimizer.pt")}


def engine() -> SavingEngine:
    """Return an engine that writes each file in three parts."""
    return SavingEngine(two_files, part_bytes=1000)


OPTIONS = SaveOptions(
    Retention(2),
    is_main=True,
    gather=lambda value: [value],
    position=lambda step: {"epoch": 0},
    description={"layout": LAYOUT, "config": CONFIG},
)


def checkpointer(folder: Path) -> Checkpointer:
    return Checkpointer(engine(), folder, OPTIONS)  # type: ignore[arg-type]


class WriterHere:
    """The writer, carrying out an order as soon as it is given, in this process; both ends of its
    channel.
    """

    class _Told(deque[dict[str, Any]]):
        def send(self, **message: Any) -> None:
            self.append(message)

    def __init__(self, memory: int) -> None:
        self._reported = self._Told()
        self._writer = Writer(self._reported, memory)  # type: ignore[arg-type]

    def send(self, **order: Any) -> None:
        if "tag" in order:
            self._writer._save(order)

    def answer(self, timeout: float | None = None) -> dict[str, Any]:
        return self._reported.popleft()

    def close(self) -> None: ...


def save_in_background(folder: Path, step: int) -> bool:
    """As a run with this save alone does."""
    checkpointer = AsyncCheckpointer(
        engine(),  # type: ignore[arg-type]
        folder,
        OPTIONS,
        rank=0,
        world_size=1,
    )
    try:
        written = checkpointer.save(step)
        checkpointer.finish(is_final=True)
        return written
    except StorageError:
        return False
    finally:
        checkpointer._staged.close()


SAVES: dict[str, Callable[[Path, int], bool]] = {
    "at once": lambda folder, step: checkpointer(folder).save(step),
    "in the background": save_in_background,
}


def before(folder: Path) -> None:
    """Two checkpoints, so that the next save has one to delete."""
    writer = checkpointer(folder)
    assert writer.save(10)
    assert writer.save(20)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    before(folder)
    return folder


def fresh_start(folder: Path) -> int:
    """What the next process does: clear up, and take the newest that is whole."""
    clear_unfinished(folder)
    found, refused = find_sound_checkpoint("auto", run_checkpoints=folder)
    assert refused == [], "a checkpoint with a name is never damaged"
    assert found is not None
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert hidden == []
    assert (folder / "latest").read_text(encoding="utf-8") == found.tag
    return found.step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "step"),
    [("at once", 30), ("at once", 20), ("in the background", 30)],
    ids=["a new step", "the same step again", "in the background"],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_of_a_save_may_go_wrong(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, how: str, step: int
) -> None:
    save = SAVES[how]
    monkeypatch.setattr(async_checkpointer, "WriterProcess", WriterHere)
    shutil.copytree(prepared, tmp_path / "counted")
    with faults(monkeypatch) as counted:
        assert save(tmp_path / "counted", step)
    assert set(counted.log) >= {
        "open",
        "write",
        "fsync",
        "rename",
        "replace",
        "unlink",
        "rmdir",
        "mkdir",
    }
    outcomes = []
    for number in range(counted.count):
        folder = tmp_path / f"{number}"
        shutil.copytree(prepared, folder)
        with faults(monkeypatch, at=number, fault=fault) as found:
            try:
                written = save(folder, step)
            except Ended:
                written = False
        assert found.count > number, "the fault was met"
        reached = fresh_start(folder)
        assert reached in {20, step}
        if written:
            assert reached == step, "what was reported as saved is there"
        outcomes.append(reached)
        shutil.rmtree(folder)
    assert outcomes[0] == (step if fault == "short" else 20)
    if fault.startswith("end") and step == 30:
        assert outcomes == sorted(outcomes), (
            "from some call on the new checkpoint is there, and stays"
        )
        assert outcomes[-1] == 30


def test_a_start_may_be_interrupted_too(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(folder: Path) -> None:
        """As after a kill between the two renames of a save, and during a deletion."""
        shutil.copytree(prepared, folder)
        (folder / "global_step20").rename(folder / ".leaving-global_step20")
        (folder / ".saving" / "global_step20").mkdir(parents=True)
        (folder / ".saving" / "global_step20" / "weights.pt").write_text("half")

    left(tmp_path / "counted")
    with faults(monkeypatch) as counted:
        clear_unfinished(tmp_path / "counted")
    for number in range(counted.count):
        left(tmp_path / f"{number}")
        with faults(monkeypatch, at=number, fault="end-after"), pytest.raises(Ended):
            clear_unfinished(tmp_path / f"{number}")
        assert fresh_start(tmp_path / f"{number}") == 20


def test_an_empty_run_folder_has_nothing_to_fear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faults(monkeypatch) as counted:
        assert checkpointer(tmp_path / "counted").save(1)
    for number in range(counted.count):
        folder = tmp_path / f"{number}"
        with faults(monkeypatch, at=number, fault="end-after"), pytest.raises(Ended):
            checkpointer(folder).save(1)
        clear_unfinished(folder)
        assert [checkpoint.step for checkpoint in list_checkpoints(folder)] in ([], [1])


def test_no_sound_checkpoint_is_no_fresh_start(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "run")
    for checkpoint in list_checkpoints(tmp_path / "run"):
        (checkpoint.path / "weights.pt").unlink()
    with pytest.raises(StorageError, match=r"no checkpoint is sound: .*checkpoint-damaged"):
        find_sound_checkpoint("auto", run_checkpoints=tmp_path / "run")
