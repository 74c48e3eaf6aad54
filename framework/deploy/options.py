"""Options of ``launch k8s`` and ``launch slurm``: fields of a request, and the values they take.
A value that could break a manifest or a script, or that others could read, is refused here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any, Final, TypeVar

from deepspeed_lint.text.document import parse_document, parse_scalar
from framework.config.run_config import RunConfig
from framework.errors import UsageError
from framework.plan.cluster import Cluster
from framework.system.arguments import add_options, like, option, refuse
from framework.system.arguments import whole as number
from framework.system.command_parser import CommandParser
from framework.system.output import masked

_Request = TypeVar("_Request", bound="JobRequest")


def parse(
    request_type: type[_Request], words: Sequence[str], *, command: str, description: str
) -> _Request:
    """Return the request that a command line makes.

    Raises UsageError for an unknown option or a wrong value.
    """
    parser = CommandParser(prog=f"dsf {command}", description=description, allow_abbrev=False)
    about = "the run config, and settings that win over it"
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help=about)
    add_options(parser, request_type)
    return request_type(**vars(parser.parse_intermixed_args(list(words))))


def last_setting(words: Sequence[str], key: str) -> str | None:
    """Return the value of the last setting ``key=value``, or None if `words` have none."""
    for word in reversed(words):
        if word.startswith(f"{key}="):
            return word.partition("=")[2]
    return None


def resume_setting(words: Sequence[str], config: RunConfig) -> list[str]:
    """Return the setting that lets a restarted job resume, unless config or `words` decide it."""
    is_default = config.checkpoint.resume == "never"
    if is_default and last_setting(words, "checkpoint.resume") is None:
        return ["checkpoint.resume=auto"]
    return []


def secrets_in(value: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted keys of a run config with values that look like secrets."""
    if masked(key, value) != value:
        yield key
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from secrets_in(item, f"{key}.{name}".removeprefix("."))


# The name of an image, with its tag and its digest. Digits after a colon are the port of a registry
# only where a slash follows; they are the tag in ``trainer:12``.
_IMAGE: Final = re.compile(
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]+(?=/))?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


def what_is_wrong_with_image(image: object) -> str:
    """Return the reason to refuse the name of an image; empty for a good one.

    With a tag that moves, two pods may run different code.
    """
    match = None
    if isinstance(image, str):
        match = _IMAGE.fullmatch(image)
    if match is None:
        return "it is not the name of an image"
    if match["digest"]:
        return ""
    if match["tag"] is None:
        return "without a tag it means latest, which moves"
    if match["tag"] == "latest":
        return "latest moves: two pods may run different code"
    return ""


# Variables that identify a process in the job. Only the launcher knows their values.
OF_THE_LAUNCHER: Final = frozenset(
    re.findall(
        r"\w+",
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE NODE_RANK NNODES NPROC_PER_NODE "
        "MASTER_ADDR MASTER_PORT JOB_COMPLETION_INDEX",
    )
)
_SECRET_KEY: Final = r"(API|ACCESS|PRIVATE|SECRET|AUTH)_?KEY"
_SECRET_NOUN: Final = r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?"
_SECRET: Final = re.compile(rf"(^|_)({_SECRET_NOUN}|{_SECRET_KEY})(_|$)")


def looks_like_a_secret(name: str) -> bool:
    """Return whether the name of a variable looks like that of a secret, such as ``API_TOKEN``."""
    return _SECRET.search(name.upper()) is not None


SECRET_IS_SHOWN: Final = (
    "everybody who may read the job would read it; Kubernetes: a variable of a Secret, "
    "--env_secret SECRET; Slurm: a variable of the shell that calls sbatch, which hands it on"
)


_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|[kMGTPE]|[KMGTPE]i)?")
_FACTORS: Final[Mapping[str | None, Fraction]] = {
    None: Fraction(1),
    "m": Fraction(1, 1000),
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
}


