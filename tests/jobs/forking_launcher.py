"""A launcher, of which the ranks are forked: forking_launcher.py PIDS MODULE ARGUMENT ... does what
`python -m MODULE ARGUMENT ...` does, for `torch.distributed.run`, DeepSpeed's launch.py and our own.

It runs as one rank of `tests.warm_ranks`, which has imported everything: neither the launcher nor
the ranks, which are its children, import torch for seconds again. What it starts as ``python -u
train.py ...`` is forked, with the environment, the output and the session that it is given; other
programs are started as ever. The process of each rank is noted in ``PIDS/rank<N>``.
"""

from __future__ import annotations

import gc
import inspect
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

_POPEN = subprocess.Popen
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ForkedRanks(subprocess.Popen):  # type: ignore[type-arg]
    """Starts processes, those of ranks without a new interpreter."""

    pids: Path

    def _execute_child(self, *arguments: Any) -> None:
        """Replace what forks and executes; all that comes before and after it is Python's own."""
        execute = _POPEN._execute_child  # type: ignore[attr-defined]
        named = inspect.signature(execute).bind(self, *arguments).arguments
        words = [os.fspath(word) for word in named["args"]]
        if words[:2] != [sys.executable, "-u"] or Path(words[2]).name != "train.py":
            execute(self, *arguments)
            return
        pid = os.fork()
        if pid == 0:
            _be_rank(words[2:], named)
        self.pid = pid
        self._child_created = True
        (self.pids / f"rank{named['env']['RANK']}").write_text(str(pid), encoding="utf-8")
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(named[end] for end in ends))  # type: ignore[attr-defined]


def _be_rank(words: Sequence[str], named: Mapping[str, Any]) -> NoReturn:
    """Become train.py in the forked process: what a new interpreter would not have is left behind."""
    code = 70
    try:
        gc.freeze()  # what is closed when it is collected would close descriptors of this process
        _forget_signals()
        if named["start_new_session"]:
            os.setsid()
        ends = (named["p2cread"], named["c2pwrite"], named["errwrite"])
        for target, source in enumerate(ends):
            if source != -1:
                os.dup2(source, target)
        _close_others({0, 1, 2, *named["pass_fds"]})
        os.environ.clear()
        os.environ.update(named["env"])
        if named["cwd"] is not None:
            os.chdir(named["cwd"])
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]  # as -u has it
        _start_with(_POPEN)
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    finally:
        os._exit(code)


def _forget_signals() -> None:
    """Handle signals as a new interpreter does: it has no handler of the program that starts it."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _close_others(kept: set[int]) -> None:
    """Close all descriptors but these."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # names only
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:  # that of the list
                continue


def _start_with(popen: Any) -> None:
    """Let launchers start processes with this class."""
    subprocess.Popen = popen  # type: ignore[misc]
    subprocess_handler.Popen = popen  # type: ignore[misc]


def main(pids: str, module: str, *arguments: str) -> None:
    """Run the launcher."""
    ForkedRanks.pids = Path(pids)
    for name in _OF_A_RANK:  # of `tests.warm_ranks`
        os.environ.pop(name, None)
    _start_with(ForkedRanks)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
