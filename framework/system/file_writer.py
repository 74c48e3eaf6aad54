"""One thread of this process that writes to log and metric files: storage that stalls does not
stall the training.

A write that is handed over is mostly done on return, as without the thread, so that not even a kill
loses it. Only if storage takes longer than a moment, writes are queued; `settle` waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Final

_MOMENT_SECONDS: Final = 0.05
_LONGEST_QUEUE: Final = 1000  # beyond it a caller waits for the storage, as without the thread


class _Writer:
    # A queue, and a future for each write: a signal handler may write while its own thread does.
    def __init__(self) -> None:
        self._writes: SimpleQueue[tuple[Callable[[], object], Future[None]]] = SimpleQueue()
        self._newest: Future[None] = Future()
        self._newest.set_result(None)
        self._thread: Thread | None = None

    def start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self.__init__()  # type: ignore[misc] # in a forked process the state is its parent's
            self._thread = Thread(
                target=self._work, args=(self._writes,), name="file-writer", daemon=True
            )
            self._thread.start()

    def hand_over(self, write: Callable[[], object], *, settles: bool = False) -> None:
        thread = self._thread
        # Done at once: before `start`, in a forked process, and what the thread itself hands over.
        if thread is None or thread is current_thread() or not thread.is_alive():
            write()
            return
        was_late = not self._newest.done()
        done = Future[None]()
        self._newest = done
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
            with suppress(BaseException):  # a write handles its errors itself
                write()
            done.set_result(None)


_WRITER: Final = _Writer()


def start() -> None:
    """Hand writes over from now on; before, and in forked processes, each is done at once."""
    _WRITER.start()


def hand_over(write: Callable[[], object]) -> None:
    """Do a write in the writer's thread, after all that were handed over before.

    Wait 50 ms for it at most, or longer if 1000 writes are queued. It handles its errors itself.
    """
    _WRITER.hand_over(write)


def settle() -> None:
    """Wait for all writes that were handed over."""
    _WRITER.hand_over(lambda: None, settles=True)
