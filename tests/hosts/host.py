"""`Host`: a machine made of namespaces, with its processes and its end."""

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
    """A folder of this machine, or a file system of a given size, for a path of a host."""

    bind: Path | None = None
    tmpfs_bytes: int | None = None
    read_only: bool = False

    def reported(self) -> dict[str, Any]:
        """Return the mount as plain values for init.py."""
        if self.bind is not None:
            return {"bind": str(self.bind), "read_only": self.read_only}
        return {"tmpfs_bytes": self.tmpfs_bytes, "read_only": self.read_only}


class Host:
    """One machine: a name, an address at eth0, its own processes, /tmp, /run and /dev/shm.
    `Network.host` makes it.

    Args:
        mounts: by path, beside the programs and libraries, which all hosts share.
        shm_bytes: size of /dev/shm.
        command: program of PID 1, as in a container; without one PID 1 only waits, and the host
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
        self.name = name
        self.address = address
        self.port = port
        self._network = network
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
            "command": list(command),
            "environment": dict(environment or {}),
            "cwd": cwd,
            "uid": uid,
            "files": self._files(),
            **_project_folders(uid),
        }
        (self._folder / "root").mkdir()
        self._start()

    def _files(self) -> dict[str, str]:
        """Write the files that differ between hosts; return path on the host -> path here."""
        texts = {
            "/etc/hosts": "",
            "/etc/hostname": f"{self.name}\n",
            "/etc/resolv.conf": "options attempts:1 timeout:1\n",
        }
        files = {}
        for path, text in texts.items():
            file = self._folder / Path(path).name
            file.write_text(text)
            files[path] = str(file)
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
            last_line = self._process.stderr.read().strip().rpartition("\n")[2]
            raise HostError(last_line or "no namespaces")
        self.pid = int(first)
        self._namespace = _namespace_of(self.pid)
        self._plug_in()
        self.write_names()
        self._process.stdin.write(json.dumps(self._spec) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer != "ready\n":
            self.kill()
            raise HostError(f"{self.name}: {answer.strip() or 'it ended at once'}")

    def _plug_in(self) -> None:
        mac = f"02:00:00:00:{self.port // 256:02x}:{self.port % 256:02x}"
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
        addresses: dict[str, str | None] = {"localhost": "127.0.0.1", self.name: self.address}
        addresses |= self._network.names
        addresses |= self.aliases
        text = ""
        for name, address in addresses.items():
            if address is not None:
                text += f"{address}\t{name}\n"
        file = self._folder / "hosts"
        # in place: this file is mounted, and a new one would not be
        with file.open("r+" if file.exists() else "w") as stream:
            stream.write(text)
            stream.truncate()

    def know(self, name: str, address: str | None) -> None:
        """Let this host alone have another address for a name, or not know it (None)."""
        self.aliases[name] = address
        self.write_names()

    def environment(self, **more: str) -> dict[str, str]:
        """Return the variables for a job on CPU, on this network."""
        variables = {
            name: value
            for name, value in job_environment().items()
            if not name.startswith("PYTEST_")
        }
        return variables | {"GLOO_SOCKET_IFNAME": "eth0"} | more

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
        """Run a command here to its end; `stdout` of the result has its stderr, too."""
        started = self.start(command, **how)
        try:
            code = started.wait(timeout)
            return subprocess.CompletedProcess(list(command), code, started.stated(), "")
        except subprocess.TimeoutExpired:
            started.signal(signal.SIGKILL)
            raise AssertionError(
                f"{self.name}: {shlex.join(command)} runs after {timeout} s:\n{started.stated()}"
            ) from None

    def processes(self, *, services: bool = False) -> dict[int, list[str]]:
        """Return the command lines of the processes here, by process id outside.

        PID 1 is left out, and so is sshd without `services`.
        """
        commands = {}
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if _namespace_of(process.pid) == self._namespace and process.pid != self.pid:
                    words = process.cmdline()
                    if not words or process.status() == psutil.STATUS_ZOMBIE:
                        continue
                    if services or not words[0].startswith(("sshd", "/usr/sbin/sshd")):
                        commands[process.pid] = words
        return commands

    def start_sshd(self, *, port: int = 2222) -> None:
        """Start an sshd that every host of the network may enter, with a host key that all know."""
        self._network.keys.serve(self, port=port)

    @property
    def ssh_folder(self) -> Path:
        """The host's /etc/ssh, as a folder here."""
        return self._folder / "ssh"

    def is_alive(self) -> bool:
        """Return whether PID 1 runs."""
        return self._process.poll() is None

    def exit_code(self) -> int | None:
        """Return the exit code of PID 1, 128 + n for signal n; None while it runs."""
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
        self.host = host
        self.output = output
        self.command = list(command)
        enter = ["nsenter", "-t", str(host.pid), "-n", "-m", "-p", "-u", "--"]
        # The folder is in the host's own tree; nsenter's --wd would be in that of this machine.
        enter += ["sh", "-c", 'cd "$0" && exec "$@"', cwd]
        with output.open("w") as stream:
            # Its own session, as sshd or a container runtime gives it.
            self._process = subprocess.Popen(
                enter + self.command,
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
            children = psutil.Process(self._process.pid).children()
            if children:
                return int(children[0].pid)
            time.sleep(0.01)
        raise RuntimeError(f"{self.command} has not started")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        with suppress(psutil.Error, ProcessLookupError):
            if self._process.poll() is None:
                os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Return the exit code, 128 + n for signal n; None while it runs."""
        code = self._process.poll()
        if code is not None and code < 0:
            return 128 - code
        return code

    def wait(self, timeout: float) -> int:
        """Wait for its exit code."""
        self._process.wait(timeout)
        code = self.poll()
        assert code is not None
        return code

    def stated(self) -> str:
        """Return all output of the command."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def _project_folders(uid: int | None) -> dict[str, list[str]]:
    """Return folders of / that the host leaves out, and folders in them to show nevertheless.

    This project and its Python may be in a folder that a host has of its own (/tmp, /run), or that
    the user may not enter. The latter are `closed`; the folders of the project are `visible`.
    """
    needed = sorted({ROOT, Path(sys.prefix), Path(sys.base_prefix)})
    closed = set()
    for path in needed:
        if uid and not all(parent.stat().st_mode & 0o001 for parent in path.parents):
            closed.add(path.parts[1])
    hidden = closed | {"tmp", "run"}
    visible = [str(path) for path in needed if path.parts[1] in hidden]
    return {"closed": sorted(closed), "visible": visible}


def _namespace_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())
