"""Speed of DeepSpeed's reads and writes of a drive, by the settings of its section `aio`.

    python -m framework.engine.nvme_bench FOLDER [--mib 256]

It prints one line of JSON. Settings are those that DeepSpeed's ds_nvme_tune goes through
(deepspeed/nvme/perf_run_sweep.py), in one process in the place of 128 that each import DeepSpeed;
the best one has the largest sum of both speeds, as there. ds_nvme_tune prints `num_threads`, a key
that DeepSpeed 0.19.8 does not read (runtime/swap_tensor/constants.py): its name is
`intra_op_parallelism`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from framework.system.json_lines import encode

MakeHandle = Callable[..., Any]
"""DeepSpeed's `aio_handle`."""
Aio = Mapping[str, Any]
"""Values of DeepSpeed's section `aio`, in the order in which `aio_handle` takes them."""
DEFAULTS: Final[Aio] = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "single_submit": False,
    "overlap_events": True,
    "intra_op_parallelism": 1,
}
_MIB: Final = 1 << 20
_LONGEST_SECONDS: Final = 1.0  # of a write, for which less is written otherwise


@dataclass(frozen=True)
class DriveSpeed:
    """Bytes per second of one setting."""

    aio: Aio
    read: float
    write: float

    @property
    def sum(self) -> float:
        return self.read + self.write


def main() -> int:
    """Measure the folder that the command line names, and print the best setting beside
    DeepSpeed's defaults.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=256)
    arguments = parser.parse_args()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    from framework.engine.extensions import announcing_compilers, use_own_cache

    use_own_cache()
    with announcing_compilers():
        make_handle = AsyncIOBuilder().load(verbose=False).aio_handle
    usual, best = measure(arguments.folder, make_handle, num_bytes=arguments.mib * _MIB)
    answer = {"usual": asdict(usual), "best": asdict(best)}
    sys.stdout.write(encode(answer).decode())
    return 0


def settings() -> Iterator[Aio]:
    """Yield all settings of DeepSpeed's sweep."""
    from deepspeed.nvme.perf_run_sweep import DEFAULT_SWEEP_CONFIG

    names = ("block_size", "queue_depth", "single_submit", "sequential_requests", "io_parallel")
    for size, depth, is_single, is_sequential, parallel in itertools.product(
        *(DEFAULT_SWEEP_CONFIG[name] for name in names)
    ):
        yield {
            "block_size": int(size.removesuffix("M")) * _MIB,
            "queue_depth": depth,
            "single_submit": is_single,
            "overlap_events": not is_sequential,
            "intra_op_parallelism": parallel,
        }


def measure(
    folder: Path, make_handle: MakeHandle, *, num_bytes: int
) -> tuple[DriveSpeed, DriveSpeed]:
    """Return the speeds of DeepSpeed's default settings and of the best ones, in a folder that is
    made within `folder` and removed again. Less than `num_bytes` are written where that takes more
    than a second.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="dsf-nvme-") as own:
        file = Path(own, "tensor")
        usual = _speed(file, make_handle, DEFAULTS, num_bytes)
        seconds = num_bytes / usual.write
        while seconds > _LONGEST_SECONDS and num_bytes > 8 * _MIB:
            num_bytes //= 2
            seconds /= 2
        best = usual
        for aio in settings():
            speed = _speed(file, make_handle, aio, num_bytes)
            if speed.sum > best.sum:
                best = speed
    return usual, best


def _speed(file: Path, make_handle: MakeHandle, aio: Aio, num_bytes: int) -> DriveSpeed:
    """Write a file of this size anew, and read it."""
    handle = make_handle(*aio.values())
    buffer = handle.new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8))
    try:
        file.unlink(missing_ok=True)
        write = num_bytes / _seconds(handle, handle.pwrite, buffer, file)
        read = num_bytes / _seconds(handle, handle.pread, buffer, file)
    finally:
        handle.free_cpu_locked_tensor(buffer)
    return DriveSpeed(dict(aio), read, write)


def _seconds(handle: Any, move: Callable[..., int], buffer: torch.Tensor, file: Path) -> float:
    start = time.perf_counter()
    if move(buffer, str(file), False, True) < 0:
        raise OSError(f"{file}: DeepSpeed's aio_handle cannot use it")
    handle.wait()
    return max(time.perf_counter() - start, 1e-9)


if __name__ == "__main__":
    sys.exit(main())
