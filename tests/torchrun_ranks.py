"""Ranks of a real job that torchrun started and looks after, one of which can be killed: the
launcher then ends the others.

    job = TorchrunRanks().start(["--config", "run.yaml"], num_ranks=2, folder=folder)
    job.kill(1)
    codes = job.wait(60)

The same methods as `tests.warm_ranks`, which is five times as fast and has no launcher. With
`TorchrunRanks(warm)` the launcher is the real one as well, and it and its ranks are forked
(tests/forked_launchers.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests import forked_launchers
from tests.launched import ROOT, job_environment
from tests.warm_ranks import Job, WarmRanks


class TorchrunRanks:
    """Starts train.py through torchrun."""

    def __init__(self, warm: WarmRanks | None = None) -> None:
        """Start processes of their own, or fork them from `warm`."""
        self._warm = warm

    def start(self, arguments: Sequence[str], *, num_ranks: int, folder: Path) -> TorchrunJob:
        """Start train.py on `num_ranks` ranks; what they print goes to files under
        ``folder/ranks``.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        module = "torch.distributed.run"
        words = ["--standalone", "--nproc-per-node", str(num_ranks), "--redirects", "3"]
        words += ["--log-dir", str(folder / "ranks"), str(ROOT / "train.py"), *arguments]
        if self._warm is not None:
            job = forked_launchers.launch(self._warm, module, *words, folder=folder)
            return TorchrunJob(_Forked(job), folder)
        with (folder / "launcher.txt").open("wb") as output:
            launcher = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=folder,
                env=job_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return TorchrunJob(launcher, folder)


class _Forked:
    """A launcher that was forked, with the methods of a `Popen`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        (self.pid,) = job.pids

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._job.codes()[0]

    def wait(self, seconds: float) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it runs longer.
        """
        deadline = time.monotonic() + seconds
        while not self._job.is_over():
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("torchrun", seconds)
            time.sleep(0.005)
        return self._job.wait(seconds)[0]


class TorchrunJob:
    """One launcher and its ranks."""

    def __init__(self, launcher: subprocess.Popen[bytes] | _Forked, folder: Path) -> None:
        self._launcher, self._folder = launcher, folder
        self._pids: dict[int, int] = {}

    def kill(self, *ranks: int) -> None:
        """SIGKILL these ranks, those of them that have been started."""
        for rank in ranks:
            if rank not in self._pids:
                self.find_ranks()
            if rank in self._pids and not self.is_over():
                with suppress(ProcessLookupError):
                    os.kill(self._pids[rank], signal.SIGKILL)

    def find_ranks(self) -> None:
        """Look the ranks' numbers up beforehand, so that a kill takes no time."""
        if isinstance(self._launcher, _Forked):
            self._pids |= forked_launchers.rank_pids(self._folder)
        else:
            self._pids |= _ranks_of(self._launcher.pid)

    def codes(self) -> list[int | None]:
        """The launcher's exit code: it has one for all of its ranks."""
        return [self._launcher.poll()]

    def is_over(self) -> bool:
        """Whether the launcher has ended."""
        return self._launcher.poll() is not None

    def wait(self, seconds: float) -> list[int]:
        """Wait for the launcher.

        Raises:
            TimeoutError: it runs longer; it and its ranks are killed.
        """
        try:
            return [self._launcher.wait(seconds)]
        except subprocess.TimeoutExpired:
            self.find_ranks()
            for pid in (*self._pids.values(), self._launcher.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._launcher.wait(60)
            raise TimeoutError(
                f"the job had not ended after {seconds:.0f} s; it said:\n{self.stated()[-4000:]}"
            ) from None

    def left_alive(self, *, wait_seconds: float = 5.0) -> list[int]:
        """Ranks that have outlived the launcher."""
        deadline = time.monotonic() + wait_seconds
        while (
            alive := [pid for pid in self._pids.values() if _is_train(pid)]
        ) and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive

    def stated(self) -> str:
        """What the ranks have printed. The launcher's own words, a traceback of its own among them,
        are not in it.
        """
        return "".join(
            path.read_text(errors="replace")
            for path in sorted((self._folder / "ranks").rglob("std*.log"))
        )


def _ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process id, of the processes that a launcher has started."""
    found = {}
    with suppress(OSError):
        for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks = [
                    int(text.removeprefix(b"RANK="))
                    for text in variables
                    if text.startswith(b"RANK=")
                ]
                if ranks and _is_train(pid):
                    found[ranks[0]] = pid
    return found


def _is_train(pid: int) -> bool:
    """Return whether a process is train.py, executed or forked; one that has ended has no words."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"train.py" in words or b"tests.warm_ranks" in words
    return False
