"""A callback that ends its rank: once, or at every start that comes so far."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import framework


class Dies:
    """Ends rank `rank` after step `step`: by SIGKILL, or by an error; with `once`, a file, only
    where that is not there. Beside that file it writes when the first process of rank 0 began, as
    the kernel knows it. With `asks` the other ranks alone are asked to stop a second
    before.
    """

    def __init__(
        self, step: int, rank: int = 1, once: str = "", error: str = "", *, asks: bool = False
    ) -> None:
        self.step, self.rank, self.once, self.error, self.asks = step, rank, once, error, asks

    def on_start(self, state: framework.State) -> None:
        if self.once and state.is_main and not (begun := Path(f"{self.once}-begun")).exists():
            ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
            age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf(
                "SC_CLK_TCK"
            )
            begun.write_text(str(time.time() - age))

    def on_step(self, state: framework.State) -> None:
        if state.step != self.step or (self.once and Path(self.once).exists()):
            return
        if int(os.environ["RANK"]) != self.rank:
            if self.asks:
                os.kill(os.getpid(), signal.SIGTERM)
            return
        if self.asks:
            time.sleep(1)
        if self.once:
            Path(self.once).touch()
        if self.error:
            raise RuntimeError(self.error)
        os.kill(os.getpid(), signal.SIGKILL)
