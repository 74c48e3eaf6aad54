"""Reads manifests and remembers the line of everything in them, so that a finding can say where."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from framework.errors import MISSING, ConfigError, Problem
from framework.system.output import masked
from framework.text.document import Document, KeyPath, parse_document

_SEPARATOR: Final = re.compile(r"^---(?=\s|$)", re.MULTILINE)


@dataclass(frozen=True)
class Manifest:
    """One object of a file: its value, and the line of each path in it."""

    value: Mapping[str, Any]
    file: str
    lines: Mapping[KeyPath, int]

    @property
    def kind(self) -> str:
        """As written; empty if it is not text."""
        kind = self.value.get("kind")
        if isinstance(kind, str):
            return kind
        return ""

    @property
    def name(self) -> str:
        """``metadata.name``; empty if there is none."""
        name = Part(self).get("metadata", "name")
        if isinstance(name, str):
            return name
        return ""


@dataclass(frozen=True)
class Part:
    """A place in a manifest. Reading is tolerant: what is not there, or of another type, is
    nothing.
    """

    manifest: Manifest
    path: KeyPath = ()

    def get(self, *keys: str | int) -> Any:
        """The value below; None if there is none."""
        value: Any = self.manifest.value
        for key in (*self.path, *keys):
            if isinstance(value, Mapping):
                value = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value):
                value = value[key]
            else:
                return None
        return value

    def at(self, *keys: str | int) -> Part:
        """The place below."""
        return Part(self.manifest, (*self.path, *keys))

    def mapping(self, *keys: str | int) -> Mapping[str, Any]:
        """The mapping below; an empty one if there is none."""
        value = self.get(*keys)
        if isinstance(value, Mapping):
            return value
        return {}

    def items(self, *keys: str | int) -> list[Part]:
        """The mappings in the list below."""
        value = self.get(*keys)
        if isinstance(value, list):
            values = value
        else:
            values = []
        return [
            self.at(*keys, index) for index, item in enumerate(values) if isinstance(item, Mapping)
        ]

    def words(self, *keys: str | int) -> list[str]:
        """The text of the list below."""
        value = self.get(*keys)
        if isinstance(value, list):
            return [str(item) for item in value]
        return []

    def problem(self, kind: str, reason: str, fix: str) -> Problem:
        """Something wrong with the value, at its line or at the one of what should hold it."""
        holders = (self.path[:end] for end in range(len(self.path), -1, -1))
        dotted = "".join(
            f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path
        ).removeprefix(".")
        value = self.get()
        if isinstance(value, list):  # a command: of its settings some may be secrets
            pairs = ((word, *str(word).partition("=")[::2]) for word in value)
            value = [
                word if masked(key, text) == text else f"{key}=***" for word, key, text in pairs
            ]
        return Problem(
            kind=f"k8s-{kind}",
            file=self.manifest.file,
            line=next(
                (self.manifest.lines[path] for path in holders if path in self.manifest.lines), 0
            ),
            key=f"{self.manifest.kind}/{self.manifest.name} {dotted}".strip(),
            value=MISSING if value is None else value,
            reason=reason,
            fix=fix,
        )


def parse_manifests(text: str, *, name: str) -> list[Manifest]:
    """All objects of a file's text, those of a List one by one; a ConfigError where it holds
    something else.
    """
    found: list[Manifest] = []
    line = 0
    for part in _SEPARATOR.split(text):
        document = parse_document("\n" * line + part, name=name)
        line += part.count("\n")
        lines = lines_of(document)
        if isinstance(document.value, dict):
            found += _unlisted(Manifest(document.value, name, lines))
        elif document.value is not None:  # nothing between two separators
            reason = "an object is a mapping with apiVersion and kind"
            fix = "compare with what `launch k8s` prints"
            raise ConfigError.of("k8s-no-object", reason, fix, file=name, line=lines[()])
    return found


def lines_of(document: Document) -> dict[KeyPath, int]:
    """The line of every path."""
    return {path: line for path, (line, _) in document.places.items()}


def _unlisted(manifest: Manifest) -> Iterator[Manifest]:
    if manifest.kind != "List":
        yield manifest
        return
    for item in Part(manifest).items("items"):
        depth = len(item.path)
        lines = {
            path[depth:]: line for path, line in manifest.lines.items() if path[:depth] == item.path
        }
        yield Manifest(item.mapping(), manifest.file, lines)


class Workload:
    """The parts of one training job in manifests, whichever kind of object describes it.

    Attributes:
        head: the Job, JobSet or TrainJob itself.
        job, jobset: their specs; None for a TrainJob on a runtime that is not in the files.
        template: the pod template.
        container: the one that trains.
        program: what holds its image, command and variables: the container, or a TrainJob's
            trainer.
        manifests: everything in the files.
    """

    def __init__(self, manifest: Manifest, manifests: Sequence[Manifest]) -> None:
        self.head = Part(manifest)
        self.manifests = manifests
        job = None
        jobset = None
        if manifest.kind == "Job":
            job = self.head.at("spec")
        elif manifest.kind == "JobSet":
            jobset = self.head.at("spec")
        else:
            kinds = ("TrainingRuntime", "ClusterTrainingRuntime")
            runtimes = {found.manifest.name: found for found in self.objects(*kinds)}
            runtime = runtimes.get(str(self.head.get("spec", "runtimeRef", "name")))
            jobset = runtime and runtime.at("spec", "template", "spec")
        if jobset:
            job = jobset.at("replicatedJobs", 0, "template", "spec")
        patch = self.head.at("spec", "runtimePatches", 0, "trainingRuntimeSpec", "template", "spec")
        of_patch = patch.at("replicatedJobs", 0, "template", "spec", "template")
        self.job = job
        self.jobset = jobset
        self.template = job.at("template") if job else of_patch
        containers = self.pod.items("containers")
        ours = [container for container in containers if "framework" in _command(container)]
        self.container = (ours or containers or [self.pod.at("containers", 0)])[0]
        is_trainjob = manifest.kind == "TrainJob"
        if is_trainjob:
            self.program = self.head.at("spec", "trainer")
        else:
            self.program = self.container
        self.resources = self.program.at("resourcesPerNode" if is_trainjob else "resources")

    @property
    def kind(self) -> str:
        """Job, JobSet or TrainJob."""
        return self.head.manifest.kind

    @property
    def name(self) -> str:
        """Of the job."""
        return self.head.manifest.name

    @property
    def pod(self) -> Part:
        """The pod's spec."""
        return self.template.at("spec")

    @property
    def command(self) -> list[str]:
        """Command of the container, arguments included."""
        return _command(self.program)

    def option(self, *names: str) -> str:
        """The value of an option in the command, in either spelling; empty if it is not there."""
        words = self.command
        for word, value in zip(words, [*words[1:], ""], strict=False):
            given, equals, own = word.partition("=")
            if given.startswith("--") and given[2:].replace("-", "_") in names:
                return own if equals else value
        return ""

    @property
    def num_nodes(self) -> int:
        """Pods that the command expects, those in reserve included; 0 if it does not say."""
        nodes = _number(self.option("nnodes", "num_nodes"))
        return nodes and nodes + _number(self.option("spares"))

    @property
    def num_ranks(self) -> int:
        """Ranks that the command starts in each pod; 0 if it does not say."""
        return _number(self.option("num_gpus", "nproc_per_node"))

    @property
    def headless(self) -> Part | None:
        """The Service that gives the pods of a plain Job their names; a JobSet makes its own."""
        named = [
            found
            for found in self.objects("Service")
            if found.manifest.name == self.service and self.service
        ]
        return named[0] if named and self.kind == "Job" else None

    @property
    def service(self) -> str:
        """The domain of the pods."""
        if self.kind == "Job":
            return str(self.pod.get("subdomain") or "")
        return str((self.jobset and self.jobset.get("network", "subdomain")) or self.name)

    @property
    def replicated(self) -> str:
        """Part of a pod's name between the job's and its number: a JobSet's job, and the number of
        that.
        """
        if self.kind == "Job":
            return "-"
        job = self.jobset and self.jobset.get("replicatedJobs", 0, "name")
        return f"-{job or 'node'}-0-"

    @property
    def master(self) -> str:
        """The name of the pod with node rank 0."""
        return f"{self.name}{self.replicated}0.{self.service}"

    def objects(self, *kinds: str) -> list[Part]:
        """The objects of these kinds in the files."""
        return [Part(manifest) for manifest in self.manifests if manifest.kind in kinds]

    def variables(self) -> Iterator[Part]:
        """The variables of the container, wherever they are written."""
        yield from self.container.items("env")
        if self.program is not self.container:
            yield from self.program.items("env")

    def volume(self, mount_path: str) -> Part | None:
        """The volume in which a path of the container lies; None: it is in the container's own file
        system.
        """
        names = {str(volume.get("name")): volume for volume in self.pod.items("volumes")}
        mounts = [
            (str(mount.get("mountPath")).rstrip("/"), str(mount.get("name")))
            for mount in self.container.items("volumeMounts")
        ]
        around = [
            (path, name)
            for path, name in mounts
            if mount_path == path or mount_path.startswith(f"{path}/")
        ]
        if around:
            return names.get(max(around)[1])
        return None


def find_workloads(manifests: Sequence[Manifest]) -> list[Workload]:
    """Every job in the files."""
    return [
        Workload(found, manifests)
        for found in manifests
        if found.kind in ("Job", "JobSet", "TrainJob")
    ]


def _number(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 7:
        return int(text)
    return 0


def _command(part: Part) -> list[str]:
    return part.words("command") + part.words("args")
