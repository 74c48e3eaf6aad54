"""What a worker of a DataLoader does first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.places import ROOT

# A worker whose rank has been killed between the fork and its first line: what is its parent by
# then is another process.
LATE = """
import sys
from torch.utils.data import _utils
from framework.data.workers import _start_worker
_utils.worker._worker_info = _utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
for rank in map(int, sys.argv[1:]):
    _start_worker(rank, 0)
    print("stays", flush=True)
"""
# A rank that is killed while it fetches the memory of a batch from its worker: its connection to
# the worker's thread is closed before it has answered the challenge. `detach` is a rank that lives;
# the thread answers in order, so the first connection has been dealt with by then.
LOST = """
import os, socket
from multiprocessing.resource_sharer import DupFd
from torch.utils.data import _utils
from framework.data.workers import _start_worker
_utils.worker._worker_info = _utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
_start_worker(os.getppid(), 0)
shared = DupFd(os.open(os.devnull, os.O_RDONLY))
killed = socket.socket(socket.AF_UNIX)
killed.connect(shared._id[0])
killed.close()
print(os.fstat(shared.detach()).st_rdev == os.stat(os.devnull).st_rdev)
"""
LOADS = """
import multiprocessing, sys
from torch.utils.data import DataLoader
from framework.data.workers import init_of_workers

if __name__ == "__main__":
    for method in sys.argv[1:]:
        multiprocessing.set_start_method(method, force=True)
        print(*DataLoader(list(range(4)), batch_size=None, num_workers=1, worker_init_fn=init_of_workers(), timeout=60))
"""


@pytest.mark.slow
def test_a_worker_goes_when_its_rank_has_gone_before_it_could_look() -> None:
    """The rank that is there is looked for first; no process may have the number of the other."""
    done = subprocess.run(
        [sys.executable, "-c", LATE, str(os.getpid()), str(2**22)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "stays\n", done.stderr
    assert done.returncode == 1


@pytest.mark.slow
def test_a_worker_prints_no_traceback_when_its_rank_is_killed_while_it_fetches() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_worker_stays_however_it_is_started() -> None:
    methods = ("fork", "spawn", "forkserver")
    words = [sys.executable, "-c", LOADS, *methods]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "0 1 2 3\n" * len(methods), done.stderr
