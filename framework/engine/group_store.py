"""The store at which ranks meet, and the environment of a launcher that names its place."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from framework.errors import (
    MISSING,
    ConfigError,
    Problem,
)

INIT_METHOD: Final = "dsf-env://"
_NAMES_OF_PLACE: Final = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_PORTS: Final = range(1, 65_536)


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse an environment by which the ranks cannot meet: torch would wait for minutes, or raise
    a different error for each variable.

    Raises:
        ConfigError: kind ``rendezvous-environment``, with every problem found.
    """
    if "RANK" not in environment:
        return
    ranks = _number(environment, "WORLD_SIZE") or 0
    rank = _number(environment, "RANK")
    is_rank = rank is not None and (ranks == 0 or rank < ranks)
    wanted_rank = f"from 0 to {ranks - 1}" if ranks else "a rank"
    has_address = bool(environment.get("MASTER_ADDR", "").strip())
    rules = {
        "WORLD_SIZE": (ranks > 0, "how many ranks there are"),
        "RANK": (is_rank, wanted_rank),
        "MASTER_ADDR": (has_address, "the host of rank 0"),
        "MASTER_PORT": (_number(environment, "MASTER_PORT") in _PORTS, "a port from 1 to 65535"),
    }
    fix = "start the ranks with deepspeed, torchrun or launch, which set it"
    problems = []
    for name, (is_good, wanted) in rules.items():
        if is_good:
            continue
        value: Any = _number(environment, name)
        if value is None:
            value = environment.get(name, MISSING)
        problems.append(Problem("rendezvous-environment", f"must be {wanted}", fix, name, value))
    if problems:
        raise ConfigError(problems)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """Return a variable's value as a number, or None if it is none."""
    value = environment.get(name, "")
    if value.isdecimal():
        return int(value)
    return None


class _KeptStore:
    """The store at which the ranks of this process have met first, with a prefix of its own for
    every group that they form.

    torch begins anew with the same keys for each group: in torchrun's store, which outlives a
    group, ranks would read the addresses of an earlier group. A store in rank 0's own process may
    still answer while it is being replaced.
    """

    def __init__(self) -> None:
        self._place: tuple[str | None, ...] = ()
        self._store: Store | None = None
        self._num_groups = 0

    def meet(self, _url: str, *, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
        """Handle `INIT_METHOD` as torch does ``env://``: yield the next group's store, this rank
        and the world size. Waits for the other ranks if no store is kept.
        """
        place = tuple(map(os.environ.get, _NAMES_OF_PLACE))
        if self._store is None or place != self._place:
            self._store = next(rendezvous("env://", timeout=timeout))[0]
            self._place = place
            self._num_groups = 0
        self._num_groups += 1
        group_store = PrefixStore(f"group{self._num_groups}", self._store)
        yield group_store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


with suppress(RuntimeError):  # it is registered already, where this module is imported again
    scheme = INIT_METHOD.partition(":")[0]
    register_rendezvous_handler(scheme, _KeptStore().meet)  # type: ignore[no-untyped-call]
