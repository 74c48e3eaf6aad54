"""Ranks meet and lose each other: the address from the launcher, and one line for every collective
that fails.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch.distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from framework.errors import (
    MISSING,
    ConfigError,
    FrameworkError,
    PeerLostError,
    Problem,
    TrainingError,
    explaining,
    printable,
)

INIT_METHOD: Final = "dsf-env://"
_NAMES_OF_PLACE: Final = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_PORTS: Final = range(1, 65_536)
# gloo's errors are plain RuntimeErrors, each with a place in its sources: others lose connections
# as well, data sets above all.
_GLOO: Final = re.compile(r"gloo/transport/\S+")
_WHAT_HAPPENED: Final = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Broken pipe|Timed out waiting"
)
# What NCCL says where the failure is another rank's; whatever else it says is of this machine, and
# would be so again.
_REMOTE: Final = re.compile(
    r"remote process exited|ncclRemoteError|communicator was aborted|key-value store|store->get|Watchdog caught|"
    r"timed? ?out|Connection (reset|closed) by",
    re.IGNORECASE,
)
_LONGEST: Final = 300
_IN_USE: Final = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_JOINED: Final = re.compile(r"(\d+)/(\d+) clients joined")
_WAITED: Final = re.compile(r"after (\d+) ?(ms|milliseconds|s|seconds)")


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse what the ranks cannot meet by: torch would wait for minutes, or raise something else
    in each place.

    Raises:
        ConfigError: kind ``rendezvous-environment``, with every problem found.
    """
    if "RANK" not in environment:
        return
    world_size = environment.get("WORLD_SIZE", "")
    if world_size.isdecimal():
        ranks = int(world_size)
    else:
        ranks = 0
    rules = {
        "WORLD_SIZE": (ranks > 0, "how many ranks there are"),
        "RANK": (
            environment["RANK"].isdecimal() and (not ranks or int(environment["RANK"]) < ranks),
            f"from 0 to {ranks - 1}" if ranks else "a rank",
        ),
        "MASTER_ADDR": (bool(environment.get("MASTER_ADDR", "").strip()), "the host of rank 0"),
        "MASTER_PORT": (
            environment.get("MASTER_PORT", "").isdecimal()
            and int(environment["MASTER_PORT"]) in _PORTS,
            "a port from 1 to 65535",
        ),
    }
    fix = "start the ranks with deepspeed, torchrun or launch, which set it"
    problems = []
    for name, (is_good, wanted) in rules.items():
        value: Any = environment.get(name, MISSING)
        if not is_good:
            if isinstance(value, str) and value.isdecimal():
                value = int(value)
            else:
                value = value
            problems.append(
                Problem("rendezvous-environment", f"must be {wanted}", fix, name, value)
            )
    if problems:
        raise ConfigError(problems)


