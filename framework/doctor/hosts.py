"""Looks at every host of a hostfile, and at what is between them: a `member` on each through ssh,
asked from here. `doctor --bench` measures them: `framework.engine.link_bench` on every rank.

Whatever a host does not do within its time is a finding about that host; no host is waited for
longer than a minute.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final, TypeVar

from framework.doctor.member import ANSWER
from framework.doctor.node.findings import Check, Node, warning
from framework.doctor.node.links import Reached, neighbours
from framework.doctor.node.requirements import Requirements
from framework.doctor.node.start import NOT_SHARED, WHY_SHARED, compare, compare_clocks
from framework.errors import Problem
from framework.launch.environment import ROOT
from framework.launch.hosts.devices import visible_variable
from framework.launch.hosts.hostfile import Chosen, Host, first_few
from framework.launch.ssh import address_of, passed_on, ssh_command
from framework.system.ports import free_port

_ASK_SECONDS: Final = 40.0
_CONNECT_SECONDS: Final = 10
_EXAMINE_SECONDS: Final = 60.0
_BENCH_SECONDS: Final = 180.0
# A host whose best partner gets less than this share of what others get is slow; links of equal
# hosts differ by a few percent.
_SLOW_SHARE: Final = 0.6
_GB: Final = 1e9
_MEMBER: Final = (sys.executable, "-m", "framework.doctor.member")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class DoctorOptions:
    """Parsed command line; `config` None: any run. Without `chosen` hosts it is about this machine.

    Attributes:
        num_ranks: on each host; None: one to a device.
        master_addr: of the first host, as the others know it; empty: as `launch -H` finds it.
    """

    config: str | None
    overrides: tuple[str, ...]
    chosen: tuple[Chosen, ...]
    num_ranks: int | None
    master_addr: str
    master_port: int
    ssh_args: str = ""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """With the devices that were chosen for slots."""
        return tuple(Host(item.host.name, len(item.devices)) for item in self.chosen)

    @property
    def addresses(self) -> list[str]:
        """Address of each host as the others call it."""
        found = [address_of(item.host.name, ssh_args=self.ssh_args) for item in self.chosen]
        return [self.master_addr, *found[1:]] if self.master_addr else found

    @property
    def own_variables(self) -> dict[str, dict[str, str]]:
        """Of single hosts: devices that are not the first, of whichever kind, as their agents will
        have them.
        """
        return {
            item.host.name: {
                visible_variable(kind): ",".join(map(str, item.devices)) for kind in ("cuda", "npu")
            }
            for item in self.chosen
            if not item.is_first
        }


class HostFailed(Exception):  # noqa: N818 - it is told, and never leaves this module
    """A host did not answer; the text says why."""


class Remote:
    """The member on one host, asked in lines of JSON; `number` is its place among all hosts."""

    def __init__(
        self, host: Host, command: Sequence[str], *, number: int, address: str = ""
    ) -> None:
        self.host = host
        self.name = host.name.rpartition("@")[2]
        self.number = number
        self.address = address
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - see `close`
        pipe = subprocess.PIPE
        errors = self._stderr
        # A session of its own: Ctrl-C ends them by their stdin, after they have cleaned up.
        self._process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._keep_answers, daemon=True).start()

    def ask(self, order: Mapping[str, Any], *, seconds: float = _ASK_SECONDS) -> dict[str, Any]:
        """Send an order and return its answer; raises HostFailed where there is none."""
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
            self._stderr.seek(0)
            last = self._stderr.read().strip().rpartition("\n")[2].strip() or "it said nothing"
            raise HostFailed(f"ssh ended with {code}: {last}")
        return dict(json.loads(line))

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
        self._stderr.close()

    def _keep_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(line.removeprefix(ANSWER))
        self._answers.put(None)


def member_command(host: Host, *, ssh_args: str = "") -> list[str]:
    """The `ssh` that starts the member: same Python, same folder, as DeepSpeed's launcher
    expects.
    """
    if (ROOT / "pyproject.toml").is_file():
        path = [f"PYTHONPATH={ROOT}"]
    else:
        path = []
    words = ["cd", os.getcwd(), "&&", "exec", "env", *path, *_MEMBER]
    return ssh_command(host, words, ssh_args=f"{ssh_args} -o ConnectTimeout={_CONNECT_SECONDS}")


def ask_all(
    remotes: Sequence[Remote],
    order: Callable[[Remote], Mapping[str, Any]],
    *,
    seconds: float = _ASK_SECONDS,
) -> list[dict[str, Any]]:
    """Answers of all hosts, asked at the same time; raises HostFailed of the first that has none,
    at the end.
    """
    return each_of(remotes, lambda remote: remote.ask(order(remote), seconds=seconds))


def each_of(remotes: Sequence[Remote], do: Callable[[Remote], _Result]) -> list[_Result]:
    """Do something with all hosts at the same time."""
    with ThreadPoolExecutor(max_workers=max(1, min(64, len(remotes)))) as pool:
        return list(pool.map(do, remotes))


def look_at_hosts(
    asked: DoctorOptions, requirements: Requirements
) -> tuple[list[Node], list[Check]]:
    """Every host, in the order of the hostfile, and what is between them."""
    with ExitStack() as stack:
        remotes = []
        for number, (host, address) in enumerate(zip(asked.hosts, asked.addresses, strict=True)):
            command = member_command(host, ssh_args=asked.ssh_args)
            remotes.append(
                stack.enter_context(closing(Remote(host, command, number=number, address=address)))
            )
        nodes = each_of(remotes, lambda remote: _examined(remote, asked, requirements))
        alive = [remote for remote, node in zip(remotes, nodes, strict=True) if node.facts]
        if len(alive) < 2:
            return nodes, []
        return nodes, [
            *compare({node.name: node.facts for node in nodes if node.facts}),
            *_between(alive, asked, requirements),
        ]


def _examined(remote: Remote, asked: DoctorOptions, requirements: Requirements) -> Node:
    started = time.perf_counter()
    order = {
        "do": "examine",
        "name": remote.name,
        "variables": passed_on(os.environ, exports=())
        | asked.own_variables.get(remote.host.name, {}),
        "cluster": asdict(requirements.cluster),
        "config": asked.config,
        "overrides": list(asked.overrides),
    }
    try:
        answer = remote.ask(order, seconds=_EXAMINE_SECONDS)
    except HostFailed as error:
        fix = f"try: ssh {remote.host.name} {sys.executable} -V"
        problem = Problem("host-unreachable", str(error), fix, key="ssh")
        return Node(
            remote.name,
            [Check("ssh", "cannot be looked at", [problem])],
            time.perf_counter() - started,
        )
    return Node(remote.name, list(map(Check.from_dict, answer["checks"])), answer["seconds"])


def _between(
    remotes: Sequence[Remote], asked: DoctorOptions, requirements: Requirements
) -> Iterator[Check]:
    token = secrets.token_hex(8)
    try:
        yield compare_clocks(
            dict(zip([each.name for each in remotes], each_of(remotes, _ahead), strict=True))
        )
        yield _network(remotes, asked.master_port, token)
        if requirements.checkpoints is not None and requirements.saves:
            yield _shared_folder(remotes, str(requirements.checkpoints), token)
    except HostFailed as error:
        problem = Problem(
            "host-lost", f"a host left while it was looked at: {error}", "run doctor again"
        )
        yield Check("network", "not finished", [problem])


def _ahead(remote: Remote) -> float:
    """Half of the way there and back is taken off; the shortest of three ways is the truest."""
    measured: list[tuple[float, float]] = []
    for _ in range(3):
        sent = time.time()
        clock = remote.ask({"do": "clock"})["clock"]
        received = time.time()
        measured.append((received - sent, clock - (sent + received) / 2))
    return min(measured)[1]


def _network(remotes: Sequence[Remote], port: int, token: str) -> Check:
    """Every host reaches the port of node 0, and each other at a port that the system chose, as
    NCCL and gloo do.
    """
    of_node_0 = [port, port + 1]  # of ranks, and of the agents that `launch` starts
    wanted = {remote: [0, *of_node_0] if remote is remotes[0] else [0] for remote in remotes}
    opened = [
        each["ports"]
        for each in ask_all(remotes, lambda each: {"do": "listen", "ports": wanted[each]})
    ]
    problems = []
    for port_of_0, found in zip(of_node_0, opened[0][1:], strict=True):
        if isinstance(found, str):
            about: dict[str, Any] = {
                "key": "--master_port",
                "value": port_of_0,
                "file": f"node {remotes[0].name}",
            }
            reason = f"nobody can meet there: {found}"
            fix = "choose another --master_port"
            problems.append(Problem("port-not-usable", reason, fix, **about))
    plan: dict[Remote, list[tuple[Remote, int]]] = {}
    for index, remote in enumerate(remotes):
        targets = [(to, opened[to][0]) for to in neighbours(index, len(remotes))]
        targets += [(0, port) for port in opened[0][1:] if index]
        plan[remote] = [(remotes[to], port) for to, port in targets if isinstance(port, int)]
    called = {
        remote: [(to.address, port) for to, port in targets] for remote, targets in plan.items()
    }
    answers = ask_all(remotes, lambda each: {"do": "call", "token": token, "targets": called[each]})
    for caller, answer in zip(remotes, answers, strict=True):
        for (to, port_there), values in zip(plan[caller], answer["reached"], strict=True):
            problems += _about_call(caller.name, to.name, port_there, Reached(**values))
    count = sum(map(len, plan.values()))
    if problems:
        stated = f"{len(problems)} of {count} connections fail"
    else:
        stated = f"{count} connections, every one answered"
    return Check("network", stated, problems)


def _about_call(caller: str, called: str, port: int, reached: Reached) -> Iterator[Problem]:
    place = f"node {caller}"
    if reached.is_loopback:
        reason = "the name of another host leads back to this one"
        value = reached.address
        yield Problem(
            "name-loopback", reason, "mend /etc/hosts there", key=called, value=value, file=place
        )
    elif reached.reason:
        there = f"{called} ({reached.address or 'no address'})"
        fix = (
            f"let {caller} connect to {there} at every port: firewall, security group, network "
            "policy, service mesh"
        )
        yield Problem("port-not-reached", reached.reason, fix, key=f"{called}:{port}", file=place)


def _shared_folder(remotes: Sequence[Remote], checkpoints: str, token: str) -> Check:
    """Each host leaves a mark where node 0 would save; each must see all of them."""
    folder = remotes[0].ask({"do": "place", "folder": checkpoints})["folder"]
    names = {remote.number: remote.name for remote in remotes}
    common = {"folder": folder, "token": token}
    marks = ask_all(remotes, lambda each: {"do": "mark", "node": each.number, **common})
    marked = [
        remote.number for remote, answer in zip(remotes, marks, strict=True) if not answer["reason"]
    ]
    views = ask_all(remotes, lambda _: {"do": "see", "nodes": marked, **common})
    written = [
        f"nothing can be written there: {mark['reason']}" if mark["reason"] else ""
        for mark in marks
    ]
    unseen = [first_few([names[number] for number in view["unseen"]]) for view in views]
    seen = [f"what {others} wrote is not seen here" if others else "" for others in unseen]
    fix = f"set run.output_dir to a folder that all hosts share: {WHY_SHARED}"
    reasons = zip([*remotes, *remotes], [*written, *seen], strict=True)
    problems = [
        Problem(NOT_SHARED, reason, fix, folder, file=f"node {each.name}")
        for each, reason in reasons
        if reason
    ]
    if not problems:
        stated = f"{folder} is seen by all"
    else:
        stated = f"{folder} is not the same folder everywhere"
    return Check("run folder", stated, problems)


def bench(asked: DoctorOptions, requirements: Requirements) -> list[Check]:
    """Run the job on every rank of the run, here or on all hosts; a few seconds, three minutes at
    most.
    """
    order = {
        "do": "bench",
        "variables": passed_on(os.environ, exports=()),
        "cluster": asdict(requirements.cluster),
        "master": [asked.addresses[0], asked.master_port]
        if asked.hosts
        else ["127.0.0.1", free_port()],
        "folder": str(requirements.checkpoints) if requirements.checkpoints else None,
        "seconds": _BENCH_SECONDS,
    }
    with ExitStack() as stack:
        remotes = []
        for number, host in enumerate(
            asked.hosts or [Host("localhost", requirements.cluster.devices_per_host)]
        ):
            command = member_command(host, ssh_args=asked.ssh_args) if asked.hosts else _MEMBER
            remotes.append(stack.enter_context(closing(Remote(host, command, number=number))))
        try:
            answers = ask_all(
                remotes, lambda each: order | {"node": each.number}, seconds=_BENCH_SECONDS + 30
            )
            reasons = zip(
                [each.name for each in remotes],
                [answer["reason"] for answer in answers],
                strict=True,
            )
            failed = "; ".join(f"{name}: {reason}" for name, reason in reasons if reason)
        except HostFailed as error:
            answers = []
            failed = str(error)
    result = next((answer["result"] for answer in answers if answer["result"]), None)
    if failed or result is None:
        reason = failed or "no rank told its result"
        fix = "run doctor without --bench first: it names what is wrong"
        return [
            Check("bench", "not finished", [Problem("bench-failed", reason, fix, key="--bench")])
        ]
    return list(judge(result))


def judge(result: Mapping[str, Any]) -> Iterator[Check]:
    """Rows for a person, and who is slow."""
    for row in result["all_reduce"]:
        took = f"{row['bytes'] >> 20} MiB in {row['seconds'] * 1e3:.2f} ms"
        stated = f"{took}: algorithm {_speed(row['algorithm'])}, bus {_speed(row['bus'])}"
        yield Check("all-reduce", stated, facts={"all_reduce": row})
    if result["pairs"]:
        yield _pairs(result["pairs"])
    for row in result["storage"]:
        if "error" in row:
            problem = Problem(
                "storage-bench-failed", row["error"], "make room there", file=f"node {row['host']}"
            )
            yield Check("storage", f"{row['host']}: not measured", [problem])
        else:
            stated = (
                f"{row['host']}: writes {_speed(row['write'])} with fsync, reads "
                f"{_speed(row['read'])}"
            )
            yield Check("storage", stated, facts={"storage": row})


def _pairs(rows: Sequence[Mapping[str, Any]]) -> Check:
    """A slow host is slow with everybody, a slow link with one."""
    best: dict[str, float] = {}
    for row in rows:
        for name in (row["a"], row["b"]):
            best[name] = max(best.get(name, 0.0), row["bytes_per_second"])
    usual = median(best.values())
    typical = median(row["bytes_per_second"] for row in rows)
    slow = [name for name, speed in best.items() if speed < _SLOW_SHARE * usual]
    problems = []
    for name in slow:
        reason = f"with none of the others it gets more, and they get {_speed(usual)}"
        fix = "look at its cable, its switch port and its driver, or leave it out"
        problems.append(
            warning("slow-node", reason, fix, "bandwidth", _speed(best[name]), f"node {name}")
        )
    for row in rows:
        speed = row["bytes_per_second"]
        ends = (row["a"], row["b"])
        if speed < _SLOW_SHARE * typical and not {*ends} & {*slow}:
            reason = f"pairs usually get {_speed(typical)}"
            fix = "look at the way between the two"
            problems.append(
                warning("slow-link", reason, fix, f"to {ends[1]}", _speed(speed), f"node {ends[0]}")
            )
    last = min(rows, key=lambda row: float(row["bytes_per_second"]))
    if len(rows) > 1:
        slowest = f"; slowest {last['a']} and {last['b']}: {_speed(last['bytes_per_second'])}"
    else:
        slowest = ""
    stated = f"{len(rows)} measured, {_speed(typical)} each way{slowest}"
    return Check("pairs", stated, problems, {"pairs": [dict(row) for row in rows]})


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / _GB:.2f} GB/s"
