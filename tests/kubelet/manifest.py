"""The part of Kubernetes' objects that the test kubelet knows; any other key or value is an
error.
"""

# ruff: noqa: N815 - the keys are spelled as Kubernetes spells them

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def num_bytes(quantity: str | int) -> int:
    """``64Mi`` -> 67108864."""
    found = re.fullmatch(r"(\d+)([kMGT]?|[KMGT]i)", str(quantity))
    if not found:
        raise ValueError(f"not a whole number of bytes: {quantity}")
    return int(found[1]) * _UNITS[found[2]]


class Known(BaseModel):
    """All keys are known."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Metadata(Known):
    name: str = ""
    namespace: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Variable(Known):
    name: str
    value: str = ""


class Port(Known):
    name: str
    containerPort: int


class ContainerSecurity(Known):
    allowPrivilegeEscalation: Literal[False]
    capabilities: dict[Literal["drop"], list[Literal["ALL"]]]


class VolumeMount(Known):
    name: str
    mountPath: str
    readOnly: bool = False


class Container(Known):
    name: str
    image: str
    command: list[str] = Field(min_length=1)
    env: list[Variable] = []
    ports: list[Port] = []
    resources: dict[Literal["requests", "limits"], dict[Literal["cpu", "memory"], str]] = {}
    terminationMessagePolicy: Literal["File", "FallbackToLogsOnError"] = "File"
    securityContext: ContainerSecurity | None = None
    volumeMounts: list[VolumeMount] = []


class EmptyDir(Known):
    medium: Literal["", "Memory"] = ""
    sizeLimit: str | None = None


class Claim(Known):
    claimName: str


class ConfigMapVolume(Known):
    name: str


class SecretVolume(Known):
    secretName: str
    defaultMode: int = 0o644


class Volume(Known):
    name: str
    emptyDir: EmptyDir | None = None
    persistentVolumeClaim: Claim | None = None
    configMap: ConfigMapVolume | None = None
    secret: SecretVolume | None = None


class Seccomp(Known):
    type: Literal["RuntimeDefault"]


class PodSecurity(Known):
    runAsNonRoot: bool = False
    runAsUser: int | None = None
    runAsGroup: int | None = None
    fsGroup: int | None = None
    fsGroupChangePolicy: Literal["OnRootMismatch"] = "OnRootMismatch"
    seccompProfile: Seccomp | None = None


class Selector(Known):
    matchLabels: dict[str, str] = Field(min_length=1)


class OwnNode(Known):
    """Every pod has a host of its own here, so that this holds by itself; no other wish for a place
    is known.
    """

    labelSelector: Selector
    topologyKey: Literal["kubernetes.io/hostname"]


class AntiAffinity(Known):
    requiredDuringSchedulingIgnoredDuringExecution: list[OwnNode] = Field(
        min_length=1, max_length=1
    )


class Affinity(Known):
    podAntiAffinity: AntiAffinity


class Toleration(Known):
    """No node here is ever lost."""

    key: Literal["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"]
    operator: Literal["Exists"]
    effect: Literal["NoExecute"]
    tolerationSeconds: int


class PodSpec(Known):
    restartPolicy: Literal["Never"]
    subdomain: str
    terminationGracePeriodSeconds: int = 30
    enableServiceLinks: Literal[False]
    automountServiceAccountToken: Literal[False]
    affinity: Affinity | None = None
    tolerations: list[Toleration] = []
    securityContext: PodSecurity = PodSecurity()
    containers: list[Container] = Field(min_length=1, max_length=1)
    volumes: list[Volume] = []


class Template(Known):
    metadata: Metadata = Metadata()
    spec: PodSpec


class OnExitCodes(Known):
    containerName: str | None = None
    operator: Literal["In", "NotIn"]
    values: list[int] = Field(min_length=1)


class Condition(Known):
    type: str
    status: Literal["True", "False"]


class Rule(Known):
    action: Literal["FailJob", "Ignore", "Count"]
    onExitCodes: OnExitCodes | None = None
    onPodConditions: list[Condition] = []

    def fits(self, *, code: int, container: str, conditions: set[str]) -> bool:
        """Whether it is about a pod that ended like this."""
        if self.onExitCodes is not None:
            asked = self.onExitCodes
            return (
                asked.containerName in (None, container)
                and code != 0
                and (code in asked.values) == (asked.operator == "In")
            )
        return any(
            (each.type in conditions) == (each.status == "True") for each in self.onPodConditions
        )


class FailurePolicy(Known):
    rules: list[Rule]


class JobSpec(Known):
    completionMode: Literal["Indexed"]
    completions: int
    parallelism: int
    backoffLimit: int | None = None
    backoffLimitPerIndex: int | None = None
    maxFailedIndexes: Literal[0] | None = None
    podReplacementPolicy: Literal["Failed"]
    podFailurePolicy: FailurePolicy = FailurePolicy(rules=[])
    activeDeadlineSeconds: int | None = None
    ttlSecondsAfterFinished: int | None = None
    template: Template


class Job(Known):
    apiVersion: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Metadata
    spec: JobSpec


class ServicePort(Known):
    name: str
    port: int


class ServiceSpec(Known):
    clusterIP: Literal["None"]
    publishNotReadyAddresses: Literal[True]
    selector: dict[str, str]
    ports: list[ServicePort] = []


class Service(Known):
    apiVersion: Literal["v1"]
    kind: Literal["Service"]
    metadata: Metadata
    spec: ServiceSpec


class ConfigMap(Known):
    apiVersion: Literal["v1"]
    kind: Literal["ConfigMap"]
    metadata: Metadata
    immutable: bool = False
    data: dict[str, str]


class Secret(Known):
    apiVersion: Literal["v1"]
    kind: Literal["Secret"]
    metadata: Metadata
    immutable: bool = False
    stringData: dict[str, str]


class PodSelector(Known):
    podSelector: Selector


class Ingress(Known):
    """Every pod has a network of its own here, with no other pod on it."""

    from_: list[PodSelector] = Field(alias="from", min_length=1, max_length=1)


class NetworkPolicySpec(Known):
    podSelector: Selector
    policyTypes: list[Literal["Ingress"]] = Field(min_length=1)
    ingress: list[Ingress] = Field(min_length=1, max_length=1)


class NetworkPolicy(Known):
    apiVersion: Literal["networking.k8s.io/v1"]
    kind: Literal["NetworkPolicy"]
    metadata: Metadata
    spec: NetworkPolicySpec


@dataclass(frozen=True)
class Manifest:
    """A job, the Service that gives its pods names, and files for its pods, by the name of what
    holds them.
    """

    job: Job
    service: Service
    config_maps: dict[str, dict[str, str]]
    secrets: dict[str, dict[str, str]]


def read_manifest(text: str) -> Manifest:
    """Parse documents.

    Raises:
        ValueError: something is not known, or the objects do not fit together.
    """
    kinds: dict[str, type[Known]] = {
        each.__name__: each for each in (Job, Service, ConfigMap, Secret, NetworkPolicy)
    }
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for document in filter(None, yaml.safe_load_all(text)):
        if document.get("kind") not in kinds:
            raise ValueError(f"the test kubelet knows no {document.get('kind')}")
        found[document["kind"]].append(kinds[document["kind"]].model_validate(document))
    (job,), (service,) = found["Job"], found["Service"]
    _check(job, service, found["NetworkPolicy"])
    config_maps = {each.metadata.name: each.data for each in found["ConfigMap"]}
    return Manifest(
        job, service, config_maps, {each.metadata.name: each.stringData for each in found["Secret"]}
    )


def _check(job: Job, service: Service, policies: list[NetworkPolicy]) -> None:
    """What an API server accepts, and what then does not work."""
    pod, name = job.spec.template.spec, job.metadata.name
    # The labels that the Job controller puts on its pods, beside the template's own.
    labels = job.spec.template.metadata.labels | {
        "batch.kubernetes.io/job-name": name,
        "job-name": name,
    }
    if (
        pod.subdomain != service.metadata.name
        or not service.spec.selector.items() <= labels.items()
    ):
        raise ValueError("the Service gives these pods no names")
    for term in (
        pod.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution
        if pod.affinity
        else ()
    ):
        if not term.labelSelector.matchLabels.items() <= labels.items():
            raise ValueError("the pods keep away from others than each other")
    for policy in policies:
        for selector in (policy.spec.podSelector, policy.spec.ingress[0].from_[0].podSelector):
            if not selector.matchLabels.items() <= labels.items():
                raise ValueError("the pods of this job could not meet")
    if (job.spec.backoffLimitPerIndex is None) != (job.spec.maxFailedIndexes is None):
        raise ValueError("pods would wait for one that is given up")
    volumes = {volume.name for volume in pod.volumes}
    if unknown := {mount.name for mount in pod.containers[0].volumeMounts} - volumes:
        raise ValueError(f"no such volumes: {unknown}")
    if pod.securityContext.runAsNonRoot and not pod.securityContext.runAsUser:
        raise ValueError("runAsNonRoot without runAsUser: the image's user is not known here")
