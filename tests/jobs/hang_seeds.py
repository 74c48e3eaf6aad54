"""Two ranks whose steps stop coming for some seconds, in one way after the other: hang_seeds.py
FOLDER WAY...

The last way lasts until both are ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from framework.engine import hang_watch
from framework.engine.hang_watch import Watched, watching
from framework.engine_protocol import SAVING, STEPS

SECONDS, SAVE_SECONDS, END_SECONDS = 4.0, 5.0, 9.0


class SlowSample(Dataset[int]):
    """A sample that its worker waits for."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(SECONDS)
        return index


def asleep(_: Path) -> None:
    time.sleep(SECONDS)


def endless_loop(_: Path) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        pass


def lock_held(_: Path) -> None:
    ctypes.PyDLL(None).sleep(int(SECONDS))


def stopped(_: Path) -> None:
    pid = os.getpid()
    subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import time, os; time.sleep({SECONDS}); os.kill({pid}, {int(signal.SIGCONT)})",
        ]
    )
    os.kill(pid, signal.SIGSTOP)


def data_worker(_: Path) -> None:
    list(DataLoader(SlowSample(), num_workers=1))


def dead_mount(folder: Path) -> None:
    """A file that does not answer: a pipe without a writer."""
    path = folder / "mount"
    os.mkfifo(path)
    subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import time; time.sleep({SECONDS}); open({str(path)!r}, 'w').close()",
        ]
    )
    path.read_text(encoding="utf-8")


def in_a_save(_: Path) -> None:
    time.sleep(SAVE_SECONDS)


SEEDS = {
    seed.__name__: seed
    for seed in (asleep, endless_loop, lock_held, stopped, data_worker, dead_mount, in_a_save)
}


def main() -> None:
    hang_watch._LOOK_SECONDS, hang_watch._SETTLE_SECONDS = 0.2, 1.0  # type: ignore[misc]
    dist.init_process_group("gloo")
    folder, rank, step = Path(sys.argv[1]), dist.get_rank(), 0
    gradient, extra, group = torch.ones(300), torch.ones(7), dist.new_group([0, 1])
    with watching(logs=folder / "logs", end_seconds=END_SECONDS, least_seconds=1.0) as watch:
        ask = Watched(watch, lambda _: "")
        watch.enter(STEPS)
        with watch.during(SAVING):  # so long that a later one of as long is none to speak of
            time.sleep(0.6)
            dist.barrier()
        for seed in (None, *(SEEDS[name] for name in sys.argv[2:]), None):
            for _ in range(600):  # so that the last hang is none of the gaps of late
                ask(step)
                step += 1
                dist.all_reduce(gradient)
            with watch.during(SAVING):
                # more than steps may take, and less than three times what a save did
                time.sleep(0.8)
                dist.barrier()
            if rank == 0:
                os.write(2, f"seed: {seed.__name__ if seed else ''}\n".encode())
            phase = SAVING if seed is in_a_save else STEPS
            with watch.during(phase):
                if seed is not None and rank == 1:
                    seed(folder)
                dist.all_reduce(gradient)
        if rank == 0:
            dist.all_reduce(gradient)
        else:  # it has missed that one, and is in one of another group
            dist.all_reduce(extra, group=group)


if __name__ == "__main__":
    main()
