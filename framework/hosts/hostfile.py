"""Hostfiles, read strictly, and the choice among their hosts.

DeepSpeed 0.19.8 goes on with this machine alone when the file is missing, reads ``slots=2x`` as 2,
starts no rank where ``slots=0``, and takes a byte-order mark as part of the first name
(launcher/runner.py `fetch_hostfile`). Each of these costs a cluster its time, so here each is a
problem with its line. A file that this reader accepts means the same to DeepSpeed, except for the
brackets of an IPv6 address, which ssh and pdsh cannot read.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from framework.errors import ConfigError, Problem
from framework.plan.cluster import Cluster

# What ssh, sockets and DeepSpeed take without a second meaning: no leading dash, no shell, no
# space.
_NAME: Final = re.compile(r"(?=.{1,253}$)(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_LOOPBACK: Final = re.compile(r"localhost(\..*)?|127(\.[0-9]{1,3}){3}|::1", re.IGNORECASE)
_REPORTED: Final = 3
_LARGEST_FILE_BYTES: Final = 1 << 20
_MOST_SLOTS: Final = 1024
_LINE: Final = re.compile(r"(\S+)[ \t]+slots=([0-9]{1,4})")
# A leading dash would be read as an option by ssh and pdsh.
_USER: Final = re.compile(r"(?!-)[A-Za-z0-9_.@-]+")
_BYTE_ORDER_MARKS: Final = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_HOW: Final = "write one `NAME slots=COUNT` per line, for example worker-0 slots=8"
# The most likely mistakes in a line, the first that fits.
_MISTAKES: Final = {
    r".*slots(\s+=|=\s)": "there is a space around =",
    r"(?i)(?!.*slots)": "the number of slots is missing",
    r"\S+[ \t]+slots=-": "the number of slots is negative",
    r"\S+[ \t]+slots=[0-9]{1,4}\s": "there is more after the number of slots, which DeepSpeed "
    "would ignore",
    r"\S+[ \t]+slots=": "the number of slots is not a whole number up to 9999",
    r"": "it is not in DeepSpeed's format",
}
_MIXED: Final = "DeepSpeed numbers local ranks wrongly when hosts differ"


def bare(name: str) -> str:
    """Return ``me@[fd00::1]`` without its brackets, and other names unchanged.

    For ssh, sockets and torch the brackets would be a part of the address.
    """
    user, at, host = name.rpartition("@")
    if host.startswith("[") and host.endswith("]") and ":" in host:
        host = host[1:-1]
    return user + at + host


def bracketed(name: str) -> str:
    """Return an IPv6 address in brackets, after its user; other names unchanged."""
    user, at, host = name.rpartition("@")
    if ":" in host:
        return f"{user}{at}[{host}]"
    return name


def is_host(name: str) -> bool:
    """Check whether this can be a host's name, or its address without brackets."""
    if ":" not in name:
        return bool(_NAME.fullmatch(name))
    try:
        # An interface, after %, means something to one host only.
        return ipaddress.ip_address(name).version == 6 and "%" not in name
    except ValueError:
        return False


def one_spelling(host: str) -> str:
    """Return the common spelling of a host: ``n1`` for ``N1.``, ``fd00::1`` for ``fd00:0::1``."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().removesuffix(".")
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)


def _names_with_domain(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a name without a domain, and the same name with one.

    `names`: names as they are written, by their common spelling.
    """
    for host, name in names.items():
        label = host.partition(".")[0]
        if label != host and label in names and not _is_address(host):
            yield names[label], name


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


def is_loopback_name(name: str) -> bool:
    """Check whether every machine takes this name for itself."""
    return bool(_LOOPBACK.fullmatch(name))


def first_few(names: Sequence[str]) -> str:
    """Return ``a, b, c and 997 more``; four names are all there."""
    if len(names) <= _REPORTED + 1:
        return ", ".join(names)
    return f"{', '.join(names[:_REPORTED])} and {len(names) - _REPORTED} more"


def node_names(names: Sequence[str]) -> str:
    """Return ``node a`` or ``nodes a, b, c and 7 more``."""
    noun = "nodes" if len(names) > 1 else "node"
    return f"{noun} {first_few(names)}"


def most_common(values: Iterable[Any]) -> Any:
    """Return the value that most hosts have; of equals the first, which is node 0's."""
    return Counter(values).most_common(1)[0][0]


def odd_ones(counts: Mapping[str, int]) -> str:
    """Return ``a 8, b 4``: hosts with their counts.

    Of many hosts there is one with the most common count, and all that have another.
    """
    shown = counts
    if len(counts) > _REPORTED + 1:
        shown = _one_usual_and_odd(counts)
    return first_few([f"{name} {count}" for name, count in shown.items()])


