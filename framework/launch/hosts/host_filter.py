"""Filter for the hosts and devices of a hostfile: `--include`, `--exclude`, `--num_nodes`, `--num_gpus`, as DeepSpeed
takes them.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from framework.errors import ConfigError, Problem
from framework.launch.hosts.hostfile import (
    Host,
    bare,
    bracketed,
    first_few,
    is_host,
    is_loopback_name,
    odd_ones,
    read_hostfile,
)


@dataclass(frozen=True)
class Chosen:
    """A host, and the numbers of the devices to use there."""

    host: Host
    devices: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        """They are what the host would take anyway."""
        return self.devices == tuple(range(len(self.devices)))


def choose_hosts(
    path: str,
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
    num_gpus_flag: str = "--num_gpus",
) -> tuple[Chosen, ...]:
    """The hosts in the order of the file, with the devices that are left of each; `num_gpus_flag` is the word that gave
    `num_gpus`.

    Raises:
        ConfigError: the file or a choice is wrong, nothing is left, or hosts are left with different numbers of
        devices.
    """
    hosts = read_hostfile(path)
    problems: list[Problem] = []
    chosen = {host.name: tuple(range(host.slots)) for host in hosts}
    if include or exclude:
        named = _parse(include or exclude, hosts, option="--include" if include else "--exclude", problems=problems)
        keep = {name: set(devices) if devices is not None else set(chosen[name]) for name, devices in named.items()}
        chosen = {
            name: tuple(number for number in numbers if (number in keep.get(name, ())) == bool(include))
            for name, numbers in chosen.items()
        }
    left = [Chosen(host, chosen[host.name]) for host in hosts if chosen[host.name]][:num_nodes]
    if num_nodes and num_nodes > len(hosts):
        problems.append(_wrong("--num_nodes", num_nodes, f"{path} has {len(hosts)} hosts", "name more hosts there"))
    if num_gpus:
        few = [item.host for item in left if item.host.slots < num_gpus]
        if few:
            more = f", and {len(few) - 1} more hosts have too few" if few[1:] else ""
            problems.append(
                _wrong(num_gpus_flag, num_gpus, f"{few[0].name} has slots={few[0].slots}{more}", "take as many")
            )
        left = [Chosen(item.host, item.devices[:num_gpus]) for item in left]
    counts = {len(item.devices) for item in left}
    if not problems and len(counts) != 1:
        listed = odd_ones({item.host.name: len(item.devices) for item in left})
        reason = "DeepSpeed numbers local ranks wrongly when hosts differ" if left else "no device is left"
        problems.append(
            Problem(
                kind="hostfile-mixed-slots",
                file=path,
                key="slots",
                value=listed,
                reason=reason,
                fix="choose the same number on every host, with --include or --num_gpus",
            )
        )
    if problems:
        raise ConfigError(problems)
    return tuple(left)


def is_this_machine(chosen: Sequence[Chosen], *, ssh_args: str = "") -> bool:
    """They are one host, and nobody has to go there; with options of ssh, localhost may be the near end of a tunnel."""
    names = [item.host.name for item in chosen]
    here = len(names) == 1 and (is_loopback_name(names[0]) or names[0].lower() == socket.gethostname().lower())
    return here and not ssh_args


def who_chose(
    path: str,
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
    num_gpus_flag: str = "--num_gpus",
) -> dict[str, str]:
    """Return the source of the number of nodes and that of slots; the arguments are those of `choose_hosts`."""
    choice = "--include" if include else "--exclude" if exclude else ""
    return {
        "nnodes": ("--num_nodes" if num_nodes else choice) or path,
        "slots": (num_gpus_flag if num_gpus else choice) or path,
    }


def _parse(
    text: str, hosts: Sequence[Host], *, option: str, problems: list[Problem]
) -> Mapping[str, tuple[int, ...] | None]:
    """Host -> devices, None for all: ``host1@host2:0,2``."""
    slots = {host.name: host.slots for host in hosts}
    named: dict[str, tuple[int, ...] | None] = {}
    for part, name, numbers in _parts(text, slots):
        if not name:
            problems.append(_unknown(option, part, list(slots)))
            continue
        devices = tuple(map(int, numbers.split(","))) if numbers else None
        if any(number >= slots[name] for number in devices or ()):
            problems.append(_wrong(option, part, f"{name} has devices 0 to {slots[name] - 1}", "name those"))
        earlier = named.get(name, ())
        named[name] = None if devices is None or earlier is None else (*earlier, *devices)
    return named


def _parts(text: str, names: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Each part with its host, empty if there is none, and its devices.

    The names are looked for first, the longest before the others: with `@` and `:` in them no rule could tell where
    they end.
    """
    spelled = {spelling: name for name in names for spelling in (name, bracketed(name))}
    longest_first = "|".join(re.escape(name) for name in sorted(spelled, key=len, reverse=True))
    known = re.compile(rf"({longest_first})(?::(\d{{1,4}}(?:,\d{{1,4}})*))?(?=@|$)", re.ASCII)
    while True:
        match = known.match(text)
        part = match[0] if match else text.partition("@")[0]
        yield part, spelled[match[1]] if match else "", (match[2] or "") if match else ""
        if len(part) == len(text):
            return
        text = text[len(part) + 1 :]


def _unknown(option: str, part: str, names: Sequence[str]) -> Problem:
    if not re.fullmatch(r"[^:]+(:\d{1,4}(,\d{1,4})*)?", part, re.ASCII) and not is_host(bare(part)):
        return _wrong(option, part, "it is not HOST or HOST:DEVICE,DEVICE", "for example worker-0@worker-1:0,2")
    name = part if is_host(bare(part)) else part.partition(":")[0]
    return _wrong(option, name, "the hostfile has no such host", f"it has {first_few(names)}")


def _wrong(option: str, value: object, reason: str, fix: str) -> Problem:
    return Problem(kind="host-choice", file="command line", key=option, value=value, reason=reason, fix=fix)
