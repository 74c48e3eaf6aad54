"""Hostfiles, read as the `deepspeed` command takes them, but strictly, and the choice among their
hosts.

DeepSpeed 0.19.8 goes on with this machine alone when the file is missing, reads ``slots=2x`` as 2,
starts no rank where ``slots=0``, and takes a byte-order mark as part of the first name
(launcher/runner.py `fetch_hostfile`). Each of these costs a cluster its time, so here each is a
problem with its line. Whatever this reader accepts means the same to DeepSpeed, but for the
brackets of an IPv6 address, which ssh and pdsh cannot read.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    """``me@[fd00::1]`` without its brackets, which ssh, sockets and torch would take for a part of
    the address.
    """
    user, at, host = name.rpartition("@")
    is_bracketed = host.startswith("[") and host.endswith("]") and ":" in host
    return user + at + (host[1:-1] if is_bracketed else host)


def bracketed(name: str) -> str:
    """The other spelling of an IPv6 address; other names as they are."""
    user, at, host = name.rpartition("@")
    if ":" in host:
        return f"{user}{at}[{host}]"
    return name


def is_host(name: str) -> bool:
    """Check whether a host can have it: a name, or an address without brackets."""
    if ":" not in name:
        return bool(_NAME.fullmatch(name))
    try:
        # An interface, behind %, means something to one host only.
        return ipaddress.ip_address(name).version == 6 and "%" not in name
    except ValueError:
        return False


def one_spelling(host: str) -> str:
    """Return a name or address as all its spellings have it in common: ``N1.`` and ``n1``,
    ``fd00:0::1`` and ``fd00::1``.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().removesuffix(".")
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
    else:
        mapped = None
    return str(mapped or address)


