"""Kubernetes' quantities, such as ``64Gi`` or ``500m``, and its rules for names."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|[kMGTPE]|[KMGTPE]i)?")
_FACTORS: Final = {
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
}

# A label of DNS that may also name a Service, which must begin with a letter (RFC 1035).
_SERVICE_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_OBJECT_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_CONFIG_KEY: Final = re.compile(r"(?!\.$|\.\.)[-._a-zA-Z0-9]{1,253}")
LONGEST_LABEL: Final = 63
_LONGEST_NAME: Final = 253
# The dash and five characters that a controller puts behind the name of a pod.
POD_SUFFIX: Final = 6


def parse_quantity(text: object) -> Fraction | None:
    """The number that a quantity stands for (bytes, cores); None: it is not one."""
    if isinstance(text, int) and not isinstance(text, bool):
        return Fraction(text)
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    return Fraction(match[1]) * _FACTORS[match[2] or ""] if match else None


def is_service_name(text: object) -> bool:
    """Whether a Job and a Service may have this name."""
    return isinstance(text, str) and len(text) <= LONGEST_LABEL and _SERVICE_NAME.fullmatch(text) is not None


def is_object_name(text: object) -> bool:
    """Whether claims, secrets, queues and accounts may have this name."""
    return isinstance(text, str) and len(text) <= _LONGEST_NAME and _OBJECT_NAME.fullmatch(text) is not None


def is_config_key(text: object) -> bool:
    """Whether a file in a ConfigMap may have this name."""
    return isinstance(text, str) and _CONFIG_KEY.fullmatch(text) is not None


def as_config_key(text: str) -> str:
    """A name that `is_config_key` accepts, the same where it does; the end of it stays, which says what kind of file it
    is.
    """
    return re.sub(r"[^-._a-zA-Z0-9]", "-", text)[-_LONGEST_NAME:].lstrip(".")


def as_service_name(text: str) -> str:
    """A name that `is_service_name` accepts, as close to this text as may be."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}".strip("-"))[:40].strip("-")
