"""What agents of a running job believe of each other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from framework.launch.rendezvous.messages import Peers
from tests.launch.conftest import Connect
from tests.launch.rendezvous.members import reset

HOSTS = {0: "a", 1: "b"}


def poll_until(peers: Peers, ready: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        peers.poll(0.05)


@pytest.mark.parametrize("node", [[], {}, "1", True, 1.0, None, 7])
def test_who_names_no_node_is_lost(connect: Connect, node: object) -> None:
    """A node that says such a thing is none of ours; it costs nobody else anything."""
    link, far = connect()
    peers = Peers(0, {1: link}, HOSTS)
    far.sendall(json.dumps({"type": "failure", "node": node, "what": "x", "code": 1}).encode() + b"\n")
    poll_until(peers, lambda: peers.failures)
    assert [failure.what for failure in peers.failures] == ["node 1 (b): lost: it speaks for another node"]


def test_the_last_word_of_a_node_that_has_gone_is_heard(connect: Connect) -> None:
    """What is told to it meanwhile finds first that the connection is gone."""
    link, far = connect()
    peers = Peers(0, {1: link}, HOSTS)
    far.sendall(json.dumps({"type": "failure", "node": 1, "what": "out of memory", "code": 137}).encode() + b"\n")
    reset(far)
    time.sleep(0.2)
    peers.send_stop("SIGTERM")
    poll_until(peers, lambda: peers.is_cut_off)
    assert next(failure.what for failure in peers.failures) == "out of memory"


def test_a_request_that_crosses_go_is_obeyed_by_all(connect: Connect) -> None:
    """A node that still waits for GO names itself nowhere when it is asked to stop."""
    (link, far), (other, listening) = connect(), connect()
    peers = Peers(0, {1: link, 2: other}, {**HOSTS, 2: "c"})
    far.sendall(b'{"type": "stop", "why": "SIGTERM"}\n')
    poll_until(peers, lambda: peers.stop or peers.failures)
    assert (peers.stop, peers.failures) == ("SIGTERM at node 1 (b)", [])
    listening.settimeout(20)
    lines = listening.makefile()
    stated = [json.loads(lines.readline()) for _ in range(2)]
    assert {"type": "stop", "why": "SIGTERM", "node": 1} in stated


def test_how_nodes_ended_is_passed_on_in_lots(connect: Connect) -> None:
    """A thousand that end together would otherwise cost node 0 a million messages."""
    pairs = {node: connect() for node in range(1, 31)}
    peers = Peers(0, {node: link for node, (link, _) in pairs.items()}, {node: f"h{node}" for node in range(31)})
    for node, (_, far) in pairs.items():
        far.sendall(json.dumps({"type": "ended", "node": node, "code": node % 2}).encode() + b"\n")
    poll_until(peers, lambda: len(peers.ended) == 30)
    peers.send_ended(0)
    peers.poll(0)
    assert peers.all_ended
    peers.close()
    expected = {str(node): node % 2 for node in range(31)}
    for _, far in pairs.values():
        stated = [message for message in map(json.loads, far.makefile()) if message["type"] == "ended"]
        assert len(stated) < 5  # one in half a second
        assert {node: code for message in stated for node, code in message["codes"].items()} == expected


def test_others_hear_of_all_ends(connect: Connect) -> None:
    link, far = connect()
    peers = Peers(1, {0: link}, HOSTS)
    far.sendall(b'{"type": "ended", "codes": {"0": 0, "1": 75}}\n')
    poll_until(peers, lambda: peers.all_ended)
    assert (peers.ended, peers.failures) == ({0: 0, 1: 75}, [])


@pytest.mark.parametrize("codes", [[], {"7": 0}, {"0": "0"}, {"0": True}, {"1" * 5000: 0}, None])
def test_ends_of_another_shape_lose_node_0(connect: Connect, codes: object) -> None:
    link, far = connect()
    peers = Peers(1, {0: link}, HOSTS)
    far.sendall(json.dumps({"type": "ended", "codes": codes}).encode() + b"\n")
    poll_until(peers, lambda: peers.failures)
    assert [failure.what for failure in peers.failures] == ["node 0 (a): lost: it does not speak this protocol"]


def test_a_node_without_a_name_has_its_number() -> None:
    assert Peers(1, {}, {0: "", 1: "b"}).name(0) == "node 0"
