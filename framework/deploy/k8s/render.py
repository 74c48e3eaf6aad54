"""The objects of a job: an Indexed Job with its Service, a JobSet, or a Kubeflow TrainJob."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from framework.deploy.k8s.manifests import lines_of
from framework.deploy.k8s.request import CACHE_PATH, CONFIG_PATH, REPLICATED_JOB, K8sRequest
from framework.deploy.options import as_config_key, parse_quantity
from framework.errors import EXIT_CONFIG, EXIT_STOPPED, EXIT_USAGE

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
        reasons: comments to write above a key; the first of a document has it.
    """
    top = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
    return top + "---\n".join(_with_reasons(document, reasons) for document in documents)


def _with_reasons(document: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    text = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=_LONG, allow_unicode=True)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    places = lines_of(root, "").items() if root else ()
    found = sorted(((line, str(path[-1])) for path, line in places if path and path[-1] in reasons), reverse=True)
    lines = text.splitlines(keepends=True)
    for key, line in {key: line for line, key in found}.items():  # the first of a document has it
        written = lines[line - 1]
        indent = " " * (len(written) - len(written.lstrip(" ")))
        lines[line - 1] = "".join(f"{indent}# {reason}\n" for reason in reasons[key].splitlines()) + written
    return "".join(lines)


# What never becomes right by itself, and what is no failure: the two lists of the pod failure policy.
NEVER_RETRY: Final = (EXIT_USAGE, EXIT_CONFIG)
NOT_COUNTED: Final = (EXIT_STOPPED,)
GPU_RESOURCE: Final = "nvidia.com/gpu"
ISTIO_LABEL: Final = "sidecar.istio.io/inject"
BUDGET_ANNOTATION: Final = "dsf-trainer/save-budget-seconds"
JOB_NAME_LABEL: Final = "batch.kubernetes.io/job-name"
JOBSET_NAME_LABEL: Final = "jobset.sigs.k8s.io/jobset-name"
CACHE_VARIABLES: Final = ("HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
# A day at least: with the job its logs go.
_TTL_SECONDS: Final = 7 * 86_400
_TRAINER_API: Final = "trainer.kubeflow.org/v1alpha1"

# Key of a manifest -> the comment above it.
_REASONS: Final[Mapping[str, str]] = json.loads(Path(__file__).with_name("reasons.json").read_text(encoding="utf-8"))
_ABOUT_RDMA: Final = """\
RDMA pins memory. The container runtime must allow that (LimitMEMLOCK=infinity):
IPC_LOCK does nothing for a user other than root."""


def manifest(request: K8sRequest, *, heading: str) -> str:
    """The objects as YAML text, in the order to create them in; `heading` is a comment at the top."""
    found: list[dict[str, Any]] = []
    if request.config_map:
        data = {"immutable": True, "data": {_config_key(request): request.config_text}}
        found.append(_object(request, "v1", "ConfigMap", _config_map_name(request)) | data)
    if request.ckpt_size:
        claim = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": request.ckpt_size}},
            "storageClassName": request.storage_class,
        }
        found.append(_object(request, "v1", "PersistentVolumeClaim", request.ckpt_pvc) | {"spec": _given(claim)})
    found += {"job": _job, "jobset": _jobset, "trainjob": _trainjob}[request.kind](request)
    count = f"{request.nodes} pod{'s' if request.nodes > 1 else ''} x {request.restarts} restarts"
    reasons = {
        **_REASONS,
        "backoffLimit": f"{count}: it counts pods, and a crash ends all of them."
        if request.kind == "job"
        else "The first failure ends this Job; the JobSet starts it again.",
        "terminationGracePeriodSeconds": f"A step and a save ({request.save_seconds} s) and a margin; then SIGKILL.",
        "securityContext": _ABOUT_RDMA if request.rdma and request.run_as_user else "",
        "containerPort": "Of this job alone: it is a port of the node." if request.host_network else "",
    }
    return write_yaml(found, heading=heading, reasons=reasons)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what nobody has asked for."""
    return {key: value for key, value in values.items() if value not in (None, "", {}, [])}


def _labels(request: K8sRequest) -> dict[str, str]:
    return {"app.kubernetes.io/name": "dsf-trainer", "app.kubernetes.io/instance": request.name}


def _object(request: K8sRequest, api: str, kind: str, name: str) -> dict[str, Any]:
    metadata = _given({"name": name, "namespace": request.namespace}) | {"labels": _labels(request)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _head(request: K8sRequest, api: str, kind: str, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Start the object that owns the pods: with the user's own marks, and the label that gives it to Kueue, which
    starts all pods or none.
    """
    found = _object(request, api, kind, request.name)
    found["metadata"]["labels"] |= dict(request.label) | _given({"kueue.x-k8s.io/queue-name": request.queue})
    found["metadata"] |= _given({"annotations": dict(annotations or {}) | request.annotations})
    return found


def _job(request: K8sRequest) -> list[dict[str, Any]]:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {JOB_NAME_LABEL: request.name},
        "ports": _ports(request, "port"),
    }
    service = _object(request, "v1", "Service", request.name) | {"spec": spec}
    return [service, _head(request, "batch/v1", "Job") | {"spec": _job_spec(request)}]


