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
from framework.launch.hosts.topology import HostTopology
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
    }
    hello |= {
        "master_port": port,
        "host": f"node-{number}",
        "machine": "",
        "hosts": "",
        "clock": time.time(),
    }
    hello |= {"facts": {"torch": "2", "config": "a" * 16, "code": "b" * 16}}
    topology = HostTopology(agents, 8, number, "127.0.0.1", port)
    return Session(topology, hello, StopRequests(), port, TOKEN)


async def lead(agents: int, port: int, ends: Connection, quiet_seconds: float) -> None:
    job = await join(session(0, agents, port))
    cpu = time.process_time()
    start = await job.begin()
    met = time.process_time() - cpu
    await asyncio.sleep(1.0)
    cpu = time.process_time()
    await asyncio.sleep(quiet_seconds)
    ends.send(
        {
            "meet_cpu_seconds": met,
            "idle_core_percent": 100 * (time.process_time() - cpu) / quiet_seconds,
        }
    )
    while len(start.peers.ended) < agents - 1:
        await start.peers.wait(0.5)
    start.peers.send("ended", code=0)
    await start.peers.flush()
    await job.close()


class Others:
    """All agents but node 0's."""

    def __init__(self, agents: int, port: int) -> None:
        self.count, self.port = agents - 1, port
        self.done, self.last = Counter[str](), {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.may: dict[str, asyncio.Event] = {what: asyncio.Event() for what in ("stop", "fail")}

    def note(self, what: str) -> None:
        self.done[what] += 1
        self.last[what] = time.monotonic()

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

    async def until(self, what: str) -> float:
        while self.done[what] < self.count:
            await asyncio.sleep(0.01)
            if self.failed.done():
                self.failed.result()
        return self.last[what]

    async def run(self) -> None:
        await asyncio.gather(*(self.agent(number) for number in range(1, self.count + 1)))


async def others(agents: int, port: int, ends: Connection) -> dict[str, float]:
    group, begun = Others(agents, port), time.monotonic()
    group.failed = asyncio.ensure_future(group.run())
    found = {"meet_seconds": await group.until("met") - begun}
    found |= await asyncio.get_running_loop().run_in_executor(None, ends.recv)
    for what in ("stop", "fail"):
        begun = time.monotonic()
        group.may[what].set()
        found[f"{what}_seconds"] = await group.until(what) - begun
    found["end_seconds"] = await group.until("end") - begun
    await group.failed
    return {name: round(value, 3) for name, value in found.items()}


def measure(agents: int, *, quiet_seconds: float = QUIET_SECONDS) -> dict[str, float]:
    """Run one coordinator with so many agents."""
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
    given = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "load_average": load_average(), "agents": {}}
    for agents in given.agents:
        found["agents"][str(agents)] = measure(agents)
        print(agents, json.dumps(found["agents"][str(agents)]), flush=True)
    write(found, given.out)


if __name__ == "__main__":
    main()
