"""Errors of a dataset reach the run without a worker's traceback, for one rank to report."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
from torch.utils.data import Dataset, IterableDataset

from framework.data.loaders import EvalLoader
from framework.data.order import Share
from framework.data.streams import StreamEvalLoader
from framework.data.workers import death_of_worker, leave_out_ends_of_workers
from framework.errors import ConfigError
from tests.data.loader_of import stream_loader, train_loader

_LINE = "data = 3: a broken sample; mend the file [samples-differ]"


_OF_A_WORKER = (
    "Caught ConfigError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
    f"last):\n  File ...\nframework.errors.ConfigError: {_LINE}\n"
)


class Broken(Dataset[Any]):
    def __init__(self, text: str) -> None:
        self._text = text

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise ConfigError(self._text)
        return index


class BrokenStream(IterableDataset[Any]):
    def __init__(self, text: str) -> None:
        self._samples = Broken(text)

    def __iter__(self) -> Iterator[int]:
        return map(self._samples.__getitem__, range(8))


def claims(line: str) -> bool:
    assert line == _LINE
    return True


def _training(text: str, num_workers: int = 0) -> Iterator[Any]:
    sizes = {"global_size": 4, "micro_size": 4, "accumulation_steps": 1, "rank": 0, "world_size": 1}
    options = {"seed": 0, "claims": claims, "num_workers": num_workers}
    return train_loader(Broken(text), **sizes, **options).stream()


def _stream(text: str, num_workers: int = 0) -> Iterator[Any]:
    share = Share(4, 4, 1, 0, 1)
    loader = stream_loader(BrokenStream(text), share=share, num_workers=num_workers, claims=claims)
    return loader.stream()


def _evaluation(text: str, num_workers: int = 0) -> Iterator[Any]:
    options: dict[str, Any] = {
        "batch_size": 4,
        "rank": 0,
        "world_size": 1,
        "claims": claims,
        "num_workers": num_workers,
    }
    return iter(EvalLoader(Broken(text), **options))


def _stream_evaluation(text: str, num_workers: int = 0) -> Iterator[Any]:
    options: dict[str, Any] = {
        "batch_size": 4,
        "rank": 0,
        "world_size": 1,
        "claims": claims,
        "num_workers": num_workers,
    }
    loader = StreamEvalLoader(BrokenStream(text), gather=lambda value: [value], **options)
    return iter(loader)


@pytest.mark.parametrize("read", [_training, _stream, _evaluation, _stream_evaluation])
@pytest.mark.parametrize("text", [_LINE, _OF_A_WORKER], ids=["of the rank", "of a worker"])
def test_an_error_of_a_sample_is_one_line_of_one_rank(read: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        next(read(text))
    assert str(caught.value) == _LINE
    assert caught.value.is_of_one_rank


class Opens(Dataset[Any]):
    """Samples that leave files open."""

    def __init__(self) -> None:
        self.files: list[int] = []

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        self.files.append(os.open("/dev/null", os.O_RDONLY))
        return index


def test_too_many_open_files_are_an_error_of_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """What explains errors cannot be imported then."""
    monkeypatch.delitem(sys.modules, "framework.data.workers")
    dataset = Opens()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files: '/dev/null'"):
            list(EvalLoader(dataset, batch_size=4, rank=0, world_size=1))
    finally:
        for file in dataset.files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("loader", ["training", "stream", "evaluation", "stream_evaluation"])
def test_the_workers_of_a_failed_loader_end(loader: str) -> None:
    """While the error is alive, and with it all that its frames hold."""
    read = {
        "training": _training,
        "stream": _stream,
        "evaluation": _evaluation,
        "stream_evaluation": _stream_evaluation,
    }
    with pytest.raises(ConfigError) as caught:
        next(read[loader](_LINE, num_workers=1))
    assert str(caught.value) == _LINE
    deadline = time.monotonic() + 60  # torch ends a worker that is not gone after five seconds
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert multiprocessing.active_children() == []


class Sends(Dataset[Any]):
    """Samples whose batches `make` makes, in a worker."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index

    def collate_fn(self, samples: list[int]) -> Any:
        return self._make()


def _sent(make: Callable[[], Any]) -> Iterator[Any]:
    sizes = {"global_size": 4, "micro_size": 4, "accumulation_steps": 1, "rank": 0, "world_size": 1}
    loader = train_loader(Sends(make), **sizes, seed=0, claims=lambda _: True, num_workers=1)
    return loader.stream()


def test_a_batch_that_cannot_be_sent_is_an_error_and_no_endless_wait(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError) as caught:
        next(_sent(threading.Lock))
    stated = (
        "data: a worker cannot send a batch to its rank: TypeError: cannot pickle '_thread.lock' "
        "object; let the dataset or its collate_fn return tensors, numpy arrays and numbers, or "
        "set data.num_workers=0 [sample-type]"
    )
    assert str(caught.value) == stated
    assert caught.value.is_of_one_rank
    assert capfd.readouterr().err == ""


class Lost:
    """A batch whose worker is killed while the rank fetches it."""

    def __reduce__(self) -> Any:
        return _lose, (os.getpid(),)


def _lose(worker: int) -> NoReturn:
    """Lose the connection before the worker has ended, which it does 0.1 s later."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler may come too late
    os.kill(worker, signal.SIGSTOP)
    threading.Timer(0.1, os.kill, (worker, signal.SIGKILL)).start()
    raise ConnectionResetError(104, "Connection reset by peer")


def test_a_worker_that_is_killed_while_it_sends_is_named() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    try:
        with pytest.raises(RuntimeError, match="is killed by signal: Killed") as caught:
            next(_sent(Lost))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert "data.num_workers" in str(death_of_worker(caught.value))


class Raises:
    """An object whose finalizer raises an error, which Python can only print."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __del__(self) -> None:
        raise self._error


def test_no_traceback_of_a_worker_s_end_comes_where_nothing_can_catch_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: met.append(args.exc_value))
    monkeypatch.setattr(threading, "excepthook", lambda args: met.append(args.exc_value))
    for _ in range(2):
        leave_out_ends_of_workers()
    other = RuntimeError("another")
    for error in (RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed. "), other):
        Raises(error)
    reset = ConnectionResetError(104, "Connection reset by peer")

    def fetch() -> NoReturn:
        raise reset

    for name in ("Thread-1 (_pin_memory_loop)", "a user's"):
        thread = threading.Thread(target=fetch, name=name)
        thread.start()
        thread.join(60)
    assert met == [other, reset]