def _ports(request: K8sRequest, key: str) -> list[dict[str, Any]]:
    return [{"name": "rendezvous", key: request.port}, {"name": "agent", key: request.port + 1}]


def _job_spec(request: K8sRequest) -> dict[str, Any]:
    def on_exit(codes: tuple[int, ...]) -> dict[str, Any]:
        return {"onExitCodes": {"containerName": REPLICATED_JOB, "operator": "In", "values": list(codes)}}

    alone = request.kind == "job"
    rules = [
        {"action": "FailJob", **on_exit(NEVER_RETRY)},
        # `status` is written out: API servers up to 1.34 require it.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", **on_exit(NOT_COUNTED)},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimit": request.nodes * request.restarts if alone else 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "activeDeadlineSeconds": request.deadline,
        "ttlSecondsAfterFinished": _TTL_SECONDS if alone else None,
        "template": _pod_template(request),
    }
    return _given(spec)


def _jobset_spec(request: K8sRequest) -> dict[str, Any]:
    refused = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job: dict[str, Any] = {"spec": _job_spec(request)}
    if request.kind == "trainjob":
        # By this label Trainer finds the job that numNodes, image and command are for.
        job = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}} | job
    return {
        "failurePolicy": {"maxRestarts": request.restarts, "rules": [refused]},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": request.name},
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": job}],
    }


def _jobset(request: K8sRequest) -> list[dict[str, Any]]:
    exclusive = "" if request.queue else request.topology
    annotations = _given({"alpha.jobset.sigs.k8s.io/exclusive-topology": exclusive})
    spec = {"ttlSecondsAfterFinished": _TTL_SECONDS} | _jobset_spec(request)
    return [_head(request, "jobset.x-k8s.io/v1alpha2", "JobSet", annotations) | {"spec": spec}]


def _trainjob(request: K8sRequest) -> list[dict[str, Any]]:
    template = _pod_template(request)
    (container,) = template["spec"]["containers"]
    trainer = {
        "image": container["image"],
        "command": container["command"],
        "numNodes": request.nodes,
        "numProcPerNode": request.ranks,
        "resourcesPerNode": container["resources"],
    }
    found = _head(request, _TRAINER_API, "TrainJob")
    if not request.runtime:
        name = f"{request.name}-runtime"
        found["spec"] = {"runtimeRef": {"name": name, "kind": "TrainingRuntime"}, "trainer": trainer}
        runtime = _object(request, _TRAINER_API, "TrainingRuntime", name)
        runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "torch"
        runtime["spec"] = {"mlPolicy": {"torch": {}}, "template": {"spec": _jobset_spec(request)}}
        return [runtime, found]
    # What a TrainJob may change of somebody else's runtime; failure and restart policies are not among it.
    for key in ("restartPolicy", "enableServiceLinks", "automountServiceAccountToken"):
        template["spec"].pop(key, None)
    template["spec"]["containers"] = [{key: container[key] for key in ("name", "securityContext", "volumeMounts")}]
    replicated = {"name": REPLICATED_JOB, "template": {"spec": {"template": template}}}
    patch = {
        "manager": "dsf-trainer/launch",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
    }
    found["spec"] = {
        "runtimeRef": {"name": request.runtime, "kind": "ClusterTrainingRuntime"},
        "activeDeadlineSeconds": request.deadline,
        "trainer": trainer | {"env": container["env"]},
        "runtimePatches": [patch],
    }
    return [found]


# The pod of one node: its container, volumes, environment and rights. The same for every kind of job.


