"""Reads manifests and remembers the line of everything in them, so that a finding can say where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from framework.errors import MISSING, ConfigError, Problem, Severity
from framework.text.document import read_text

KeyPath = tuple[str | int, ...]
# More than any job has; aliases of aliases would make billions.
_MOST_NODES: Final = 50_000


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
        return kind if isinstance(kind, str) else ""

    @property
    def name(self) -> str:
        """``metadata.name``; empty if there is none."""
        name = Part(self).get("metadata", "name")
        return name if isinstance(name, str) else ""


@dataclass(frozen=True)
class Part:
    """A place in a manifest. Reading is tolerant: what is not there, or of another type, is nothing."""

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
        return value if isinstance(value, Mapping) else {}

    def items(self, *keys: str | int) -> list[Part]:
        """The mappings in the list below."""
        value = self.get(*keys)
        values = value if isinstance(value, list) else []
        return [self.at(*keys, index) for index, item in enumerate(values) if isinstance(item, Mapping)]

    def words(self, *keys: str | int) -> list[str]:
        """The text of the list below."""
        value = self.get(*keys)
        return [str(item) for item in value] if isinstance(value, list) else []

    def problem(self, kind: str, *keys: str | int, reason: str, fix: str, severity: Severity = "error") -> Problem:
        """Something wrong with the value below, at its line or at the one of what should hold it."""
        path = (*self.path, *keys)
        line = next(
            (self.manifest.lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.manifest.lines),
            0,
        )
        where = f"{self.manifest.kind}/{self.manifest.name} {_dotted(path)}".strip()
        value = self.get(*keys)
        return Problem(
            kind=f"k8s-{kind}",
            file=self.manifest.file,
            line=line,
            key=where,
            value=MISSING if value is None else value,
            reason=reason,
            fix=fix,
            severity=severity,
        )


def _dotted(path: KeyPath) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def read_manifests(files: Iterable[str]) -> list[Manifest]:
    """All objects of these files, those of a List one by one.

    Raises:
        ConfigError: a file cannot be read, or is not YAML.
    """
    return [found for file in files for found in parse_manifests(read_text(Path(file), name=file), name=file)]


def parse_manifests(text: str, *, name: str) -> list[Manifest]:
    """All objects of a text; `name` is the file to name in problems.

    Raises:
        ConfigError: it is not YAML, a key stands twice, or it holds something other than objects.
    """
    found: list[Manifest] = []
    try:
        roots: Iterator[yaml.Node | None] = yaml.compose_all(text, Loader=yaml.SafeLoader)
        for root in roots:
            if root is None:  # nothing between two separators
                continue
            lines = dict(_lines(root, name))
            value = yaml.constructor.SafeConstructor().construct_document(root)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise _refusal(name, root.start_mark.line + 1, "an object is a mapping with apiVersion and kind")
            found += _unlisted(Manifest(value, name, lines))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 0
        raise _refusal(name, line, f"it is not YAML: {getattr(error, 'problem', None) or 'unreadable'}") from None
    except (RecursionError, ValueError):  # too deep for the parser; a date such as 2020-13-45
        raise _refusal(name, 0, "it is not YAML that a manifest would hold") from None
    return found


def _unlisted(manifest: Manifest) -> Iterator[Manifest]:
    if manifest.kind != "List":
        yield manifest
        return
    for item in Part(manifest).items("items"):
        depth = len(item.path)
        lines = {path[depth:]: line for path, line in manifest.lines.items() if path[:depth] == item.path}
        yield Manifest(item.mapping(), manifest.file, lines)


def _lines(root: yaml.Node, name: str) -> Iterator[tuple[KeyPath, int]]:
    """Path and line of everything, without recursion; a key that stands twice is refused, for only one of them would
    count.
    """
    waiting: list[tuple[KeyPath, yaml.Node]] = [((), root)]
    count = 0
    while waiting:
        path, node = waiting.pop()
        count += 1
        if count > _MOST_NODES:
            raise _refusal(name, node.start_mark.line + 1, f"it has more than {_MOST_NODES} values")
        if not path:
            yield path, node.start_mark.line + 1
        if isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                yield (*path, index), child.start_mark.line + 1
                waiting.append(((*path, index), child))
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, child in node.value:
                if str(key.value) in seen:
                    raise _refusal(
                        name, key.start_mark.line + 1, f"the key {key.value} stands twice", kind="duplicate-key"
                    )
                seen.add(str(key.value))
                yield (*path, key.value), key.start_mark.line + 1
                waiting.append(((*path, key.value), child))


def _refusal(name: str, line: int, reason: str, *, kind: str = "not-yaml") -> ConfigError:
    fix = "keep one of them" if kind == "duplicate-key" else "compare with what `launch k8s` prints"
    return ConfigError.of(kind=f"k8s-{kind}", file=name, line=line, reason=reason, fix=fix)


# `Workload`: one training job in manifests, whichever kind of object describes it.


@dataclass(frozen=True)
class Workload:
    """The parts of one job that rules look at.

    Attributes:
        head: the Job, JobSet or TrainJob itself.
        job: the Job's spec; None for a TrainJob on a runtime that is not in the files.
        jobset: the JobSet's spec; None for a plain Job.
        template: the pod template.
        container: the one that trains.
        program: what holds its image, command, resources and variables: the container, or a TrainJob's trainer.
        resources: name of the key of the resources there.
        manifests: everything in the files.
    """

    head: Part
    job: Part | None
    jobset: Part | None
    template: Part
    container: Part
    program: Part
    resources: str
    manifests: Sequence[Manifest]

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
        return self.program.words("command") + self.program.words("args")

    def option(self, *names: str) -> str:
        """The value of an option in the command; empty if it is not there."""
        words = self.command
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name in names:
                return value if equals else words[index + 1] if index + 1 < len(words) else ""
        return ""

    @property
    def num_nodes(self) -> int:
        """Pods that the command expects; 0 if it does not say."""
        text = self.option("--nnodes", "--num_nodes")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0

    @property
    def service(self) -> str:
        """The domain of the pods."""
        if self.jobset is None and self.job is not None:
            return str(self.pod.get("subdomain") or "")
        own = self.jobset.get("network", "subdomain") if self.jobset is not None else None
        return str(own or self.name)

    @property
    def master(self) -> str:
        """The name of the pod with node rank 0."""
        if self.jobset is None and self.job is not None:
            return f"{self.name}-0.{self.service}"
        return f"{self.name}-{self.replicated}-0-0.{self.service}"

    @property
    def replicated(self) -> str:
        """The name of the JobSet's job."""
        job = self.jobset.get("replicatedJobs", 0, "name") if self.jobset is not None else None
        return str(job or "node")

    def variables(self) -> Iterator[Part]:
        """The variables of the container, wherever they are written."""
        yield from self.container.items("env")
        if self.program != self.container:
            yield from self.program.items("env")

    def volume(self, mount_path: str) -> Part | None:
        """The volume in which a path of the container lies; None: it is in the container's own file system."""
        names = {str(volume.get("name")): volume for volume in self.pod.items("volumes")}
        mounts = [
            (str(mount.get("mountPath")).rstrip("/"), str(mount.get("name")))
            for mount in self.container.items("volumeMounts")
        ]
        around = [(path, name) for path, name in mounts if mount_path == path or mount_path.startswith(f"{path}/")]
        return names.get(max(around)[1]) if around else None


