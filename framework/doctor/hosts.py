"""Preflight of all hosts of a hostfile, and of the connections between them.

A `member` runs on each host through ssh, and carries out orders from here. `doctor --bench`
measures the hosts, by `framework.engine.link_bench` on every rank.

An answer that does not come in time is a finding about its host; no host is waited for longer than
a minute.
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
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final, TypeVar

from framework.doctor.member import ANSWER
from framework.doctor.node.findings import Check, Node, warning
from framework.doctor.node.links import CallResult, neighbours
from framework.doctor.node.requirements import Requirements
from framework.doctor.node.start import NOT_SHARED, WHY_SHARED, compare, compare_clocks
from framework.errors import Problem
from framework.launch.environment import ROOT
from framework.launch.hosts.devices import visible_variable
from framework.launch.hosts.hostfile import ChosenHost, Host, first_few
from framework.launch.ssh import address_of, passed_on, ssh_command
from framework.system.ports import free_port

_ANSWER_SECONDS: Final = 40.0
_CONNECT_SECONDS: Final = 10
_EXAMINE_SECONDS: Final = 60.0
_BENCH_SECONDS: Final = 180.0
# A host is slow if its best link has less than this share of the usual speed; links of equal hosts
# differ by a few percent.
_SLOW_SHARE: Final = 0.6
_GB: Final = 1e9
_MEMBER: Final = (sys.executable, "-m", "framework.doctor.member")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class DoctorOptions:
    """Parsed command line.

    Attributes:
        config: path of the run config; None: any run.
        chosen: hosts and devices; empty: this machine.
        num_ranks: on each host; None: one to a device.
        master_addr: of the first host, as the others know it; empty: as `launch -H` finds it.
    """

    config: str | None
    overrides: tuple[str, ...]
    chosen: tuple[ChosenHost, ...]
    num_ranks: int | None
    master_addr: str
    master_port: int
    ssh_args: str = ""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts, with the number of chosen devices as slots."""
        return tuple(Host(item.host.name, len(item.devices)) for item in self.chosen)

    @property
    def addresses(self) -> list[str]:
        """Address of each host as the others call it."""
        addresses = [address_of(item.host.name, ssh_args=self.ssh_args) for item in self.chosen]
        if self.master_addr:
            addresses[:1] = [self.master_addr]
        return addresses

    @property
    def own_variables(self) -> dict[str, dict[str, str]]:
        """Variables of single hosts, by name: those that make the chosen devices visible.

        Agents set the same ones. Hosts with the first devices have none.
        """
        variables = {}
        for item in self.chosen:
            if not item.is_first:
                numbers = ",".join(map(str, item.devices))
                names = (visible_variable("cuda"), visible_variable("npu"))
                variables[item.host.name] = dict.fromkeys(names, numbers)
        return variables


class HostFailed(Exception):  # noqa: N818 - it becomes a finding, and never leaves this module
    """Error: a host did not answer; the text is the reason."""


class Remote:
    """The member on one host, which takes orders as lines of JSON.

    Attributes:
        number: place of the host among all hosts.
    """

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
        # A session of its own: Ctrl-C ends members by their stdin, after they have cleaned up.
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

    def ask(self, order: Mapping[str, Any], *, seconds: float = _ANSWER_SECONDS) -> dict[str, Any]:
        """Send an order and return its answer; raises HostFailed if none comes in time."""
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
        """Let the member clean up, and kill its `ssh` if that takes too long."""
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
    """Return the `ssh` that starts the member, with the same Python in the same folder.

    DeepSpeed's launcher expects both at the same paths, too.
    """
    words = ["cd", os.getcwd(), "&&", "exec", "env"]
    if (ROOT / "pyproject.toml").is_file():
        words.append(f"PYTHONPATH={ROOT}")
    words += _MEMBER
    return ssh_command(host, words, ssh_args=f"{ssh_args} -o ConnectTimeout={_CONNECT_SECONDS}")


def ask_all(
    remotes: Sequence[Remote],
    order: Callable[[Remote], Mapping[str, Any]],
    *,
    seconds: float = _ANSWER_SECONDS,
) -> list[dict[str, Any]]:
    """Send an order to all hosts at the same time, and return their answers.

    Raises:
        HostFailed: a host has not answered; raised when all others are done.
    """
    return each_of(remotes, lambda remote: remote.ask(order(remote), seconds=seconds))


