"""The objects of a job: an Indexed Job with its Service, a JobSet, or a Kubeflow TrainJob."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from framework.deploy.k8s import pod
from framework.deploy.k8s.request import REPLICATED_JOB, K8sRequest
from framework.errors import EXIT_CONFIG, EXIT_STOPPED, EXIT_USAGE

# Manifests as text that Kubernetes reads as it was meant, with a comment where a value is a decision.


# Text that needs no quotes for any reader. The one of Kubernetes (Go) takes 1e3 for a number and y for a truth value,
# which PyYAML writes without quotes; so everything that does not look like a word or a quantity gets them.
_PLAIN: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_./@:=+-]*|--?[a-z_]+|[0-9]+(m|[KMGT]i)")
_TRUTH: Final = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
_LONG: Final = 10_000


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _TRUTH and not text.endswith(":")
    style = "|" if "\n" in text else None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _list(dumper: yaml.SafeDumper, values: Sequence[Any]) -> yaml.SequenceNode:
    flow = all(isinstance(value, int) or (isinstance(value, str) and len(values) == 1) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flow)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def write_yaml(documents: Iterable[Mapping[str, Any]], *, heading: str = "", reasons: Mapping[str, str]) -> str:
    """The text of a file with these documents, keys in the order they have.

    Args:
        documents: what to write.
        heading: comment at the top.
        reasons: comments to write above a key, by the key's dotted path or the end of it; the first of a document has
            it.
    """
    parts = [_with_reasons(_dump(document), reasons) for document in documents]
    top = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
    return top + "---\n".join(parts)


def _dump(document: Mapping[str, Any]) -> str:
    text: str = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=_LONG, allow_unicode=True)
    return text


def _with_reasons(text: str, reasons: Mapping[str, str]) -> str:
    comments: dict[int, str] = {}
    done: set[str] = set()
    lines = text.splitlines(keepends=True)
    for path, mark in _keys(yaml.compose(text, Loader=yaml.SafeLoader), ()):
        ends = (".".join(path[start:]) for start in range(len(path)))
        found = next((end for end in ends if end in reasons and end not in done), None)
        if found is not None:
            done.add(found)
            indent = len(lines[mark]) - len(lines[mark].lstrip(" "))
            comments[mark] = comments.get(mark, "") + "".join(
                f"{' ' * indent}# {line}\n" for line in reasons[found].splitlines()
            )
    return "".join(comments.get(number, "") + line for number, line in enumerate(lines))


def _keys(node: yaml.Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The path of every key, indices left out, and the number of its line."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line
            yield from _keys(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _keys(value, path)


# What never becomes right by itself, and what is no failure: the two lists of the pod failure policy.
NEVER_RETRY: Final = (EXIT_USAGE, EXIT_CONFIG)
NOT_COUNTED: Final = (EXIT_STOPPED,)
KUEUE_QUEUE: Final = "kueue.x-k8s.io/queue-name"
EXCLUSIVE_TOPOLOGY: Final = "alpha.jobset.sigs.k8s.io/exclusive-topology"
# A day at least: with the job its logs go.
TTL_SECONDS: Final = 7 * 86_400
JOBSET_API: Final = "jobset.x-k8s.io/v1alpha2"
TRAINER_API: Final = "trainer.kubeflow.org/v1alpha1"

_REASONS: Final[Mapping[str, str]] = {
    "clusterIP": "Headless: every pod gets a name of its own.",
    "publishNotReadyAddresses": "Nodes find each other before any is ready.",
    "accessModes": "Every rank of every pod writes its part of a checkpoint. Who deletes this object deletes the "
    "checkpoints.",
    "immutable": "A running job keeps the config it started with; another config makes another name.",
    "podReplacementPolicy": "A new pod starts when the old one is gone, not while it still saves: one pod per node "
    "rank.",
    "podFailurePolicy": "The first rule that fits holds. The numbers are the exit codes of `python -m framework "
    "launch`.",
    "activeDeadlineSeconds": "The last safety net; a stopped run does not count as a failure, however often.",
    "ttlSecondsAfterFinished": "The logs go with the job.",
    "subdomain": "The Service; without it pods have no names.",
    "enableServiceLinks": "A Service named `master` would set MASTER_PORT.",
    "automountServiceAccountToken": "Training asks nothing of the cluster.",
    "terminationMessagePolicy": "`kubectl describe pod` shows the reason.",
    "volumes": "/dev/shm is 64 MiB otherwise; what is in it counts against the memory limit.",
    "preferredDuringSchedulingIgnoredDuringExecution": "Near each other where that can be had.",
    "podAntiAffinity": "A node for each pod; --share_nodes leaves it out.",
    "dnsPolicy": "On the node's network the pods' names would not be found otherwise.",
    "maxRestarts": "Of the whole job: survivors are restarted along with the pod that failed.",
}


def documents(request: K8sRequest, *, config_text: str = "") -> list[dict[str, Any]]:
    """The objects, in the order to create them in.

    Args:
        request: what was asked.
        config_text: content of the run config, for a ConfigMap.
    """
    found: list[dict[str, Any]] = []
    if request.embed_config:
        name = pod.config_map_name(request, config_text)
        found.append(
            _object(request, "v1", "ConfigMap", name)
            | {
                "immutable": True,
                "data": {pod.config_key(request): config_text},
            }
        )
    if request.claim_size:
        found.append(_claim(request))
    jobs = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}
    return [*found, *jobs[request.kind](request, config_text)]


def manifest(request: K8sRequest, *, config_text: str = "", heading: str = "") -> str:
    """The objects as YAML text; arguments as for `documents`, `heading` is a comment at the top."""
    count = f"{request.nodes} pod{'s' if request.nodes > 1 else ''} x {request.restarts} restarts"
    reasons = {
        **_REASONS,
        "backoffLimit": f"{count}: it counts pods, and a crash ends all of them."
        if request.kind == "job"
        else "The first failure ends this Job; the JobSet starts it again.",
        "terminationGracePeriodSeconds": f"A step and a save ({request.save_seconds} s) and a margin; then SIGKILL.",
        "securityContext": _about_rdma(request),
        "containerPort": "Of this job alone: it is a port of the node." if request.host_network else "",
    }
    written = {key: reason for key, reason in reasons.items() if reason}
    return write_yaml(documents(request, config_text=config_text), heading=heading, reasons=written)


def _about_rdma(request: K8sRequest) -> str:
    if not request.rdma or request.user == 0:
        return ""
    limit = "RDMA pins memory. The container runtime must allow that (LimitMEMLOCK=infinity):"
    return f"{limit}\nIPC_LOCK does nothing for a user other than root."


def _object(
    request: K8sRequest, api: str, kind: str, name: str, annotations: Mapping[str, str] | None = None
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if request.namespace:
        metadata["namespace"] = request.namespace
    metadata["labels"] = pod.labels(request)
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _claim(request: K8sRequest) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": request.claim_size}},
    }
    if request.storage_class:
        spec["storageClassName"] = request.storage_class
    return _object(request, "v1", "PersistentVolumeClaim", request.claim) | {"spec": spec}


def _queued(request: K8sRequest, found: dict[str, Any]) -> dict[str, Any]:
    """With the user's own marks, and the label that gives it to Kueue, which starts all pods or none."""
    found["metadata"]["labels"] |= dict(request.labels)
    if request.annotations:
        found["metadata"]["annotations"] = found["metadata"].get("annotations", {}) | dict(request.annotations)
    if request.queue:
        found["metadata"]["labels"][KUEUE_QUEUE] = request.queue
    return found