# A rule looks at one job and yields what is wrong.
Rule = Callable[[Workload], Iterator[Problem]]


def find_workloads(manifests: Sequence[Manifest]) -> list[Workload]:
    """Every job in the files."""
    runtimes = {found.name: found for found in manifests if found.kind in ("TrainingRuntime", "ClusterTrainingRuntime")}
    found: list[Workload] = []
    for manifest in manifests:
        head = Part(manifest)
        if manifest.kind == "Job":
            found.append(_with_job(head, head.at("spec"), None, manifests))
        elif manifest.kind == "JobSet":
            found.append(_with_job(head, _replicated(head.at("spec")), head.at("spec"), manifests))
        elif manifest.kind == "TrainJob":
            runtime = runtimes.get(str(head.get("spec", "runtimeRef", "name")))
            found.append(_of_trainjob(head, runtime, manifests))
    return found


def _replicated(jobset: Part) -> Part:
    return jobset.at("replicatedJobs", 0, "template", "spec")


def _with_job(head: Part, job: Part, jobset: Part | None, manifests: Sequence[Manifest]) -> Workload:
    template = job.at("template")
    container = _trainer(template.at("spec"))
    return Workload(head, job, jobset, template, container, container, "resources", manifests)


def _of_trainjob(head: Part, runtime: Manifest | None, manifests: Sequence[Manifest]) -> Workload:
    trainer = head.at("spec", "trainer")
    if runtime is not None:
        jobset = Part(runtime).at("spec", "template", "spec")
        job = _replicated(jobset)
        template = job.at("template")
        return Workload(
            head, job, jobset, template, _trainer(template.at("spec")), trainer, "resourcesPerNode", manifests
        )
    replicated = head.at("spec", "runtimePatches", 0, "trainingRuntimeSpec", "template", "spec", "replicatedJobs", 0)
    template = replicated.at("template", "spec", "template")
    return Workload(head, None, None, template, _trainer(template.at("spec")), trainer, "resourcesPerNode", manifests)


def _trainer(pod: Part) -> Part:
    """The container that runs our command; the first where none does."""
    containers = pod.items("containers")
    ours = [
        container for container in containers if "framework" in container.words("command") + container.words("args")
    ]
    return (ours or containers or [pod.at("containers", 0)])[0]
