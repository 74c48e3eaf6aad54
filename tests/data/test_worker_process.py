"""What a worker of a DataLoader does first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.places import ROOT

# A worker whose rank has been killed between the fork and its first line: what is its parent by then is somebody else.
LATE = """
import sys
from torch.utils.data import _utils
from framework.data.loaders import _leave_signals_to_rank
_utils.worker._worker_info = _utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
_leave_signals_to_rank(int(sys.argv[1]), 0)
print("stays")
"""
LOADS = """
import multiprocessing, sys
from torch.utils.data import DataLoader
from framework.data.loaders import init_of_workers

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    print(*DataLoader(list(range(4)), batch_size=None, num_workers=1, worker_init_fn=init_of_workers(), timeout=60))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("is_there", "stated"), [(True, "stays\n"), (False, "")])
def test_a_worker_goes_when_its_rank_has_gone_before_it_could_look(is_there: bool, stated: str) -> None:
    rank = os.getpid() if is_there else 2**22  # beyond what a process may have
    done = subprocess.run(
        [sys.executable, "-c", LATE, str(rank)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == stated, done.stderr
    assert done.returncode == (0 if is_there else 1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_stays_however_it_is_started(method: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOADS, method], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "0 1 2 3\n", done.stderr
