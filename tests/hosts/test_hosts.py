"""The hosts themselves: what each has of its own, what can go wrong between them, and that nothing
stays.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.host import Host, Mount
from tests.hosts.network import Network, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made"),
]

_SERVE = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    while True:
        with server.accept()[0] as peer:
            while said := peer.recv(1 << 16):
                peer.sendall(said)
"""
_ASK = """
import socket, sys, time
peer = socket.create_connection(("node-1", 5000), float(sys.argv[1]))
began = time.monotonic()
for _ in range(5):
    peer.sendall(b"?")
    assert peer.recv(1) == b"?"
print((time.monotonic() - began) / 5)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(None) as network:
        network.host("node-0")
        network.host("node-1", shm_bytes=1 << 20)
        network.hosts[1].start(["python3", "-c", _SERVE])
        assert _until(lambda: network.hosts[0].run(["python3", "-c", _ASK, "1"]).returncode == 0)
        yield network


def _until(holds: object) -> bool:
    deadline = time.monotonic() + 60
    while not (is_so := holds()) and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.05)
    return bool(is_so)


def _stated(host: Host, script: str) -> str:
    done = host.run(["sh", "-c", script])
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


def test_each_host_has_its_own_name_and_address(network: Network) -> None:
    for host in network.hosts:
        assert _stated(host, "hostname") == host.name
        assert host.address in _stated(host, "ip -4 -o addr show eth0")
        assert _stated(host, f"getent hosts {host.name}").split() == [host.address, host.name]


def test_each_host_has_its_own_processes_and_folders(network: Network) -> None:
    first, second = network.hosts
    _stated(first, "touch /tmp/mine /dev/shm/mine /run/mine")
    assert _stated(second, "ls /tmp /dev/shm /run | grep -c mine || true") == "0"
    assert not Path("/tmp/mine").exists()
    assert _stated(second, "df --output=size -B1 /dev/shm | tail -1").strip() == str(1 << 20)
    assert _stated(first, "echo $$") != str(os.getpid())
    assert str(os.getpid()) not in _stated(first, "ls /proc").split()
    assert first.processes() == {}


def test_names_come_and_go_while_programs_run(network: Network) -> None:
    first, second = network.hosts
    network.publish("late", "10.77.9.9")
    assert _stated(second, "getent hosts late").startswith("10.77.9.9")
    first.know("late", "10.77.9.8")
    assert _stated(first, "getent hosts late").startswith("10.77.9.8")
    assert _stated(second, "getent hosts late").startswith("10.77.9.9")
    first.know("late", None)
    network.publish("late", None)
    for host in network.hosts:
        assert host.run(["getent", "hosts", "late"]).returncode == 2


def test_a_cable_is_cut_slowed_down_and_healed(network: Network) -> None:
    first, second = network.hosts

    def ask(seconds: int) -> float | None:
        done = first.run(["python3", "-c", _ASK, str(seconds)])
        return float(done.stdout) if done.returncode == 0 else None

    usual = ask(30)
    assert usual is not None
    network.delay(second, 40)
    slow = ask(30)
    assert slow is not None
    assert slow > 0.08  # there and back
    network.cut(second)
    assert ask(1) is None
    network.drop(second, 1.0)
    assert ask(1) is None
    network.heal(second)
    assert ask(30) is not None


def test_lost_frames_are_sent_again(network: Network) -> None:
    first, second = network.hosts
    network.drop(second, 0.2)
    send = _ASK.replace("range(5)", "range(30)")
    before = time.monotonic()
    done = first.run(["python3", "-c", send, "1"])
    network.heal(second)
    # TCP waits 200 ms and more before it sends anew; that none of 60 frames is lost has a chance of
    # one in a million.
    assert done.returncode != 0 or time.monotonic() - before > 0.2


def test_a_command_ends_as_it_ends(network: Network) -> None:
    host = network.hosts[0]
    assert host.run(["sh", "-c", "exit 75"]).returncode == 75
    for number in (signal.SIGKILL, signal.SIGTERM):
        sleeping = host.start(["sleep", "600"])
        assert _until(lambda: any("sleep" in words for words in host.processes().values()))
        sleeping.signal(number)
        assert sleeping.wait(60) == 128 + number


def test_small_and_read_only_file_systems(tmp_path: Path) -> None:
    with Network(None) as network:
        host = network.host(
            "node",
            mounts={
                "/small": Mount(tmpfs_bytes=1 << 20),
                "/checkpoints/all": Mount(bind=tmp_path),
                "/frozen": Mount(bind=tmp_path, read_only=True),
            },
        )
        assert (
            "No space left" in host.run(["sh", "-c", "head -c 2000000 /dev/zero > /small/x"]).stdout
        )
        assert "Read-only" in host.run(["touch", "/frozen/x"]).stdout
        _stated(host, "echo shared > /checkpoints/all/x")
        assert (tmp_path / "x").read_text() == "shared\n"


@pytest.mark.skipif(bool(why_not(ssh=True)), reason=why_not(ssh=True) or "sshd is here")
def test_plain_ssh_between_hosts(network: Network) -> None:
    for host in network.hosts:
        host.start_sshd()
    assert (
        _stated(network.hosts[0], "ssh node-1 'hostname; echo $SSH_CONNECTION'").split()[0]
        == "node-1"
    )
    assert network.hosts[0].run(["ssh", "node-1", "exit 77"]).returncode == 77


def test_pid_1_may_be_a_program_of_its_own() -> None:
    with Network(None) as network:
        pod = network.host(
            "pod",
            command=["sh", "-c", "echo I am $$; trap 'exit 75' TERM; sleep 600 & wait"],
            environment={"PATH": os.environ["PATH"]},
            uid=1000,
        )
        assert _until(lambda: "I am 1" in pod.log.read_text() and pod.processes())
        pod.signal(signal.SIGTERM)
        assert _until(lambda: pod.exit_code() == 75)
        assert pod.processes() == {}


def test_a_killed_host_is_gone_at_once_and_nothing_stays() -> None:
    links = set(Path("/sys/class/net").iterdir())
    with Network(None) as network:
        host = network.host("node")
        host.start(["setsid", "sh", "-c", "trap '' TERM; sleep 600 & wait"])
        assert _until(lambda: len(host.processes()) >= 2)
        folder, processes = network.folder, host.processes()
        host.kill()
        assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
        assert not host.is_alive()
    assert not folder.exists()
    assert (
        str(folder) not in Path("/proc/self/mounts").read_text()
    )  # other tests of this moment have mounts of their own
    assert set(Path("/sys/class/net").iterdir()) == links
