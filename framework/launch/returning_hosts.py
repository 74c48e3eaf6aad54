"""Hosts before another start of a job over ssh: lost ones come back, or the job goes on without."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Final

from framework.errors import PeerLostError
from framework.launch.hosts.hostfile import first_few
from framework.launch.job import print_line
from framework.launch.stop_requests import StopRequests

ENOUGH_SECONDS: Final = 60.0
"""Wait for hosts that took part before, if the job can go on with fewer."""
_PROBE_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.1
_REPORT_SECONDS: Final = 15.0


def answering(
    commands: Sequence[tuple[str, Sequence[str]]],
    expected: Sequence[int],
    requests: StopRequests,
    *,
    fits: Callable[[int], bool],
    longest_seconds: float,
    enough_seconds: float = ENOUGH_SECONDS,
) -> list[int]:
    """Wait for the hosts of the next start, and return their numbers.

    They are all that are expected. After a while they are as many of those that answer as the job
    can be split over.

    Args:
        commands: each host's name, and an `ssh` that ends with 0 if the host can take part.
        expected: numbers of the hosts that took part in the last start.
        requests: to stop.
        fits: whether a job of this number of hosts, fewer than expected, is allowed and has a plan.
        longest_seconds, enough_seconds: to wait for enough of them, and for all.

    Raises:
        PeerLostError: too few answer.
        RunStopped: on request.
    """
    begun = time.monotonic()
    reported = time.monotonic() - _REPORT_SECONDS
    while True:
        here = _probe(commands, requests)
        missing = [commands[number][0] for number in expected if number not in here]
        if not missing:
            if fits(len(here)):
                return here
            return [number for number in here if number in expected]
        waited = time.monotonic() - begun
        if waited > enough_seconds:
            count = _largest_count(len(here), fits)
            if count:
                print_line(
                    f"going on without {first_few(missing)}, on {count} of {len(commands)} "
                    "hosts [fewer-hosts]"
                )
                return here[:count]
        if waited > longest_seconds:
            raise PeerLostError(
                f"{first_few(missing)} did not come back within {waited:.0f} s [host-lost]"
            )
        if time.monotonic() - reported >= _REPORT_SECONDS:
            reported = time.monotonic()
            print_line(
                f"waiting for {first_few(missing)} since {waited:.0f} s, until "
                f"{longest_seconds:.0f} s"
            )
        requests.wait(_PAUSE_SECONDS)


def _largest_count(most: int, fits: Callable[[int], bool]) -> int:
    for count in range(most, 0, -1):
        if fits(count):
            return count
    return 0


def _probe(commands: Sequence[tuple[str, Sequence[str]]], requests: StopRequests) -> list[int]:
    """Return the numbers of the hosts that answer now; all are probed at the same time."""
    quiet = subprocess.DEVNULL
    probes = {
        number: subprocess.Popen(
            command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )
        for number, (_, command) in enumerate(commands)
    }
    until = time.monotonic() + _PROBE_SECONDS
    try:
        while any(probe.poll() is None for probe in probes.values()) and time.monotonic() < until:
            requests.wait(_LOOK_SECONDS)
    finally:
        for probe in probes.values():
            probe.kill()
            probe.wait()
    return [number for number, probe in probes.items() if probe.returncode == 0]
