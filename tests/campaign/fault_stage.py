"""Two nodes (and where wanted a third host that starts them through ssh) on which one fault happens
to one run.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.campaign.traces import differences
from tests.dead_disk import dead_disk
from tests.hosts.host import Command, Host, Mount
from tests.hosts.network import Network
from tests.launched import ROOT

TOTAL_STEPS, SAVE_EVERY = 30, 5
RUN = "run"
SHARED, DEAD = "/shared", "/dead"
START_SECONDS, END_SECONDS = 180.0, 90.0
CONFIG: dict[str, Any] = {
    "run": {"name": RUN, "output_dir": SHARED},
    "model": {"target": "tests.campaign.slow_net:SlowNet"},
    "data": {
        "kind": "synthetic_images",
        "image_size": 8,
        "channels": 1,
        "num_classes": 10,
        "num_samples": 1437,
    },
    "batch": {"global_size": 120},
    "zero": {"stage": 1},
    "scheduler": {"kind": "warmup_cosine", "warmup_steps": 5},
    "training": {"max_steps": TOTAL_STEPS, "log_every": 1},
    "evaluation": {"at_end": False},
    "checkpoint": {"every_steps": SAVE_EVERY, "keep_last": 2, "resume": "auto"},
    "monitors": {"tensorboard": False, "csv": False, "progress": "off"},
}


@dataclass
class Seen:
    """What became of the nodes.

    Attributes:
        codes: exit code of each started command by its host; of a host that was killed there is
            none.
        seconds: from the fault until nothing of the job ran anywhere.
        said: all printed text.
        orphans: command lines that still ran when the time was up.
    """

    codes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    stated: str = ""
    orphans: list[str] = field(default_factory=list)


class Stage:
    """A network, a folder that all hosts share, and a run."""

    def __init__(
        self,
        folder: Path,
        *,
        num_nodes: int = 2,
        shared_bytes: int | None = None,
        read_only: bool = False,
        has_dead_disk: bool = False,
        is_apart: bool = False,
    ) -> None:
        self.folder, self.num_nodes = folder, num_nodes
        self.shared = folder / "shared"
        self._shared_bytes, self._read_only, self._has_dead_disk = (
            shared_bytes,
            read_only,
            has_dead_disk,
        )
        # node 1 has a folder of its own where the others have the shared one
        self._is_apart = is_apart
        self._stack = ExitStack()
        self.commands: dict[str, Command] = {}
        self.hosts: dict[str, Host] = {}
        self.fault_at = 0.0
        self._bystanders: set[int] = set()

    def __enter__(self) -> Stage:
        self.shared.mkdir(parents=True, exist_ok=True)
        if self._shared_bytes is not None:
            options = ["-t", "tmpfs", "-o", f"size={self._shared_bytes}"]
            subprocess.run(["mount", *options, "none", str(self.shared)], check=True)
            self._stack.callback(
                lambda: subprocess.run(["umount", "-l", str(self.shared)], check=True)
            )
        if self._has_dead_disk:
            self._stack.enter_context(dead_disk(self.dead))
        (self.shared / "run.yaml").write_text(yaml.safe_dump(CONFIG))
        lines = [f"node-{node} slots=1\n" for node in range(self.num_nodes)]
        (self.shared / "hostfile").write_text("".join(lines))
        self.network = self._stack.enter_context(Network(self.folder))
        for node in range(self.num_nodes):
            self.add_host(f"node-{node}", read_only=self._read_only)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def dead(self) -> Path:
        """A file system that does not answer, where the stage has one: on node 1 it is at DEAD."""
        return self.folder / "dead"

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.shared / RUN

    def add_host(self, name: str, *, read_only: bool = False) -> Host:
        """A host with the shared folder; one of the same name that was killed is replaced."""
        shared = self.shared
        if self._is_apart and name == "node-1":
            shared = Path(shutil.copytree(self.shared, self.folder / "apart"))
            self._is_apart = False  # its next host is as it should be
        mounts = {SHARED: Mount(bind=shared, read_only=read_only)}
        if self._has_dead_disk and name == "node-1":
            mounts[DEAD] = Mount(bind=self.dead)
        self.hosts[name] = self.network.host(name, mounts=mounts)
        return self.hosts[name]

    def node(
        self, node: int, *, rank: int | None = None, words: Sequence[str] = (), **environment: str
    ) -> Command:
        """Start `launch node` on a host; `words` come behind all others and win."""
        place = [
            "--nnodes",
            str(self.num_nodes),
            "--node_rank",
            str(node if rank is None else rank),
            "--num_gpus",
            "1",
            "--master_addr",
            "node-0",
            "--master_port",
            "29500",
            "--wait_seconds",
            "120",
        ]
        return self.start(
            f"node-{node}", ["launch", "node", f"{SHARED}/run.yaml", *place, *words], **environment
        )

    def nodes(self, *, step_seconds: float = 0.1) -> None:
        """All of them, as they should be."""
        for node in range(self.num_nodes):
            self.node(node, DSF_STEP_SECONDS=str(step_seconds))

    def over_ssh(self, words: Sequence[str] = (), **environment: str) -> Command:
        """`launch -H` on a host of its own, which trains nothing."""
        for name in [*self.hosts]:
            self.hosts[name].start_sshd()
        if "login" not in self.hosts:
            self.network.keys.give(self.add_host("login"))
        command = [
            "launch",
            "-H",
            f"{SHARED}/hostfile",
            f"{SHARED}/run.yaml",
            "--num_gpus",
            "1",
            *words,
        ]
        return self.start("login", command, **environment)

    def start(
        self,
        host: str,
        words: Sequence[str],
        *,
        program: Sequence[str] = (sys.executable, "-m", "framework"),
        **environment: str,
    ) -> Command:
        """Start a command; its end is part of what is seen."""
        where = self.hosts[host]
        environment = {"DSF_TOKEN": "a token of sixteen bytes or more"} | environment
        self.commands[host] = where.start(
            [*program, *words], cwd=ROOT, environment=where.environment(**environment)
        )
        return self.commands[host]

    def add_bystander(self, host: str, command: Sequence[str], *, says: str) -> None:
        """Start a program that is no part of the job, and wait for its first output."""
        started = self.hosts[host].start(command, cwd=ROOT)
        while says not in started.stated():
            assert started.poll() is None, started.stated()
            time.sleep(0.02)
        self._bystanders |= self.hosts[host].processes().keys()

    # ------------------------------------------------------------------------------------------------ what is waited
    # for

    def until(
        self, holds: Callable[[], object], what: str, *, seconds: float = START_SECONDS
    ) -> None:
        """Wait for something.

        Raises:
            AssertionError: it does not come, or every command has ended before.
        """
        deadline = time.monotonic() + seconds
        while not holds():
            over = all(command.poll() is not None for command in self.commands.values())
            assert not over, f"the job ended before {what}:\n{self.stated()}"
            assert time.monotonic() < deadline, f"no {what} after {seconds:.0f} s:\n{self.stated()}"
            time.sleep(0.002)

    def until_step(self, step: int) -> None:
        """Wait until a step is logged."""
        self.until(lambda: self.last_step() >= step, f"step {step}")

    def until_step_or_end(self) -> None:
        """Wait for the last step; a full disk may keep its line from being written, and then for
        the job's end.
        """
        deadline = time.monotonic() + START_SECONDS
        while self.last_step() < TOTAL_STEPS and any(
            each.poll() is None for each in self.commands.values()
        ):
            assert time.monotonic() < deadline, self.stated()
            time.sleep(0.02)

    def until_saving(self) -> None:
        """Wait for a checkpoint that is being written."""
        self.until_step(1)
        self.until((self.run / "checkpoints" / ".saving").exists, "save")

    def until_said(self, text: str) -> None:
        """Wait for words of any command."""
        self.until(lambda: text in self.stated(), repr(text))

    def last_step(self) -> int:
        """The last that was logged."""
        return last_logged(self.run)

    def stated(self) -> str:
        """Of all commands, with the host in front."""
        return "\n".join(
            f"{host}| {line}"
            for host, command in self.commands.items()
            for line in command.stated().splitlines()
        )

    def logged(self) -> str:
        """Of all ranks, with the name of the log in front."""
        logs = sorted((self.run / "logs").glob("rank*.log"))
        return "\n".join(
            f"{path.name}| {line}"
            for path in logs
            for line in path.read_text(errors="replace").splitlines()
        )

    # ----------------------------------------------------------------------------------------------------------- the
    # end

    def pid(self, host: str, *words: str) -> int:
        """The one process on a host whose command line has all of these words."""
        found = [
            pid
            for pid, command in self.hosts[host].processes().items()
            if all(word in " ".join(command) for word in words)
        ]
        assert found, f"{host}: no process {words} among {self.hosts[host].processes()}"
        # a fork of it has its words, and where numbers begin again a lower number
        return min(found, key=started_at)

    def rank(self, node: int) -> int:
        """Process id of the rank of a node."""
        return self.pid(f"node-{node}", "train.py", "--local_rank=")

    def fault(self) -> None:
        """Now it happens: the clock runs."""
        self.fault_at = time.monotonic()

    def see(self, *, limit: float = END_SECONDS) -> Seen:
        """Wait until nothing of the job runs, and return whether that came."""
        began = self.fault_at or time.monotonic()
        deadline = time.monotonic() + limit
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.05)
        seen = Seen(seconds=time.monotonic() - began, orphans=self._left())
        for host, command in self.commands.items():
            if (code := command.poll()) is not None and self.hosts[host].is_alive():
                seen.codes[host] = code
        seen.stated = self.stated()
        return seen

    def _left(self) -> list[str]:
        running = [
            f"{host}: {' '.join(command.command)}"
            for host, command in self.commands.items()
            if command.poll() is None
        ]
        return running + [
            f"{name}: {' '.join(words)}"
            for name, host in self.hosts.items()
            if host.is_alive()
            for pid, words in host.processes().items()
            if pid not in self._bystanders
        ]

    def clear(self) -> None:
        """Kill what is left, and bring hosts, cables and names back as they should be."""
        for name, host in list(self.hosts.items()):
            for pid in host.processes() if host.is_alive() else ():
                with suppress(ProcessLookupError):
                    subprocess.run(["kill", f"-{signal.SIGKILL:d}", str(pid)], check=False)
            host.kill()
            self.network.hosts.remove(host)
            self.add_host(name)
        self.commands.clear()

    def resume_and_compare(self, unbroken: Path) -> list[str]:
        """Start the run as it should be, to its end; what is not as in the unbroken one."""
        self.clear()
        self.num_nodes, self.fault_at = 2, 0.0  # as in the unbroken one
        self.nodes()
        seen = self.see(limit=START_SECONDS)
        if set(seen.codes.values()) != {0}:
            return [f"the resumed run ended with {seen.codes}: {seen.stated[-1500:]}"]
        return differences(unbroken, self.run, num_steps=TOTAL_STEPS)


def started_at(pid: int) -> float:
    """When a process was started; one that has ended meanwhile: never."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).create_time()
    return math.inf


def last_logged(run: Path) -> int:
    """The last step in a run's metrics; its last line may be in the writing."""
    with suppress(FileNotFoundError):
        lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
        return max((int(json.loads(line)["step"]) for line in lines), default=0)
    return 0


def unbroken_run(folder: Path) -> Path:
    """Return a copy of the folder of the undisturbed run."""
    with Stage(folder / "unbroken") as stage:
        stage.nodes()
        seen = stage.see(limit=START_SECONDS)
        assert set(seen.codes.values()) == {0}, seen.stated
        shutil.copytree(stage.run, folder / "unbroken-run")
    return folder / "unbroken-run"
