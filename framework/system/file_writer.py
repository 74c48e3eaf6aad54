"""One thread of this process that writes to log and metric files: storage that stalls does not
stall the training.

A write that is handed over is mostly done on return, as without the thread, so that not even a kill
loses it. Only where storage takes longer than a moment, writes line up behind each other; `settle`
waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Final

_MOMENT_SECONDS: Final = 0.05
_LONGEST_QUEUE: Final = 1000  # then whoever writes waits for the storage, as without the thread


class _Writer:
    # A queue, and a lock for each write: a signal handler may write while its own thread does.
    def __init__(self) -> None:
        self._writes: SimpleQueue[tuple[Callable[[], object], Future[None]]] = SimpleQueue()
        self._newest: Future[None] = Future()
        self._newest.set_result(None)
        self._thread: Thread | None = None

    def start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self.__init__()  # type: ignore[misc] # what a forked process finds here is its parent's
            self._thread = Thread(
                target=self._work, args=(self._writes,), name="file-writer", daemon=True
            )
            self._thread.start()

    def hand_over(self, write: Callable[[], object], *, settles: bool = False) -> None:
        thread = self._thread
        # as in a process that was forked
        if thread is None or thread is current_thread() or not thread.is_alive():
            write()
            return
        was_late = not self._newest.done()
        self._newest = (done := Future[None]())
        self._writes.put((write, done))
        if settles or self._writes.qsize() > _LONGEST_QUEUE:
            done.result()
        elif not was_late:
            with suppress(TimeoutError):
                done.result(_MOMENT_SECONDS)

    @staticmethod
    def _work(writes: SimpleQueue[tuple[Callable[[], object], Future[None]]]) -> None:
        while True:
            write, done = writes.get()
            with suppress(BaseException):  # it is the writes' own business
                write()
            done.set_result(None)


_WRITER: Final = _Writer()


def start() -> None:
    """From now on writes are handed over; before, and in forked processes, each is done at once."""
    _WRITER.start()


def hand_over(write: Callable[[], object]) -> None:
    """Do a write, after those that were handed over before; it sees to its errors itself."""
    _WRITER.hand_over(write)


def settle() -> None:
    """Wait for all that was handed over."""
    _WRITER.hand_over(lambda: None, settles=True)
