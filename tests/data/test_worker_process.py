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
from framework.data.loaders import _leave_signals_to_rank
_utils.worker._worker_info = _utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
for rank in map(int, sys.argv[1:]):
    _leave_signals_to_rank(rank, 0)
    print("stays", flush=True)
"""
LOADS = """
import multiprocessing, sys
from torch.utils.data import DataLoader
from framework.data.loaders import init_of_workers

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
def test_a_worker_stays_however_it_is_started() -> None:
    methods = ("fork", "spawn", "forkserver")
    words = [sys.executable, "-c", LOADS, *methods]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "0 1 2 3\n" * len(methods), done.stderr