def each_of(remotes: Sequence[Remote], do: Callable[[Remote], _Result]) -> list[_Result]:
    """Call a function with each host, at the same time, and return the results."""
    with ThreadPoolExecutor(max_workers=max(1, min(64, len(remotes)))) as pool:
        return list(pool.map(do, remotes))


def look_at_hosts(
    options: DoctorOptions, requirements: Requirements
) -> tuple[list[Node], list[Check]]:
    """Examine every host, in the order of the hostfile, and the connections between them."""
    with _members(options) as remotes:
        nodes = each_of(remotes, lambda remote: _examined(remote, options, requirements))
        alive = [remote for remote, node in zip(remotes, nodes, strict=True) if node.facts]
        if len(alive) < 2:
            return nodes, []
        checks = compare({node.name: node.facts for node in nodes if node.facts})
        checks += _between(alive, options, requirements)
        return nodes, checks


@contextmanager
def _members(options: DoctorOptions) -> Iterator[list[Remote]]:
    """Start a member on each host, and end them after the block."""
    with ExitStack() as stack:
        remotes = []
        pairs = zip(options.hosts, options.addresses, strict=True)
        for number, (host, address) in enumerate(pairs):
            command = member_command(host, ssh_args=options.ssh_args)
            remote = Remote(host, command, number=number, address=address)
            remotes.append(stack.enter_context(closing(remote)))
        yield remotes


def _examined(remote: Remote, options: DoctorOptions, requirements: Requirements) -> Node:
    started = time.perf_counter()
    variables = passed_on(os.environ, exports=())
    variables |= options.own_variables.get(remote.host.name, {})
    order = {
        "do": "examine",
        "name": remote.name,
        "variables": variables,
        "cluster": asdict(requirements.cluster),
        "config": options.config,
        "overrides": list(options.overrides),
    }
    try:
        answer = remote.ask(order, seconds=_EXAMINE_SECONDS)
    except HostFailed as error:
        fix = f"try: ssh {remote.host.name} {sys.executable} -V"
        problem = Problem("host-unreachable", str(error), fix, key="ssh")
        check = Check("ssh", "cannot be looked at", [problem])
        return Node(remote.name, [check], time.perf_counter() - started)
    checks = [Check.from_dict(values) for values in answer["checks"]]
    return Node(remote.name, checks, answer["seconds"])


def _between(
    remotes: Sequence[Remote], options: DoctorOptions, requirements: Requirements
) -> Iterator[Check]:
    """Compare clocks, and test connections and the shared folder, until a host fails."""
    token = secrets.token_hex(8)
    try:
        names = [remote.name for remote in remotes]
        yield compare_clocks(dict(zip(names, each_of(remotes, _ahead), strict=True)))
        yield _network(remotes, options.master_port, token)
        if requirements.checkpoints is not None and requirements.saves:
            yield _shared_folder(remotes, str(requirements.checkpoints), token)
    except HostFailed as error:
        problem = Problem(
            "host-lost", f"a host left while it was looked at: {error}", "run doctor again"
        )
        yield Check("network", "not finished", [problem])


def _ahead(remote: Remote) -> float:
    """Return the seconds by which a host's clock is ahead, by the fastest of three answers.

    Half of the time that an answer takes is subtracted.
    """
    measured: list[tuple[float, float]] = []
    for _ in range(3):
        sent = time.time()
        clock = remote.ask({"do": "clock"})["clock"]
        received = time.time()
        measured.append((received - sent, clock - (sent + received) / 2))
    return min(measured)[1]


def _network(remotes: Sequence[Remote], port: int, token: str) -> Check:
    """Test whether every host reaches the ports of node 0, and a free port of other hosts.

    NCCL and gloo listen at such a port, which the system chooses.
    """
    ports_of_node_0 = [port, port + 1]  # of ranks, and of the agents that `launch` starts

    def listen_order(remote: Remote) -> dict[str, Any]:
        ports = [0, *ports_of_node_0] if remote is remotes[0] else [0]
        return {"do": "listen", "ports": ports}

    opened = [answer["ports"] for answer in ask_all(remotes, listen_order)]
    problems = []
    for port_of_0, failure in zip(ports_of_node_0, opened[0][1:], strict=True):
        if isinstance(failure, str):  # else it is the port, which is open
            reason = f"nobody can meet there: {failure}"
            fix = "choose another --master_port"
            file = f"node {remotes[0].name}"
            problems.append(
                Problem(
                    "port-not-usable",
                    reason,
                    fix,
                    key="--master_port",
                    value=port_of_0,
                    file=file,
                )
            )
    targets = _call_targets(remotes, opened)
    answers = ask_all(remotes, lambda remote: _call_order(targets[remote], token))
    for caller, answer in zip(remotes, answers, strict=True):
        for (called, port_there), values in zip(targets[caller], answer["reached"], strict=True):
            problems += _about_call(caller.name, called.name, port_there, CallResult(**values))
    count = sum(map(len, targets.values()))
    if problems:
        outcome = f"{len(problems)} of {count} connections fail"
    else:
        outcome = f"{count} connections, every one answered"
    return Check("network", outcome, problems)


