"""Inspection of all hosts of a hostfile, and of what is between them, by agents that start nothing.

An `inspection_agent` runs on each host through ssh, and carries out orders from here. It examines
its host, and meets the agents of the other hosts as before a start. For `doctor --bench` agents run
`framework.engine.link_bench` on every rank.

An answer that does not come in time is a finding about its host; no host is waited for longer than
a minute and a half.
"""

from __future__ import annotations

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
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from framework.doctor.node.bandwidth import judge
from framework.doctor.node.findings import Check, Node
from framework.doctor.node.requirements import Requirements
from framework.doctor.node.start import compare
from framework.errors import Problem, counted
from framework.hosts.devices import visible_variable
from framework.hosts.environment import ROOT
from framework.hosts.hostfile import ChosenHost, Host
from framework.launch.inspection_agent import ANSWER, Answer, Bench, Examine, InspectionJob, Meet
from framework.launch.ssh import address_of, passed_on, ssh_command
from framework.system.json_lines import BadLineError, decode
from framework.system.ports import free_port

_CONNECT_SECONDS: Final = 10
_EXAMINE_SECONDS: Final = 60.0
_MEET_SECONDS: Final = 90.0
_BENCH_SECONDS: Final = 180.0
_END_SECONDS: Final = 5.0
_AGENT: Final = (sys.executable, "-m", "framework.launch.inspection_agent")
# As `framework.engine.link_bench` prints it. It imports torch, so it is not imported here.
_RESULT: Final = "@link_bench "
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


