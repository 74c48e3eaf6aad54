"""Options of ``launch k8s`` and ``launch slurm``: fields of a request, and what they may hold.
Whatever could break a manifest or a script, or be read by others, is refused here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any, Final, TypeVar

from framework.config.run_config import RunConfig
from framework.errors import UsageError
from framework.plan.cluster import Cluster
from framework.system.arguments import CommandParser, add_options, like, option
from framework.system.arguments import whole as number
from framework.system.output import masked
from framework.text.document import parse_document, parse_scalar

_Request = TypeVar("_Request", bound="JobRequest")


def parse(
    request: type[_Request], words: Sequence[str], *, command: str, description: str
) -> _Request:
    """The request that a command line makes; a UsageError where an option is unknown, or has a
    wrong value.
    """
    parser = CommandParser(
        prog=f"python -m framework {command}", description=description, allow_abbrev=False
    )
    about = "the run config, and settings that win over it"
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help=about)
    add_options(parser, request)
    return request(**vars(parser.parse_intermixed_args(list(words))))


def last_setting(words: Sequence[str], key: str) -> str | None:
    """The value that counts of a setting ``key=value``; None where it is not given."""
    return next(
        (word.partition("=")[2] for word in reversed(words) if word.startswith(f"{key}=")), None
    )


def resume_setting(words: Sequence[str], config: RunConfig) -> list[str]:
    """The setting with which a job that starts again goes on, where nobody has decided that."""
    is_free = (
        config.checkpoint.resume == "never" and last_setting(words, "checkpoint.resume") is None
    )
    return ["checkpoint.resume=auto"] if is_free else []


def refuse(command: str, mistakes: Iterable[tuple[object, str]]) -> None:
    """Raise a UsageError of the first sentence whose condition holds."""
    for is_wrong, sentence in mistakes:
        if is_wrong:
            raise UsageError(f"{command}: {sentence}")


def secrets_in(value: Any, key: str = "") -> Iterator[str]:
    """The keys of a run config whose values look like secrets."""
    if masked(key, value) != value:
        yield key
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from secrets_in(item, f"{key}.{name}".removeprefix("."))


# Image names that mean the same image tomorrow as today.
_IMAGE: Final = re.compile(
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


def what_is_wrong_with_image(image: object) -> str:
    """A reason to refuse the name of an image, if any: with a tag that moves, two pods may run
    different code.
    """
    if isinstance(image, str):
        match = _IMAGE.fullmatch(image)
    else:
        match = None
    if match is None:
        return "it is not the name of an image"
    if match["digest"]:
        return ""
    if match["tag"] is None:
        return "without a tag it means latest, which moves"
    if match["tag"] == "latest":
        return "latest moves: two pods may run different code"
    return ""


# Variables that say who a process is. Only the launcher knows it.
OF_THE_LAUNCHER: Final = frozenset(
    re.findall(
        r"\w+",
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE NODE_RANK NNODES NPROC_PER_NODE "
        "MASTER_ADDR MASTER_PORT JOB_COMPLETION_INDEX",
    )
)
_SECRET: Final = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE|SECRET|AUTH)_?KEY)(_|$)"
)


def looks_like_a_secret(name: str) -> bool:
    """Check whether the value of a variable of this name is not for all who may read the job."""
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
    """The bytes or cores that a quantity of Kubernetes (``64Gi``, ``500m``) stands for; None: it is
    not one.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return Fraction(text)
    if isinstance(text, str):
        match = _QUANTITY.fullmatch(text)
    else:
        match = None
    if match:
        return Fraction(match[1]) * _FACTORS[match[2]]
    return None


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
    """A file's name where it fits `CONFIG_KEY`, else as close to it as may be; its end, the kind of
    file, stays.
    """
    return re.sub(r"[^-._a-zA-Z0-9]", "-", PurePosixPath(path).name)[-_LONGEST_NAME:].lstrip(".")


