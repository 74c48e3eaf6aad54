"""Looks at every host of a hostfile, and at what is between them: a `member` on each through ssh, asked from here.

Whatever a host does not do within its time is a finding about that host; no host is waited for longer than a minute.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from framework.doctor.member import ANSWER
from framework.doctor.node.findings import Check, Node
from framework.doctor.node.links import Reached
from framework.doctor.node.need import Need
from framework.doctor.node.start import compare, compare_clocks
from framework.errors import Problem
from framework.launch.environment import ROOT
from framework.launch.hosts.hostfile import Host, first_few
from framework.launch.ssh import passed_on

# `Remote`: the preflight's member on one host, started through ssh and asked in lines of JSON.


_ASK_SECONDS: Final = 40.0
_CONNECT_SECONDS: Final = 10


class HostFailed(Exception):  # noqa: N818 - it is told, and never leaves this module
    """A host did not answer; the text says why."""


class Remote:
    """The member on one host."""

    def __init__(self, host: Host, command: Sequence[str], *, address: str = "") -> None:
        self.host, self.name = host, host.name.rpartition("@")[2]
        self.address = address
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C ends them by their stdin, after they have cleaned up
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._stderr: list[str] = []
        self._errors = threading.Thread(target=self._keep_errors, daemon=True)
        self._errors.start()
        threading.Thread(target=self._keep_answers, daemon=True).start()

    def ask(self, order: Mapping[str, Any], *, seconds: float = _ASK_SECONDS) -> dict[str, Any]:
        """Send an order and wait for its answer.

        Raises:
            HostFailed: there is none.
        """
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise HostFailed(f"no answer within {seconds:.0f} s") from None
        except OSError:
            line = None
        if line is None:
            code = self._process.wait()
            self._errors.join(1)
            last = next((each.strip() for each in reversed(self._stderr) if each.strip()), "it said nothing")
            raise HostFailed(f"ssh ended with {code}: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it clean up, and end it where it does not."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _keep_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(line.removeprefix(ANSWER))
        self._answers.put(None)

    def _keep_errors(self) -> None:
        assert self._process.stderr is not None
        self._stderr.extend(self._process.stderr)


def member_command(host: Host, *, ssh_args: Sequence[str] = ()) -> list[str]:
    """Starts the member: same Python, same folder, as DeepSpeed's launcher expects them; words are quoted for the shell
    there.
    """
    path = [f"PYTHONPATH={ROOT}"] if (ROOT / "pyproject.toml").is_file() else []
    words = ["env", *path, sys.executable, "-m", "framework.doctor.member"]
    there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
    own = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", "-T"]
    return ["ssh", *ssh_args, *own, "--", host.name, there]  # of two values ssh takes the first


def variables() -> dict[str, str]:
    """Return the variables of the environment here that `launch` gives to the hosts; sent over stdin, where nobody sees
    them.
    """
    return passed_on(os.environ, exports=())


def each_of(remotes: Sequence[Remote], do: Callable[[Remote], Any]) -> list[Any]:
    """Return the results of `do` for each host, all run at the same time; the first exception is raised after all have
    ended.
    """
    with ThreadPoolExecutor(max_workers=max(1, min(64, len(remotes)))) as pool:
        return list(pool.map(do, remotes))


_EXAMINE_SECONDS: Final = 60.0
# Calls between all pairs up to here, and beyond it from and to node 0 and between neighbours.
_ALL_PAIRS: Final = 16


Start = Callable[[Host], Sequence[str]]


@dataclass(frozen=True)
class Wanted:
    """Subject of the examination of all hosts."""

    need: Need
    config: str | None
    overrides: tuple[str, ...]
    port: int
    own_variables: Mapping[str, Mapping[str, str]]


def look_at_hosts(
    hosts: Sequence[Host],
    need: Need,
    *,
    config: str | None,
    overrides: Sequence[str],
    addresses: Sequence[str],
    port: int,
    own_variables: Mapping[str, Mapping[str, str]],
    start: Start = member_command,
) -> tuple[tuple[Node, ...], tuple[Check, ...]]:
    """Every host and what is between them.

    Args:
        hosts: in the order of the hostfile; the first is node 0.
        need: what the run asks of each.
        config: path of the run config, the same on every host.
        overrides: settings that win over it.
        addresses: what the others call each host.
        port: where node 0 will listen.
        own_variables: of single hosts, by name.
        start: the command that starts a member on a host.
    """
    asked = Wanted(need, config, tuple(overrides), port, own_variables)
    with ExitStack() as stack:
        remotes = [Remote(host, start(host), address=address) for host, address in zip(hosts, addresses, strict=True)]
        for remote in remotes:
            stack.callback(remote.close)
        nodes = each_of(remotes, lambda remote: _examined(remote, asked))
        alive = [remote for remote, node in zip(remotes, nodes, strict=True) if node.facts]
        if len(alive) < 2:
            return tuple(nodes), ()
        facts = {node.name: node.facts for node in nodes if node.facts}
        return tuple(nodes), (*compare(facts), *_between(alive, asked))


def _examined(remote: Remote, asked: Wanted) -> Node:
    started = time.perf_counter()
    order = {
        "do": "examine",
        "name": remote.name,
        "variables": {**variables(), **asked.own_variables.get(remote.host.name, {})},
        "cluster": asdict(asked.need.cluster),
        "config": asked.config,
        "overrides": list(asked.overrides),
    }
    try:
        answer = remote.ask(order, seconds=_EXAMINE_SECONDS)
    except HostFailed as error:
        problem = Problem(
            kind="host-unreachable",
            key="ssh",
            reason=str(error),
            fix=f"try: ssh {remote.host.name} {sys.executable} -V",
        )
        return Node(remote.name, (Check("ssh", "cannot be looked at", (problem,)),), time.perf_counter() - started)
    return Node(remote.name, tuple(map(Check.from_dict, answer["checks"])), answer["seconds"])


def _clocks(remotes: Sequence[Remote]) -> Check:
    """Half of the way there and back is taken off; the shortest of three ways is the truest."""

    def offset(remote: Remote) -> float:
        measured: list[tuple[float, float]] = []
        for _ in range(3):
            sent = time.time()
            clock = remote.ask({"do": "clock"})["clock"]
            received = time.time()
            measured.append((received - sent, clock - (sent + received) / 2))
        return min(measured)[1]

    return compare_clocks(dict(zip([each.name for each in remotes], each_of(remotes, offset), strict=True)))


def _between(remotes: Sequence[Remote], asked: Wanted) -> Iterator[Check]:
    token = secrets.token_hex(16)
    try:
        yield _clocks(remotes)
        yield _network(remotes, asked, token)
        if asked.need.checkpoints is not None and asked.need.saves:
            yield _shared_folder(remotes, asked, token)
    except HostFailed as error:
        problem = Problem(
            kind="host-lost", reason=f"a host left while it was looked at: {error}", fix="run doctor again"
        )
        yield Check("network", "not finished", (problem,))


def _network(remotes: Sequence[Remote], asked: Wanted, token: str) -> Check:
    """Check the network: every host reaches the port of node 0, and each other at a port that the system chose, as NCCL
    and gloo do.
    """
    of_node_0 = [asked.port, asked.port + 1]  # of ranks, and of the agents that `launch` starts
    wanted = {remote: [0, *of_node_0] if remote is remotes[0] else [0] for remote in remotes}
    opened = each_of(remotes, lambda each: each.ask({"do": "listen", "ports": wanted[each]})["ports"])
    problems = [
        Problem(
            kind="port-not-usable",
            file=f"node {remotes[0].name}",
            key="--master_port",
            value=port,
            reason=f"nobody can meet there: {found}",
            fix="choose another --master_port",
        )
        for port, found in zip(of_node_0, opened[0][1:], strict=True)
        if isinstance(found, str)
    ]
    plan = {index: _targets(index, remotes, opened) for index in range(len(remotes))}
    calls = [
        (remote, [(remotes[to].address, port) for to, port in plan[index]]) for index, remote in enumerate(remotes)
    ]
    answers = each_of(
        [each for each, _ in calls],
        lambda each: each.ask({"do": "call", "token": token, "targets": dict(calls)[each]})["reached"],
    )
    for index, reached in enumerate(answers):
        for (to, port), values in zip(plan[index], reached, strict=True):
            problems += _about_call(remotes[index].name, remotes[to].name, port, Reached(**values))
    count = sum(map(len, plan.values()))
    stated = (
        f"{count} connections, every one answered" if not problems else f"{len(problems)} of {count} connections fail"
    )
    return Check("network", stated, tuple(problems))


def _targets(index: int, remotes: Sequence[Remote], opened: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
    """(host, port) pairs that a host calls."""
    others = range(len(remotes)) if len(remotes) <= _ALL_PAIRS or index == 0 else {0, (index + 1) % len(remotes)}
    pairs = [(to, opened[to][0]) for to in others if to != index and isinstance(opened[to][0], int)]
    return pairs + ([(0, port) for port in opened[0][1:] if isinstance(port, int)] if index else [])


def _about_call(caller: str, called: str, port: int, reached: Reached) -> Iterator[Problem]:
    if reached.is_loopback:
        yield Problem(
            kind="name-loopback",
            file=f"node {caller}",
            key=called,
            value=reached.address,
            fix="mend /etc/hosts there",
            reason="the name of another host leads back to this one",
        )
    elif reached.reason:
        yield Problem(
            kind="port-not-reached",
            file=f"node {caller}",
            key=f"{called}:{port}",
            reason=reached.reason,
            fix=f"let {caller} connect to {called} ({reached.address or 'no address'}) at every port: firewall, "
            "security group, network policy, service mesh",
        )


def _shared_folder(remotes: Sequence[Remote], asked: Wanted, token: str) -> Check:
    """Each host leaves a mark where node 0 would save; each must see all of them."""
    folder = remotes[0].ask({"do": "place", "folder": str(asked.need.checkpoints)})["folder"]
    numbers = {each: number for number, each in enumerate(remotes)}
    problems = []

    def refuse(remote: Remote, reason: str) -> None:
        problems.append(
            Problem(
                kind="run-folder-not-shared",
                file=f"node {remote.name}",
                key=folder,
                reason=reason,
                fix="set run.output_dir to a folder that all hosts share: every rank saves its part of a checkpoint "
                "there",
            )
        )

    marked = []
    for remote, answer in zip(
        remotes,
        each_of(
            remotes, lambda each: each.ask({"do": "mark", "folder": folder, "token": token, "node": numbers[each]})
        ),
        strict=True,
    ):
        if answer["reason"]:
            refuse(remote, f"nothing can be written there: {answer['reason']}")
        else:
            marked.append(numbers[remote])
    order = {"do": "see", "folder": folder, "token": token, "nodes": marked}
    for remote, unseen in zip(remotes, each_of(remotes, lambda each: each.ask(order)["unseen"]), strict=True):
        others = [remotes[number].name for number in unseen]
        if others:
            refuse(remote, f"what {first_few(others)} wrote is not seen here")
    stated = f"{folder} is seen by all" if not problems else f"{folder} is not the same folder everywhere"
    return Check("run folder", stated, tuple(problems))