def _service(request: K8sRequest) -> dict[str, Any]:
    ports = [
        {"name": "rendezvous", "port": request.master_port},
        {"name": "agent", "port": request.master_port + 1},
    ]
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {pod.JOB_NAME_LABEL: request.name},
        "ports": ports,
    }
    return _object(request, "v1", "Service", request.service) | {"spec": spec}


def _job_spec(request: K8sRequest, config_text: str) -> dict[str, Any]:
    alone = request.kind == "job"
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimit": request.nodes * request.restarts if alone else 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _failure_rules()},
        "activeDeadlineSeconds": request.deadline_seconds,
    }
    if alone:
        spec["ttlSecondsAfterFinished"] = TTL_SECONDS
    return spec | {"template": pod.pod_template(request, config_text=config_text)}


def _failure_rules() -> list[dict[str, Any]]:
    def on_exit(codes: tuple[int, ...]) -> dict[str, Any]:
        return {"onExitCodes": {"containerName": pod.CONTAINER, "operator": "In", "values": list(codes)}}

    return [
        {"action": "FailJob", **on_exit(NEVER_RETRY)},
        # `status` is written out: API servers up to 1.34 require it.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", **on_exit(NOT_COUNTED)},
    ]


def _job(request: K8sRequest, config_text: str) -> list[dict[str, Any]]:
    job = _object(request, "batch/v1", "Job", request.name) | {"spec": _job_spec(request, config_text)}
    return [_service(request), _queued(request, job)]


