"""The switch between the hosts, which can cut, lose and delay: python -m tests.hosts.switch, orders
as JSON lines on stdin.

    # eth0 appears in the network of that process
    {"do": "attach", "port": 3, "pid": 4711, "mac": "02:00:00:00:00:03"}
    # for frames from and to that port
    {"do": "set", "port": 3, "cut": true, "drop": 0.0, "delay_ms": 0}

Each order is answered by one line. It is a process that forwards frames between tap devices, so
that it works on kernels without `tc netem`, and leaves nothing in this machine's own network.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

from tests.hosts import kernel

_SET_TAP = 0x400454CA
_TAP_WITHOUT_HEADER = 0x1002
_LONGEST_FRAME = 65_600


@dataclass
class Port:
    """One host's cable, and its faults."""

    tap: int
    mac: bytes
    cut: bool = False
    drop: float = 0.0
    delay_ms: float = 0.0


class Switch:
    """Forwards frames. It knows the address of every port, so it does not have to learn any."""

    def __init__(self) -> None:
        self._ports: dict[int, Port] = {}
        self._poll = select.epoll()
        self._by_tap: dict[int, Port] = {}
        self._late: list[tuple[float, int, Port, bytes]] = []
        self._number = count()
        self._draw = random.Random(0)
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY)

    def serve(self) -> None:
        """Forward and obey until stdin ends."""
        self._poll.register(0, select.EPOLLIN)
        orders = b""
        while True:
            timeout = -1.0  # none
            if self._late:
                timeout = max(0.0, self._late[0][0] - time.monotonic())
            for descriptor, _ in self._poll.poll(timeout):
                if descriptor != 0:
                    if descriptor in self._by_tap:
                        self._forward(self._by_tap[descriptor])
                    continue
                read = os.read(0, 65_536)
                if not read:
                    return
                lines = (orders + read).split(b"\n")
                orders = lines.pop()
                for line in lines:
                    print(json.dumps(self._obey(json.loads(line))), flush=True)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, port, frame = heapq.heappop(self._late)
                self._deliver(port, frame)

    def _obey(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            if order["do"] == "attach":
                mac = bytes.fromhex(order["mac"].replace(":", ""))
                self._attach(order["port"], order["pid"], mac)
                return {}
            port = self._ports.get(order["port"])
            if port is not None:  # a host that has ended has no cable
                port.cut = order["cut"]
                port.drop = order["drop"]
                port.delay_ms = order["delay_ms"]
        except OSError as error:
            return {"error": str(error)}
        return {}

    def _attach(self, number: int, pid: int, mac: bytes) -> None:
        # The device belongs to the network in which it is opened; the descriptor stays good after
        # the way back.
        kernel.join_network(f"/proc/{pid}/ns/net")
        try:
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tap, _SET_TAP, struct.pack("16sH22x", b"eth0", _TAP_WITHOUT_HEADER))
        finally:
            kernel.join_network(self._home)
        port = Port(tap, mac)
        self._ports[number] = port
        self._by_tap[tap] = port
        self._poll.register(tap, select.EPOLLIN)

    def _detach(self, port: Port) -> None:
        self._poll.unregister(port.tap)
        del self._by_tap[port.tap]
        self._ports = {number: other for number, other in self._ports.items() if other is not port}
        os.close(port.tap)

    def _forward(self, source: Port) -> None:
        for _ in range(64):  # so that no port keeps the others waiting
            try:
                frame = os.read(source.tap, _LONGEST_FRAME)
            except BlockingIOError:
                return
            except OSError:  # the host is gone and its network with it
                self._detach(source)
                return
            to_all = frame[0] & 1
            for port in list(self._ports.values()):
                if port is not source and (to_all or frame[:6] == port.mac):
                    self._carry(source, port, frame)

    def _carry(self, source: Port, target: Port, frame: bytes) -> None:
        if source.cut or target.cut:
            return
        for port in (source, target):
            if port.drop and self._draw.random() < port.drop:
                return
        delay = (source.delay_ms + target.delay_ms) / 1000
        if not delay:
            self._deliver(target, frame)
            return
        due = time.monotonic() + delay
        heapq.heappush(self._late, (due, next(self._number), target, frame))

    def _deliver(self, port: Port, frame: bytes) -> None:
        if port.tap not in self._by_tap:
            return
        try:
            os.write(port.tap, frame)
        except OSError:  # full, down or gone: a real cable loses such a frame as well
            return


if __name__ == "__main__":
    Switch().serve()
    sys.exit(0)
