"""Names and addresses of hosts: which can be one, IPv6 with and without brackets, and how many of them are told."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

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
    """Whether a host can have it: a name, or an address without brackets."""
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
    """What most hosts have; of equals the first, which is node 0's."""
    counts = Counter(values)
    return max(counts, key=lambda value: counts[value])


def odd_ones(counts: Mapping[str, int]) -> str:
    """``a 8, b 4``: hosts with their counts; of many, one of the usual kind and those that are not."""
    usual = most_common(counts.values()) if counts else 0
    first = [name for name, count in counts.items() if count == usual][:1]
    odd = [name for name, count in counts.items() if count != usual]
    names = counts if len(counts) <= _REPORTED + 1 else [*first, *odd]
    return first_few([f"{name} {counts[name]}" for name in names])
