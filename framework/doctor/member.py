"""One host under examination: started by `hosts` through ssh, asked in lines of JSON, gone when its
stdin closes.
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
# As the module prints it; it stands beyond the torch line, and this half does not import it.
RESULT: Final = "@link_bench "


def judge_config(
    path: str | None, overrides: Sequence[str], cluster: Cluster, *, is_chosen: bool = True
) -> tuple[list[Check], Requirements]:
    """Judge a run config and return its requirements on each host; without a path, or a plan, those
    of any run. Unless the number of ranks `is_chosen`, that of the config wins.
    """
    if path is None:
        return [], requirements_without_config(cluster)
    try:
        run = load_run(path, overrides)
        if run.config.run.world_size and not is_chosen:
            cluster = replace(cluster, devices_per_host=run.config.run.world_size)
        plan = run.chosen(cluster, is_proposal=True).plan(cluster)
    except ConfigError as error:
        return [
            Check("config", f"{path}: refused on {cluster}", error.problems)
        ], requirements_without_config(cluster)
    problems = (*run.source.notes, *plan.findings)
    return [Check("config", f"{path} on {cluster}: {plan.layout}", problems)], requirements_of(plan)


def local_devices() -> tuple[Device, int]:
    """Kind and number of devices here; what is wrong with them is said by the check of devices."""
    try:
        found = find_devices(os.environ)
    except ConfigError:
        asked = os.environ.get("DS_ACCELERATOR")
        return ("cuda" if asked == "cuda" else "npu" if asked == "npu" else "cpu"), 0
    return found.kind, found.count


def run_ranks(order: Mapping[str, Any], cluster: Cluster, *, reported: IO[str]) -> dict[str, Any]:
    """Run this host's ranks of the measuring job: the result where rank 0 is here, and why it did
    not go well. When `reported`, where orders come from, closes, nobody waits for the result any
    more.
    """
    from framework.launch.ranks import rank_environment  # psutil comes with the train extra only

    num_ranks = cluster.devices_per_host
    topology = HostTopology(cluster.num_hosts, num_ranks, order["node"], *order["master"])
    common = {
        **os.environ,
        **added_environment(os.environ, device=cluster.device, num_ranks=num_ranks),
    }
    command = [
        sys.executable,
        "-m",
        _MODULE,
        *(["--folder", order["folder"]] if order["folder"] else []),
    ]
    opened = partial(tempfile.TemporaryFile, "w+", encoding="utf-8", errors="replace")
    none = subprocess.DEVNULL
    with ExitStack() as stack:
        outputs = [stack.enter_context(opened()) for _ in range(num_ranks)]
        started = []
        for local, output in enumerate(outputs):
            own = common | rank_environment(topology, local)
            started.append(
                subprocess.Popen(command, env=own, stdin=none, stdout=output, stderr=output)
            )
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        reason = _wait(started, seconds=float(order["seconds"]), reported=reported)
        for output in outputs:
            output.seek(0)
        texts = [output.read() for output in outputs]
    if reason.isdecimal():
        last = texts[int(reason)].strip().rpartition("\n")[2]
        reason = (
            f"rank {reason} of this host ended with {started[int(reason)].returncode}: {last[:300]}"
        )
    lines = [
        line.removeprefix(RESULT)
        for text in texts
        for line in text.splitlines()
        if line.startswith(RESULT)
    ]
    return {"reason": reason, "result": json.loads(lines[0]) if lines else None}


def _wait(started: list[subprocess.Popen[bytes]], *, seconds: float, reported: IO[str]) -> str:
    """Empty when all ended well; the number of the first that did not; or why nobody waits any
    longer.
    """
    deadline = time.monotonic() + seconds
    while None in [process.poll() for process in started]:
        failed = [number for number, process in enumerate(started) if process.returncode]
        if failed:
            return str(failed[0])
        if time.monotonic() > deadline:
            return f"not finished after {seconds:.0f} s"
        if select.select([reported], [], [], 0.1)[0]:  # no order comes in between, so it is the end
            return "nobody waits for the result"
    return next((str(number) for number, process in enumerate(started) if process.returncode), "")


# A login shell may print greetings on the same stream.
ANSWER: Final = "@preflight "

Order = Mapping[str, Any]


class Examiner:
    """Carries out orders; what it opened or wrote is closed and removed at its end."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def answer(self, order: Order) -> dict[str, Any]:
        """Do what an order names: one of the methods `do_...`."""
        answer: dict[str, Any] = getattr(self, f"do_{order['do']}")(order)
        return answer

    def do_examine(self, order: Order) -> dict[str, Any]:
        """Look at everything here."""
        os.environ.update(order["variables"])
        cluster = _here(order)
        before, requirements = judge_config(order["config"], order["overrides"], cluster)
        node = examine(requirements, os.environ, name=order["name"], counts_replaced=True)
        checks = [*(check for check in before if check.status == "error"), *node.checks]
        return {"checks": [check.to_dict() for check in checks], "seconds": node.seconds}

    def do_listen(self, order: Order) -> dict[str, Any]:
        """Answer at ports; returns their numbers, or why not."""
        found: list[int | str] = []
        # hosts may call each other by either kind of address
        if socket.has_dualstack_ipv6():
            both = "::"
        else:
            both = ""
        for port in order["ports"]:
            try:
                echo = Echo(port, address=both)
                self.stack.callback(echo.close)
                found.append(echo.port)
            except OSError as error:
                found.append((error.strerror or str(error)).lower())
        return {"ports": found}

    def do_call(self, order: Order) -> dict[str, Any]:
        """Call others."""
        targets = [(str(host), int(port)) for host, port in order["targets"]]
        return {"reached": [asdict(each) for each in call_all(targets, token=order["token"])]}

    def do_clock(self, order: Order) -> dict[str, Any]:
        """Tell the time."""
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
        """Look for the marks of others."""
        return {"unseen": unseen(Path(order["folder"]), order["token"], order["nodes"])}

    def do_bench(self, order: Order) -> dict[str, Any]:
        """Run the ranks of the measuring job."""
        os.environ.update(order["variables"])
        return run_ranks(order, _here(order), reported=sys.stdin)


def _here(order: Order) -> Cluster:
    return replace(Cluster(**order["cluster"]), device=local_devices()[0])


def main() -> int:
    """Answer each line with one line."""
    member = Examiner()
    with member.stack:
        for line in sys.stdin:
            print(ANSWER + json.dumps(member.answer(json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
