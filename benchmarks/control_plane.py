"""How many agents one coordinator holds: python -m benchmarks.control_plane [--agents 250 1000
4000] [--out FILE]

Node 0 is a process of its own; all other agents are the real ones, in one process, over loopback,
with a token. Measured are the time from the first call to the last GO; node 0's share of a core
while nothing happens; how long a request to stop, and a failure, takes until the last has heard it,
where every agent says it at once; and how long until the last knows how all have ended. The agents
share one core, so that these are upper bounds: a real node has one to itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, load_average, machine, write
from framework.hosts.topology import HostTopology
from framework.launch.rendezvous.channel import PROTOCOL
from framework.launch.rendezvous.join import Job, join
from framework.launch.rendezvous.session import Session, Start
from framework.launch.stop_requests import StopRequests
from framework.system.ports import free_port

TOKEN = "a token of sixteen bytes or more"
QUIET_SECONDS = 20.0


def session(number: int, agents: int, port: int) -> Session:
    hello = {
        "protocol": PROTOCOL,
        "job": "",
        "node_rank": number,
        "nnodes": agents,
        "spares": 0,
        "slots": 8,
        "master_port": port,
        "host": f"node-{number}",
        "machine": "",
        "hosts": "",
        "clock": time.time(),
        "facts": {"torch": "2", "config": "aaaaaaaaaaaaaaaa", "code": "bbbbbbbbbbbbbbbb"},
    }
    topology = HostTopology(agents, 8, number, "127.0.0.1", port)
    return Session(topology, hello, StopRequests(), port, TOKEN)


async def lead(agents: int, port: int, ends: Connection, quiet_seconds: float) -> None:
    job = await join(session(0, agents, port))
    cpu = time.process_time()
    start = await job.begin()
    meet_seconds = time.process_time() - cpu
    await asyncio.sleep(1.0)
    cpu = time.process_time()
    await asyncio.sleep(quiet_seconds)
    idle_percent = 100 * (time.process_time() - cpu) / quiet_seconds
    ends.send({"meet_cpu_seconds": meet_seconds, "idle_core_percent": idle_percent})
    while len(start.peers.ended) < agents - 1:
        await start.peers.wait(0.5)
    start.peers.send("ended", code=0)
    await start.peers.flush()
    await job.close()


class Others:
    """All agents but node 0's."""

    def __init__(self, agents: int, port: int) -> None:
        self.count = agents - 1
        self.port = port
        self.num_done = Counter[str]()  # agents that have passed an event
        self.last: dict[str, float] = {}  # time of the last one
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.may = {"stop": asyncio.Event(), "fail": asyncio.Event()}

    def note(self, event: str) -> None:
        self.num_done[event] += 1
        self.last[event] = time.monotonic()

    async def agent(self, number: int) -> None:
        job: Job = await join(session(number, self.count + 1, self.port))
        start: Start = await job.begin()
        self.note("met")
        await self.may["stop"].wait()
        start.peers.send("stop", why="SIGTERM")
        while not start.peers.stop:
            await start.peers.wait(60)
        self.note("stop")
        await self.may["fail"].wait()
        start.peers.send_failure(f"node {number}: storage failed", code=74)
        while not start.peers.failures:
            await start.peers.wait(60)
        self.note("fail")
        start.peers.send("ended", code=75)
        while not (start.peers.all_ended or start.peers.is_cut_off):
            await start.peers.wait(60)
        assert start.peers.all_ended
        self.note("end")
        await job.close()

    async def until(self, event: str) -> float:
        """Return the time at which the last agent has passed the event."""
        while self.num_done[event] < self.count:
            await asyncio.sleep(0.01)
            if self.failed.done():
                self.failed.result()
        return self.last[event]

    async def run(self) -> None:
        await asyncio.gather(*(self.agent(number) for number in range(1, self.count + 1)))


async def others(agents: int, port: int, ends: Connection) -> dict[str, float]:
    group = Others(agents, port)
    begun = time.monotonic()
    group.failed = asyncio.ensure_future(group.run())
    figures = {"meet_seconds": await group.until("met") - begun}
    figures |= await asyncio.get_running_loop().run_in_executor(None, ends.recv)
    for event in ("stop", "fail"):
        begun = time.monotonic()
        group.may[event].set()
        figures[f"{event}_seconds"] = await group.until(event) - begun
    figures["end_seconds"] = await group.until("end") - begun
    await group.failed
    return {name: round(value, 3) for name, value in figures.items()}


def measure(agents: int, *, quiet_seconds: float = QUIET_SECONDS) -> dict[str, float]:
    """Run one coordinator with this number of agents, and return the figures."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe()
    port = free_port()
    process = context.Process(target=lambda: asyncio.run(lead(agents, port, far, quiet_seconds)))
    process.start()
    try:
        return asyncio.run(others(agents, port, near))
    finally:
        process.join(30)
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--agents", type=int, nargs="+", default=[250, 1000, 4000])
    parser.add_argument("--out", type=Path, default=RESULTS / "control_plane.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "load_average": load_average(), "agents": {}}
    for agents in arguments.agents:
        figures = measure(agents)
        results["agents"][str(agents)] = figures
        print(agents, json.dumps(figures), flush=True)
    write(results, arguments.out)


if __name__ == "__main__":
    main()