def _jobset_spec(request: K8sRequest, config_text: str) -> dict[str, Any]:
    refused = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job: dict[str, Any] = {"spec": _job_spec(request, config_text)}
    if request.kind == "trainjob":
        # By this label Trainer finds the job that numNodes, image and command are for.
        job = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}} | job
    return {
        "failurePolicy": {"maxRestarts": request.restarts, "rules": [refused]},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": request.service},
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": job}],
    }


def _jobset(request: K8sRequest, config_text: str) -> list[dict[str, Any]]:
    exclusive = {EXCLUSIVE_TOPOLOGY: request.topology} if request.topology and not request.queue else {}
    found = _object(request, JOBSET_API, "JobSet", request.name, exclusive)
    found["spec"] = {"ttlSecondsAfterFinished": TTL_SECONDS} | _jobset_spec(request, config_text)
    return [_queued(request, found)]


def _trainjob(request: K8sRequest, config_text: str) -> list[dict[str, Any]]:
    trainer = {
        "image": request.image,
        "command": pod.member_command(request),
        "numNodes": request.nodes,
        "numProcPerNode": request.ranks_per_node,
        "resourcesPerNode": pod.resources(request),
    }
    found = _queued(request, _object(request, TRAINER_API, "TrainJob", request.name))
    if request.runtime:
        found["spec"] = {
            "runtimeRef": {"name": request.runtime, "kind": "ClusterTrainingRuntime"},
            "activeDeadlineSeconds": request.deadline_seconds,
            "trainer": trainer | {"env": pod.environment(request)},
            "runtimePatches": [_patch(request, config_text)],
        }
        return [found]
    name = f"{request.name}-runtime"
    found["spec"] = {"runtimeRef": {"name": name, "kind": "TrainingRuntime"}, "trainer": trainer}
    runtime = _object(request, TRAINER_API, "TrainingRuntime", name)
    runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "torch"
    runtime["spec"] = {"mlPolicy": {"torch": {}}, "template": {"spec": _jobset_spec(request, config_text)}}
    return [runtime, found]


def _patch(request: K8sRequest, config_text: str) -> dict[str, Any]:
    """Return the changes that a TrainJob may make to somebody else's runtime; failure and restart policies are not
    among them.
    """
    template = pod.pod_template(request, config_text=config_text)
    spec = {
        "terminationGracePeriodSeconds": request.grace,
        **pod.placement(request),
        "securityContext": pod.pod_security(request),
        "containers": [
            {
                "name": pod.CONTAINER,
                "securityContext": pod.container_security(request),
                "volumeMounts": pod.volume_mounts(request),
            }
        ],
        "volumes": pod.volumes(request, config_text=config_text),
    }
    job = {"spec": {"template": {"metadata": template["metadata"], "spec": spec}}}
    replicated = {"name": REPLICATED_JOB, "template": job}
    return {
        "manager": "dsf-trainer/launch",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
    }
