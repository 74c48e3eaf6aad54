"""Values of options: whatever could break a manifest is refused here, each function the `type` of an argument."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Final

# Image names that mean the same image tomorrow as today.


_IMAGE: Final = re.compile(
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


def what_is_wrong_with_image(image: object) -> str:
    """A reason to refuse the name of an image; empty: there is none.

    Nodes pull at different times: with a tag that moves, two pods of one job may run different code.
    """
    match = _IMAGE.fullmatch(image) if isinstance(image, str) else None
    if match is None:
        return "it is not the name of an image"
    if match["digest"]:
        return ""
    if match["tag"] is None:
        return "without a tag it means latest, which moves"
    return "latest moves: two pods may run different code" if match["tag"] == "latest" else ""


# Environment variables that a manifest should not set.


# What says who a process is. Only the launcher knows it.
OF_THE_LAUNCHER: Final = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "NODE_RANK",
        "NNODES",
        "NPROC_PER_NODE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "JOB_COMPLETION_INDEX",
    )
)
_SECRET: Final = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE|SECRET|AUTH)_?KEY)(_|$)"
)


def looks_like_a_secret(name: str) -> bool:
    """Check whether the value of a variable of this name should not be read by everybody who may read the job."""
    return _SECRET.search(name.upper()) is not None


# Kubernetes' quantities, such as ``64Gi`` or ``500m``, and its rules for names.


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
    """Check whether a Job and a Service may have this name."""
    return isinstance(text, str) and len(text) <= LONGEST_LABEL and _SERVICE_NAME.fullmatch(text) is not None


def is_object_name(text: object) -> bool:
    """Check whether claims, secrets, queues and accounts may have this name."""
    return isinstance(text, str) and len(text) <= _LONGEST_NAME and _OBJECT_NAME.fullmatch(text) is not None


def is_config_key(text: object) -> bool:
    """Check whether a file in a ConfigMap may have this name."""
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


_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUALIFIED: Final = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
# Labels and annotations that decide what our own objects mean to each other.
_OURS: Final = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "sidecar.istio.io/inject",
    "dsf-trainer/",
    "batch.kubernetes.io/",
    "jobset.sigs.k8s.io/",
    "kueue.x-k8s.io/queue-name",
)
_EFFECTS: Final = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")


def _refuse(text: str, what: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} is not {what}")


def whole(text: str) -> int:
    """A whole number below a billion."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise _refuse(text, "a whole number")
    return int(text)


def count(text: str) -> int:
    """A whole number above 0."""
    if not whole(text):
        raise _refuse(text, "a number above 0")
    return int(text)


def port(text: str) -> int:
    """A port that needs no rights, with another one above it."""
    if not 1024 <= whole(text) <= 65_534:
        raise _refuse(text, "a port from 1024 to 65534")
    return int(text)


def quantity(text: str) -> str:
    """A quantity above 0, as it was written."""
    if not parse_quantity(text):
        raise _refuse(text, "a quantity such as 64Gi or 8")
    return text


def service_name(text: str) -> str:
    """A name for a Job and its Service."""
    if not is_service_name(text):
        raise _refuse(text, "a name: lower-case letters, digits and -, a letter first")
    return text


def object_name(text: str) -> str:
    """A name for a claim, a Secret, a queue or an account."""
    if not is_object_name(text):
        raise _refuse(text, "the name of an object: lower-case letters, digits, - and .")
    return text


def image(text: str) -> str:
    """The name of an image that does not move."""
    reason = what_is_wrong_with_image(text)
    if reason:
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}; write NAME:TAG or NAME@sha256:DIGEST")
    return text


def mount_path(text: str) -> str:
    """An absolute path in a container."""
    path = PurePosixPath(text)
    if not path.is_absolute() or str(path) != text or ".." in path.parts or ":" in text or len(path.parts) < 2:
        raise _refuse(text, "an absolute path such as /checkpoints")
    return text


def qualified(text: str) -> str:
    """The name of a label."""
    if not _QUALIFIED.fullmatch(text):
        raise _refuse(text, "the name of a label")
    return text


def label(text: str) -> tuple[str, str]:
    """A label and its value."""
    name, equals, value = text.partition("=")
    if not equals or not _QUALIFIED.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
        raise _refuse(text, "LABEL=VALUE")
    return name, value


def own_label(text: str) -> tuple[str, str]:
    """A label that is not ours."""
    name, value = label(text)
    return _not_ours(name), value


def annotation(text: str) -> tuple[str, str]:
    """An annotation, whose value may be any text, and that is not ours."""
    name, equals, value = text.partition("=")
    if not equals or not _QUALIFIED.fullmatch(name) or not value.isprintable():
        raise _refuse(text, "KEY=VALUE on one line")
    return _not_ours(name), value


def _not_ours(name: str) -> str:
    if name.startswith(_OURS):
        raise argparse.ArgumentTypeError(f"{name}: the launcher sets it")
    return name


def mount(text: str) -> tuple[str, str, bool]:
    """A claim, a path in a container, and whether it is only read."""
    claim, _, rest = text.partition(":")
    path, _, way = rest.partition(":")
    if way not in ("", "ro", "rw"):
        raise _refuse(text, "CLAIM:/PATH or CLAIM:/PATH:ro")
    return object_name(claim), mount_path(path), way == "ro"


def toleration(text: str) -> str:
    """A taint, as it was written."""
    taint, _, effect = text.partition(":")
    name, _, value = taint.partition("=")
    if effect not in _EFFECTS or not _QUALIFIED.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
        raise _refuse(text, "KEY[=VALUE][:NoSchedule|PreferNoSchedule|NoExecute]")
    return text


def rdma(text: str) -> tuple[str, int]:
    """A resource and how many of it."""
    name, _, number = text.partition("=")
    if "/" not in name or not _QUALIFIED.fullmatch(name):
        raise _refuse(text, "a resource such as rdma/hca_shared_devices_a")
    return name, count(number or "1")


def variable(text: str) -> tuple[str, str]:
    """A variable and its value, neither secret nor the launcher's own."""
    name, equals, value = text.partition("=")
    if not equals or not _ENV_NAME.fullmatch(name) or not value.isprintable():
        raise _refuse(text, "NAME=VALUE on one line")
    if looks_like_a_secret(name):
        raise argparse.ArgumentTypeError(
            f"{name}: everybody who may read the job would read it; put it into a Secret, --env_secret SECRET"
        )
    if name in OF_THE_LAUNCHER:
        raise argparse.ArgumentTypeError(f"{name}: the launcher sets it")
    return name, value
