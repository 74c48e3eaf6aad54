"""`Host`: a machine made of namespaces. What runs on it, how it dies."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.launched import ROOT, job_environment

if TYPE_CHECKING:
    from tests.hosts.network import Network

_START_SECONDS = 60


@dataclass(frozen=True)
class Mount:
    """What is at a path of a host: a folder of this machine, or a file system of its own with a
    size.
    """

    bind: Path | None = None
    tmpfs_bytes: int | None = None
    read_only: bool = False

    def reported(self) -> dict[str, Any]:
        """For init.py."""
        what = (
            {"bind": str(self.bind)} if self.bind is not None else {"tmpfs_bytes": self.tmpfs_bytes}
        )
        return what | {"read_only": self.read_only}


class Host:
    """One machine: a name, an address at eth0, its own processes, /tmp, /run and /dev/shm. Made by
    `Network.host`.

    Args:
        mounts: what is at which path beside the programs and libraries, which all hosts share.
        shm_bytes: size of /dev/shm.
        command: what PID 1 is, as in a container; left out: a process that waits, and the host
            stays until it is killed.
        environment: all variables of `command`.
        cwd: its working folder.
        uid: user and group of `command`.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        *,
        address: str,
        port: int,
        mounts: Mapping[str, Mount] | None = None,
        shm_bytes: int = 1 << 30,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        cwd: str = "/",
        uid: int | None = None,
    ) -> None:
        self.name, self.address, self.port, self._network = name, address, port, network
        self.aliases: dict[str, str | None] = {}
        self._folder = network.folder / f"{port}-{name}"
        self._folder.mkdir()
        self.log = network.logs / f"{port}-{name}.log"
        self.log.touch()
        self._spec: dict[str, Any] = {
            "name": name,
            "root": str(self._folder / "root"),
            "shm_bytes": shm_bytes,
            "log": str(self.log),
            "mounts": {path: mount.reported() for path, mount in (mounts or {}).items()},
            "command": [*command],
            "environment": dict(environment or {}),
            "cwd": cwd,
            "uid": uid,
            "files": self._files(),
            **_ways_to_programs(uid),
        }
        (self._folder / "root").mkdir()
        self._start()

    def _files(self) -> dict[str, str]:
        """Files of /etc that differ between hosts."""
        names = {
            "/etc/hosts": "",
            "/etc/hostname": f"{self.name}\n",
            "/etc/resolv.conf": "options attempts:1 timeout:1\n",
        }
        for path, text in names.items():
            (self._folder / Path(path).name).write_text(text)
        files = {path: str(self._folder / Path(path).name) for path in names}
        self.termination_log = self._folder / "termination-log"
        self.termination_log.touch()
        self.termination_log.chmod(0o666)
        files["/dev/termination-log"] = str(self.termination_log)
        if Path("/etc/ssh").is_dir():
            (self._folder / "ssh").mkdir()
            files["/etc/ssh"] = str(self._folder / "ssh")
        return files

    def _start(self) -> None:
        from tests.hosts.network import HostError

        init = Path(__file__).with_name("init.py")
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(init)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        first = self._process.stdout.readline()
        if not first:
            raise HostError(
                self._process.stderr.read().strip().rpartition("\n")[2] or "no namespaces"
            )
        self.pid = int(first)
        self._namespace = _namespace_of(self.pid)
        self._plug_in()
        self.write_names()
        self._process.stdin.write(json.dumps(self._spec) + "\n")
        self._process.stdin.flush()
        if (stated := self._process.stdout.readline()) != "ready\n":
            self.kill()
            raise HostError(f"{self.name}: {stated.strip() or 'it ended at once'}")

    def _plug_in(self) -> None:
        mac = "02:00:00:00:{:02x}:{:02x}".format(*divmod(self.port, 256))
        self._network.order({"do": "attach", "port": self.port, "pid": self.pid, "mac": mac})
        orders = (
            "link set lo up",
            f"link set eth0 address {mac} mtu 9000",
            f"addr add {self.address}/16 brd + dev eth0",
            "link set eth0 up",
        )
        subprocess.run(
            ["nsenter", "-t", str(self.pid), "-n", "ip", "-b", "-"],
            input="\n".join(orders),
            text=True,
            check=True,
            capture_output=True,
        )

    def write_names(self) -> None:
        """Write /etc/hosts: the names that the network publishes, and this host's own view of some
        (`aliases`).
        """
        names = {
            "localhost": "127.0.0.1",
            self.name: self.address,
            **self._network.names,
            **self.aliases,
        }
        text = "".join(
            f"{address}\t{name}\n" for name, address in names.items() if address is not None
        )
        file = self._folder / "hosts"
        # in place: this very file is mounted
        with file.open("r+" if file.exists() else "w") as stream:
            stream.write(text)
            stream.truncate()

    def know(self, name: str, address: str | None) -> None:
        """This host alone takes a name for another address, or does not know it (None)."""
        self.aliases[name] = address
        self.write_names()

    def environment(self, **more: str) -> dict[str, str]:
        """Variables for a job on CPU, on this network."""
        dropped = {
            name: value
            for name, value in job_environment().items()
            if not name.startswith("PYTEST_")
        }
        return dropped | {"GLOO_SOCKET_IFNAME": "eth0"} | more

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: str | Path = "/tmp",
        output: Path | None = None,
    ) -> Command:
        """Start a command here, with its output in a file."""
        output = output or self._network.logs / f"{self.port}-{self.name}-{time.monotonic_ns()}.txt"
        return Command(
            self,
            command,
            environment=environment or self.environment(),
            cwd=str(cwd),
            output=output,
        )

    def run(
        self, command: Sequence[str], *, timeout: float = 120, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end; what it printed, stderr too, is in `stdout`."""
        started = self.start(command, **how)
        try:
            return subprocess.CompletedProcess(
                [*command], started.wait(timeout), started.stated(), ""
            )
        except subprocess.TimeoutExpired:
            started.signal(signal.SIGKILL)
            raise AssertionError(
                f"{self.name}: {shlex.join(command)} runs after {timeout} s:\n{started.stated()}"
            ) from None

    def processes(self, *, services: bool = False) -> dict[int, list[str]]:
        """Command lines of what runs here, by process id outside; without PID 1, and without sshd
        unless asked.
        """
        found = {}
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if _namespace_of(process.pid) == self._namespace and process.pid != self.pid:
                    words = process.cmdline()
                    is_zombie = process.status() == psutil.STATUS_ZOMBIE
                    if (
                        words
                        and not is_zombie
                        and (services or not words[0].startswith(("sshd", "/usr/sbin/sshd")))
                    ):
                        found[process.pid] = words
        return found

    def start_sshd(self, *, port: int = 2222) -> None:
        """An sshd that every host of the network may enter, with a host key that all know."""
        self._network.keys.serve(self, port=port)

    @property
    def ssh_folder(self) -> Path:
        """Its /etc/ssh."""
        return self._folder / "ssh"

    def is_alive(self) -> bool:
        """Whether its PID 1 runs."""
        return self._process.poll() is None

    def exit_code(self) -> int | None:
        """How PID 1 ended, 128 + n for signal n; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to PID 1, as a container runtime does."""
        with suppress(ProcessLookupError):
            if self.is_alive():
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Power off: every process is gone at once."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait(timeout=30)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


class Command:
    """A command that runs on a host."""

    def __init__(
        self,
        host: Host,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: str,
        output: Path,
    ) -> None:
        self.host, self.output, self.command = host, output, [*command]
        # The folder is one of the host's own tree, which nsenter's --wd is not.
        enter = [
            "nsenter",
            "-t",
            str(host.pid),
            "-n",
            "-m",
            "-p",
            "-u",
            "--",
            "sh",
            "-c",
            'cd "$0" && exec "$@"',
            cwd,
        ]
        with output.open("w") as stream:
            # Its own session, as sshd or a container runtime gives it.
            self._process = subprocess.Popen(
                [*enter, *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id outside: the child of nsenter."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if children := psutil.Process(self._process.pid).children():
                return int(children[0].pid)
            time.sleep(0.01)
        raise RuntimeError(f"{self.command} has not started")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        with suppress(psutil.Error, ProcessLookupError):
            if self._process.poll() is None:
                os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Exit code, 128 + n for signal n; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def wait(self, timeout: float) -> int:
        """Wait for its exit code."""
        self._process.wait(timeout)
        code = self.poll()
        assert code is not None
        return code

    def stated(self) -> str:
        """Everything that it has printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def _ways_to_programs(uid: int | None) -> dict[str, list[str]]:
    """Where this project and its Python lie under a folder that a host has of its own, or that the
    user may not enter.

    Such folders of / are left out (`closed`), and what is needed of them is put back (`visible`).
    """
    needed = sorted({ROOT, Path(sys.prefix), Path(sys.base_prefix)})
    closed = {
        path.parts[1]
        for path in needed
        for parent in path.parents
        if uid and not parent.stat().st_mode & 0o001
    }
    own = closed | {"tmp", "run"}
    return {
        "closed": sorted(closed),
        "visible": [str(path) for path in needed if path.parts[1] in own],
    }


def _namespace_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())