class HostAgent:
    """The agent on one host, which takes orders as lines of JSON.

    Attributes:
        number: place of the host among all hosts.
        address: of the host, as the others call it.
        mark: path of the file that it left in the run folder; empty if there is none.
        results: of measuring jobs, which their first rank prints.
    """

    def __init__(
        self, host: Host, command: Sequence[str], *, number: int, address: str = ""
    ) -> None:
        self.host = host
        self.name = host.name.rpartition("@")[2]
        self.number = number
        self.address = address
        self.mark = ""
        self.results: list[dict[str, Any]] = []
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - see `close`
        pipe = subprocess.PIPE
        errors = self._stderr
        # A session of its own: Ctrl-C ends agents by their stdin, after they have cleaned up.
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
        self._sending: threading.Thread | None = None
        threading.Thread(target=self._sort_output, daemon=True).start()

    def ask(self, order: Examine | Meet | Bench, *, seconds: float) -> Answer:
        """Send an order, and wait for its answer.

        Raises:
            HostFailed: none comes within `seconds`, the agent has ended, or is of another release.
        """
        line = order.model_dump_json() + "\n"
        # In a thread: a long order waits for the host to read, and a host may hang.
        self._sending = threading.Thread(target=self._send, args=(line,), daemon=True)
        self._sending.start()
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise HostFailed(f"no answer within {seconds:.0f} s") from None
        if answer is None:
            raise HostFailed(self._end())
        try:
            return Answer.model_validate_json(answer)
        except ValidationError:
            raise HostFailed("its answer is of another release of the framework") from None

    def _send(self, line: str) -> None:
        """Write a line to the agent; one that reads nothing any more ends the answers."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except (OSError, ValueError):  # it has ended, or `close` was called
            self._answers.put(None)

    def _end(self) -> str:
        """Wait for the end of an `ssh` that has closed its output, and return how it ended."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "ssh has closed its output, and does not end"
        self._stderr.seek(0)
        last = self._stderr.read().strip().rpartition("\n")[2].strip()
        return f"ssh ended with {code}: {last or 'it printed nothing'}"

    def close(self) -> None:
        """Let the agent clean up, and kill its `ssh` if that takes too long."""
        if self._sending is not None and self._sending.is_alive():
            self._process.kill()  # it does not read, and closing its stdin would wait for it
            self._sending.join(_END_SECONDS)
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def _sort_output(self) -> None:
        """Queue the agent's answers and keep its results, in a thread; None ends the queue."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(line.removeprefix(ANSWER))
            elif line.startswith(_RESULT):
                with suppress(BadLineError):
                    self.results.append(decode(line.removeprefix(_RESULT).encode()))
        self._answers.put(None)


def inspection_command(host: Host, *, ssh_args: str = "") -> list[str]:
    """Return the `ssh` that starts the agent, with the same Python in the same folder.

    DeepSpeed's launcher expects both at the same paths, too.
    """
    words = ["cd", os.getcwd(), "&&", "exec", "env"]
    if (ROOT / "pyproject.toml").is_file():
        words.append(f"PYTHONPATH={ROOT}")
    words += _AGENT
    return ssh_command(host, words, ssh_args=f"{ssh_args} -o ConnectTimeout={_CONNECT_SECONDS}")


def inspect_hosts(
    options: DoctorOptions, requirements: Requirements
) -> tuple[list[Node], list[Check]]:
    """Return every host with its checks, in the order of the hostfile, and checks between hosts.

    There are none between hosts if fewer than two could be examined.
    """
    with _agents(options) as agents:
        nodes = _each_of(agents, lambda agent: _examine_host(agent, options, requirements))
        alive = [agent for agent, node in zip(agents, nodes, strict=True) if node.facts]
        if len(alive) < 2:
            return nodes, []
        checks = compare({node.name: node.facts for node in nodes if node.facts})
        has_folder = requirements.checkpoints is not None and requirements.saves
        try:
            checks += _check_between(alive, options, has_folder=has_folder)
        except HostFailed as error:
            reason = f"a host left while it was looked at: {error}"
            problem = Problem("host-lost", reason, "run doctor again")
            checks.append(Check("network", "not finished", [problem]))
        return nodes, checks


@contextmanager
def _agents(options: DoctorOptions) -> Iterator[list[HostAgent]]:
    """Start an agent on each host, and end them after the block."""
    with ExitStack() as stack:
        agents = []
        pairs = zip(options.hosts, options.addresses, strict=True)
        for number, (host, address) in enumerate(pairs):
            command = inspection_command(host, ssh_args=options.ssh_args)
            agent = HostAgent(host, command, number=number, address=address)
            agents.append(stack.enter_context(closing(agent)))
        yield agents


def _each_of(agents: Sequence[HostAgent], do: Callable[[HostAgent], _Result]) -> list[_Result]:
    """Call a function with each agent, at the same time, and return the results."""
    with ThreadPoolExecutor(max_workers=max(1, len(agents))) as pool:
        return list(pool.map(do, agents))


def _environment(agent: HostAgent, options: DoctorOptions) -> dict[str, str]:
    return passed_on(os.environ, exports=()) | options.own_variables.get(agent.host.name, {})


def _examine_host(agent: HostAgent, options: DoctorOptions, requirements: Requirements) -> Node:
    """Have an agent examine its host, and note its mark; no answer is a problem of the host."""
    started = time.perf_counter()
    order = Examine(
        environment=_environment(agent, options),
        name=agent.name,
        number=agent.number,
        cluster=requirements.cluster,
        config=options.config,
        overrides=list(options.overrides),
    )
    try:
        answer = agent.ask(order, seconds=_EXAMINE_SECONDS)
    except HostFailed as error:
        fix = f"try: ssh {agent.host.name} {sys.executable} -V"
        problem = Problem("host-unreachable", str(error), fix, key="ssh")
        check = Check("ssh", "cannot be looked at", [problem])
        return Node(agent.name, [check], time.perf_counter() - started)
    agent.mark = answer.mark
    return Node(agent.name, answer.checks, answer.seconds)


def _job_of(agents: Sequence[HostAgent], *, master_port: int) -> InspectionJob:
    """Return the job of these agents, as the first of them sees it."""
    return InspectionJob(
        node=0,
        names=[agent.name for agent in agents],
        master_addr=agents[0].address,
        master_port=master_port,
        token=secrets.token_hex(16),
    )


def _check_between(
    agents: Sequence[HostAgent], options: DoctorOptions, *, has_folder: bool
) -> list[Check]:
    """Have the agents meet, and return the checks of node 0 with the findings of all.

    Args:
        agents: of the hosts that have been examined.
        options: the command line.
        has_folder: whether node 0 looks for the marks of all in the run folder.

    Raises:
        HostFailed: an agent has not answered; raised when all others are done.
    """
    job = _job_of(agents, master_port=options.master_port)
    marks = []
    if has_folder:
        marks = [agent.mark for agent in agents]

    def ask(agent: HostAgent) -> Answer:
        own_job = job.model_copy(update={"node": agents.index(agent)})
        return agent.ask(Meet(job=own_job, marks=marks), seconds=_MEET_SECONDS)

    checks = []
    problems: list[Problem] = []
    num_connections = 0
    for answer in _each_of(agents, ask):
        for check in answer.checks:
            if check.name == "network":
                problems += check.problems
                num_connections += check.facts.get("connections", 0)
            else:
                checks.append(check)
    if problems:
        outcome = counted(len(problems), "problem")
    else:
        outcome = f"{num_connections} connections, every one answered"
    return [*checks, Check("network", outcome, problems)]


def bench(options: DoctorOptions, requirements: Requirements) -> list[Check]:
    """Measure links and storage with every rank of the run, here or on all hosts.

    It takes a few seconds, and three minutes at most.
    """
    try:
        if options.hosts:
            with _agents(options) as agents:
                result = _bench_result(agents, options, requirements)
        else:
            localhost = Host("localhost", requirements.cluster.devices_per_host)
            here = replace(options, master_port=free_port())
            with closing(HostAgent(localhost, _AGENT, number=0, address="127.0.0.1")) as agent:
                result = _bench_result([agent], here, requirements)
    except HostFailed as error:
        fix = "run doctor without --bench first: it names what is wrong"
        problem = Problem("bench-failed", str(error), fix, key="--bench")
        return [Check("bench", "not finished", [problem])]
    return list(judge(result))


def _bench_result(
    agents: Sequence[HostAgent], options: DoctorOptions, requirements: Requirements
) -> Mapping[str, Any]:
    """Run the measuring job, and return its result.

    Raises:
        HostFailed: a host did not answer, or its ranks failed.
    """
    job = _job_of(agents, master_port=options.master_port)
    folder = None
    if requirements.checkpoints is not None:
        folder = str(requirements.checkpoints)

    def ask(agent: HostAgent) -> Answer:
        order = Bench(
            environment=_environment(agent, options),
            cluster=requirements.cluster,
            job=job.model_copy(update={"node": agents.index(agent)}),
            folder=folder,
        )
        return agent.ask(order, seconds=_BENCH_SECONDS)

    answers = _each_of(agents, ask)
    for agent, answer in zip(agents, answers, strict=True):
        if answer.reason:
            raise HostFailed(f"{agent.name}: {answer.reason}")
    for agent in agents:
        if agent.results:
            return agent.results[0]
    raise HostFailed("no rank has printed its result")
