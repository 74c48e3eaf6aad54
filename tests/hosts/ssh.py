"""Keys and settings for sshd on hosts: each host has an /etc/ssh of its own, so that plain
`ssh NAME` works between them.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.hosts.host import Host

_READY_SECONDS = 30


class Keys:
    """A key of all hosts, and a key of the user who enters them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.user = folder / "user"
        self._host = folder / "host"
        self._known = folder / "known_hosts"
        for key in (self.user, self._host):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(key)],
                check=True,
            )
        public = self._host.with_suffix(".pub").read_text()
        self._known.write_text(f"* {public}")

    def give(self, host: Host, *, port: int = 2222) -> None:
        """Write a host's /etc/ssh: it may enter all others."""
        folder = host.ssh_folder
        for source, name in (
            (self._host, "host_key"),
            (self.user, "user_key"),
            (self._known, "known_hosts"),
            (self.user.with_suffix(".pub"), "authorized_keys"),
        ):
            shutil.copy(source, folder / name)
        (folder / "sshd_config").write_text(
            f"Port {port}\n"
            "HostKey /etc/ssh/host_key\n"
            "AuthorizedKeysFile /etc/ssh/authorized_keys\n"
            "StrictModes no\n"
            "PermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\n"
            "UsePAM no\n"
            "PidFile none\n"
            "AcceptEnv LANG LC_*\n"
        )
        (folder / "ssh_config").write_text(
            "Host *\n"
            f"  Port {port}\n"
            "  User root\n"
            "  IdentityFile /etc/ssh/user_key\n"
            "  IdentitiesOnly yes\n"
            "  GlobalKnownHostsFile /etc/ssh/known_hosts\n"
            "  UserKnownHostsFile /dev/null\n"
            "  LogLevel ERROR\n"
        )

    def serve(self, host: Host, *, port: int) -> None:
        """Start a host's sshd."""
        self.give(host, port=port)
        done = host.run(["sh", "-c", "mkdir -p /run/sshd && exec /usr/sbin/sshd"])
        assert done.returncode == 0, done.stdout
        self._wait(host, port)

    def _wait(self, host: Host, port: int) -> None:
        look = f"import socket; socket.create_connection(('{host.address}', {port}), 2).recv(4)"
        deadline = time.monotonic() + _READY_SECONDS
        while host.run(["python3", "-c", look]).returncode != 0:
            assert time.monotonic() < deadline, f"sshd of {host.name} does not answer"
