"""Saves in the background: two files for each rank, ranks that are threads, and writer processes
that stand still or die.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.async_checkpointer import AsyncCheckpointer
from framework.checkpoint.checkpointer import Retention, SaveOptions
from framework.errors import StorageError
from tests.checkpoint.small_checkpoints import CONFIG, LAYOUT
from tests.fake_engine import SavingEngine
from tests.until import until

SECONDS = 60.0  # a generous limit for what takes milliseconds


def rank_files(rank: int = 0, num_bytes: int = 100_000) -> Callable[[int], Mapping[str, bytes]]:
    """Return what makes two files of a step, with bytes that depend on the step and the rank."""

    def files(step: int) -> Mapping[str, bytes]:
        return {
            f"{kind}{rank}.pt": bytes([step % 251, rank, number]) * (num_bytes // 3)
            for number, kind in enumerate(("model", "optimizer"))
        }

    return files


def options(**given: Any) -> SaveOptions:
    values: dict[str, Any] = {
        "retention": Retention(100),
        "is_main": True,
        "gather": lambda value: [value],
        "last_step": None,
        "position": lambda step: {"epoch": step // 4},
        "description": {"layout": LAYOUT, "config": CONFIG},
        **given,
    }
    return SaveOptions(**values)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., AsyncCheckpointer]]:
    made: list[AsyncCheckpointer] = []

    def build(
        engine: SavingEngine | None = None, folder: Path = tmp_path, **given: Any
    ) -> AsyncCheckpointer:
        ranks = {"rank": given.pop("rank", 0), "world_size": given.pop("world_size", 1)}
        made.append(
            AsyncCheckpointer(
                engine or SavingEngine(rank_files()), folder, options(**given), **ranks
            )
        )
        return made[-1]

    yield build
    for checkpointer in made:  # all of them first: one that closes may wait for another
        if checkpointer._writer is not None:
            os.kill(writer(checkpointer), signal.SIGCONT)
    for checkpointer in made:
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


def await_warning(capfd: pytest.CaptureFixture[str]) -> str:
    """Until a save is said to have failed; all that was said."""
    stated: list[str] = []

    def is_said() -> bool:
        stated.append(capfd.readouterr().err)
        return "[checkpoint-not-written]" in "".join(stated)

    until(is_said)
    return "".join(stated)


def is_dead(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            == "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return True


def limit_file_size(pid: int, num_bytes: int) -> None:
    """The kernel refuses longer files to this process: a write fails as on a full disk, though with
    other words.
    """
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


class Ranks:
    """Two ranks, each a thread with a writer process of its own; what they gather meets at a
    barrier.
    """

    def __init__(self, make: Any, **given: Any) -> None:
        self._values: list[Any] = [None, None]
        self.waits: list[float] = []
        self._barrier = threading.Barrier(2, timeout=SECONDS)
        self.all = [
            make(
                SavingEngine(rank_files(rank)),
                rank=rank,
                world_size=2,
                is_main=rank == 0,
                gather=self._gather(rank),
                **given,
            )
            for rank in (0, 1)
        ]

    def _gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            begin = time.monotonic()
            self._barrier.wait()
            self.waits.append(time.monotonic() - begin)
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


def records(folder: Path, *, rank: int) -> list[Path]:
    """What a rank's writer has left beside the files of the save that is under way."""
    return list((folder / ".saving").glob(f"written-by-rank{rank}*.json"))


def orders_of(checkpointer: AsyncCheckpointer) -> list[Mapping[str, Any]]:
    """What its writer has to do from here on."""
    orders, begin = [], checkpointer._begin

    def note(order: dict[str, Any]) -> None:
        orders.append(order)
        begin(order)

    checkpointer._begin = note  # type: ignore[method-assign]
    return orders