class _KeptStore:
    """The store at which the ranks of this process have met first, with a room of its own for every
    group that they form.

    torch begins anew with the same keys for each group: in torchrun's store, which outlives a
    group, ranks then read the addresses that an earlier one left there. A store of rank 0's own may
    still answer while it is being replaced.
    """

    def __init__(self) -> None:
        self._place: tuple[str | None, ...] = ()
        self._store: Store | None = None
        self._num_groups = 0

    def meet(self, _url: str, *, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
        """Handle `INIT_METHOD` as torch does ``env://``."""
        place = tuple(map(os.environ.get, _NAMES_OF_PLACE))
        if self._store is None or place != self._place:
            self._store = next(rendezvous("env://", timeout=timeout))[0]
            self._place = place
            self._num_groups = 0
        self._num_groups += 1
        room = PrefixStore(f"group{self._num_groups}", self._store)
        yield room, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


with suppress(RuntimeError):  # it is registered already, where this module is imported again
    register_rendezvous_handler(INIT_METHOD.partition(":")[0], _KeptStore().meet)  # type: ignore[no-untyped-call]


def is_lost_peer(error: BaseException) -> bool:
    """Check whether this is a collective that another rank did not live to take part in."""
    stated = str(error)
    if isinstance(error, torch.distributed.DistBackendError):
        return _REMOTE.search(stated) is not None
    if isinstance(error, torch.distributed.DistError):
        return True
    # A worker's error is raised again as a RuntimeError with the worker's whole traceback, whatever
    # is in it.
    return (
        isinstance(error, RuntimeError)
        and bool(_GLOO.search(stated))
        and not stated.startswith("Caught ")
    )


def failure_of_nccl(error: BaseException) -> TrainingError | None:
    """The error of a collective that NCCL itself refuses on this rank; None for other errors."""
    if not isinstance(error, torch.distributed.DistBackendError) or is_lost_peer(error):
        return None
    # Its last words are preceded by a place in its sources, its release, and advice to read them.
    stated = str(error).split("Exception raised from", 1)[0]
    words = " ".join(stated.rpartition("Last error:")[2].split()) or " ".join(stated.split())
    return TrainingError(
        f"{_this_rank()}: NCCL fails: {printable(words[:_LONGEST])}; NCCL_DEBUG=WARN tells more "
        "[nccl-failed]",
        is_of_one_rank=True,
    )


def lost_peer(error: BaseException) -> FrameworkError | None:
    """The error of a collective that failed; the reason is what the rank that is gone said
    itself.
    """
    if not is_lost_peer(error):
        return failure_of_nccl(error)
    happened = _WHAT_HAPPENED.search(str(error))
    return PeerLostError(
        f"{_this_rank()}: another rank has ended or cannot be reached any more "
        f"({happened[0] if happened else type(error).__name__}); what that one said last tells "
        "why [peer-lost]",
        is_of_one_rank=True,
    )


def _not_met(error: BaseException) -> FrameworkError | None:
    """The error of joining the process group: it names the address, or what NCCL says."""
    of_nccl = failure_of_nccl(error)
    if of_nccl is not None or not isinstance(error, RuntimeError):
        return of_nccl
    reason = _reason_not_met(error)
    if reason:
        return PeerLostError(reason, is_of_one_rank=True)
    return None


def _reason_not_met(error: RuntimeError) -> str:
    stated = str(error)
    backend_error = torch.distributed.DistBackendError
    is_network = isinstance(error, torch.distributed.DistError) and not isinstance(
        error, backend_error
    )
    rank = os.environ.get("RANK", "0")
    world_size = os.environ.get("WORLD_SIZE", "1")
    host = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    place = f"rank {rank} of {world_size}"
    within = ""
    waited = _WAITED.search(stated)
    if waited:
        within = f" within {int(waited[1]) / (1000 if waited[2].startswith('m') else 1):.0f} s"
    if _IN_USE.search(stated):
        return (
            f"{place}: port {port} on {socket.gethostname()} is in use, by another job, one that "
            "is still ending or a second rank 0; choose another with --master_port "
            "[rendezvous-port-in-use]"
        )
    joined = _JOINED.search(stated)
    if joined:
        return (
            f"{place}: only {joined[1]} of {joined[2]} ranks came to {host}:{port}{within}; look "
            "at what the others said, and whether every node was started with its own "
            "--node_rank [rendezvous-incomplete]"
        )
    if is_network and rank != "0":
        return (
            f"{place}: no rank 0 answers at {host}:{port}{within}; check that MASTER_ADDR is its "
            "host, that it was started and that no firewall is between [rendezvous-unreachable]"
        )
    if is_network or "gloo" in stated.lower() or "nccl" in stated.lower():
        why = " ".join(stated.split("Exception raised from", 1)[0].split())[:160]
        return (
            f"{place}: the ranks that met at {host}:{port} cannot connect to each other ({why}); "
            "check the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) "
            "[rendezvous-failed]"
        )
    return ""


def _this_rank() -> str:
    return f"rank {os.environ.get('RANK', '0')}"


explaining_rendezvous = partial(explaining, _not_met)
