"""Workers that read data: how one starts, how its rank meets its end, and why it has ended."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import Queue
from traceback import walk_tb
from types import TracebackType
from typing import Any, Final, TypeAlias

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from framework.errors import ConfigError, Problem, in_one_line
from framework.system.parent_watch import die_with
from framework.system.stopping import SIGNALS

_ExceptHook: TypeAlias = Callable[
    [type[BaseException], BaseException, TracebackType | None], object
]
_WORKER: Final = r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\)"
_END: Final = r"(is killed by signal: ([\w ]+)|exited unexpectedly)"
_DEAD_WORKER: Final = re.compile(f"{_WORKER} {_END}")
# The kernel's name of the signal -> its usual cause, and the fix.
_WAYS_OUT: Final = {
    "Killed": "the host, or the memory limit of this job, has no room for it: set "
    "data.num_workers or data.prefetch_batches lower",
    "Bus error": "/dev/shm is full: give the container a larger one (docker --shm-size, an "
    "emptyDir of medium Memory), or set data.num_workers or data.prefetch_batches "
    "lower",
}
_NO_WAY_OUT_KNOWN: Final = (
    "the code that reads the data has ended its process: data.num_workers=0 shows where"
)


def death_of_worker(error: BaseException) -> Problem | None:
    """Return the failure with a way out, if torch's error reports the end of a worker, else
    None.
    """
    dead = _dead_worker(error)
    if not dead:
        return None
    way_out = _WAYS_OUT.get((dead[2] or "").strip(), _NO_WAY_OUT_KNOWN)
    reason = f"a worker that reads the data {dead[1].strip()}: {way_out}"
    return Problem("data-worker-ended", reason)


def _dead_worker(error: BaseException) -> re.Match[str] | None:
    """Find the end of a worker in an error, or, if that names no signal, in the error that it was
    raised from. Group 1 is how the worker ended, group 2 the signal's name, or None.
    """
    dead = _DEAD_WORKER.search(str(error))
    cause = error.__cause__ or error.__context__
    if dead and not dead[2] and cause:
        return _DEAD_WORKER.search(str(cause)) or dead
    return dead


def end_of_worker(error: Exception) -> str:
    """Return torch's words for the end of a worker where torch has others, else an empty string.

    If a worker is killed while the rank fetches the memory of a batch from it, the rank loses the
    connection before the worker has ended: torch raises the error of the connection. If torch finds
    the end before the signal of it, it does not name what killed the worker.
    """
    if isinstance(error, RuntimeError) and not str(error).endswith("exited unexpectedly"):
        return ""
    for frame, _ in walk_tb(error.__traceback__):
        reader = frame.f_locals.get("self")
        if not isinstance(reader, _MultiProcessingDataLoaderIter):
            continue
        for worker in reader._workers:
            code = worker.exitcode or 0
            if code < 0:
                words = f"is killed by signal: {signal.strsignal(-code)}. "
                return f"DataLoader worker (pid {worker.pid}) {words}"
            if code > 0:
                return f"DataLoader worker (pid {worker.pid}) exited unexpectedly"
    return ""


class _HookWithoutWorkers:
    """A hook for errors that nothing can catch, which leaves out the ends of data workers.

    In a rank's main thread torch raises the end of a worker at any line, in a finalizer and in a
    fork as well. Torch's thread that pins memory meets a lost connection. Either way the rank
    learns of the end when it waits for the next batch, and Python would print a traceback before.
    """

    def __init__(self, before: Callable[[Any], object]) -> None:
        self._before = before

    def __call__(self, met: Any) -> None:
        """Handle `sys.UnraisableHookArgs`, or `threading.ExceptHookArgs`."""
        is_end = _DEAD_WORKER.search(str(met.exc_value)) is not None
        if "_pin_memory_loop" in getattr(getattr(met, "thread", None), "name", ""):
            is_end = isinstance(met.exc_value, (ConnectionError, EOFError))
        if not is_end:
            self._before(met)


def leave_out_ends_of_workers() -> None:
    """Print no traceback for the end of a data worker, from now on, in this rank."""
    if not isinstance(sys.unraisablehook, _HookWithoutWorkers):
        sys.unraisablehook = _HookWithoutWorkers(sys.unraisablehook)
    if not isinstance(threading.excepthook, _HookWithoutWorkers):
        threading.excepthook = _HookWithoutWorkers(threading.excepthook)


def send_errors_of_batches() -> None:
    """Send the rank the error of a batch that cannot be sent, from now on, in this worker.

    `multiprocessing` prints it in a thread and goes on; the rank would wait for ever.
    """
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]


_print_error: Final = Queue._on_queue_feeder_error  # type: ignore[attr-defined]


def _send_error(queue: Any, error: Exception, sent: Any) -> None:
    """Put an error into a worker's queue in place of what was to be sent: a number and a batch."""
    match sent:
        case (int() as number, _):
            pass
        case _:  # of another queue, or of a connection
            _print_error(error, sent)
            return
    if not isinstance(error, OSError):
        cause = in_one_line(error, longest=300)
        reason = f"a worker cannot send a batch to its rank: {cause}"
        fix = (
            "let the dataset or its collate_fn return tensors, numpy arrays and numbers, or set "
            "data.num_workers=0"
        )
        refusal = ConfigError.of("sample-type", reason, fix, "data")
        error = refusal.with_traceback(error.__traceback__)
    described = (type(error), error, error.__traceback__)
    wrapped = ExceptionWrapper(described, where="in a data worker")  # type: ignore[no-untyped-call]
    queue.put((number, wrapped))


def init_of_workers() -> Callable[[int], None]:
    """Return a `worker_init_fn` for the workers of this process, which is a rank.

    Workers ignore the signals that stop a run. A signal to a whole process group (Ctrl-C,
    `timeout`, Slurm, the deepspeed launcher) would otherwise end the workers, and the run with
    them, while the rank still needs their batches to reach the step that it saves. Workers end when
    the rank closes their queue; if the rank is gone, the kernel ends them, which is sooner than
    torch's own check every five seconds. Neither the rank nor a worker prints a traceback because
    the other one was killed.
    """
    leave_out_ends_of_workers()
    return partial(_start_worker, os.getpid())


def _start_worker(rank: int, _worker: int) -> None:
    assert get_worker_info() is not None
    sys.excepthook = _quiet_for_lost_connections(sys.excepthook)
    send_errors_of_batches()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = rank
    if multiprocessing.get_start_method() == "forkserver":
        # A fork server lives as long as the rank, and is the parent of its workers.
        parent = os.getppid()
    die_with(parent)


def _quiet_for_lost_connections(before: _ExceptHook) -> _ExceptHook:
    """Return a `sys.excepthook` for a worker that leaves all but lost connections to `before`.

    A thread of `multiprocessing` in the worker hands the memory of batches to the rank. If the rank
    is killed meanwhile, the thread reports its lost connection by `sys.excepthook`, which would
    print a traceback below the message that names the cause. If the rank lives, it raises an error
    of its own for the same connection. The worker's own errors go to the rank through torch.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, (ConnectionError, EOFError)):
            before(kind, error, trace)

    return hook