def parse_quantity(text: object) -> Fraction | None:
    """Return the bytes or cores of a Kubernetes quantity (``64Gi``, ``500m``), or None for any
    other value.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return Fraction(text)
    if not isinstance(text, str):
        return None
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    return Fraction(match[1]) * _FACTORS[match[2]]


LONGEST_LABEL: Final = 63
_LONGEST_NAME: Final = 253
_QUALIFIED_NAME: Final = (
    r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)
_LABEL_VALUE: Final = r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?"
_QUALIFIED: Final = re.compile(_QUALIFIED_NAME)
# A label of DNS that may also name a Service, which must begin with a letter (RFC 1035).
SERVICE_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
CONFIG_KEY: Final = re.compile(r"(?!\.$|\.\.)[-._a-zA-Z0-9]{1,253}")


def as_config_key(path: str) -> str:
    """Return a key that fits `CONFIG_KEY`, as close to the file's name as possible.

    A long name loses its beginning, so that the file's ending stays.
    """
    plain = re.sub(r"[^-._a-zA-Z0-9]", "-", PurePosixPath(path).name)
    return plain[-_LONGEST_NAME:].lstrip(".")


def as_service_name(text: str) -> str:
    """Return a name that fits `SERVICE_NAME`, as close to this text as possible."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"run-{name}".strip("-")
    return name[:40].strip("-")


# From here on: functions that read the value of an option.


def matching(pattern: str | re.Pattern[str], what: str) -> Callable[[str], str]:
    """Return a reader of text that fits a pattern; `what` completes "... is not"."""
    if isinstance(pattern, re.Pattern):
        pattern = pattern.pattern
    return like(pattern, str, f"{{!r}} is not {what}")


def _mismatch(text: str, what: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} is not {what}")


service_name: Final = matching(
    SERVICE_NAME, "a name: lower-case letters, digits and -, a letter first"
)
object_name: Final = matching(
    r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*",
    "the name of an object: lower-case letters, digits, - and .",
)
qualified: Final = matching(_QUALIFIED, "the name of a label")
toleration: Final = matching(
    f"{_QUALIFIED_NAME}(={_LABEL_VALUE})?(:(NoSchedule|PreferNoSchedule|NoExecute)?)?",
    "KEY[=VALUE][:NoSchedule|PreferNoSchedule|NoExecute]",
)


whole: Final = number(0, 10**9, "{!r} is not a whole number")
count: Final = number(1, 10**9, "{!r} is not a number above 0")
# A port that needs no privileges, with another one above it.
port: Final = number(1024, 65_535, "{!r} is not a port from 1024 to 65534")


def quantity(text: str) -> str:
    """Return a quantity above 0 as it is written."""
    if not parse_quantity(text):
        raise _mismatch(text, "a quantity such as 64Gi or 8")
    return text


def image(text: str) -> str:
    """Return the name of an image. Refuses one with a tag that moves."""
    reason = what_is_wrong_with_image(text)
    if reason:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {reason}; write NAME:TAG or NAME@sha256:DIGEST"
        )
    return text


mount_path: Final = matching(r"(/(?!\.{1,2}(/|$))[^/:]+)+", "an absolute path such as /checkpoints")


def mount(text: str) -> tuple[str, str, bool]:
    """Return a claim, a path in a container, and whether it is only read."""
    claim, _, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    if mode not in ("", "ro", "rw"):
        raise _mismatch(text, "CLAIM:/PATH or CLAIM:/PATH:ro")
    return object_name(claim), mount_path(path), mode == "ro"


def rdma(text: str) -> tuple[str, int]:
    """Return the name of a resource and its number."""
    name, _, number = text.partition("=")
    if "/" not in name or not _QUALIFIED.fullmatch(name):
        raise _mismatch(text, "a resource such as rdma/hca_shared_devices_a")
    return name, count(number or "1")


# Beginnings of labels and annotations by which our own objects refer to each other.
_OURS: Final = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "sidecar.istio.io/inject",
    "dsf-trainer/",
    "batch.kubernetes.io/",
    "jobset.sigs.k8s.io/",
    "kueue.x-k8s.io/queue-name",
)


def _pair(
    pattern: str, what: str, *, may_be_ours: bool = False
) -> Callable[[str], tuple[str, str]]:
    """Return a reader of ``NAME=VALUE`` that fits a pattern; `what` completes "... is not". Names
    that the launcher sets are refused unless `may_be_ours`.
    """

    def read(text: str) -> tuple[str, str]:
        name, _, value = text.partition("=")
        if not re.fullmatch(pattern, text) or not value.isprintable():
            raise _mismatch(text, what)
        if name.startswith(_OURS) and not may_be_ours:
            raise argparse.ArgumentTypeError(f"{name}: the launcher sets it")
        return name, value

    return read


