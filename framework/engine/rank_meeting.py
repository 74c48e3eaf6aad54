"""A place in the store of the process group where all ranks meet before a collective that code of
the run calls: one that some ranks leave out ends in words.
"""

from __future__ import annotations

import time
from typing import Final

import torch.distributed
from torch.distributed.distributed_c10d import Store

from framework.engine.distributed import own_store
from framework.errors import TrainingError, counted

WAIT_SECONDS: float = 300.0
"""How long a call waits for the other ranks."""
_LONGEST_PAUSE: Final = 0.05  # seconds between two looks into the store


class Meeting:
    """A place in the store of the process group where all ranks meet before a collective."""

    def __init__(self) -> None:
        self._rank = torch.distributed.get_rank()
        self._num_ranks = torch.distributed.get_world_size()
        self._num_calls = 0
        self._store: Store | None = None
        if self._num_ranks > 1:
            self._store = own_store("full-weights")

    def wait(self, call: str) -> None:
        """Wait until all ranks have come as often as this one.

        Raises:
            TrainingError: some did not come within `WAIT_SECONDS`.
        """
        if self._store is None:
            return
        self._num_calls += 1
        self._store.set(f"rank/{self._rank}", str(self._num_calls))
        wanted = self._num_calls * self._num_ranks
        if self._store.add("came", 1) >= wanted:
            return
        deadline = time.monotonic() + WAIT_SECONDS
        pause = 0.0005
        while self._store.add("came", 0) < wanted:
            if time.monotonic() > deadline:
                raise self._alone(call)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _alone(self, call: str) -> TrainingError:
        assert self._store is not None
        missing = []
        for rank in range(self._num_ranks):
            key = f"rank/{rank}"
            if not self._store.check([key]) or int(self._store.get(key)) < self._num_calls:
                missing.append(str(rank))
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        error = TrainingError(
            f"rank {self._rank}: {call}: {counted(len(missing), 'rank')} ({shown}) did not call it "
            f"within {WAIT_SECONDS:.0f} s; every rank holds a part of the weights: call it on all "
            "ranks, outside of `if state.is_main` and the like [not-on-every-rank]"
        )
        error.is_of_one_rank = True
        return error
