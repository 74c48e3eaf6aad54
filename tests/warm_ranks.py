"""Ranks of a real job, forked from a process that has imported everything: train.py in two seconds
instead of ten.

After the fork a rank does the same as a process of its own after its imports: train.py reads its
command line, joins the process group, builds the engine. Tests that start hundreds of jobs, to kill
them, would import torch for hours otherwise.

    with WarmRanks() as warm:
        job = warm.start(["--config", "run.yaml"], num_ranks=2, folder=folder)
        job.kill(1)                       # SIGKILL; the job then ends as torchrun ends it
        codes = job.wait(60)

Run as a module it is the process that forks; it takes one line of JSON for each job and ends, with
its jobs, when its input does. Given pairs of file descriptors it imports everything once and forks
such a process for each pair: one for each lane of tests (`tests/lanes.py`).
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import pkgutil
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import framework
from framework.engine import garbage
from tests.launched import NO_COMPILE, ROOT, job_environment
from tests.ports import free_ports

_READY_SECONDS = 300.0  # imports, on a machine that has other things to do
# between the end of one rank and SIGKILL for the others: torchrun gives them 30
_GRACE_SECONDS = 20.0
_KILL_SECONDS = 60.0  # in which a process that was killed is gone
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


_session: list[WarmRanks] = []
_line_of_lane: tuple[int, int] | None = None
is_fast_part = False  # of the suite: no test of this session may need ranks


def session_ranks() -> WarmRanks:
    """Return the process that forks for all tests of the session; `tests/conftest.py` ends it."""
    assert not is_fast_part, "a test that starts ranks is slow: mark it so"
    if not _session:
        _session.append(WarmRanks(_line_of_lane).__enter__())
    return _session[0]


def processor_seconds() -> float:
    """Return the processor time of the session's ranks that have ended, with their children."""
    return sum(ranks.processor_seconds for ranks in _session)


def end_session_ranks() -> None:
    """End the session's process, if it was started."""
    while _session:
        _session.pop().__exit__()


class ForLanes:
    """Processes that fork ranks, one for each lane: they import everything once, together."""

    def __init__(self, num_lanes: int) -> None:
        """Start importing, while tests are collected."""
        theirs = []
        self._ours = []
        for _ in range(num_lanes):
            orders, order_writer = os.pipe()
            answers, answer_writer = os.pipe()
            theirs.append((orders, answer_writer))
            self._ours.append((answers, order_writer))
        ends = [end for pair in theirs for end in pair]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_ranks", *map(str, ends)],
            cwd=ROOT,
            env=job_environment(**{NO_COMPILE: "0"}),  # all ranks have its imports
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=ends,
            start_new_session=True,  # Ctrl-C ends the lanes, and they end it
        )
        for end in ends:
            os.close(end)

    def take(self, lane: int) -> None:
        """Make one of them that of this process, which is a lane."""
        global _line_of_lane
        _line_of_lane = self._ours.pop(lane)
        self._close()

    def hand_over(self) -> None:
        """Leave them to the lanes, which were forked: each ends with its lane."""
        self._close()

    def _close(self) -> None:
        while self._ours:
            for end in self._ours.pop():
                os.close(end)


