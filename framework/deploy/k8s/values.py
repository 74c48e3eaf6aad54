"""Values of options: whatever could break a manifest is refused here, each function the `type` of an argument."""

from __future__ import annotations

import argparse
import re
from pathlib import PurePosixPath
from typing import Final

from framework.deploy.k8s.image import what_is_wrong_with_image
from framework.deploy.k8s.quantity import is_object_name, is_service_name, parse_quantity
from framework.deploy.k8s.variables import OF_THE_LAUNCHER, looks_like_a_secret

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
