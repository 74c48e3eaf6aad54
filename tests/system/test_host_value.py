"""One value for the ranks of a host: made once, by the first one to come, and none
waits for a rank that is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from framework.errors import ConfigError
from framework.system.host_value import HostValue, made_once_on_host
from tests.ranks_of_host import on_ranks


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary folder of these ranks."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


class Made:
    """Counter, over all processes, of how often a value is made; `first` is done the first time."""

    def __init__(self, folder: Path, *, first: Callable[[], object] = lambda: None) -> None:
        self._folder, self._first = folder / "made", first

    def __call__(self) -> dict[str, Any]:
        is_first = self.count() == 0
        with self._folder.open("a") as stream:
            stream.write("x")
        time.sleep(0.2)  # the others come meanwhile
        if is_first:
            self._first()
        return {
            "name": "numbers",
            "numbers": np.arange(1000),
            "none": np.zeros(0),
            "odd": np.full(3, 7, np.uint8),
        }

    def count(self) -> int:
        return self._folder.stat().st_size if self._folder.exists() else 0


held: list[HostValue] = []  # as long as the run needs it


def summed(make: Callable[[], object]) -> tuple[str, int, int]:
    held.append(made_once_on_host("numbers", make))
    found = held[-1].value
    assert len(found["none"]) == 0
    assert not found["numbers"].flags.writeable
    return found["name"], int(found["numbers"].sum()), int(found["odd"].sum())


SUMMED = ("numbers", 499500, 21)


@pytest.mark.slow
def test_the_first_rank_makes_it_and_nothing_is_left_behind(
    tmp_path: Path, temporary: Path
) -> None:
    make = Made(tmp_path)
    assert on_ranks(lambda: summed(make), num_ranks=4) == [SUMMED] * 4
    assert make.count() == 1
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_rank_that_dies_while_it_makes_it_is_replaced(tmp_path: Path) -> None:
    make = Made(tmp_path, first=lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert sorted(on_ranks(lambda: summed(make), num_ranks=3), key=str) == [SUMMED, SUMMED, None]
    assert make.count() == 2


@pytest.mark.slow
def test_an_error_of_the_first_is_the_error_of_all(tmp_path: Path, temporary: Path) -> None:
    def fail() -> None:
        raise ConfigError.of(
            "dataset-no-images", "there are none", "put some there", "data.root", "images"
        )

    make = Made(tmp_path, first=fail)
    found = on_ranks(lambda: summed(make), num_ranks=3)
    assert {(type(error), str(error)) for error in found} == {
        (ConfigError, "data.root = images: there are none; put some there [dataset-no-images]")
    }
    assert make.count() == 1
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_an_error_of_python_is_met_by_each_with_its_place_in_the_code(tmp_path: Path) -> None:
    def find() -> str:
        try:
            made_once_on_host("folder", lambda: (tmp_path / "nowhere").read_bytes())
        except FileNotFoundError as error:
            return f"{error} ({traceback.extract_tb(error.__traceback__)[-2].name})"
        return ""

    stated = f"[Errno 2] No such file or directory: '{tmp_path}/nowhere' (read_bytes)"
    assert on_ranks(find, num_ranks=2) == [stated] * 2


@pytest.mark.slow
def test_what_an_earlier_start_left_is_not_taken(tmp_path: Path, temporary: Path) -> None:
    """The earlier start has the same address and port: its third rank had died."""
    make = Made(tmp_path)
    assert on_ranks(lambda: summed(make), num_ranks=2, of=3) == [SUMMED] * 2
    assert len(list(temporary.iterdir())) == 1
    assert on_ranks(lambda: summed(make), num_ranks=3) == [SUMMED] * 3
    assert make.count() == 2
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_second_run_of_a_process_has_its_own(tmp_path: Path) -> None:
    make = Made(tmp_path)
    assert on_ranks(lambda: (summed(make), summed(make)), num_ranks=2) == [(SUMMED, SUMMED)] * 2
    assert make.count() == 2


@pytest.mark.slow
@pytest.mark.parametrize("obstacle", ["none", "link"])
def test_where_no_file_can_be_shared_every_rank_makes_its_own(
    tmp_path: Path, temporary: Path, obstacle: str
) -> None:
    make = Made(tmp_path)
    if obstacle == "none":
        temporary.rmdir()
    else:
        on_ranks(lambda: summed(make), num_ranks=1, of=2)
        (left,) = temporary.iterdir()
        left.unlink()
        left.symlink_to(tmp_path / "elsewhere")
    before = make.count()
    assert on_ranks(lambda: summed(make), num_ranks=2) == [SUMMED] * 2
    assert make.count() == before + 2
    assert not (tmp_path / "elsewhere").exists()


def look(shared: HostValue, queue: Queue[tuple[int, int]]) -> None:
    """Look up the value, in a worker."""
    queue.put((os.fstat(shared._descriptor).st_ino, int(shared.value["numbers"].sum())))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_maps_the_same_memory_however_it_is_started(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    # a fork server's socket lies there, and its name must be short
    monkeypatch.setattr(tempfile, "tempdir", None)
    shared, processes = (
        HostValue.of({"numbers": np.arange(1_000_000)}),
        multiprocessing.get_context(method),
    )
    queue: Queue[tuple[int, int]] = processes.Queue()
    worker = processes.Process(target=look, args=(shared, queue))
    worker.start()  # type: ignore[attr-defined]
    assert queue.get(timeout=60) == (os.fstat(shared._descriptor).st_ino, 499999500000)
    worker.join(60)  # type: ignore[attr-defined]


def test_a_copy_has_the_value() -> None:
    """A copy may be pickled to a file, which outlives this process."""
    copied = pickle.loads(pickle.dumps(HostValue.of({"numbers": np.arange(5)})))
    assert copied.value["numbers"].tolist() == [0, 1, 2, 3, 4]