class WarmRanks:
    """The process that forks, seen from outside."""

    def __init__(self, line: tuple[int, int] | None = None) -> None:
        """Start the process, or use the one at the other end of `line`: where its answers come
        from, and where its orders go.
        """
        self._process: subprocess.Popen[bytes] | None = None
        if line is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_ranks"],
                cwd=ROOT,
                env=job_environment(**{NO_COMPILE: "0"}),  # all ranks have its imports
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert self._process.stdout is not None
            assert self._process.stdin is not None
            line = (os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno()))
            self._process.stdout.close()
            self._process.stdin.close()
        self._answers = os.fdopen(line[0], encoding="utf-8")
        self._orders = os.fdopen(line[1], "w", encoding="utf-8")
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._pids: list[list[int]] = []
        self._codes: dict[int, int] = {}
        self._is_ready = False
        self._is_over = False
        self.processor_seconds = 0.0
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> WarmRanks:
        self._until(lambda: self._is_ready, seconds=_READY_SECONDS)
        return self

    def __exit__(self, *error: object) -> None:
        self._orders.close()
        if self._process is not None:
            self._process.wait(timeout=60)

    def start(
        self,
        arguments: Sequence[str],
        *,
        num_ranks: int,
        folder: Path,
        script: Path | None = None,
        cwd: Path | None = None,
    ) -> Job:
        """Start train.py, or another script, on `num_ranks` ranks; their output goes to
        ``folder/rank<N>.txt``.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(num_ranks):
            (folder / f"rank{rank}.txt").write_bytes(b"")  # a rank may be killed before it opens it
        port = free_ports(1)
        number = len(self._pids) + 1
        order = {
            "arguments": list(arguments),
            "num_ranks": num_ranks,
            "folder": str(folder),
            "port": port,
            "script": str(script or ""),
            "cwd": str(cwd or folder),
        }
        self._send(order)
        self._until(lambda: len(self._pids) >= number, seconds=60)
        return Job(self, self._pids[number - 1], folder, port)

    def codes(self) -> dict[int, int]:
        """Return the exit code of every process that has ended, by its id; -9 for SIGKILL."""
        with self._changed:
            return dict(self._codes)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal, through the parent: a process that it has not yet waited for keeps its
        number.
        """
        self._send({"signal": number, "pid": pid})

    def _send(self, order: dict[str, Any]) -> None:
        with self._sending:
            self._orders.write(json.dumps(order) + "\n")
            self._orders.flush()

    def _until(self, holds: Any, *, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: holds() or self._is_over, timeout=seconds)
            if not holds():
                raise RuntimeError("the process that forks ranks does not answer")

    def _listen(self) -> None:
        for line in self._answers:
            message = json.loads(line)
            with self._changed:
                if "pids" in message:
                    for pid in message["pids"]:
                        self._codes.pop(pid, None)  # of an earlier process of this number
                    self._pids.append(message["pids"])
                elif "code" in message:
                    self._codes[message["pid"]] = message["code"]
                    self.processor_seconds += message["seconds"]
                else:
                    self._is_ready = True
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class Job:
    """Ranks that were started together."""

    def __init__(self, warm: WarmRanks, pids: list[int], folder: Path, port: int) -> None:
        self._warm = warm
        self._pids = pids
        self._folder = folder
        self._port = port
        # kept: other processes get these numbers later
        self._codes: list[int | None] = [None] * len(pids)

    @property
    def pids(self) -> list[int]:
        """Process of each rank."""
        return list(self._pids)

    def kill(self, *ranks: int) -> None:
        """SIGKILL these ranks."""
        for rank in ranks:
            self.signal(signal.SIGKILL, rank)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to these ranks."""
        for rank in ranks:
            self._warm.signal(self._pids[rank], number)

    def codes(self) -> list[int | None]:
        """Return the exit code of every rank, None while it runs."""
        ended = self._warm.codes()
        for rank, pid in enumerate(self._pids):
            if self._codes[rank] is None:
                self._codes[rank] = ended.get(pid)
        return list(self._codes)

    def is_over(self) -> bool:
        """Return whether a rank has failed or all have ended."""
        codes = self.codes()
        return any(codes) or None not in codes

    def wait(self, seconds: float, *, alone_seconds: float = 1.0) -> list[int]:
        """Wait for all ranks, end the others when one has failed, and return the exit codes.

        Args:
            seconds: the job may run.
            alone_seconds: the others have to end by themselves, before SIGTERM. One that has lost
                its peer may report it in the first second; a test of that report gives it longer,
                for a machine that is busy.

        Raises:
            TimeoutError: the job runs longer; it is killed.
        """
        deadline = time.monotonic() + seconds
        while not self.is_over() and time.monotonic() < deadline:
            time.sleep(0.005)
        is_late = not self.is_over()
        self._end_ranks(0.0 if is_late else _GRACE_SECONDS, alone_seconds=alone_seconds)
        for buffer in Path("/dev/shm").glob(
            f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{self._port}_*"
        ):
            buffer.unlink(missing_ok=True)  # 66 MiB for each rank that was killed
        if is_late:
            raise TimeoutError(
                f"the job had not ended after {seconds:.0f} s; it said:\n{self.stated()[-4000:]}"
            )
        return [code for code in self.codes() if code is not None]

    def _end_ranks(self, grace_seconds: float, *, alone_seconds: float) -> None:
        """End all ranks: by SIGTERM after `alone_seconds`, and by SIGKILL `grace_seconds` after it,
        at once if these are 0.
        """
        number = signal.SIGTERM if grace_seconds else signal.SIGKILL
        begin = time.monotonic()
        codes = self.codes()
        while None in codes:
            is_due = number == signal.SIGKILL or time.monotonic() > begin + alone_seconds
            for pid, code in zip(self._pids, codes, strict=True):
                if code is None and is_due:
                    self._warm.signal(pid, number)
            time.sleep(0.2 if is_due and number == signal.SIGTERM else 0.02)
            if time.monotonic() > begin + alone_seconds + grace_seconds:
                number = signal.SIGKILL
            codes = self.codes()
            if time.monotonic() > begin + alone_seconds + grace_seconds + _KILL_SECONDS:
                raise RuntimeError(f"ranks do not end after SIGKILL: {codes} of {self._pids}")

    def stated(self, rank: int | None = None) -> str:
        """Return the output of a rank, or of all ranks."""
        ranks = range(len(self._pids)) if rank is None else [rank]
        paths = [self._folder / f"rank{number}.txt" for number in ranks]
        return "".join(path.read_text(errors="replace") for path in paths)


def _warm_up() -> None:
    """Import all modules of a run, also those that DeepSpeed and torch import late."""
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.runtime.zero.muon.muon_optimizer
    import deepspeed.utils.pin_memory  # noqa: F401
    import torch
    from deepspeed.comm.torch import build_shm_op

    import train  # noqa: F401
    from framework.engine.extensions import quoting_torchs_library, use_own_cache

    if importlib.util.find_spec("transformers") is not None:
        from transformers import LlamaForCausalLM  # noqa: F401  # lists all models, in a second

    for module in pkgutil.walk_packages(framework.__path__, "framework."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

    _ask_about_processors()
    use_own_cache()
    with quoting_torchs_library():
        build_shm_op()  # a rank that is killed while it compiles would leave the op broken for all
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()
    # For devices that nothing uses, torch keeps each seed with the stack it was given from.
    torch.cuda.manual_seed_all = _no_seed
    torch.xpu.manual_seed_all = _no_seed
    torch.mtia.manual_seed_all = _no_seed
    gc.collect()
    # so that ranks collect garbage among their own objects only, and do not copy shared pages
    gc.freeze()


def _ask_about_processors() -> None:
    """Ask what ranks keep, once for all of them."""
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
    from deepspeed.utils import numa

    from framework.engine.extensions import keep_answers_about_processors

    keep_answers_about_processors()
    CPUAdamBuilder().cxx_args()
    numa.get_numa_cores()


def _no_seed(seed: int) -> None: ...


def _serve_lanes(ends: list[int]) -> None:
    """Fork a process that serves for each pair of ends: its orders, and its answers. Never returns."""
    _warm_up()
    for number in range(0, len(ends), 2):
        if os.fork() == 0:
            for end in set(ends) - {*ends[number : number + 2]}:
                os.close(end)
            _serve(ends[number], ends[number + 1])
    for end in ends:
        os.close(end)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)  # tearing down what was imported takes longer than a test


def _serve_alone() -> None:
    orders = os.dup(0)
    answers = os.dup(1)
    os.dup2(2, 1)  # output of imports must not be taken for an answer
    _warm_up()
    _serve(orders, answers)


def _serve(orders_end: int, answers_end: int) -> None:
    """Fork ranks as they are ordered. Never returns."""
    orders = os.fdopen(orders_end, "rb", buffering=0)
    answers = os.fdopen(answers_end, "w", buffering=1)
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    answers.write("{}\n")
    running: set[int] = set()
    buffered = b""
    while True:
        ready, _, _ = select.select([orders, wake_reader], [], [])
        if wake_reader in ready:
            os.read(wake_reader, 4096)
            _collect(running, answers)
        if orders in ready:
            more = os.read(orders.fileno(), 65536)
            if not more:
                break
            lines = (buffered + more).split(b"\n")
            buffered = lines.pop()
            for line in lines:
                _obey(json.loads(line), running, answers)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # tearing down what was imported takes longer than a test


def _collect(running: set[int], answers: Any) -> None:
    for pid in sorted(running):
        ended_pid, status, usage = os.wait4(pid, os.WNOHANG)
        if ended_pid:
            running.discard(pid)
            message = {
                "pid": pid,
                "code": os.waitstatus_to_exitcode(status),
                "seconds": usage.ru_utime + usage.ru_stime,
            }
            answers.write(json.dumps(message) + "\n")


def _obey(order: dict[str, Any], running: set[int], answers: Any) -> None:
    if "signal" in order:
        if order["pid"] in running:
            os.kill(order["pid"], order["signal"])
        return
    pids = []
    for rank in range(order["num_ranks"]):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, order)
        pids.append(pid)
    running.update(pids)
    answers.write(json.dumps({"pids": pids}) + "\n")


def _be_rank(rank: int, order: dict[str, Any]) -> None:
    """Become train.py, or another script, on one rank. Never returns."""
    code = 70
    # An engine that closes unfreezes all objects: with those of the parent, each collection after
    # it would take half a second, and copy their pages.
    without = {"freeze": lambda: None, "unfreeze": lambda: None}
    garbage.gc = SimpleNamespace(**vars(gc) | without)  # type: ignore[assignment]
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        folder = Path(order["folder"])
        output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        # the pipes to the parent: it must notice when the parent's other end is closed
        os.closerange(3, 256)
        os.chdir(order["cwd"])
        number = str(order["num_ranks"])
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=number,
            LOCAL_WORLD_SIZE=number,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(order["port"]),
        )
        sys.argv = [order["script"] or "train.py", *order["arguments"]]
        code = _run(order["script"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run(script: str) -> int:
    if script:
        sys.path.insert(0, str(Path(script).parent))  # as Python does
        runpy.run_path(script, run_name="__main__")
        return 0
    from framework.script import exit_code

    return exit_code()


if __name__ == "__main__":
    if sys.argv[1:]:
        _serve_lanes([int(end) for end in sys.argv[1:]])
    else:
        _serve_alone()