def _shortened(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names of a file that stand there with a domain and without one, the short one first."""
    for host, name in names.items():
        label, dot, _ = host.partition(".")
        if dot and ":" not in host and not host.replace(".", "").isdigit() and label in names:
            yield names[label], name


def is_loopback_name(name: str) -> bool:
    """Every machine takes it for itself."""
    return bool(_LOOPBACK.fullmatch(name))


def first_few(names: Sequence[str]) -> str:
    """``a, b, c and 997 more``; one more than that is named as well."""
    if len(names) <= _REPORTED + 1:
        return ", ".join(names)
    return f"{', '.join(names[:_REPORTED])} and {len(names) - _REPORTED} more"


def node_names(names: Sequence[str]) -> str:
    """``nodes a, b, c and 7 more``."""
    return f"node{'s' if len(names) > 1 else ''} {first_few(names)}"


def most_common(values: Iterable[Any]) -> Any:
    """Return the value that most hosts have; of equals the first, which is node 0's."""
    return Counter(values).most_common(1)[0][0]


def odd_ones(counts: Mapping[str, int]) -> str:
    """``a 8, b 4``: hosts with their counts; of many, one of the usual kind and those that are
    not.
    """
    if counts:
        usual = most_common(counts.values())
    else:
        usual = 0
    names = list(counts)
    if len(names) > _REPORTED + 1:
        first = next(name for name in names if counts[name] == usual)
        names = [first, *(name for name in names if counts[name] != usual)]
    return first_few([f"{name} {counts[name]}" for name in names])


@dataclass(frozen=True)
class Host:
    """One line of a hostfile: what ssh is told (name or address, perhaps with ``user@``; IPv6
    without brackets), and the number of devices, and so of ranks, on it.
    """

    name: str
    slots: int


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """The hosts in the order of the file, which is that of their ranks; a ConfigError has all that
    is wrong.
    """
    hosts: list[Host] = []
    problems: list[Problem] = []
    lines: dict[str, int] = {}  # first line of each name
    names: dict[str, str] = {}  # first spelling of each host

    def refuse(kind: str, key: str, value: object, reason: str, fix: str, line: int) -> None:
        problems.append(
            Problem(
                f"hostfile-{kind}", reason, fix, file=str(path), line=line, key=key, value=value
            )
        )

    for number, line in enumerate(
        re.split(r"\r\n|\r|\n", _read_text(Path(path), name=str(path))), start=1
    ):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        name, slots = (bare(match[1]), int(match[2])) if match else ("", 0)
        if not match:
            why = next(reason for pattern, reason in _MISTAKES.items() if re.match(pattern, entry))
            refuse("malformed", "line", entry, why, _HOW, number)
        elif slots == 0:
            fix = "write its number of devices, or remove the line"
            refuse("zero-slots", "slots", 0, f"{match[1]} would train nothing", fix, number)
        elif slots > _MOST_SLOTS:
            reason = f"no machine has more than {_MOST_SLOTS} devices"
            refuse("many-slots", "slots", slots, reason, "write its number of devices", number)
        else:
            user, at, host = name.rpartition("@")
            if not is_host(host) or (at and not _USER.fullmatch(user)):
                if ":" in host:
                    reason = "it is not an IPv6 address"
                else:
                    reason = "no host can have this name"
                fix = (
                    "letters, digits, - _ . and user@, or an address such as 10.0.0.2 or [fd00::2]"
                )
                refuse("bad-name", "host", name, reason, fix, number)
            first = names.setdefault(one_spelling(host), name)
            if name in lines:
                reason = f"the host is already in line {lines[name]}"
                refuse(
                    "duplicate-host",
                    "host",
                    name,
                    reason,
                    "keep one line with all its slots",
                    number,
                )
            elif first != name:
                reason = f"it is the host of line {lines[first]}, which is {first} there"
                refuse(
                    "duplicate-host",
                    "host",
                    name,
                    reason,
                    "keep one line with all its slots",
                    number,
                )
            lines.setdefault(name, number)
            hosts.append(Host(name, slots))
    for short, name in _shortened(names):
        reason = (
            f"{short} in line {lines[short]} may be the same host, and its devices would be "
            "taken twice"
        )
        fix = (
            "keep one line with all its slots; if they are two hosts, write both names with "
            "their domain"
        )
        refuse("duplicate-host", "host", name, reason, fix, lines[name])
    for each in hosts if len(hosts) > 1 else ():  # alone in a file such a name is this machine
        if is_loopback_name(each.name.rpartition("@")[2]):
            fix = "write the name that the others know it by"
            refuse(
                "loopback",
                "host",
                each.name,
                "every host takes this name for itself",
                fix,
                lines[each.name],
            )
    if not hosts and not problems:
        problems.append(Problem("hostfile-empty", "it names no host", _HOW, file=str(path)))
    if problems:
        raise ConfigError(problems)
    return tuple(hosts)


def cluster_of(hosts: Sequence[Host], *, path: str | Path = "") -> Cluster:
    """The cluster that these hosts make; a ConfigError where they have different numbers of
    slots.
    """
    counts = sorted({host.slots for host in hosts})
    if len(counts) > 1:
        listed = odd_ones({host.name: host.slots for host in hosts})
        fix = f"give every host slots={counts[0]}"
        raise ConfigError.of(
            "hostfile-mixed-slots", _MIXED, fix, key="slots", value=listed, file=str(path)
        )
    return Cluster(num_hosts=len(hosts), devices_per_host=counts[0])


def _read_text(path: Path, *, name: str) -> str:
    def refuse(kind: str, reason: str, fix: str) -> ConfigError:
        return ConfigError.of(f"hostfile-{kind}", reason, fix, file=name)

    try:
        status = path.stat()
        # Opening a pipe would wait for its writer, and DeepSpeed takes one for a missing file.
        if not stat.S_ISREG(status.st_mode):
            raise refuse(
                "not-a-file", "it is a directory or a pipe, not a file", "name a text file"
            )
        if status.st_size > _LARGEST_FILE_BYTES:
            raise refuse(
                "malformed",
                f"it has {status.st_size} bytes, no hostfile is so large",
                "name the right file",
            )
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        fix = "DeepSpeed would train on this machine alone; check the path"
        raise refuse("not-found", "there is no such file", fix) from None
    except (OSError, ValueError) as error:
        reason = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        raise refuse("unreadable", reason, "check the path") from None
    if content.startswith(_BYTE_ORDER_MARKS):
        reason = "it begins with a byte-order mark, which would become part of the first name"
        raise refuse("bom", reason, "save it as UTF-8 without a byte-order mark")
    with suppress(UnicodeDecodeError):
        if "\0" not in (text := content.decode("utf-8")):
            return text
    raise refuse("malformed", "it is not a text file", "name the right file")


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
    """The hosts in the order of the file with what is left of each; `num_gpus_flag` is the word
    that gave `num_gpus`. A ConfigError where the file or the choice is wrong, or leaves nothing or
    different numbers of devices.
    """
    hosts = read_hostfile(path)
    problems: list[Problem] = []
    chosen = {host.name: tuple(range(host.slots)) for host in hosts}
    if include or exclude:
        named = _parse(
            include or exclude,
            hosts,
            option="--include" if include else "--exclude",
            problems=problems,
        )
        chosen = {
            name: tuple(
                number for number in numbers if (number in named.get(name, ())) == bool(include)
            )
            for name, numbers in chosen.items()
        }
    left = [Chosen(host, chosen[host.name]) for host in hosts if chosen[host.name]][:num_nodes]
    if num_nodes and num_nodes > len(hosts):
        problems.append(
            _wrong(
                "--num_nodes", num_nodes, f"{path} has {len(hosts)} hosts", "name more hosts there"
            )
        )
    if num_gpus:
        few = [item.host for item in left if item.host.slots < num_gpus]
        if few:
            if few[1:]:
                more = f", and {len(few) - 1} more hosts have too few"
            else:
                more = ""
            reason = f"{few[0].name} has slots={few[0].slots}{more}"
            problems.append(_wrong(num_gpus_flag, num_gpus, reason, "take as many"))
        left = [Chosen(item.host, item.devices[:num_gpus]) for item in left]
    counts = {len(item.devices) for item in left}
    if not problems and len(counts) != 1:
        listed = odd_ones({item.host.name: len(item.devices) for item in left})
        reason = _MIXED if left else "no device is left"
        fix = "choose the same number on every host, with --include or --num_gpus"
        problems.append(
            Problem("hostfile-mixed-slots", reason, fix, key="slots", value=listed, file=path)
        )
    if problems:
        raise ConfigError(problems)
    return tuple(left)


def is_this_machine(chosen: Sequence[Chosen], *, ssh_args: str = "") -> bool:
    """They are one host, and nobody has to go there; with options of ssh, localhost may be the near
    end of a tunnel.
    """
    names = [item.host.name for item in chosen]
    here = len(names) == 1 and (
        is_loopback_name(names[0]) or names[0].lower() == socket.gethostname().lower()
    )
    return here and not ssh_args


def _parse(
    text: str, hosts: Sequence[Host], *, option: str, problems: list[Problem]
) -> dict[str, set[int]]:
    """Host -> devices: ``host1@host2:0,2``."""
    slots = {host.name: host.slots for host in hosts}
    named: dict[str, set[int]] = {}
    for part, name, numbers in _parts(text, slots):
        if not name:
            problems.append(_unknown(option, part, list(slots)))
            continue
        if numbers:
            devices = set(map(int, numbers.split(",")))
        else:
            devices = set(range(slots[name]))
        if max(devices) >= slots[name]:
            problems.append(
                _wrong(option, part, f"{name} has devices 0 to {slots[name] - 1}", "name those")
            )
        named.setdefault(name, set()).update(devices)
    return named


def _parts(text: str, names: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Each part with its host, empty if there is none, and its devices. Names are looked for first,
    the longest before the others: with `@` and `:` in them no rule could tell where they end.
    """
    spelled = {spelling: name for name in names for spelling in (name, bracketed(name))}
    longest_first = "|".join(re.escape(name) for name in sorted(spelled, key=len, reverse=True))
    known = re.compile(rf"({longest_first})(?::(\d{{1,4}}(?:,\d{{1,4}})*))?(?=@|$)", re.ASCII)
    is_more = True
    while is_more:
        match = known.match(text)
        if match:
            part = match[0]
        else:
            part = text.partition("@")[0]
        yield part, spelled[match[1]] if match else "", (match[2] or "") if match else ""
        is_more = len(part) < len(text)
        text = text[len(part) + 1 :]


def _unknown(option: str, part: str, names: Sequence[str]) -> Problem:
    if not re.fullmatch(r"[^:]+(:\d{1,4}(,\d{1,4})*)?", part, re.ASCII) and not is_host(bare(part)):
        return _wrong(
            option,
            part,
            "it is not HOST or HOST:DEVICE,DEVICE",
            "for example worker-0@worker-1:0,2",
        )
    if is_host(bare(part)):
        name = part
    else:
        name = part.partition(":")[0]
    return _wrong(option, name, "the hostfile has no such host", f"it has {first_few(names)}")


def _wrong(option: str, value: object, reason: str, fix: str) -> Problem:
    return Problem("host-choice", reason, fix, key=option, value=value, file="command line")