def _call_targets(
    remotes: Sequence[Remote], opened: Sequence[Sequence[int | str]]
) -> dict[Remote, list[tuple[Remote, int]]]:
    """Return the hosts and ports that each host calls.

    Args:
        remotes: all hosts.
        opened: by host, the ports at which it listens; a text is the reason why it does not.
    """
    targets: dict[Remote, list[tuple[Remote, int]]] = {}
    for index, caller in enumerate(remotes):
        targets[caller] = []
        for called in neighbours(index, len(remotes)):
            free = opened[called][0]
            if isinstance(free, int):
                targets[caller].append((remotes[called], free))
        for port in opened[0][1:]:
            if index and isinstance(port, int):
                targets[caller].append((remotes[0], port))
    return targets


def _call_order(targets: Sequence[tuple[Remote, int]], token: str) -> dict[str, Any]:
    addresses = [(remote.address, port) for remote, port in targets]
    return {"do": "call", "token": token, "targets": addresses}


def _about_call(caller: str, called: str, port: int, reached: CallResult) -> Iterator[Problem]:
    file = f"node {caller}"
    if reached.is_loopback:
        reason = "the name of another host leads back to this one"
        value = reached.address
        yield Problem(
            "name-loopback", reason, "mend /etc/hosts there", key=called, value=value, file=file
        )
    elif reached.reason:
        there = f"{called} ({reached.address or 'no address'})"
        fix = (
            f"let {caller} connect to {there} at every port: firewall, security group, network "
            "policy, service mesh"
        )
        yield Problem("port-not-reached", reached.reason, fix, key=f"{called}:{port}", file=file)


def _shared_folder(remotes: Sequence[Remote], checkpoints: str, token: str) -> Check:
    """Test whether each host sees the marks of all hosts where node 0 would save."""
    folder = remotes[0].ask({"do": "place", "folder": checkpoints})["folder"]
    names = {remote.number: remote.name for remote in remotes}
    common = {"folder": folder, "token": token}
    marks = ask_all(remotes, lambda remote: {"do": "mark", "node": remote.number, **common})
    pairs = zip(remotes, marks, strict=True)
    marked = [remote.number for remote, mark in pairs if not mark["reason"]]
    views = ask_all(remotes, lambda _: {"do": "see", "nodes": marked, **common})
    fix = f"set run.output_dir to a folder that all hosts share: {WHY_SHARED}"
    problems = []
    for remote, mark in zip(remotes, marks, strict=True):
        if mark["reason"]:
            reason = f"nothing can be written there: {mark['reason']}"
            problems.append(Problem(NOT_SHARED, reason, fix, folder, file=f"node {remote.name}"))
    for remote, view in zip(remotes, views, strict=True):
        if view["unseen"]:
            others = first_few([names[number] for number in view["unseen"]])
            reason = f"what {others} wrote is not seen here"
            problems.append(Problem(NOT_SHARED, reason, fix, folder, file=f"node {remote.name}"))
    if not problems:
        outcome = f"{folder} is seen by all"
    else:
        outcome = f"{folder} is not the same folder everywhere"
    return Check("run folder", outcome, problems)


def bench(options: DoctorOptions, requirements: Requirements) -> list[Check]:
    """Measure links and storage with every rank of the run, here or on all hosts.

    It takes a few seconds, and three minutes at most.
    """
    try:
        if options.hosts:
            with _members(options) as remotes:
                master = (remotes[0].address, options.master_port)
                result = _bench_result(remotes, requirements, master)
        else:
            localhost = Host("localhost", requirements.cluster.devices_per_host)
            with closing(Remote(localhost, _MEMBER, number=0)) as remote:
                result = _bench_result([remote], requirements, ("127.0.0.1", free_port()))
    except HostFailed as error:
        fix = "run doctor without --bench first: it names what is wrong"
        problem = Problem("bench-failed", str(error), fix, key="--bench")
        return [Check("bench", "not finished", [problem])]
    return list(judge(result))


