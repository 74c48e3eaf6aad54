"""Failures of training that have a known way out, which torch raises as any RuntimeError, and code that exits in
mid-run: one line.

The traceback goes to the rank's log. Where many ranks meet the same failure, one of them tells it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Final

import torch

from framework.engine.distributed import claims_error_report
from framework.engine.extensions import failure_of_compiler
from framework.errors import TrainingError, printable
from framework.system.early_exits import refusing_exits

_NO_DEVICE_MEMORY: Final = re.compile(r"(CUDA|HIP) (error: )?out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED")
_NO_HOST_MEMORY: Final = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|Cannot allocate memory|std::bad_alloc"
)
_ASKED: Final = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_FREE: Final = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
_SMALLER_STEPS: Final = (
    "set a smaller batch.micro_size (batch.global_size may stay), training.recompute_every, a higher zero.stage or "
    "zero.offload_optimizer"
)
_SMALLER_ON_HOST: Final = (
    "set a smaller batch.micro_size, data.num_workers or data.prefetch_batches, fewer ranks on this host, no "
    "zero.offload_*, or raise the memory limit of the job (ulimit -v, Slurm --mem, resources of the pod)"
)
_SMALLER_EVALUATION: Final = "set a smaller evaluation.batch_size"

_DEAD_WORKER: Final = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (is killed by signal: ([\w ]+)|exited unexpectedly)"
)
# The kernel's name of the signal -> what that mostly means.
_WAYS_OUT: Final = {
    "Killed": "the host, or the memory limit of this job, has no room for it: set data.num_workers or "
    "data.prefetch_batches lower",
    "Bus error": "/dev/shm is full: give the container a larger one (docker --shm-size, an emptyDir of medium "
    "Memory), or set data.num_workers or data.prefetch_batches lower",
}
_NO_WAY_OUT_KNOWN: Final = "the code that reads the data has ended its process: data.num_workers=0 shows where"


@contextmanager
def explaining_known_failures() -> Iterator[None]:
    """Where such a failure leaves the block it does so as a TrainingError, with the torch error as its cause."""
    try:
        with refusing_exits(speaks=claims_error_report):
            yield
    except (RuntimeError, MemoryError, OSError) as error:
        line = known_failure(error)
        if not line:
            raise
        reported = TrainingError(f"rank {os.environ.get('RANK', '0')}: {line}")
        reported.is_of_one_rank = claims_error_report(line.rpartition("[")[2])
        raise reported from error


def known_failure(error: BaseException) -> str:
    """What happened, the way out and the kind; empty where it is not known."""
    if isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_DEVICE_MEMORY.search(str(error))
    ):
        way_out = _SMALLER_EVALUATION if _is_from_evaluation(error) else _SMALLER_STEPS
        return f"the device has no memory left{_numbers(str(error))}; {way_out} [out-of-memory]"
    if problem := failure_of_compiler(error):
        return str(problem)
    if _is_out_of_host_memory(error):
        return f"the host has no memory left for this process; {_SMALLER_ON_HOST} [out-of-host-memory]"
    if isinstance(error, RuntimeError) and (dead := _death_of_worker(error)):
        way_out = _WAYS_OUT.get((dead[2] or "").strip(), _NO_WAY_OUT_KNOWN)
        return f"a worker that reads the data {printable(dead[1].strip())}: {way_out} [data-worker-ended]"
    return ""


def _is_out_of_host_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _NO_HOST_MEMORY.search(str(error)) is not None
    )


def _numbers(stated: str) -> str:
    asked, free = _ASKED.search(stated), _FREE.search(stated)
    parts = [f"{asked[1]} were asked for"] if asked else []
    parts += [f"{free[2]} of {free[1]} are free"] if free else []
    return f" ({', '.join(parts)})" if parts else ""


def _is_from_evaluation(error: BaseException) -> bool:
    calls = ((frame.f_code.co_name, frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__))
    return any(name == "evaluate" and module.startswith("framework.") for name, module in calls)


def _death_of_worker(error: BaseException) -> re.Match[str] | None:
    """The signal, where one error of torch's names it and the one that it became does not any more."""
    dead = _DEAD_WORKER.search(str(error))
    before = error.__cause__ or error.__context__
    return (dead and not dead[2] and before and _DEAD_WORKER.search(str(before))) or dead
