"""What every worker of a DataLoader does first: it leaves requests to stop to its rank, and goes when its rank goes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

from torch.utils.data import get_worker_info

_DIE_WITH_PARENT: Final = 1  # prctl's PR_SET_PDEATHSIG


def leave_signals_to_rank(_worker: int) -> None:
    """A `worker_init_fn`.

    A request that goes to a whole process group (Ctrl-C, `timeout`, Slurm, the deepspeed launcher) would end the workers, and
    the run with them, while the rank still needs their batches to reach the step that it saves. They end when the rank
    closes their queue; if it is gone, the kernel ends them, which is sooner than torch's own look every five seconds.
    """
    assert get_worker_info() is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        rank = os.getppid()
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != rank:
            os._exit(1)  # it went in between
