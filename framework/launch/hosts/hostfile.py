"""Hostfiles and names of hosts.

Reads a hostfile: one ``NAME slots=COUNT`` per line, as the `deepspeed` command takes it, but strictly.

DeepSpeed 0.19.8 goes on with this machine alone when the file is missing, reads ``slots=2x`` as 2, starts no rank where
``slots=0``, and takes a byte-order mark as part of the first name (launcher/runner.py `fetch_hostfile`). Each of these
costs a cluster its time, so here each is a problem with its line. Whatever this reader accepts means the same to
DeepSpeed, but for the brackets of an IPv6 address, which ssh and pdsh cannot read.
"""

from __future__ import annotations

import ipaddress
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from framework.errors import ConfigError, Problem
from framework.plan.cluster import Cluster

# Names and addresses of hosts: which can be one, IPv6 with and without brackets, and how many of them are told.


# What ssh, sockets and DeepSpeed take without a second meaning: no leading dash, no shell, no space.
_NAME: Final = re.compile(r"(?=.{1,253}$)(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_LOOPBACK: Final = re.compile(r"localhost(\..*)?|127(\.[0-9]{1,3}){3}|::1", re.IGNORECASE)
_REPORTED: Final = 3


def bare(name: str) -> str:
    """Without the brackets of an IPv6 address, which ssh, sockets and torch would take for a part of it:
    ``me@[fd00::1]``.
    """
    user, at, host = name.rpartition("@")
    is_bracketed = host.startswith("[") and host.endswith("]") and ":" in host
    return user + at + (host[1:-1] if is_bracketed else host)


def bracketed(name: str) -> str:
    """The other spelling of an IPv6 address; other names as they are."""
    user, at, host = name.rpartition("@")
    return f"{user}{at}[{host}]" if ":" in host else name


def is_host(name: str) -> bool:
    """Check whether a host can have it: a name, or an address without brackets."""
    if ":" not in name:
        return bool(_NAME.fullmatch(name))
    try:
        return (
            ipaddress.ip_address(name).version == 6 and "%" not in name
        )  # an interface means something to one host only
    except ValueError:
        return False


def is_loopback_name(name: str) -> bool:
    """Every machine takes it for itself."""
    return bool(_LOOPBACK.fullmatch(name))


def first_few(names: Sequence[str], *, most: int = _REPORTED) -> str:
    """``a, b, c and 997 more``; one more than that is named as well."""
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def node_names(names: Sequence[str]) -> str:
    """``nodes a, b, c and 7 more``."""
    return f"node{'s' if len(names) > 1 else ''} {first_few(names)}"


def most_common(values: Iterable[Any]) -> Any:
    """Return the value that most hosts have; of equals the first, which is node 0's."""
    counts = Counter(values)
    return max(counts, key=lambda value: counts[value])


def odd_ones(counts: Mapping[str, int]) -> str:
    """``a 8, b 4``: hosts with their counts; of many, one of the usual kind and those that are not."""
    usual = most_common(counts.values()) if counts else 0
    first = [name for name, count in counts.items() if count == usual][:1]
    odd = [name for name, count in counts.items() if count != usual]
    names = counts if len(counts) <= _REPORTED + 1 else [*first, *odd]
    return first_few([f"{name} {counts[name]}" for name in names])


_LARGEST_FILE_BYTES: Final = 1 << 20
_MOST_SLOTS: Final = 1024
_LINE: Final = re.compile(r"(\S+)[ \t]+slots=([0-9]{1,4})")
# A leading dash would be read as an option by ssh and pdsh.
_USER: Final = re.compile(r"(?!-)[A-Za-z0-9_.@-]+")
_BYTE_ORDER_MARKS: Final = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_HOW: Final = "write one `NAME slots=COUNT` per line, for example worker-0 slots=8"


@dataclass(frozen=True)
class Host:
    """One line of a hostfile.

    Attributes:
        name: what ssh is told: a name or an address, with ``user@`` where it needs one; IPv6 without brackets.
        slots: devices, and so ranks, on it.
    """

    name: str
    slots: int


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """The hosts in the order of the file, which is the order of their ranks.

    Raises:
        ConfigError: with everything that is wrong in it.
    """
    text = _read_text(Path(path), name=str(path))
    hosts: list[Host] = []
    problems: list[Problem] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        host = _parse(entry, file=str(path), line=number)
        if isinstance(host, Problem):
            problems.append(host)
            continue
        problems += _about_name(host.name, first_line, file=str(path), line=number)
        first_line.setdefault(host.name, number)
        hosts.append(host)
    problems += _loopback_among(hosts, first_line, file=str(path))
    if not hosts and not problems:
        problems.append(Problem(kind="hostfile-empty", file=str(path), reason="it names no host", fix=_HOW))
    if problems:
        raise ConfigError(problems)
    return tuple(hosts)


def cluster_of(hosts: Sequence[Host], *, path: str | Path = "") -> Cluster:
    """The cluster that these hosts make.

    Raises:
        ConfigError: they do not have the same number of slots.
    """
    counts = sorted({host.slots for host in hosts})
    if len(counts) > 1:
        listed = odd_ones({host.name: host.slots for host in hosts})
        raise ConfigError(
            Problem(
                kind="hostfile-mixed-slots",
                file=str(path),
                key="slots",
                value=listed,
                reason="DeepSpeed numbers local ranks wrongly when hosts differ",
                fix=f"give every host slots={counts[0]}",
            )
        )
    return Cluster(num_hosts=len(hosts), devices_per_host=counts[0])


def _parse(entry: str, *, file: str, line: int) -> Host | Problem:
    """A host, or what is wrong with its line."""
    match = _LINE.fullmatch(entry)
    if not match:
        return Problem(
            kind="hostfile-malformed", file=file, line=line, key="line", value=entry, reason=_why(entry), fix=_HOW
        )
    if int(match[2]) == 0:
        return Problem(
            kind="hostfile-zero-slots",
            file=file,
            line=line,
            key="slots",
            value=0,
            reason=f"{match[1]} would train nothing",
            fix="write its number of devices, or remove the line",
        )
    if int(match[2]) > _MOST_SLOTS:
        return Problem(
            kind="hostfile-many-slots",
            file=file,
            line=line,
            key="slots",
            value=int(match[2]),
            reason=f"no machine has more than {_MOST_SLOTS} devices",
            fix="write its number of devices",
        )
    return Host(bare(match[1]), int(match[2]))


def _loopback_among(hosts: Sequence[Host], lines: dict[str, int], *, file: str) -> Iterator[Problem]:
    """A name that every machine takes for itself; alone in a file it is this machine."""
    for host in hosts if len(hosts) > 1 else ():
        if is_loopback_name(host.name.rpartition("@")[2]):
            yield Problem(
                kind="hostfile-loopback",
                file=file,
                line=lines[host.name],
                key="host",
                value=host.name,
                reason="every host takes this name for itself",
                fix="write the name that the others know it by",
            )


def _why(entry: str) -> str:
    """The most likely mistake in a line."""
    if re.search(r"slots(\s+=|=\s)", entry):
        return "there is a space around ="
    if "slots" not in entry.lower():
        return "the number of slots is missing"
    if re.match(r"\S+[ \t]+slots=-", entry):
        return "the number of slots is negative"
    if re.match(r"\S+[ \t]+slots=[0-9]{1,4}\s", entry):
        return "there is more after the number of slots, which DeepSpeed would ignore"
    if re.match(r"\S+[ \t]+slots=", entry):
        return "the number of slots is not a whole number up to 9999"
    return "it is not in DeepSpeed's format"


def _about_name(name: str, first_line: dict[str, int], *, file: str, line: int) -> Iterator[Problem]:
    user, at, host = name.rpartition("@")
    if not is_host(host) or (at and not _USER.fullmatch(user)):
        reason = "it is not an IPv6 address" if ":" in host else "no host can have this name"
        yield Problem(
            kind="hostfile-bad-name",
            file=file,
            line=line,
            key="host",
            value=name,
            reason=reason,
            fix="letters, digits, - _ . and user@, or an address such as 10.0.0.2 or [fd00::2]",
        )
    if name in first_line:
        yield Problem(
            kind="hostfile-duplicate-host",
            file=file,
            line=line,
            key="host",
            value=name,
            reason=f"the host is already in line {first_line[name]}",
            fix="keep one line with all its slots",
        )


def _read_text(path: Path, *, name: str) -> str:
    """The file's text; everything that makes it no text file is a problem of its own."""

    def refuse(kind: str, reason: str, fix: str) -> ConfigError:
        return ConfigError(Problem(kind=f"hostfile-{kind}", file=name, reason=reason, fix=fix))

    try:
        status = path.stat()
        # Opening a pipe would wait for its writer, and DeepSpeed takes one for a missing file.
        if not stat.S_ISREG(status.st_mode):
            raise refuse("not-a-file", "it is a directory or a pipe, not a file", "name a text file")
        if status.st_size > _LARGEST_FILE_BYTES:
            raise refuse("malformed", f"it has {status.st_size} bytes, no hostfile is so large", "name the right file")
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise refuse(
            "not-found", "there is no such file", "DeepSpeed would train on this machine alone; check the path"
        ) from None
    except (OSError, ValueError) as error:
        raise refuse(
            "unreadable", f"it cannot be read: {getattr(error, 'strerror', None) or error}", "check the path"
        ) from None
    if content.startswith(_BYTE_ORDER_MARKS):
        raise refuse(
            "bom",
            "it begins with a byte-order mark, which would become part of the first name",
            "save it as UTF-8 without a byte-order mark",
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise refuse("malformed", "it is not a text file", "name the right file")
    return text
