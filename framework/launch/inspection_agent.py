"""One host of `doctor -H`: an agent that examines it, meets the other agents as before a start, and
starts nothing but the ranks of `doctor --bench`.

`inspection` starts this process through ssh, sends it orders as lines of JSON, and closes its stdin
at the end. Ports that it opened, and files that it wrote, are gone at its end.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
)

import framework
from framework.doctor.node.findings import Check
from framework.doctor.node.machine import examine
from framework.doctor.node.requirements import (
    Requirements,
    requirements_of,
    requirements_without_config,
)
from framework.doctor.node.start import left_mark, reported_facts
from framework.errors import ConfigError, FrameworkError
from framework.hosts.devices import find_devices
from framework.hosts.rank_environment import added_environment
from framework.hosts.topology import HostTopology
from framework.launch.stop_requests import StopRequests
from framework.load_run import load_run
from framework.plan.cluster import Cluster, Device

# A login shell may print greetings on the same stream.
ANSWER: Final = "@inspection "
# For the calls between hosts, after node 0 has waited for all nodes.
_CALL_SECONDS: Final = 15.0
_SAVE_SECONDS: Final = 1.0  # ranks that measure have nothing to save


def _read_check(value: Any) -> Check:
    if isinstance(value, Check):
        return value
    try:
        return Check.from_dict(value)
    except (KeyError, TypeError) as error:
        raise ValueError("this is no check") from error


_Check = Annotated[Check, PlainValidator(_read_check), PlainSerializer(Check.to_dict)]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class InspectionJob(_Message):
    """The hosts of an inspection, as one of them sees them.

    Attributes:
        node: number of this host.
        names: of all hosts.
        master_addr, master_port: where ranks meet; agents meet at the next port.
        token: secret of the agents.
    """

    node: int
    names: list[str]
    master_addr: str
    master_port: int
    token: str


class Examine(_Message):
    """Order to examine this host, with the environment of its ranks, for a run config."""

    do: Literal["examine"] = "examine"
    environment: dict[str, str]
    name: str
    number: int
    cluster: Cluster
    config: str | None
    overrides: list[str]


class Meet(_Message):
    """Order to meet the agents of all hosts; `marks`: paths of their marks in the run folder."""

    do: Literal["meet"] = "meet"
    job: InspectionJob
    marks: list[str]


class Bench(_Message):
    """Order to run the ranks of the measuring job; `folder`: where they write files."""

    do: Literal["bench"] = "bench"
    environment: dict[str, str]
    cluster: Cluster
    job: InspectionJob
    folder: str | None


class Answer(_Message):
    """Answer to an order.

    Attributes:
        checks: of this host, or of what is between hosts.
        seconds: how long the examination took.
        mark: path of this host's mark in the run folder; empty if there is none.
        reason: why ranks have failed; empty if they have not.
    """

    checks: list[_Check] = []
    seconds: float = 0.0
    mark: str = ""
    reason: str = ""


_ORDER: Final[TypeAdapter[Examine | Meet | Bench]] = TypeAdapter(
    Annotated[Examine | Meet | Bench, Field(discriminator="do")]
)


def judge_config(
    path: str | None, overrides: Sequence[str], cluster: Cluster, *, is_chosen: bool = True
) -> tuple[list[Check], Requirements]:
    """Check a run config, and return the checks with its requirements on each host.

    Args:
        path: of the run config. If it is None, or the config is refused, the requirements are those
            of any run.
        overrides: further settings of the run.
        cluster: that the run is planned for.
        is_chosen: whether the user has chosen the number of ranks; else that of the config wins.
    """
    if path is None:
        return [], requirements_without_config(cluster)
    try:
        run = load_run(path, overrides)
        if run.config.run.world_size and not is_chosen:
            cluster = replace(cluster, devices_per_host=run.config.run.world_size)
        plan = run.chosen(cluster, is_proposal=True).plan(cluster)
    except ConfigError as error:
        check = Check("config", f"{path}: refused on {cluster}", error.problems)
        return [check], requirements_without_config(cluster)
    problems = (*run.source.notes, *plan.findings)
    return [Check("config", f"{path} on {cluster}: {plan.layout}", problems)], requirements_of(plan)


def local_devices() -> tuple[Device, int]:
    """Return the kind and number of devices here; their problems are left to `check_devices`."""
    try:
        devices = find_devices(os.environ)
    except ConfigError:
        requested = os.environ.get("DS_ACCELERATOR")
        if requested == "cuda":
            return "cuda", 0
        if requested == "npu":
            return "npu", 0
        return "cpu", 0
    return devices.kind, devices.count


class InspectionAgent:
    """Carries out orders."""

    def __init__(self, stack: ExitStack) -> None:
        """Prepare; what has to be removed at the end is left to `stack`."""
        self._stack = stack
        self._requests = StopRequests()
        self._requests.hold(sys.stdin.fileno())
        self._facts: dict[str, Any] = {}

    def answer(self, order: Examine | Meet | Bench) -> Answer:
        """Carry out an order."""
        if isinstance(order, Examine):
            return self._examine(order)
        if isinstance(order, Meet):
            return self._meet(order)
        return self._bench(order)

    def _examine(self, order: Examine) -> Answer:
        """Examine this host, and leave its mark in the run folder until this process ends."""
        os.environ.update(order.environment)
        cluster = _with_local_device(order.cluster)
        config_checks, requirements = judge_config(order.config, order.overrides, cluster)
        node = examine(requirements, os.environ, name=order.name, counts_replaced=True)
        self._facts = reported_facts(node)
        mark = ""
        if requirements.checkpoints is not None:
            mark = self._stack.enter_context(left_mark(requirements, order.number))
        errors = [check for check in config_checks if check.status == "error"]
        return Answer(checks=[*errors, *node.checks], seconds=node.seconds, mark=mark)

    def _meet(self, order: Meet) -> Answer:
        """Meet the agents of the other hosts; node 0's answer has the checks between hosts."""
        from framework.launch.node import hello_of
        from framework.launch.rendezvous.inspecting import MEET_SECONDS, inspect
        from framework.launch.rendezvous.session import Session

        topology = _topology(order.job, slots=1)  # no rank starts, so any equal number does
        hello = hello_of(topology, order.job.token, spares=0, names=(), facts={})
        session = Session(
            topology,
            {**hello, "look": self._facts},
            self._requests,
            port=topology.master_port + 1,
            token=order.job.token,
            deadline_seconds=MEET_SECONDS + _CALL_SECONDS,
        )
        checks = asyncio.run(inspect(session, order.job.names, order.marks))
        return Answer(checks=checks)

    def _bench(self, order: Bench) -> Answer:
        """Run the measuring ranks of this host to their end; rank 0 prints the result."""
        from framework.launch.node import run_node

        os.environ.update(order.environment)
        cluster = _with_local_device(order.cluster)
        topology = _topology(order.job, slots=cluster.devices_per_host)
        devices = find_devices(os.environ)
        added = added_environment(os.environ, device=devices.kind, num_ranks=topology.slots)
        script = Path(framework.__file__).with_name("entry") / "link_bench.py"
        arguments = []
        if order.folder is not None:
            arguments = ["--folder", order.folder]
        try:
            end = run_node(
                topology,
                [str(script), *arguments],
                devices=devices,
                environment={**os.environ, **added},
                requests=self._requests,
                grace_seconds=_SAVE_SECONDS,
                port=topology.master_port + 1,
                token=order.job.token,
            )
        except FrameworkError as error:
            return Answer(reason=str(error))
        if end.code:
            return Answer(reason=end.line)
        return Answer()


def _topology(job: InspectionJob, *, slots: int) -> HostTopology:
    return HostTopology(len(job.names), slots, job.node, job.master_addr, job.master_port)


def _with_local_device(cluster: Cluster) -> Cluster:
    return replace(cluster, device=local_devices()[0])


def main() -> int:
    """Answer each line of stdin with one line, until it is closed."""
    with ExitStack() as stack:
        agent = InspectionAgent(stack)
        for line in sys.stdin:
            answer = agent.answer(_ORDER.validate_json(line))
            print(ANSWER + answer.model_dump_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
