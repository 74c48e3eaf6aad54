"""A node that has node 0's address tells whoever calls there, and nobody who calls ends it."""

from __future__ import annotations

import select
import socket

from framework.launch.meet.keeper import Keeper
from framework.launch.meet.meeting import Meeting
from framework.launch.requests import Requests
from framework.launch.topology import Topology
from tests.launch.meet.members import reset


def test_who_is_gone_again_costs_nothing() -> None:
    meeting = Meeting(Topology(2, 1, 1, "127.0.0.1", 29500), 29501, {"host": "b", "node_rank": 1}, Requests())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        keeper = Keeper(meeting, listener)
        caller = socket.create_connection(listener.getsockname())
        reset(caller)
        assert select.select([listener], [], [], 20)[0]
        keeper.step()
        with socket.create_connection(listener.getsockname(), timeout=20) as second:
            keeper.step()
            assert b'"challenge"' in second.recv(4096)
        keeper.step()
