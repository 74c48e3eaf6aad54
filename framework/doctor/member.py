"""One host under examination: `hosts` starts this process through ssh, sends it orders as lines of
JSON, and closes its stdin at the end.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from framework.doctor.node.findings import Check
from framework.doctor.node.links import Echo, call_all, existing, mark, unseen
from framework.doctor.node.machine import examine
from framework.doctor.node.requirements import (
    Requirements,
    requirements_of,
    requirements_without_config,
)
from framework.errors import ConfigError
from framework.launch.deepspeed_command import added_environment
from framework.launch.hosts.devices import find_devices
from framework.launch.hosts.topology import HostTopology
from framework.load_run import load_run
from framework.plan.cluster import Cluster, Device

_MODULE: Final = "framework.engine.link_bench"
# As that module prints it. It imports torch, so it is not imported here.
RESULT: Final = "@link_bench "


def judge_config(
    path: str | None, overrides: Sequence[str], cluster: Cluster, *, is_chosen: bool = True
) -> tuple[list[Check], Requirements]:
    """Check a run config, and return the checks with its requirements on each host.

    Args:
        path: of the run config; None, or without a plan: the requirements are the same for any run.
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


def run_ranks(order: Mapping[str, Any], cluster: Cluster, *, orders: IO[str]) -> dict[str, Any]:
    """Run this host's ranks of the measuring job.

    Args:
        order: that of `do_bench`.
        cluster: all hosts and ranks.
        orders: stream of the orders; when it closes, the result is no longer needed.

    Returns:
        The ``result`` if rank 0 is here, else None, and the ``reason`` of a failure, else empty.
    """
    from framework.launch.ranks import rank_environment  # psutil comes with the train extra only

    num_ranks = cluster.devices_per_host
    topology = HostTopology(cluster.num_hosts, num_ranks, order["node"], *order["master"])
    environment = dict(os.environ)
    environment |= added_environment(os.environ, device=cluster.device, num_ranks=num_ranks)
    command = [sys.executable, "-m", _MODULE]
    if order["folder"]:
        command += ["--folder", order["folder"]]
    make_file = partial(tempfile.TemporaryFile, "w+", encoding="utf-8", errors="replace")
    with ExitStack() as stack:
        outputs = [stack.enter_context(make_file()) for _ in range(num_ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        for local_rank, output in enumerate(outputs):
            rank = subprocess.Popen(
                command,
                env=environment | rank_environment(topology, local_rank),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            ranks.append(rank)
            stack.callback(rank.wait)
            stack.callback(rank.kill)
        reason = _wait(ranks, seconds=float(order["seconds"]), orders=orders)
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
    if reason.isdecimal():
        last_line = texts[int(reason)].strip().rpartition("\n")[2]
        code = ranks[int(reason)].returncode
        reason = f"rank {reason} of this host ended with {code}: {last_line[:300]}"
    return {"reason": reason, "result": _result(texts)}


def _result(texts: Sequence[str]) -> Any:
    """Return the result in the ranks' outputs, or None."""
    for text in texts:
        for line in text.splitlines():
            if line.startswith(RESULT):
                return json.loads(line.removeprefix(RESULT))
    return None


def _wait(ranks: list[subprocess.Popen[bytes]], *, seconds: float, orders: IO[str]) -> str:
    """Wait for the ranks.

    Returns:
        The number of the first rank that failed, the reason why this waits no longer, or an empty
        text if all have ended well.
    """
    deadline = time.monotonic() + seconds
    while None in [rank.poll() for rank in ranks]:
        failed = _first_failed(ranks)
        if failed:
            return failed
        if time.monotonic() > deadline:
            return f"not finished after {seconds:.0f} s"
        # no order comes meanwhile, so this is the end of the stream
        if select.select([orders], [], [], 0.1)[0]:
            return "nobody waits for the result"
    return _first_failed(ranks)


def _first_failed(ranks: Sequence[subprocess.Popen[bytes]]) -> str:
    for number, rank in enumerate(ranks):
        if rank.returncode:
            return str(number)
    return ""


# A login shell may print greetings on the same stream.
ANSWER: Final = "@preflight "

Order = Mapping[str, Any]


class Examiner:
    """Carries out orders; ports that it opened, and files that it wrote, are gone at its end."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def answer(self, order: Order) -> dict[str, Any]:
        """Carry out an order, by the method `do_...` that it names."""
        answer: dict[str, Any] = getattr(self, f"do_{order['do']}")(order)
        return answer

    def do_examine(self, order: Order) -> dict[str, Any]:
        """Examine this host, for a run config."""
        os.environ.update(order["variables"])
        cluster = _here(order)
        before, requirements = judge_config(order["config"], order["overrides"], cluster)
        node = examine(requirements, os.environ, name=order["name"], counts_replaced=True)
        errors = [check for check in before if check.status == "error"]
        checks = list(map(Check.to_dict, [*errors, *node.checks]))
        return {"checks": checks, "seconds": node.seconds}

    def do_listen(self, order: Order) -> dict[str, Any]:
        """Answer at ports, and return their numbers, or texts with the reasons of failures."""
        ports: list[int | str] = []
        # hosts may call each other by either kind of address
        if socket.has_dualstack_ipv6():
            address = "::"
        else:
            address = ""
        for port in order["ports"]:
            try:
                echo = Echo(port, address=address)
                self.stack.callback(echo.close)
                ports.append(echo.port)
            except OSError as error:
                ports.append((error.strerror or str(error)).lower())
        return {"ports": ports}

    def do_call(self, order: Order) -> dict[str, Any]:
        """Call other hosts."""
        targets = [(str(host), int(port)) for host, port in order["targets"]]
        return {"reached": list(map(asdict, call_all(targets, token=order["token"])))}

    def do_clock(self, order: Order) -> dict[str, Any]:
        """Return the time of this host."""
        return {"clock": time.time()}

    def do_place(self, order: Order) -> dict[str, Any]:
        """Find the folder for the marks."""
        return {"folder": str(existing(Path(order["folder"])))}

    def do_mark(self, order: Order) -> dict[str, Any]:
        """Leave a mark."""
        try:
            self.stack.enter_context(mark(Path(order["folder"]), order["token"], order["node"]))
        except OSError as error:
            return {"reason": (error.strerror or str(error)).lower()}
        return {"reason": ""}

    def do_see(self, order: Order) -> dict[str, Any]:
        """Return the hosts that have left no visible mark."""
        return {"unseen": unseen(Path(order["folder"]), order["token"], order["nodes"])}

    def do_bench(self, order: Order) -> dict[str, Any]:
        """Run the ranks of the measuring job."""
        os.environ.update(order["variables"])
        return run_ranks(order, _here(order), orders=sys.stdin)


def _here(order: Order) -> Cluster:
    return replace(Cluster(**order["cluster"]), device=local_devices()[0])


def main() -> int:
    """Answer each line of stdin with one line."""
    examiner = Examiner()
    with examiner.stack:
        for line in sys.stdin:
            print(ANSWER + json.dumps(examiner.answer(json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