def _bench_result(
    remotes: Sequence[Remote], requirements: Requirements, master: tuple[str, int]
) -> Mapping[str, Any]:
    """Run the measuring job, and return its result.

    Args:
        remotes: all hosts.
        requirements: of the run.
        master: address and port where the ranks meet.

    Raises:
        HostFailed: a host did not answer, or its ranks failed.
    """
    order = {
        "do": "bench",
        "variables": passed_on(os.environ, exports=()),
        "cluster": asdict(requirements.cluster),
        "master": master,
        "folder": str(requirements.checkpoints) if requirements.checkpoints else None,
        "seconds": _BENCH_SECONDS,
    }
    answers = ask_all(
        remotes, lambda remote: order | {"node": remote.number}, seconds=_BENCH_SECONDS + 30
    )
    reasons = []
    for remote, answer in zip(remotes, answers, strict=True):
        if answer["reason"]:
            reasons.append(f"{remote.name}: {answer['reason']}")
    if reasons:
        raise HostFailed("; ".join(reasons))
    for answer in answers:
        if answer["result"]:
            return dict(answer["result"])
    raise HostFailed("no rank told its result")


def judge(result: Mapping[str, Any]) -> Iterator[Check]:
    """Yield the measurements as rows of a table, with slow hosts and links as warnings."""
    for row in result["all_reduce"]:
        took = f"{row['bytes'] >> 20} MiB in {row['seconds'] * 1e3:.2f} ms"
        outcome = f"{took}: algorithm {_speed(row['algorithm'])}, bus {_speed(row['bus'])}"
        yield Check("all-reduce", outcome, facts={"all_reduce": row})
    if result["pairs"]:
        yield _pairs(result["pairs"])
    for row in result["storage"]:
        if "error" in row:
            problem = Problem(
                "storage-bench-failed", row["error"], "make room there", file=f"node {row['host']}"
            )
            yield Check("storage", f"{row['host']}: not measured", [problem])
        else:
            outcome = (
                f"{row['host']}: writes {_speed(row['write'])} with fsync, reads "
                f"{_speed(row['read'])}"
            )
            yield Check("storage", outcome, facts={"storage": row})


def _pairs(rows: Sequence[Mapping[str, Any]]) -> Check:
    """Find slow hosts, which are slow with all others, and slow links, which are one pair each."""
    best: dict[str, float] = {}
    for row in rows:
        for name in (row["a"], row["b"]):
            best[name] = max(best.get(name, 0.0), row["bytes_per_second"])
    slow_hosts = _slow_hosts(best)
    typical = median(row["bytes_per_second"] for row in rows)
    outcome = f"{len(rows)} measured, {_speed(typical)} each way"
    if len(rows) > 1:
        slowest = min(rows, key=lambda row: float(row["bytes_per_second"]))
        speed = _speed(slowest["bytes_per_second"])
        outcome += f"; slowest {slowest['a']} and {slowest['b']}: {speed}"
    problems = list(slow_hosts.values())
    for row in rows:
        is_slow = row["bytes_per_second"] < _SLOW_SHARE * typical
        if is_slow and slow_hosts.keys().isdisjoint((row["a"], row["b"])):
            problems.append(_slow_link(row, typical))
    return Check("pairs", outcome, problems, {"pairs": list(map(dict, rows))})


def _slow_hosts(best: Mapping[str, float]) -> dict[str, Problem]:
    """Return a warning for each slow host; `best`: speed of each host's best link."""
    usual = median(best.values())
    problems = {}
    for name, speed in best.items():
        if speed < _SLOW_SHARE * usual:
            reason = f"with none of the others it gets more, and they get {_speed(usual)}"
            fix = "look at its cable, its switch port and its driver, or leave it out"
            problems[name] = warning(
                "slow-node", reason, fix, "bandwidth", _speed(speed), f"node {name}"
            )
    return problems


def _slow_link(row: Mapping[str, Any], typical: float) -> Problem:
    reason = f"pairs usually get {_speed(typical)}"
    fix = "look at the way between the two"
    speed = _speed(row["bytes_per_second"])
    return warning("slow-link", reason, fix, f"to {row['b']}", speed, f"node {row['a']}")


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / _GB:.2f} GB/s"
