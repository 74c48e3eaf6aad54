"""`Network`: hosts, the switch between them, and the faults of their connections."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from tests.hosts.host import Host
from tests.hosts.ssh import Keys
from tests.launched import ROOT

_PREFIX = "10.77"


@cache
def why_not(*, ssh: bool = False) -> str:
    """Return why hosts cannot be made here; empty if they can."""
    if os.name != "posix" or not sys.platform.startswith("linux"):
        return "namespaces are Linux"
    if os.geteuid() != 0:
        return "namespaces as hosts need root"
    programs = ["ip", "nsenter"]
    if ssh:
        programs += ["ssh", "ssh-keygen"]
    for program in programs:
        if shutil.which(program) is None:
            return f"there is no `{program}` (Debian: iproute2, util-linux, openssh-client)"
    if ssh and not Path("/usr/sbin/sshd").exists():
        return "there is no sshd (Debian: openssh-server)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    try:
        with Network(None) as network:
            network.host("probe")
    except (OSError, HostError) as error:
        return f"this kernel or container refuses namespaces: {error}"
    return ""


class HostError(Exception):
    """Error for a host that could not be made."""


class Network:
    """A switch and the hosts at it, each with an address and a name. All end with the block.

    Args:
        folder: for the logs and the output of hosts; None for a temporary one.
    """

    def __init__(self, folder: Path | None) -> None:
        self._stack = ExitStack()
        self._given = folder
        self.hosts: list[Host] = []
        self.names: dict[str, str] = {}
        self._num_hosts = 0
        self._keys: Keys | None = None

    def __enter__(self) -> Network:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        self.logs = self._given or self.folder
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.switch"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._stack.callback(self._end_switch)
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack:  # it ends the switch, also if a host does not end
            for host in self.hosts:
                host.kill()

    def host(self, name: str, *, publish: bool = True, **furniture: Any) -> Host:
        """Make a host with the next address. `furniture` are arguments of `Host`.

        Args:
            publish: whether all hosts know its name at once.
        """
        self._num_hosts += 1
        number = self._num_hosts
        address = f"{_PREFIX}.{number // 250}.{number % 250 + 1}"
        host = Host(self, name, address=address, port=number, **furniture)
        self.hosts.append(host)
        if publish:
            self.publish(name, address)
        return host

    def publish(self, name: str, address: str | None) -> None:
        """Let every host know this name from now on, or no longer (None)."""
        self.names.pop(name, None)
        if address is not None:
            self.names[name] = address
        for host in self.hosts:
            host.write_names()

    def cut(self, host: Host) -> None:
        """Lose all frames in both directions: nothing is refused, nothing arrives."""
        self._set(host, cut=True)

    def drop(self, host: Host, share: float) -> None:
        """Lose this share of the frames, in each direction."""
        self._set(host, drop=share)

    def delay(self, host: Host, milliseconds: float) -> None:
        """Delay each frame from and to the host."""
        self._set(host, delay_ms=milliseconds)

    def heal(self, host: Host) -> None:
        """End all faults of the host's connection."""
        self._set(host)

    def _set(
        self, host: Host, *, cut: bool = False, drop: float = 0.0, delay_ms: float = 0.0
    ) -> None:
        self.order({"do": "set", "port": host.port, "cut": cut, "drop": drop, "delay_ms": delay_ms})

    @property
    def keys(self) -> Keys:
        """Keys of this network, made at first use."""
        if self._keys is None:
            self._keys = Keys(self.folder / "ssh")
        return self._keys

    def order(self, what: dict[str, Any]) -> None:
        """Send an order to the switch, and wait for its answer.

        Raises:
            HostError: the switch could not obey.
        """
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(what) + "\n")
        self._switch.stdin.flush()
        answer = json.loads(self._switch.stdout.readline() or '{"error": "the switch has ended"}')
        if answer:
            raise HostError(answer["error"])

    def _end_switch(self) -> None:
        assert self._switch.stdin is not None
        self._switch.stdin.close()
        self._switch.wait(timeout=30)