def _pod_template(request: K8sRequest) -> dict[str, Any]:
    annotations = {BUDGET_ANNOTATION: str(request.save_seconds)} | request.annotations
    if request.queue and request.topology:
        annotations["kueue.x-k8s.io/podset-required-topology"] = request.topology
    # One label keeps a proxy off the ports of the ranks.
    labels = _labels(request) | {ISTIO_LABEL: "false"} | dict(request.label)
    user = request.run_as_user
    volumes = _volumes(request)
    spec = {
        "restartPolicy": "Never",
        "subdomain": request.name if request.kind == "job" else None,  # JobSet writes its own
        "terminationGracePeriodSeconds": request.grace_seconds,
        "enableServiceLinks": False,
        "automountServiceAccountToken": None if request.service_account else False,
        "serviceAccountName": request.service_account,
        "imagePullSecrets": [{"name": request.pull_secret}] if request.pull_secret else None,
        "nodeSelector": dict(request.node_selector),
        "tolerations": [_toleration(text) for text in request.toleration],
        "priorityClassName": request.priority_class,
        "schedulerName": request.scheduler,
        "affinity": _affinity(request),
        "hostNetwork": request.host_network or None,
        "dnsPolicy": "ClusterFirstWithHostNet" if request.host_network else None,
        "securityContext": {
            "runAsNonRoot": user != 0,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            # A volume may hold a million files: their owner changes only where it is not right already.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(request, mounts=[mount for _, mount in volumes])],
        "volumes": [volume for volume, _ in volumes],
    }
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": _given(spec)}


def _affinity(request: K8sRequest) -> dict[str, Any]:
    def own_pods(topology: str) -> dict[str, Any]:
        label = JOB_NAME_LABEL if request.kind == "job" else JOBSET_NAME_LABEL
        return {"labelSelector": {"matchLabels": {label: request.name}}, "topologyKey": topology}

    found: dict[str, Any] = {}
    # Where Kueue chooses the nodes by topology it does not look at affinity, and pods would hang.
    if request.nodes > 1 and not request.share_nodes and not (request.queue and request.topology):
        apart = own_pods("kubernetes.io/hostname")
        found["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    if request.topology and not request.queue and request.kind != "jobset":
        together = {"weight": 100, "podAffinityTerm": own_pods(request.topology)}
        found["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [together]}
    return found


def _toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    found = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return found | _given({"effect": effect})


def _container(request: K8sRequest, *, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    # Memory is requested and limited alike; cores are not limited, for a throttled rank holds up all others.
    limits: dict[str, Any] = {"memory": request.memory_limit}
    if not request.on_cpu:
        limits[GPU_RESOURCE] = request.ranks
    if request.rdma:
        name, count = request.rdma
        limits[name] = count
    # A root with RDMA may pin memory; for any other user IPC_LOCK would do nothing.
    added = ["IPC_LOCK"] if request.rdma and request.run_as_user == 0 else None
    found = {
        "name": REPLICATED_JOB,
        "image": request.image,
        "command": _command(request),
        "env": _environment(request),
        "envFrom": [{"secretRef": {"name": name}} for name in request.env_secret],
        "ports": _ports(request, "containerPort"),
        "resources": {"requests": {"cpu": request.cpu_request, "memory": request.memory_limit}, "limits": limits},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": _given({"drop": ["ALL"], "add": added}),
        },
        "volumeMounts": mounts,
    }
    return _given(found)


def _command(request: K8sRequest) -> list[str]:
    """The command of one node; its rank comes from the environment."""
    config = f"{CONFIG_PATH}/{_config_key(request)}" if request.config_map else request.config
    options = {
        "--nnodes": request.nodes,
        "--num_gpus": request.ranks,
        "--master_addr": request.master_addr,
        "--master_port": request.port,
        "--grace_seconds": request.agent_grace_seconds,
    }
    words = ["python", "-m", "framework", "launch", "node", config, *request.overrides]
    return [_as_it_is(str(word)) for word in (*words, *(part for pair in options.items() for part in pair))]


def _as_it_is(text: str) -> str:
    """Kubernetes puts variables in the place of ``$(NAME)``, and one sign in that of two."""
    return text.replace("$", "$$")


def _config_key(request: K8sRequest) -> str:
    """The file's name in the ConfigMap, and so in the container."""
    return as_config_key(PurePosixPath(request.config).name)


def _config_map_name(request: K8sRequest) -> str:
    """A name that changes with the content: a running job keeps what it started with."""
    return f"{request.name}-config-{hashlib.sha256(request.config_text.encode()).hexdigest()[:8]}"


def _environment(request: K8sRequest) -> list[dict[str, Any]]:
    """Variables of the container; the user's own come last and win."""
    values = {"PYTHONUNBUFFERED": "1", "USER": "dsf", "HOME": CACHE_PATH, "XDG_CACHE_HOME": CACHE_PATH}
    for name in CACHE_VARIABLES[1:]:
        values[name] = f"{CACHE_PATH}/{name.removesuffix('_DIR').removesuffix('_CACHE').lower()}"
    if request.on_cpu:
        threads = max(1, int((parse_quantity(request.cpu_request) or 0) / request.ranks))
        values |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
    else:
        values["NCCL_DEBUG"] = "WARN"
    values |= {name: _as_it_is(value) for name, value in request.env}
    found: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items()]
    if request.token_secret:
        reference = {"secretKeyRef": {"name": request.token_secret, "key": "token"}}
        found.append({"name": "DSF_TOKEN", "valueFrom": reference})
    return found


def _volumes(request: K8sRequest) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each volume and its mount."""
    runs = {"persistentVolumeClaim": {"claimName": request.ckpt_pvc}} if request.ckpt_pvc else {"emptyDir": {}}
    found: list[tuple[str, dict[str, Any], str, bool]] = [
        ("dshm", {"emptyDir": {"medium": "Memory", "sizeLimit": request.shm_size}}, "/dev/shm", False),
        ("cache", {"emptyDir": {}}, CACHE_PATH, False),
        ("runs", runs, request.ckpt_path, False),
    ]
    for number, (claim, path, read_only) in enumerate(request.mount):
        source = _given({"claimName": claim, "readOnly": read_only or None})
        found.append((f"mount-{number}", {"persistentVolumeClaim": source}, path, read_only))
    if request.config_map:
        found.append(("config", {"configMap": {"name": _config_map_name(request)}}, CONFIG_PATH, True))
    return [
        ({"name": name, **source}, _given({"name": name, "mountPath": path, "readOnly": read_only or None}))
        for name, source, path, read_only in found
    ]