def as_service_name(text: str) -> str:
    """A name that fits `SERVICE_NAME`, as close to this text as may be."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}".strip("-"))[:40].strip("-")


# From here on: what reads the value of an option.


def matching(pattern: str | re.Pattern[str], what: str) -> Callable[[str], str]:
    """A reader of text that fits a pattern; `what` completes "... is not"."""
    return like(
        pattern if isinstance(pattern, str) else pattern.pattern, str, f"{{!r}} is not {what}"
    )


def _refuse(text: str, what: str) -> argparse.ArgumentTypeError:
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
# One that needs no rights, with another one above it.
port: Final = number(1024, 65_535, "{!r} is not a port from 1024 to 65534")


def quantity(text: str) -> str:
    """A quantity above 0, as it was written."""
    if not parse_quantity(text):
        raise _refuse(text, "a quantity such as 64Gi or 8")
    return text


def image(text: str) -> str:
    """The name of an image that does not move."""
    reason = what_is_wrong_with_image(text)
    if reason:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {reason}; write NAME:TAG or NAME@sha256:DIGEST"
        )
    return text


mount_path: Final = matching(r"(/(?!\.{1,2}(/|$))[^/:]+)+", "an absolute path such as /checkpoints")


def mount(text: str) -> tuple[str, str, bool]:
    """A claim, a path in a container, and whether it is only read."""
    claim, _, rest = text.partition(":")
    path, _, way = rest.partition(":")
    if way not in ("", "ro", "rw"):
        raise _refuse(text, "CLAIM:/PATH or CLAIM:/PATH:ro")
    return object_name(claim), mount_path(path), way == "ro"


def rdma(text: str) -> tuple[str, int]:
    """A resource and how many of it."""
    name, _, number = text.partition("=")
    if "/" not in name or not _QUALIFIED.fullmatch(name):
        raise _refuse(text, "a resource such as rdma/hca_shared_devices_a")
    return name, count(number or "1")


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


def _pair(
    pattern: str, what: str, *, may_be_ours: bool = False
) -> Callable[[str], tuple[str, str]]:
    """A reader of a name and its value, which fit a pattern together; `what` completes "... is
    not".
    """

    def read(text: str) -> tuple[str, str]:
        name, _, value = text.partition("=")
        if not re.fullmatch(pattern, text) or not value.isprintable():
            raise _refuse(text, what)
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
    """A variable and its value, neither secret nor the launcher's own."""
    name, value = _variable(text)
    if looks_like_a_secret(name):
        raise argparse.ArgumentTypeError(f"{name}: {SECRET_IS_SHOWN}")
    if name in OF_THE_LAUNCHER:
        raise argparse.ArgumentTypeError(f"{name}: the launcher sets it")
    return name, value


@dataclass(frozen=True)
class JobRequest:
    """Options of both commands; `max_restarts` and `config_text`, where it is sent along, come from
    the run config.
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
        """Check whether there are no GPUs."""
        return self.gpus == 0

    @property
    def ranks(self) -> int:
        """Ranks of a node, one to a GPU."""
        return self.gpus or self.ranks_per_node or 1

    @property
    def cluster(self) -> Cluster:
        """The cluster that the nodes make."""
        return Cluster(
            num_hosts=self.nodes,
            devices_per_host=self.ranks,
            device="cpu" if self.on_cpu else "cuda",
        )

    def refuse_mistakes(self, command: str, more: Sequence[tuple[object, str]]) -> None:
        """Raise a UsageError for `more` mistakes, or those that options of both commands can
        make.
        """
        own = (
            (not self.words, "name a run config, for example ds_configs/quickstart.yaml"),
            (
                self.gpus is None and not self.on_cpu,
                "give the GPUs of each with --gpus G; --gpus 0 --ranks_per_node N for none",
            ),
            (
                self.ranks_per_node and self.gpus and self.ranks_per_node != self.gpus,
                "with GPUs there is one rank to each; leave --ranks_per_node out",
            ),
        )
        refuse(command, (*own, *more))

    def refuse_secrets(self, command: str) -> None:
        """Raise a UsageError where a setting, or the config that is sent along, holds what looks
        like a secret.
        """
        values = [
            (parse_scalar(value), key)
            for key, _, value in (word.partition("=") for word in self.overrides)
        ]
        if self.config_text:
            values.append((parse_document(self.config_text, name=self.config).value, ""))
        found = [key for value, key in values for key in secrets_in(value, key)]
        refuse(command, [(True, f"{key}: {SECRET_IS_SHOWN} [secret-in-the-job]") for key in found])
