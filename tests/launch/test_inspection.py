"""`doctor -H` and `--bench` between machines made of namespaces, with sshd on each, and what is
wrong between them.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.node.broken import QUICKSTART, doctor
from tests.hosts.host import Host, Mount
from tests.hosts.network import Network, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timing]
needs_hosts = pytest.mark.skipif(
    bool(why_not(ssh=True)), reason=why_not(ssh=True) or "hosts can be made"
)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    shared = tmp_path_factory.mktemp("shared")
    with Network(None) as network:
        for name in ("node-0", "node-1", "node-2"):
            host = network.host(name, mounts={"/shared": Mount(bind=shared)})
            host.start_sshd()
            done = host.run(
                [
                    "sh",
                    "-c",
                    "mkdir -p /tmp/project && printf 'class Net: pass\n' > /tmp/project/my_nets.py",
                ]
            )
            assert done.returncode == 0, done.stdout
        network.hosts[0].run(
            ["sh", "-c", "printf 'node-0 slots=1\nnode-1 slots=1\nnode-2 slots=1\n' > /tmp/hosts"]
        )
        yield network


def ask(host: Host, *words: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "framework",
        "doctor",
        QUICKSTART,
        "-H",
        "/tmp/hosts",
        "--json",
        *words,
    ]
    done = host.run(command, cwd="/tmp/project")
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 78)
    return found


def reported(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(each["id"], each["node"]) for each in found["findings"] if each["severity"] == "error"}


@needs_hosts
def test_hosts_in_good_order(network: Network) -> None:
    found = ask(network.hosts[0], "run.output_dir=/shared")
    assert reported(found) == set()
    assert [node["node"] for node in found["nodes"]] == ["node-0", "node-1", "node-2"]
    stated = {each["name"]: each["found"] for each in found["across"]}
    assert stated["network"] == "9 connections, every one answered"
    assert stated["run folder"] == "/shared is seen by all"
    assert not network.hosts[1].processes()


@needs_hosts
def test_all_problems_between_hosts_are_reported_at_once(network: Network) -> None:
    """The hosts have a folder that is not shared, other code, a name that leads back, and a port in
    use.
    """
    first, second, third = network.hosts
    third.run(["sh", "-c", "printf 'class Net: depth = 2\n' > /tmp/project/my_nets.py"])
    second.know("node-0", "127.0.0.1")
    taken = first.start(
        [
            sys.executable,
            "-c",
            "import socket, time; held = socket.create_server(('', 29500)); "
            "print('taken', flush=True); time.sleep(600)",
        ]
    )
    while "taken" not in taken.stated():
        assert taken.poll() is None, taken.stated()
        time.sleep(0.02)
    try:
        found = ask(first, "run.output_dir=/tmp/runs", "model={target: 'my_nets:Net'}")
    finally:
        taken.signal(9)
        second.know("node-0", first.address)
        third.run(["sh", "-c", "printf 'class Net: pass\n' > /tmp/project/my_nets.py"])
    not_shared = {("run-folder-not-shared", host.name) for host in (second, third)}
    others = {
        ("code-differs", "node-2"),
        ("name-loopback", "node-1"),
        ("port-not-usable", "node-0"),
    }
    assert reported(found) == not_shared | others, found["findings"]


@needs_hosts
def test_a_host_that_is_gone(network: Network) -> None:
    network.cut(network.hosts[2])
    try:
        found = ask(network.hosts[0], "run.output_dir=/shared", "--ssh_args", "-o ConnectTimeout=2")
    finally:
        network.heal(network.hosts[2])
    assert reported(found) == {("host-unreachable", "node-2")}
    assert {each["name"] for each in found["across"]} >= {"network", "run folder"}, (
        "the others are compared all the same"
    )


@needs_hosts
def test_the_slow_host_is_named(network: Network) -> None:
    network.delay(network.hosts[1], 20)
    try:
        found = ask(network.hosts[0], "run.output_dir=/shared", "--bench")
    finally:
        network.heal(network.hosts[1])
    slow = [
        (each["id"], each["node"]) for each in found["findings"] if each["id"].startswith("slow")
    ]
    assert slow == [("slow-node", "node-1")], found["measured"]
    storage = [each["storage"] for each in found["measured"] if "storage" in each]
    assert [each["host"] for each in storage] == ["node-0", "node-1", "node-2"]


def test_this_machine_is_measured(tmp_path: Path) -> None:
    done = doctor(QUICKSTART, f"run.output_dir={tmp_path}", "--num_gpus", "2", "--bench", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    rows = [each["all_reduce"] for each in found["measured"] if "all_reduce" in each]
    assert [each["bytes"] >> 20 for each in rows] == [1, 4, 16, 64]
    for each in rows:  # of two ranks, both bandwidths are the same, and size over time
        assert (
            each["bus"]
            == pytest.approx(each["algorithm"])
            == pytest.approx(each["bytes"] / each["seconds"])
        )
    assert not list(tmp_path.iterdir())


@needs_hosts
def test_a_start_is_refused_on_every_host(network: Network) -> None:
    """The refusal comes before a rank starts, and without an option for it."""
    command = [
        sys.executable,
        "-m",
        "framework",
        "launch",
        QUICKSTART,
        "run.output_dir=/tmp/runs",
        "-H",
        "/tmp/hosts",
    ]
    done = network.hosts[0].run(command, cwd="/tmp/project")
    assert done.returncode == 78, done.stdout
    refusal = r"nodes .*\b1 \(node-1\).*: run.output_dir = /tmp: what it wrote there is not seen by node 0 \(node-0\)"
    for host in network.hosts:  # each of them prints the same
        assert re.search(rf"^{host.name}: {refusal}", done.stdout, re.MULTILINE), done.stdout