def _one_usual_and_odd(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the first host with the most common count, and all hosts with another."""
    usual = most_common(counts.values())
    odd = {name: count for name, count in counts.items() if count != usual}
    first = next(name for name in counts if name not in odd)
    return {first: usual} | odd


@dataclass(frozen=True)
class Host:
    """One line of a hostfile.

    Attributes:
        name: name or address as ssh takes it, perhaps with ``user@``; IPv6 without brackets.
        slots: number of devices, and so of ranks, on it.
    """

    name: str
    slots: int


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read the hosts, in the order of the file, which is that of their ranks.

    Raises:
        ConfigError: every problem of the file.
    """
    reader = _Reader(str(path))
    lines = re.split(r"\r\n|\r|\n", _read_text(Path(path), name=str(path)))
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if entry:
            reader.read_line(entry, number)
    reader.compare_names()
    if not reader.hosts and not reader.problems:
        reader.problems.append(Problem("hostfile-empty", "it names no host", _HOW, file=str(path)))
    if reader.problems:
        raise ConfigError(reader.problems)
    return tuple(reader.hosts)


class _Reader:
    """Hosts of a file and its problems, as far as it has been read."""

    def __init__(self, path: str) -> None:
        self.hosts: list[Host] = []
        self.problems: list[Problem] = []
        self._path = path
        self._lines: dict[str, int] = {}  # first line of each name
        self._names: dict[str, str] = {}  # first spelling of each host

    def read_line(self, entry: str, line: int) -> None:
        """Read a line, without its comment and the space around it."""
        match = _LINE.fullmatch(entry)
        if not match:
            mistakes = _MISTAKES.items()
            reason = next(reason for pattern, reason in mistakes if re.match(pattern, entry))
            self._add_problem("hostfile-malformed", reason, _HOW, line, key="line", value=entry)
            return
        slots = int(match[2])
        if slots == 0:
            reason = f"{match[1]} would train nothing"
            fix = "write its number of devices, or remove the line"
            self._add_problem("hostfile-zero-slots", reason, fix, line, key="slots", value=0)
        elif slots > _MOST_SLOTS:
            reason = f"no machine has more than {_MOST_SLOTS} devices"
            fix = "write its number of devices"
            self._add_problem("hostfile-many-slots", reason, fix, line, key="slots", value=slots)
        else:
            self._add_host(bare(match[1]), slots, line)

    def _add_host(self, name: str, slots: int, line: int) -> None:
        """Add a host, and its problems; a wrong one is added, too: later lines may repeat it."""
        self._check_name(name, line)
        first = self._names.setdefault(one_spelling(name.rpartition("@")[2]), name)
        reason = ""
        if name in self._lines:
            reason = f"the host is already in line {self._lines[name]}"
        elif first != name:
            reason = f"it is the host of line {self._lines[first]}, which is {first} there"
        if reason:
            fix = "keep one line with all its slots"
            self._add_problem("hostfile-duplicate-host", reason, fix, line, key="host", value=name)
        self._lines.setdefault(name, line)
        self.hosts.append(Host(name, slots))

    def _check_name(self, name: str, line: int) -> None:
        """Add a problem for a name that no host can have."""
        user, at, host = name.rpartition("@")
        if is_host(host) and (not at or _USER.fullmatch(user)):
            return
        if ":" in host:
            reason = "it is not an IPv6 address"
        else:
            reason = "no host can have this name"
        fix = "letters, digits, - _ . and user@, or an address such as 10.0.0.2 or [fd00::2]"
        self._add_problem("hostfile-bad-name", reason, fix, line, key="host", value=name)

    def compare_names(self) -> None:
        """Note names that may mean one host, or mean another one on each host."""
        lines = self._lines
        for short, name in _names_with_domain(self._names):
            reason = (
                f"{short} in line {lines[short]} may be the same host, and its devices would be "
                "taken twice"
            )
            fix = (
                "keep one line with all its slots; if they are two hosts, write both names with "
                "their domain"
            )
            line = lines[name]
            self._add_problem("hostfile-duplicate-host", reason, fix, line, key="host", value=name)
        if len(self.hosts) > 1:  # alone in a file a loopback name is this machine
            self._note_loopback_names()

    def _note_loopback_names(self) -> None:
        for host in self.hosts:
            if is_loopback_name(host.name.rpartition("@")[2]):
                reason = "every host takes this name for itself"
                fix = "write the name that the others know it by"
                line = self._lines[host.name]
                self._add_problem(
                    "hostfile-loopback", reason, fix, line, key="host", value=host.name
                )

    def _add_problem(
        self, kind: str, reason: str, fix: str, line: int, *, key: str, value: object
    ) -> None:
        self.problems.append(
            Problem(kind, reason, fix, file=self._path, line=line, key=key, value=value)
        )


def cluster_of(hosts: Sequence[Host], *, path: str | Path = "") -> Cluster:
    """Return the cluster of these hosts; a ConfigError if their numbers of slots differ."""
    counts = sorted({host.slots for host in hosts})
    if len(counts) > 1:
        listed = odd_ones({host.name: host.slots for host in hosts})
        fix = f"give every host slots={counts[0]}"
        raise ConfigError.of(
            "hostfile-mixed-slots", _MIXED, fix, key="slots", value=listed, file=str(path)
        )
    return Cluster(num_hosts=len(hosts), devices_per_host=counts[0])


def _read_bytes(path: Path, refusal: Callable[[str, str, str], ConfigError]) -> bytes:
    """Return what a hostfile holds; raise a `refusal` (kind, reason, fix) where it is none."""
    try:
        status = path.stat()
        # Opening a pipe would wait for its writer, and DeepSpeed takes one for a missing file.
        if not stat.S_ISREG(status.st_mode):
            raise refusal(
                "not-a-file", "it is a directory or a pipe, not a file", "name a text file"
            )
        if status.st_size > _LARGEST_FILE_BYTES:
            raise refusal(
                "malformed",
                f"it has {status.st_size} bytes, no hostfile is so large",
                "name the right file",
            )
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        fix = "DeepSpeed would train on this machine alone; check the path"
        raise refusal("not-found", "there is no such file", fix) from None
    except (OSError, ValueError) as error:
        reason = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        raise refusal("unreadable", reason, "check the path") from None


def _read_text(path: Path, *, name: str) -> str:
    """Return the text of a hostfile; `name`: its path as the user wrote it.

    Raises:
        ConfigError: it is missing, no regular file, too large, unreadable, or not text.
    """

    def refusal(kind: str, reason: str, fix: str) -> ConfigError:
        return ConfigError.of(f"hostfile-{kind}", reason, fix, file=name)

    content = _read_bytes(path, refusal)
    if content.startswith(_BYTE_ORDER_MARKS):
        reason = "it begins with a byte-order mark, which would become part of the first name"
        raise refusal("bom", reason, "save it as UTF-8 without a byte-order mark")
    with suppress(UnicodeDecodeError):
        text = content.decode("utf-8")
        if "\0" not in text:
            return text
    raise refusal("malformed", "it is not a text file", "name the right file")


@dataclass(frozen=True)
class ChosenHost:
    """A host, and the numbers of the devices to use there."""

    host: Host
    devices: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        """True if these are the devices that the host would take without a choice."""
        return self.devices == tuple(range(len(self.devices)))


def choose_hosts(
    path: str,
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
    num_gpus_flag: str = "--num_gpus",
) -> tuple[ChosenHost, ...]:
    """Choose hosts and devices of a hostfile, as DeepSpeed's options do.

    Args:
        path: of the hostfile.
        include, exclude: hosts and devices, as ``host1@host2:0,2``.
        num_nodes: takes the first hosts.
        num_gpus: takes the first devices of each.
        num_gpus_flag: name of the option that gave `num_gpus`.

    Returns:
        The hosts that are left, in the order of the file.

    Raises:
        ConfigError: the file or the choice is wrong, or leaves nothing or different numbers of
            devices.
    """
    hosts = read_hostfile(path)
    problems: list[Problem] = []
    chosen = _filtered(hosts, include=include, exclude=exclude, problems=problems)
    left = [item for item in chosen if item.devices][:num_nodes]
    if num_nodes and num_nodes > len(hosts):
        reason = f"{path} has {len(hosts)} hosts"
        problems.append(_wrong_choice("--num_nodes", num_nodes, reason, "name more hosts there"))
    if num_gpus:
        problems += _too_few_slots(left, num_gpus, num_gpus_flag)
        left = [ChosenHost(item.host, item.devices[:num_gpus]) for item in left]
    if not problems:
        problems += _different_counts(left, path)
    if problems:
        raise ConfigError(problems)
    return tuple(left)


def _different_counts(chosen: Sequence[ChosenHost], path: str) -> Iterator[Problem]:
    """Yield a problem if hosts have different numbers of devices, or none has any."""
    counts = {item.host.name: len(item.devices) for item in chosen}
    if len(set(counts.values())) != 1:
        reason = _MIXED if chosen else "no device is left"
        fix = "choose the same number on every host, with --include or --num_gpus"
        yield Problem(
            "hostfile-mixed-slots", reason, fix, key="slots", value=odd_ones(counts), file=path
        )


def _filtered(
    hosts: Sequence[Host], *, include: str, exclude: str, problems: list[Problem]
) -> list[ChosenHost]:
    """Return all hosts with the devices that are included, or not excluded; add the problems."""
    if include:
        included = _parse_choice(include, hosts, option="--include", problems=problems)
    else:
        included = {host.name: set(range(host.slots)) for host in hosts}
    excluded: dict[str, set[int]] = {}
    if exclude and not include:
        excluded = _parse_choice(exclude, hosts, option="--exclude", problems=problems)
    chosen = []
    for host in hosts:
        devices = included.get(host.name, set()) - excluded.get(host.name, set())
        chosen.append(ChosenHost(host, tuple(sorted(devices & set(range(host.slots))))))
    return chosen


def _too_few_slots(chosen: Sequence[ChosenHost], num_gpus: int, flag: str) -> list[Problem]:
    """Return one problem for all hosts with fewer than `num_gpus` slots, or none."""
    too_small = [item.host for item in chosen if item.host.slots < num_gpus]
    if not too_small:
        return []
    reason = f"{too_small[0].name} has slots={too_small[0].slots}"
    if len(too_small) > 1:
        reason += f", and {len(too_small) - 1} more hosts have too few"
    return [_wrong_choice(flag, num_gpus, reason, "take as many")]


def is_this_machine(chosen: Sequence[ChosenHost], *, ssh_args: str = "") -> bool:
    """Check whether these are one host, which is this machine, so that ssh is not needed.

    With options of ssh, localhost may be the near end of a tunnel.
    """
    if ssh_args or len(chosen) != 1:
        return False
    name = chosen[0].host.name
    return is_loopback_name(name) or name.lower() == socket.gethostname().lower()


def _parse_choice(
    text: str, hosts: Sequence[Host], *, option: str, problems: list[Problem]
) -> dict[str, set[int]]:
    """Return the devices by host of a text such as ``host1@host2:0,2``, and add its problems."""
    slots = {host.name: host.slots for host in hosts}
    named: dict[str, set[int]] = {}
    for part, name, numbers in _split_choice(text, slots):
        if not name:
            problems.append(_unknown_host(option, part, list(slots)))
            continue
        if numbers:
            devices = set(map(int, numbers.split(",")))
        else:
            devices = set(range(slots[name]))
        if max(devices) >= slots[name]:
            reason = f"{name} has devices 0 to {slots[name] - 1}"
            problems.append(_wrong_choice(option, part, reason, "name those"))
        named.setdefault(name, set()).update(devices)
    return named


def _split_choice(text: str, names: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield each part of a text such as ``host1@host2:0,2``, with its host and its devices.

    They are ``("host2:0,2", "host2", "0,2")``. Without devices the last one is empty, and for a
    part that names no host the last two are.

    The text is matched with the names, the longest ones first: with `@` and `:` in names no rule
    finds where they end.
    """
    spellings: dict[str, str] = {}
    for name in names:
        spellings[name] = name
        spellings[bracketed(name)] = name
    longest_first = "|".join(re.escape(name) for name in sorted(spellings, key=len, reverse=True))
    known = re.compile(rf"({longest_first})(?::(\d{{1,4}}(?:,\d{{1,4}})*))?(?=@|$)", re.ASCII)
    is_more = True
    while is_more:
        match = known.match(text)
        if match:
            part = match[0]
            yield part, spellings[match[1]], match[2] or ""
        else:
            part = text.partition("@")[0]
            yield part, "", ""
        is_more = len(part) < len(text)
        text = text[len(part) + 1 :]


def _unknown_host(option: str, part: str, names: Sequence[str]) -> Problem:
    """Return the problem of a part that names no host, or has not the form of one."""
    has_form = re.fullmatch(r"[^:]+(:\d{1,4}(,\d{1,4})*)?", part, re.ASCII)
    if not has_form and not is_host(bare(part)):
        reason = "it is not HOST or HOST:DEVICE,DEVICE"
        return _wrong_choice(option, part, reason, "for example worker-0@worker-1:0,2")
    if is_host(bare(part)):
        name = part
    else:
        name = part.partition(":")[0]
    return _wrong_choice(
        option, name, "the hostfile has no such host", f"it has {first_few(names)}"
    )


def _wrong_choice(option: str, value: object, reason: str, fix: str) -> Problem:
    return Problem("host-choice", reason, fix, key=option, value=value, file="command line")
