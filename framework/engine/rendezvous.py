"""Address at which ranks meet: the launcher's settings for it, and one line for every failure to meet."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import torch.distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from framework.engine.lost_peers import failure_of_nccl
from framework.errors import MISSING, ConfigError, PeerLostError, Problem

INIT_METHOD: Final = "dsf-env://"
_NAMES_OF_PLACE: Final = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_PORTS: Final = range(1, 65_536)
_IN_USE: Final = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_JOINED: Final = re.compile(r"(\d+)/(\d+) clients joined")
_WAITED: Final = re.compile(r"after (\d+) ?(ms|milliseconds|s|seconds)")


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse what the ranks cannot meet by: torch would wait for minutes, or raise something else in each place.

    Raises:
        ConfigError: kind ``rendezvous-environment``, with every problem found.
    """
    if "RANK" not in environment:
        return
    world_size = environment.get("WORLD_SIZE", "")
    ranks = int(world_size) if world_size.isdecimal() else 0
    fits = {
        "WORLD_SIZE": ranks > 0,
        "RANK": environment["RANK"].isdecimal() and (not ranks or int(environment["RANK"]) < ranks),
        "MASTER_ADDR": bool(environment.get("MASTER_ADDR", "").strip()),
        "MASTER_PORT": environment.get("MASTER_PORT", "").isdecimal() and int(environment["MASTER_PORT"]) in _PORTS,
    }
    wanted = {
        "WORLD_SIZE": "how many ranks there are",
        "RANK": f"from 0 to {ranks - 1}" if ranks else "a rank",
        "MASTER_ADDR": "the host of rank 0",
        "MASTER_PORT": "a port from 1 to 65535",
    }
    problems = [
        Problem(
            kind="rendezvous-environment",
            key=name,
            value=_number(environment.get(name, MISSING)),
            reason=f"must be {wanted[name]}",
            fix="start the ranks with deepspeed, torchrun or launch, which set it",
        )
        for name, is_good in fits.items()
        if not is_good
    ]
    if problems:
        raise ConfigError(problems)


class _KeptStore:
    """The store at which the ranks of this process have met first, with a room of its own for every group that they
    form.

    torch begins anew with the same keys for each group: in torchrun's store, which outlives a group, ranks then read
    the addresses that an earlier one left there. A store of rank 0's own may still answer while it is being replaced.
    """

    def __init__(self) -> None:
        self._place: tuple[str | None, ...] = ()
        self._store: Store | None = None
        self._num_groups = 0

    def meet(self, _url: str, *, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
        """Handle `INIT_METHOD` as torch does ``env://``."""
        place = tuple(map(os.environ.get, _NAMES_OF_PLACE))
        if self._store is None or place != self._place:
            self._store, self._place, self._num_groups = next(rendezvous("env://", timeout=timeout))[0], place, 0
        self._num_groups += 1
        room = PrefixStore(f"group{self._num_groups}", self._store)
        yield room, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


with suppress(RuntimeError):  # it is registered already, where this module is imported again
    register_rendezvous_handler(INIT_METHOD.partition(":")[0], _KeptStore().meet)  # type: ignore[no-untyped-call]


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


@contextmanager
def explaining_rendezvous() -> Iterator[None]:
    """Turn errors of joining the process group into one line that names the address, or what NCCL says."""
    try:
        yield
    except RuntimeError as error:
        if (of_nccl := failure_of_nccl(error)) is not None:
            raise of_nccl from error
        is_network = isinstance(error, torch.distributed.DistError) and not isinstance(
            error, torch.distributed.DistBackendError
        )
        reported = PeerLostError(_reason(str(error), is_network=is_network))
        reported.is_of_one_rank = True
        if not reported.args[0]:
            raise
        raise reported from error


def _reason(stated: str, *, is_network: bool) -> str:
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    place = f"rank {rank} of {world_size}"
    if _IN_USE.search(stated):
        return (
            f"{place}: port {port} on {socket.gethostname()} is in use, by another job, one that is still ending or a "
            "second rank 0; choose another with --master_port [rendezvous-port-in-use]"
        )
    if joined := _JOINED.search(stated):
        return (
            f"{place}: only {joined[1]} of {joined[2]} ranks came to {host}:{port}{_waited(stated)}; look at what the "
            "others said, and whether every node was started with its own --node_rank [rendezvous-incomplete]"
        )
    if is_network and rank != "0":
        return (
            f"{place}: no rank 0 answers at {host}:{port}{_waited(stated)}; check that MASTER_ADDR is its host, that "
            "it was started and that no firewall is between [rendezvous-unreachable]"
        )
    if is_network or "gloo" in stated.lower() or "nccl" in stated.lower():
        why = " ".join(stated.split("Exception raised from", 1)[0].split())[:160]
        return (
            f"{place}: the ranks that met at {host}:{port} cannot connect to each other ({why}); "
            "check the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) [rendezvous-failed]"
        )
    return ""


def _waited(stated: str) -> str:
    waited = _WAITED.search(stated)
    if waited is None:
        return ""
    seconds = int(waited[1]) / (1000 if waited[2].startswith("m") else 1)
    return f" within {seconds:.0f} s"
