"""Bandwidth between ranks and to storage: a small job on torch.distributed alone, as a launcher
starts its ranks.

    torchrun --nproc-per-node 8 -m framework.engine.link_bench [--folder CHECKPOINTS] [--seconds
    0.5]

Rank 0 prints one line of JSON. Bandwidths are in bytes per second and mean what they mean in
nccl-tests: *algorithm* is the size of the tensor over the time; *bus* is that times 2 (n - 1) / n
for an all-reduce, which does not depend on the number of ranks and can be compared with the link.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist

# What `framework.doctor.member` looks for among whatever else a rank prints.
RESULT: Final = "@link_bench "
_MIB: Final = 1 << 20
_SIZES: Final = {
    "gloo": [_MIB * 4**power for power in range(4)],
    "nccl": [_MIB * 4**power for power in range(6)],
}
_PAIR_BYTES: Final = {"gloo": 4 * _MIB, "nccl": 64 * _MIB}
_MOST_ROUNDS: Final = 15
_JOIN_SECONDS: Final = 120


def main() -> int:
    """Join the group, measure, and print on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="measure writing and reading there as well")
    parser.add_argument(
        "--file_mib", type=int, default=256, help="size of the file that is written by each host"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="about how long each size is measured"
    )
    asked = parser.parse_args()
    uses_cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"
    if uses_cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    else:
        device = torch.device("cpu")
    if uses_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if uses_cuda else "gloo", timeout=datetime.timedelta(seconds=_JOIN_SECONDS)
    )
    found = measure(
        device, seconds=asked.seconds, folder=asked.folder, file_bytes=asked.file_mib * _MIB
    )
    if dist.get_rank() == 0:
        print(RESULT + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(
    device: torch.device, *, seconds: float, folder: Path | None, file_bytes: int
) -> dict[str, Any]:
    """Everything, as plain values, about so many seconds for each size; files only in a folder.
    Collective.
    """
    backend = dist.get_backend()
    hosts = _gather((socket.gethostname(), int(os.environ.get("LOCAL_RANK", "0"))))
    speak = [rank for rank, (_, local) in enumerate(hosts) if local == 0]
    # on one host its ranks are compared
    if len(speak) > 1:
        units = speak
    else:
        units = list(range(len(hosts)))
    labels = [hosts[rank][0] if len(speak) > 1 else f"rank {rank}" for rank in units]
    return {
        "backend": backend,
        "world_size": len(hosts),
        "hosts": [hosts[rank][0] for rank in speak],
        "all_reduce": list(all_reduces(_SIZES[backend], device, seconds=seconds))
        if len(hosts) > 1
        else [],
        "pairs": pairs(units, labels, device, num_bytes=_PAIR_BYTES[backend])
        if len(units) > 1
        else [],
        "storage": storage(folder, file_bytes, speak) if folder is not None else [],
    }


def _gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def all_reduces(
    sizes: Sequence[int], device: torch.device, *, seconds: float
) -> Iterator[dict[str, float]]:
    """Each size; those beyond one that takes more than twice the time that is meant for it are left
    out. Collective.
    """
    for size in sizes:
        found = all_reduce(size, device, seconds=seconds)
        yield found
        if found["seconds"] > 2 * seconds:
            return


def all_reduce(num_bytes: int, device: torch.device, *, seconds: float) -> dict[str, float]:
    """One size: the time of one all-reduce as the slowest rank sees it, and both bandwidths.
    Collective.
    """
    tensor = torch.zeros(num_bytes // 4, device=device)

    def slowest(repeats: int) -> float:
        took = torch.tensor(
            timed(lambda: dist.all_reduce(tensor), device, repeats=repeats), dtype=torch.float64
        )
        dist.all_reduce(shared := took.to(device), dist.ReduceOp.MAX)
        return float(shared)

    dist.all_reduce(tensor)  # connects
    took = slowest(int(min(max(seconds / max(slowest(1), 1e-9), 2), 200)))
    algorithm = num_bytes / took
    count = dist.get_world_size()
    return {
        "bytes": num_bytes,
        "seconds": took,
        "algorithm": algorithm,
        "bus": algorithm * 2 * (count - 1) / count,
    }


def pairs(
    units: Sequence[int], labels: Sequence[str], device: torch.device, *, num_bytes: int
) -> list[dict[str, Any]]:
    """Bytes per second that two of them send to each other, disjoint pairs at the same time.
    Collective.
    """
    own: list[dict[str, Any]] = []
    for together in itertools.islice(rounds(len(units)), _MOST_ROUNDS):
        dist.barrier()
        for a, b in together:
            if dist.get_rank() in (units[a], units[b]):
                if dist.get_rank() == units[a]:
                    other = units[b]
                else:
                    other = units[a]
                speed = _exchange(other, device, num_bytes=num_bytes)
                if dist.get_rank() == units[a]:
                    own.append({"a": labels[a], "b": labels[b], "bytes_per_second": speed})
    return [each for some in _gather(own) for each in some]


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of `count` once, in rounds in which each takes part at most once (the circle
    method).
    """
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def storage(folder: Path, num_bytes: int, writers: Sequence[int]) -> list[dict[str, Any]]:
    """Each host writes, flushes and reads again, all of them at the same time as in a checkpoint.
    Collective.
    """
    dist.barrier()
    if dist.get_rank() in writers:
        found = _write_and_read(folder, num_bytes)
    else:
        found = None
    return [each for each in _gather(found) if each is not None]


def _write_and_read(folder: Path, num_bytes: int) -> dict[str, Any]:
    place = next(each for each in (folder, *folder.parents) if each.is_dir())
    host = socket.gethostname()
    path = place / f".preflight-bench-{host}-{os.getpid()}"
    # zeros would be stored in no time by a file system that compresses
    block = os.urandom(4 * _MIB)
    try:
        began = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(num_bytes // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            wrote = time.perf_counter() - began
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(len(block)):
                pass
        return {
            "host": host,
            "write": num_bytes / wrote,
            "read": num_bytes / (time.perf_counter() - began),
        }
    except OSError as error:
        return {"host": host, "error": f"{place}: {error.strerror or error}"}
    finally:
        with suppress(OSError):
            path.unlink()


def _exchange(other: int, device: torch.device, *, num_bytes: int) -> float:
    """Bytes per second in each direction, the median of five."""
    mine = torch.zeros(num_bytes // 4, device=device)
    theirs = torch.empty(num_bytes // 4, device=device)

    def both_ways() -> None:
        operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    both_ways()  # connects
    return num_bytes / median(timed(both_ways, device, repeats=1) for _ in range(5))


def timed(do: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Seconds for one of `repeats`."""
    synchronize = (
        partial(torch.cuda.synchronize, device) if device.type == "cuda" else torch.cpu.synchronize
    )
    synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        do()
    synchronize()
    return (time.perf_counter() - began) / repeats


if __name__ == "__main__":
    sys.exit(main())
