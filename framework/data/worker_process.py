"""What every worker of a DataLoader does first: it leaves requests to stop to its rank, and goes when its rank goes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial

from torch.utils.data import get_worker_info

from framework.system.orphans import die_with
from framework.system.stop_signals import SIGNALS


def init_of_workers() -> Callable[[int], None]:
    """A `worker_init_fn` for the workers of this process, which is a rank.

    A request that goes to a whole process group (Ctrl-C, `timeout`, Slurm, the deepspeed launcher) would end the
    workers, and the run with them, while the rank still needs their batches to reach the step that it saves. They end
    when the rank closes their queue; if it is gone, the kernel ends them, which is sooner than torch's own look every
    five seconds.
    """
    return partial(_leave_signals_to_rank, os.getpid())


def _leave_signals_to_rank(rank: int, _worker: int) -> None:
    """In a worker, whose rank may be gone by now."""
    assert get_worker_info() is not None
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # A fork server lives as long as the rank, and is the parent of its workers.
    die_with(os.getppid() if multiprocessing.get_start_method() == "forkserver" else rank)