_LABEL: Final = f"{_QUALIFIED_NAME}={_LABEL_VALUE}"
label: Final = _pair(_LABEL, "LABEL=VALUE", may_be_ours=True)
own_label: Final = _pair(_LABEL, "LABEL=VALUE")
annotation: Final = _pair(f"{_QUALIFIED_NAME}=.*", "KEY=VALUE on one line")
_variable: Final = _pair(r"[A-Za-z_][A-Za-z0-9_]*=.*", "NAME=VALUE on one line")


def variable(text: str) -> tuple[str, str]:
    """Return a variable and its value. Refuses secrets and the launcher's own variables."""
    name, value = _variable(text)
    if looks_like_a_secret(name):
        raise argparse.ArgumentTypeError(f"{name}: {SECRET_IS_SHOWN}")
    if name in OF_THE_LAUNCHER:
        raise argparse.ArgumentTypeError(f"{name}: the launcher sets it")
    return name, value


@dataclass(frozen=True)
class JobRequest:
    """Options of both commands.

    Attributes:
        max_restarts: ``supervision.max_restarts`` of the run config.
        config_text: the run config as text, if it is sent along; otherwise empty.
    """

    words: Sequence[str]
    nodes: int = option("machines, or pods (1)", "N", count, default=1)
    gpus: int | None = option(
        "GPUs of each, one rank to a GPU; 0: none, then --ranks_per_node", "G", whole, default=None
    )
    ranks_per_node: int = option("ranks of each without GPUs (1)", "N", count, default=0)
    env: Sequence[tuple[str, str]] = option(
        "variable of the run", "NAME=VALUE", variable, many=True
    )
    out: str | None = option("write there instead of printing", "FILE", default=None)
    dry_run: bool = option("print and write nothing; without --out it is what happens anyway")
    max_restarts: int = 0
    config_text: str = ""

    @property
    def config(self) -> str:
        """Path of the run config."""
        return self.words[0]

    @property
    def overrides(self) -> Sequence[str]:
        """``key=value`` settings."""
        return self.words[1:]

    @property
    def on_cpu(self) -> bool:
        """True if the nodes have no GPUs."""
        return self.gpus == 0

    @property
    def ranks(self) -> int:
        """Ranks of a node, one to a GPU."""
        return self.gpus or self.ranks_per_node or 1

    @property
    def cluster(self) -> Cluster:
        """Cluster that the nodes form."""
        return Cluster(
            num_hosts=self.nodes,
            devices_per_host=self.ranks,
            device="cpu" if self.on_cpu else "cuda",
        )

    def refuse_mistakes(self, command: str, more: Sequence[tuple[object, str]]) -> None:
        """Raise UsageError for the first mistake in options of both commands, or in `more`; a
        mistake is a condition and its message.
        """
        mistakes: list[tuple[object, str]] = [
            (not self.words, "name a run config, for example ds_configs/quickstart.yaml"),
            (
                self.gpus is None and not self.on_cpu,
                "give the GPUs of each with --gpus G; --gpus 0 --ranks_per_node N for none",
            ),
            (
                self.ranks_per_node and self.gpus and self.ranks_per_node != self.gpus,
                "with GPUs there is one rank to each; leave --ranks_per_node out",
            ),
        ]
        mistakes += more
        refuse(command, mistakes)

    def refuse_secrets(self, command: str) -> None:
        """Raise UsageError if a setting, or the config that is sent along, looks like a secret."""
        secret_keys: list[str] = []
        for setting in self.overrides:
            key, _, value = setting.partition("=")
            secret_keys += secrets_in(parse_scalar(value), key)
        if self.config_text:
            document = parse_document(self.config_text, name=self.config)
            secret_keys += secrets_in(document.value)
        if secret_keys:
            key = secret_keys[0]
            raise UsageError(f"{command}: {key}: {SECRET_IS_SHOWN} [secret-in-the-job]")
