"""Reads manifests with the line of every value in them, so that a problem can name its line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deepspeed_lint.text.document import Document, KeyPath, parse_document
from framework.errors import MISSING, ConfigError, Problem
from framework.system.output import masked

_SEPARATOR: Final = re.compile(r"^---(?=\s|$)", re.MULTILINE)


@dataclass(frozen=True)
class Manifest:
    """One object of a file: its value, and the line of each path in it."""

    value: Mapping[str, Any]
    file: str
    lines: Mapping[KeyPath, int]

    @property
    def kind(self) -> str:
        """Kind as written; empty if it is not text."""
        kind = self.value.get("kind")
        if isinstance(kind, str):
            return kind
        return ""

    @property
    def name(self) -> str:
        """``metadata.name``; empty if it is missing or not text."""
        name = ManifestPart(self).get("metadata", "name")
        if isinstance(name, str):
            return name
        return ""


@dataclass(frozen=True)
class ManifestPart:
    """A manifest and a path in it. Reading never fails: a value that is missing, or has another
    type, reads as None or as an empty collection.
    """

    manifest: Manifest
    path: KeyPath = ()

    def get(self, *keys: str | int) -> Any:
        """Return the value at `keys` below this part, or None if it is missing."""
        value: Any = self.manifest.value
        for key in self.path + keys:
            if isinstance(value, Mapping):
                value = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value):
                value = value[key]
            else:
                return None
        return value

    def at(self, *keys: str | int) -> ManifestPart:
        """Return the part at `keys` below this one, which may be missing."""
        return ManifestPart(self.manifest, self.path + keys)

    def mapping(self, *keys: str | int) -> Mapping[str, Any]:
        """Return the mapping at `keys`, or an empty one."""
        value = self.get(*keys)
        if isinstance(value, Mapping):
            return value
        return {}

    def items(self, *keys: str | int) -> list[ManifestPart]:
        """Return the mappings in the list at `keys`, each as a part."""
        value = self.get(*keys)
        if not isinstance(value, list):
            return []
        holder = self.at(*keys)
        return [holder.at(index) for index, item in enumerate(value) if isinstance(item, Mapping)]

    def words(self, *keys: str | int) -> list[str]:
        """Return the items of the list at `keys`, each as text."""
        value = self.get(*keys)
        if isinstance(value, list):
            return [str(item) for item in value]
        return []

    def problem(self, kind: str, reason: str, fix: str) -> Problem:
        """Return a problem with the value of this part; secrets in a list are masked."""
        value = self.get()
        if isinstance(value, list):  # a command: its settings may hold secrets
            value = [_without_secret(item) for item in value]
        if value is None:
            value = MISSING
        return Problem(
            kind=f"k8s-{kind}",
            file=self.manifest.file,
            line=self._line(),
            key=f"{self.manifest.kind}/{self.manifest.name} {self._dotted_path()}".strip(),
            value=value,
            reason=reason,
            fix=fix,
        )

    def _line(self) -> int:
        """Return the line of this part, or of the closest part around it that is written."""
        for length in range(len(self.path), -1, -1):
            line = self.manifest.lines.get(self.path[:length])
            if line is not None:
                return line
        return 0

    def _dotted_path(self) -> str:
        """Return the path as text, such as ``spec.containers[0].image``."""
        text = ""
        for key in self.path:
            if isinstance(key, int):
                text += f"[{key}]"
            else:
                text += f".{key}"
        return text.removeprefix(".")


def _without_secret(item: Any) -> Any:
    """Return an item of a command, its value masked if it looks like a secret ``key=value``."""
    key, _, value = str(item).partition("=")
    if masked(key, value) == value:
        return item
    return f"{key}=***"


def parse_manifests(text: str, *, name: str) -> list[Manifest]:
    """Return all objects of a file's text; a List counts as its items.

    Raises ConfigError for a document that is not a mapping.
    """
    manifests: list[Manifest] = []
    line = 0
    for document_text in _SEPARATOR.split(text):
        document = parse_document("".ljust(line, "\n") + document_text, name=name)
        line += document_text.count("\n")
        lines = lines_of(document)
        if isinstance(document.value, dict):
            manifests += _without_lists(Manifest(document.value, name, lines))
        elif document.value is not None:  # None: nothing between two separators
            reason = "an object is a mapping with apiVersion and kind"
            fix = "compare with what `launch k8s` prints"
            raise ConfigError.of("k8s-no-object", reason, fix, file=name, line=lines[()])
    return manifests


def lines_of(document: Document) -> dict[KeyPath, int]:
    """Return the line of every path."""
    return {path: line for path, (line, _) in document.places.items()}


def _without_lists(manifest: Manifest) -> Iterator[Manifest]:
    """Yield the manifest, or the items of a List, each with lines of its own paths."""
    if manifest.kind != "List":
        yield manifest
        return
    for item in ManifestPart(manifest).items("items"):
        depth = len(item.path)
        lines = {
            path[depth:]: line for path, line in manifest.lines.items() if path[:depth] == item.path
        }
        yield Manifest(item.mapping(), manifest.file, lines)


class Workload:
    """The parts of one training job in manifests, for any kind of object that describes it.

    Attributes:
        head: the Job, JobSet or TrainJob itself.
        job, jobset: their specs; None for a TrainJob on a runtime that is not in the files.
        template: the pod template.
        container: the one that trains.
        program: the part with image, command and variables of the trainer: the container, or
            ``spec.trainer`` of a TrainJob.
        manifests: everything in the files.
    """

    def __init__(self, manifest: Manifest, manifests: Sequence[Manifest]) -> None:
        self.head = ManifestPart(manifest)
        self.manifests = manifests
        self.jobset = self._find_jobset()
        self.job = self._find_job()
        self.template = self._find_template()
        self.container = self._find_container()
        if self.kind == "TrainJob":
            self.program = self.head.at("spec", "trainer")
            self.resources = self.program.at("resourcesPerNode")
        else:
            self.program = self.container
            self.resources = self.program.at("resources")

    def _find_jobset(self) -> ManifestPart | None:
        if self.kind == "Job":
            return None
        if self.kind == "JobSet":
            return self.head.at("spec")
        runtimes = self.objects("TrainingRuntime", "ClusterTrainingRuntime")
        runtime_by_name = {runtime.manifest.name: runtime for runtime in runtimes}
        runtime = runtime_by_name.get(str(self.head.get("spec", "runtimeRef", "name")))
        if runtime is None:
            return None
        return runtime.at("spec", "template", "spec")

    def _find_job(self) -> ManifestPart | None:
        if self.kind == "Job":
            return self.head.at("spec")
        if self.jobset is None:
            return None
        return self.jobset.at("replicatedJobs", 0, "template", "spec")

    def _find_template(self) -> ManifestPart:
        """Return the pod template; without a job it is that of a TrainJob's first patch."""
        if self.job is not None:
            return self.job.at("template")
        patch = self.head.at("spec", "runtimePatches", 0, "trainingRuntimeSpec", "template", "spec")
        return patch.at("replicatedJobs", 0, "template", "spec", "template")

    def _find_container(self) -> ManifestPart:
        """Return the first container that runs this framework, or else the first one."""
        containers = self.pod.items("containers")
        for container in containers:
            if "framework" in _command(container):
                return container
        if containers:
            return containers[0]
        return self.pod.at("containers", 0)

    @property
    def kind(self) -> str:
        """Kind of the head: Job, JobSet or TrainJob."""
        return self.head.manifest.kind

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.head.manifest.name

    @property
    def pod(self) -> ManifestPart:
        """Spec of the pods."""
        return self.template.at("spec")

    @property
    def command(self) -> list[str]:
        """Command of the program, arguments included."""
        return _command(self.program)

    def option(self, *names: str) -> str:
        """Return the value of an option in the command, in either spelling; empty if missing."""
        words = self.command
        next_words = words[1:]
        next_words.append("")
        for word, next_word in zip(words, next_words, strict=False):
            flag, equals, value = word.partition("=")
            if flag.startswith("--") and flag[2:].replace("-", "_") in names:
                return value if equals else next_word
        return ""

    @property
    def num_nodes(self) -> int:
        """Pods that the command expects, spares included; 0 if it has no such option."""
        nodes = _number(self.option("nnodes", "num_nodes"))
        if nodes == 0:
            return 0
        return nodes + _number(self.option("spares"))

    @property
    def num_ranks(self) -> int:
        """Ranks that the command starts in each pod; 0 if it has no such option."""
        return _number(self.option("num_gpus", "nproc_per_node"))

    @property
    def headless(self) -> ManifestPart | None:
        """Service that gives the pods of a plain Job their names; a JobSet makes its own."""
        if self.kind != "Job" or not self.service:
            return None
        for service in self.objects("Service"):
            if service.manifest.name == self.service:
                return service
        return None

    @property
    def service(self) -> str:
        """Domain of the pods."""
        if self.kind == "Job":
            return str(self.pod.get("subdomain") or "")
        subdomain = None
        if self.jobset is not None:
            subdomain = self.jobset.get("network", "subdomain")
        return str(subdomain or self.name)

    @property
    def pod_infix(self) -> str:
        """Text between the job's name and the pod's number in a pod's name.

        In a JobSet it names the replicated job and its replica: ``-node-0-``.
        """
        if self.kind == "Job":
            return "-"
        replicated_job = None
        if self.jobset is not None:
            replicated_job = self.jobset.get("replicatedJobs", 0, "name")
        return f"-{replicated_job or 'node'}-0-"

    @property
    def master(self) -> str:
        """Name of the pod with node rank 0."""
        return f"{self.name}{self.pod_infix}0.{self.service}"

    def objects(self, *kinds: str) -> list[ManifestPart]:
        """Return the objects of these kinds in the files."""
        return [ManifestPart(manifest) for manifest in self.manifests if manifest.kind in kinds]

    def variables(self) -> Iterator[ManifestPart]:
        """Yield the variables of the container, and of a TrainJob's trainer."""
        yield from self.container.items("env")
        if self.program is not self.container:
            yield from self.program.items("env")

    def volume(self, mount_path: str) -> ManifestPart | None:
        """Return the volume that holds a path of the container; None for its own file system."""
        volume_by_name = {str(volume.get("name")): volume for volume in self.pod.items("volumes")}
        mounts_around: list[tuple[str, str]] = []
        for mount in self.container.items("volumeMounts"):
            path = str(mount.get("mountPath")).rstrip("/")
            if mount_path == path or mount_path.startswith(f"{path}/"):
                mounts_around.append((path, str(mount.get("name"))))
        if not mounts_around:
            return None
        _, innermost_name = max(mounts_around)
        return volume_by_name.get(innermost_name)


def find_workloads(manifests: Sequence[Manifest]) -> list[Workload]:
    """Return every training job in the files."""
    kinds = ("Job", "JobSet", "TrainJob")
    return [Workload(manifest, manifests) for manifest in manifests if manifest.kind in kinds]


def _number(text: str) -> int:
    """Return the number in `text`, or 0 if it is not one of at most six digits."""
    if text.isascii() and text.isdigit() and len(text) < 7:
        return int(text)
    return 0


def _command(part: ManifestPart) -> list[str]:
    return part.words("command") + part.words("args")
