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
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist

# `framework.launch.inspection` looks for this at the beginning of the lines that a rank prints.
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
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # launchers give it
    arguments = parser.parse_args()
    backend = "gloo"
    device = torch.device("cpu")
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda":
        backend = "nccl"
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=_JOIN_SECONDS))
    result = measure(
        device,
        seconds=arguments.seconds,
        folder=arguments.folder,
        file_bytes=arguments.file_mib * _MIB,
    )
    if dist.get_rank() == 0:
        print(RESULT + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(
    device: torch.device, *, seconds: float, folder: Path | None, file_bytes: int
) -> dict[str, Any]:
    """Measure all-reduces, pairs and storage, and return plain values. Collective.

    Args:
        device: this rank's.
        seconds: about how long each size of an all-reduce is measured.
        folder: where files are written; None leaves storage out.
        file_bytes: size of the file that each host writes.
    """
    backend = dist.get_backend()
    places = _gather((socket.gethostname(), int(os.environ.get("LOCAL_RANK", "0"))))
    first_ranks = [rank for rank, (_, local_rank) in enumerate(places) if local_rank == 0]
    hosts = [places[rank][0] for rank in first_ranks]
    # hosts are compared; if there is only one, its ranks are
    if len(first_ranks) > 1:
        units = first_ranks
        labels = hosts
    else:
        units = list(range(len(places)))
        labels = [f"rank {rank}" for rank in units]
    result: dict[str, Any] = {
        "backend": backend,
        "world_size": len(places),
        "hosts": hosts,
        "all_reduce": [],
        "pairs": [],
        "storage": [],
    }
    if len(places) > 1:
        result["all_reduce"] = list(all_reduces(_SIZES[backend], device, seconds=seconds))
    if len(units) > 1:
        result["pairs"] = pairs(units, labels, device, num_bytes=_PAIR_BYTES[backend])
    if folder is not None:
        result["storage"] = storage(folder, file_bytes, first_ranks)
    return result


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None for _ in range(dist.get_world_size())]
    dist.all_gather_object(values, value)
    return values


def all_reduces(
    sizes: Sequence[int], device: torch.device, *, seconds: float
) -> Iterator[dict[str, float]]:
    """Measure sizes (bytes) one after the other, each for about `seconds`. End after the first one
    with a single all-reduce of more than twice that. Collective.
    """
    for size in sizes:
        result = all_reduce(size, device, seconds=seconds)
        yield result
        if result["seconds"] > 2 * seconds:
            return


def all_reduce(num_bytes: int, device: torch.device, *, seconds: float) -> dict[str, float]:
    """Measure one size: the time of one all-reduce on the slowest rank, and both bandwidths.
    Collective.
    """
    tensor = torch.zeros(num_bytes // 4, device=device)

    def slowest(repeats: int) -> float:
        rank_seconds = timed(lambda: dist.all_reduce(tensor), device, repeats=repeats)
        most = torch.tensor(rank_seconds, dtype=torch.float64).to(device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    dist.all_reduce(tensor)  # connects
    repeats = seconds / max(slowest(1), 1e-9)
    measured = slowest(int(min(max(repeats, 2), 200)))
    algorithm = num_bytes / measured
    count = dist.get_world_size()
    return {
        "bytes": num_bytes,
        "seconds": measured,
        "algorithm": algorithm,
        "bus": algorithm * 2 * (count - 1) / count,
    }


def pairs(
    units: Sequence[int], labels: Sequence[str], device: torch.device, *, num_bytes: int
) -> list[dict[str, Any]]:
    """Measure bytes per second between every two of `units` (ranks), disjoint pairs at the same
    time, in at most `_MOST_ROUNDS` rounds. `labels` name the units in the result. Collective.
    """
    rank = dist.get_rank()
    rank_results: list[dict[str, Any]] = []
    for disjoint_pairs in itertools.islice(rounds(len(units)), _MOST_ROUNDS):
        dist.barrier()
        for a, b in disjoint_pairs:
            if rank == units[a]:
                speed = _exchange(units[b], device, num_bytes=num_bytes)
                rank_results.append({"a": labels[a], "b": labels[b], "bytes_per_second": speed})
            elif rank == units[b]:
                _exchange(units[a], device, num_bytes=num_bytes)
    return list(itertools.chain.from_iterable(_gather(rank_results)))


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield every pair of `count` numbers once, in rounds in which each number takes part at most
    once (the circle method).
    """
    seats: list[int | None] = list(range(count))
    if count % 2:
        seats.append(None)
    half = len(seats) // 2
    for _ in range(len(seats) - 1):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def storage(folder: Path, num_bytes: int, writers: Sequence[int]) -> list[dict[str, Any]]:
    """Measure writing and reading a file on each of `writers`, one rank per host, all at the same
    time as in a checkpoint. Collective.
    """
    dist.barrier()
    result = None
    if dist.get_rank() in writers:
        result = _write_and_read(folder, num_bytes)
    return [host_result for host_result in _gather(result) if host_result is not None]


def _write_and_read(folder: Path, num_bytes: int) -> dict[str, Any]:
    """Measure a file in a folder, or in the nearest parent that exists: return bytes per second, or
    the error.
    """
    existing = folder
    while not existing.is_dir():
        existing = existing.parent
    host = socket.gethostname()
    path = existing / f".preflight-bench-{host}-{os.getpid()}"
    # zeros would be stored in no time by a file system that compresses
    block = os.urandom(4 * _MIB)
    try:
        start = time.perf_counter()
        with path.open("wb") as file:
            for start_of_block in range(0, num_bytes, len(block)):
                file.write(block[: num_bytes - start_of_block])
            file.flush()
            os.fsync(file.fileno())
            write_seconds = time.perf_counter() - start
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(len(block)):
                pass
        read_seconds = time.perf_counter() - start
        return {
            "host": host,
            "write": num_bytes / write_seconds,
            "read": num_bytes / read_seconds,
        }
    except OSError as error:
        return {"host": host, "error": f"{existing}: {error.strerror or error}"}
    finally:
        with suppress(OSError):
            path.unlink()


def _exchange(other: int, device: torch.device, *, num_bytes: int) -> float:
    """Measure bytes per second in each direction, the median of five, as rank `other` does."""
    sent = torch.zeros(num_bytes // 4, device=device)
    received = torch.empty(num_bytes // 4, device=device)

    def both_ways() -> None:
        send = dist.P2POp(dist.isend, sent, other)
        receive = dist.P2POp(dist.irecv, received, other)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()

    both_ways()  # connects
    return num_bytes / median(timed(both_ways, device, repeats=1) for _ in range(5))


def timed(do: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Return the seconds that one call takes, the mean of `repeats`."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        do()
    _synchronize(device)
    return (time.perf_counter() - start) / repeats


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
