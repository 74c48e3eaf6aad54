"""Agents that meet as they do before a start, and start nothing: `doctor -H` looks so at what is
between hosts.

Node 0 waits for the others for some seconds, and goes on with those that came: clocks are compared
by their HELLOs, all nodes call each other, and node 0 looks for the marks of all in the run folder.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from framework.doctor.node.findings import Check
from framework.doctor.node.start import compare_clocks, not_shared, unseen_marks
from framework.errors import ConfigError, PeerLostError, Problem
from framework.launch.rendezvous.connections import Client
from framework.launch.rendezvous.connectivity import is_loopback, resolve
from framework.launch.rendezvous.coordinator import Coordinator
from framework.launch.rendezvous.member import Member, find_listener
from framework.launch.rendezvous.messages import is_address
from framework.launch.rendezvous.session import LOOK_SECONDS, JobOver, Session

# Agents are asked to meet at the same time, and call again every second.
MEET_SECONDS: Final = 8.0
# NFS may show another host's new file after its attribute cache expires, 3 s by default.
_SEE_SECONDS: Final = 5.0


async def inspect(session: Session, names: Sequence[str], marks: Sequence[str]) -> list[Check]:
    """Meet the other agents, and return what this one has found out.

    Args:
        session: this node's part; its deadline is for the calls of node 0.
        names: of the nodes, by which findings name them.
        marks: paths of the nodes' marks in the run folder; empty if the run saves nothing there.
    """
    if session.topology.node_rank:
        return await _call_node_0(session, names)
    try:
        listener = await find_listener(session)
    except ConfigError as error:
        return [Check("network", "", error.problems)]
    inspector = Inspector(session, listener, names)
    await inspector.listen()
    try:
        return await inspector.inspect(marks)
    finally:
        await inspector.close()


async def _call_node_0(session: Session, names: Sequence[str]) -> list[Check]:
    """Take part as another node than node 0, until it ends; return only what has failed here."""
    member = Member(session)
    try:
        await member.begin()
    except JobOver:
        return []
    except ConfigError as error:
        return [Check("network", "", error.problems)]
    except PeerLostError as error:
        return [Check("network", "", [_unmet(session, names, str(error))])]
    finally:
        await member.close()
    return []


def _unmet(session: Session, names: Sequence[str], reason: str) -> Problem:
    """Return the problem of a node that did not reach the agent of node 0."""
    topology = session.topology
    master = topology.master_addr
    file = f"node {names[topology.node_rank]}"
    addresses = resolve(master)
    if is_loopback(master) and not is_address(master):
        return Problem(
            "name-loopback",
            "the name of another host leads back to this one",
            "correct /etc/hosts there",
            key=names[0],
            value=addresses[0],
            file=file,
        )
    where = f"{names[0]} ({', '.join(addresses) or 'no address'})"
    fix = (
        f"let {names[topology.node_rank]} connect to {where} at every port: firewall, security "
        "group, network policy, service mesh"
    )
    return Problem("port-not-reached", reason, fix, key=f"{master}:{session.port}", file=file)


class Inspector(Coordinator):
    """Node 0 of agents that start nothing. `listen` comes first, `close` last."""

    def __init__(self, session: Session, listener: socket.socket, names: Sequence[str]) -> None:
        super().__init__(session, listener)
        self._node_names = names

    async def inspect(self, marks: Sequence[str]) -> list[Check]:
        """Return the checks of clocks, network and run folder, and let the others go."""
        self._session.begin_wait()
        num_others = len(self._node_names) - 1
        await self._wait_until(lambda: len(self._clients.present) >= num_others, MEET_SECONDS)
        chosen = sorted(self._clients.present, key=lambda client: client.node)
        checks = [self._compare_clocks(chosen), await self._network(chosen)]
        if marks:
            checks.append(await self._run_folder(marks))
        await self._send_last("done", code=0)
        return checks

    async def _wait_until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition holds, for at most `seconds`; raises RunStopped on request."""
        until = time.monotonic() + seconds
        while not holds() and time.monotonic() < until:
            self._session.requests.refuse_start()
            await self._wait(LOOK_SECONDS)

    def _compare_clocks(self, chosen: Sequence[Client]) -> Check:
        offsets = {self._node_names[0]: 0.0}
        for client in chosen:
            offsets[self._node_names[client.node]] = client.hello["ahead"]
        return compare_clocks(offsets)

    async def _network(self, chosen: Sequence[Client]) -> Check:
        """Have all nodes call each other, and node 0 at the port of the ranks."""
        session = self._session
        name = self._node_names[0]
        master_port = session.topology.master_port
        problems = []
        try:
            session.answer_at(self._address, master_port)
        except OSError as error:
            reason = f"nodes cannot meet there: {(error.strerror or str(error)).lower()}"
            fix = "choose another --master_port"
            problems.append(
                Problem(
                    "port-not-usable", reason, fix, "--master_port", master_port, f"node {name}"
                )
            )
        is_open = not problems
        callers = [client for client in chosen if "echo" in client.hello]
        if not callers:
            return Check("network", "", problems, {"connections": 0})
        names = dict(enumerate(self._node_names))
        port = session.answer_at(self._address)
        round_ = self._call_each_other(callers, port, names)
        self._round = round_
        while not round_.is_over:
            session.requests.refuse_start()
            await self._wait(LOOK_SECONDS)
        problems += round_.problems(with_master=is_open)
        return Check("network", "", problems, {"connections": round_.num_calls})

    async def _run_folder(self, marks: Sequence[str]) -> Check:
        """Look for what the other nodes wrote in the run folder."""
        own_mark = marks[0]
        folder = str(Path(own_mark).parent)
        others = {mark for mark in marks if mark}
        seen: set[str] = set()
        until = time.monotonic() + _SEE_SECONDS
        unseen = unseen_marks(own_mark, others, seen)
        while unseen and time.monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS)
            unseen = unseen_marks(own_mark, others, seen)
        problems = []
        for name, mark in zip(self._node_names, marks, strict=True):
            if mark in unseen:
                problems.append(not_shared(name, mark, name_of_0=self._node_names[0]))
        if problems:
            return Check("run folder", f"{folder} is not the same folder everywhere", problems)
        return Check("run folder", f"{folder} is seen by all")
