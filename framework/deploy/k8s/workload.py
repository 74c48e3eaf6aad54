"""`Workload`: one training job in manifests, whichever kind of object describes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from framework.deploy.k8s.manifests import Manifest, Part
from framework.errors import Problem


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
        """What the container runs, arguments included."""
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
