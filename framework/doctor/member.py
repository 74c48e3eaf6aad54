"""One host under examination: started by `hosts` through ssh, told what to do in lines of JSON, gone when its stdin
closes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from framework.doctor.node.findings import Node
from framework.doctor.node.inspect import examine
from framework.doctor.node.links import Echo, call_all, existing, mark, unseen
from framework.doctor.planned_need import judge_config, local_devices
from framework.doctor.ranks import run_ranks
from framework.plan.cluster import Cluster

# A login shell may print greetings on the same stream.
ANSWER: Final = "@preflight "

Order = Mapping[str, Any]


class Member:
    """Carries out orders; what it opened or wrote is closed and removed at its end."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.orders: Mapping[str, Callable[[Order], dict[str, Any]]] = {
            "examine": self._examine,
            "listen": self._listen,
            "call": self._call,
            "clock": self._clock,
            "place": self._place,
            "mark": self._mark,
            "see": self._see,
            "bench": self._bench,
        }

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _examine(self, order: Order) -> dict[str, Any]:
        os.environ.update(order["variables"])
        cluster = _here(order)
        before, need = judge_config(order["config"], order["overrides"], cluster)
        node = examine(need, os.environ, name=order["name"], counts_replaced=True)
        refused = tuple(check for check in before if check.status == "error")
        checks = Node(node.name, (*refused, *node.checks), node.seconds).checks
        return {"checks": [check.to_dict() for check in checks], "seconds": node.seconds}

    def _listen(self, order: Order) -> dict[str, Any]:
        found: list[int | str] = []
        both = "::" if socket.has_dualstack_ipv6() else ""  # hosts may call each other by either kind of address
        for port in order["ports"]:
            try:
                echo = Echo(port, address=both)
            except OSError as error:
                found.append((error.strerror or str(error)).lower())
            else:
                self._stack.callback(echo.close)
                found.append(echo.port)
        return {"ports": found}

    def _call(self, order: Order) -> dict[str, Any]:
        targets = [(str(host), int(port)) for host, port in order["targets"]]
        return {"reached": [asdict(each) for each in call_all(targets, token=order["token"])]}

    def _clock(self, order: Order) -> dict[str, Any]:
        return {"clock": time.time()}

    def _place(self, order: Order) -> dict[str, Any]:
        return {"folder": str(existing(Path(order["folder"])))}

    def _mark(self, order: Order) -> dict[str, Any]:
        try:
            self._stack.enter_context(mark(Path(order["folder"]), order["token"], order["node"]))
        except OSError as error:
            return {"reason": (error.strerror or str(error)).lower()}
        return {"reason": ""}

    def _see(self, order: Order) -> dict[str, Any]:
        return {"unseen": unseen(Path(order["folder"]), order["token"], order["nodes"])}

    def _bench(self, order: Order) -> dict[str, Any]:
        os.environ.update(order["variables"])
        found = run_ranks(order, _here(order), reported=sys.stdin)
        return found | {"result": json.loads(found["result"]) if found["result"] else None}


def _here(order: Order) -> Cluster:
    """The cluster with the kind of device that this host has."""
    return replace(Cluster(**order["cluster"]), device=local_devices()[0])


def main() -> int:
    """Answer each line with one line."""
    with Member() as member:
        for line in sys.stdin:
            order = json.loads(line)
            answer = member.orders[order["do"]](order)
            print(ANSWER + json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
