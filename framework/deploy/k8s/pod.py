"""The pod of one node: its container, volumes, environment and rights. The same for every kind of job."""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath
from typing import Any, Final

from framework.deploy.k8s.request import K8sRequest
from framework.deploy.k8s.values import as_config_key, parse_quantity

CONTAINER: Final = "node"  # as Kubeflow's torch runtimes call it
GPU_RESOURCE: Final = "nvidia.com/gpu"
ISTIO_LABEL: Final = "sidecar.istio.io/inject"
BUDGET_ANNOTATION: Final = "dsf-trainer/save-budget-seconds"
TOKEN_VARIABLE: Final = "DSF_TOKEN"
TOKEN_KEY: Final = "token"
JOB_NAME_LABEL: Final = "batch.kubernetes.io/job-name"
JOBSET_NAME_LABEL: Final = "jobset.sigs.k8s.io/jobset-name"
HOST_NAME_LABEL: Final = "kubernetes.io/hostname"
KUEUE_TOPOLOGY: Final = "kueue.x-k8s.io/podset-required-topology"
# Compilers and downloads write here. On the node itself: on a network volume a lock that is left behind stops every
# rank.
CACHE_PATH: Final = "/cache"
CACHE_VARIABLES: Final = ("HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_CONFIG_PATH: Final = "/etc/dsf-trainer"
OWN_PATHS: Final = ("/dev/shm", CACHE_PATH, _CONFIG_PATH)


def labels(request: K8sRequest) -> dict[str, str]:
    """Return the labels of every object."""
    return {"app.kubernetes.io/name": "dsf-trainer", "app.kubernetes.io/instance": request.name}


def config_map_name(request: K8sRequest, text: str) -> str:
    """A name that changes with the content: a running job keeps what it started with."""
    return f"{request.name}-config-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def config_key(request: K8sRequest) -> str:
    """The file's name in the ConfigMap, and so in the container."""
    return as_config_key(PurePosixPath(request.config).name)


def member_command(request: K8sRequest) -> list[str]:
    """The command of one node; its rank comes from the environment."""
    config = f"{_CONFIG_PATH}/{config_key(request)}" if request.embed_config else request.config
    words = [
        "python",
        "-m",
        "framework",
        "launch",
        "node",
        config,
        *request.overrides,
        "--nnodes",
        str(request.nodes),
        "--num_gpus",
        str(request.ranks_per_node),
        "--master_addr",
        request.master_addr,
        "--master_port",
        str(request.master_port),
        "--grace_seconds",
        str(request.agent_grace),
    ]
    return [_as_it_is(word) for word in words]


def _as_it_is(text: str) -> str:
    """Kubernetes puts variables in the place of ``$(NAME)``, and one sign in that of two."""
    return text.replace("$", "$$")


def pod_template(request: K8sRequest, *, config_text: str) -> dict[str, Any]:
    """Labels, annotations and spec of the pods."""
    annotations = {BUDGET_ANNOTATION: str(request.save_seconds)} | dict(request.annotations)
    if request.queue and request.topology:
        annotations[KUEUE_TOPOLOGY] = request.topology
    return {
        "metadata": {"labels": pod_labels(request), "annotations": annotations},
        "spec": _pod_spec(request, config_text),
    }


def pod_labels(request: K8sRequest) -> dict[str, str]:
    """Labels of the pods: those of all objects, and one that keeps a proxy off the ports of the ranks."""
    return labels(request) | {ISTIO_LABEL: "false"} | dict(request.labels)


def _pod_spec(request: K8sRequest, config_text: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"restartPolicy": "Never"}
    if request.kind == "job":
        spec["subdomain"] = request.service  # JobSet writes its own
    spec["terminationGracePeriodSeconds"] = request.grace
    spec["enableServiceLinks"] = False
    if not request.service_account:
        spec["automountServiceAccountToken"] = False
    spec |= placement(request)
    if request.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    spec["securityContext"] = pod_security(request)
    spec["containers"] = [_container(request)]
    spec["volumes"] = volumes(request, config_text=config_text)
    return spec


def placement(request: K8sRequest) -> dict[str, Any]:
    """Return the placement of the pods: nodes, scheduler, service account, and the secret to pull with."""
    found: dict[str, Any] = {}
    if request.service_account:
        found["serviceAccountName"] = request.service_account
    if request.pull_secret:
        found["imagePullSecrets"] = [{"name": request.pull_secret}]
    if request.node_selector:
        found["nodeSelector"] = dict(request.node_selector)
    if request.tolerations:
        found["tolerations"] = [_toleration(text) for text in request.tolerations]
    if request.priority_class:
        found["priorityClassName"] = request.priority_class
    if request.scheduler:
        found["schedulerName"] = request.scheduler
    affinity = _apart(request) | _together(request)
    return found | ({"affinity": affinity} if affinity else {})


def _apart(request: K8sRequest) -> dict[str, Any]:
    """A node for each pod. Where Kueue chooses the nodes by topology it does not look at this, and pods would hang."""
    if request.nodes == 1 or request.share_nodes or (request.queue and request.topology):
        return {}
    return {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_own_pods(request, HOST_NAME_LABEL)]}
    }


def _together(request: K8sRequest) -> dict[str, Any]:
    if not request.topology or request.queue or request.kind == "jobset":
        return {}
    preferred = [{"weight": 100, "podAffinityTerm": _own_pods(request, request.topology)}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _own_pods(request: K8sRequest, topology: str) -> dict[str, Any]:
    label = JOB_NAME_LABEL if request.kind == "job" else JOBSET_NAME_LABEL
    return {"labelSelector": {"matchLabels": {label: request.name}}, "topologyKey": topology}


def _toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    found = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return found | ({"effect": effect} if effect else {})


def pod_security(request: K8sRequest) -> dict[str, Any]:
    """Return the user and groups of the processes. Volumes change their owner only where it is not right already: they
    may hold a million files.
    """
    return {
        "runAsNonRoot": request.user != 0,
        "runAsUser": request.user,
        "runAsGroup": request.user,
        "fsGroup": request.user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(request: K8sRequest) -> dict[str, Any]:
    """No rights beyond a user's; a root with RDMA may pin memory. For any other user IPC_LOCK would do nothing."""
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if request.rdma and request.user == 0:
        capabilities["add"] = ["IPC_LOCK"]
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def _container(request: K8sRequest) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": request.image,
        "command": member_command(request),
        "env": environment(request),
        **env_from(request),
        "ports": [
            {"name": "rendezvous", "containerPort": request.master_port},
            {"name": "agent", "containerPort": request.master_port + 1},
        ],
        "resources": resources(request),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security(request),
        "volumeMounts": volume_mounts(request),
    }


def environment(request: K8sRequest) -> list[dict[str, Any]]:
    """Variables of the container; the user's own come last and win."""
    values = {"PYTHONUNBUFFERED": "1", "USER": "dsf", "HOME": CACHE_PATH, "XDG_CACHE_HOME": CACHE_PATH}
    for name in CACHE_VARIABLES[1:]:
        values[name] = f"{CACHE_PATH}/{name.removesuffix('_DIR').removesuffix('_CACHE').lower()}"
    if request.device == "cpu":
        threads = max(1, int((parse_quantity(request.cpu_request) or 0) / request.ranks_per_node))
        values |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
    else:
        values["NCCL_DEBUG"] = "WARN"
    own = {name: _as_it_is(value) for name, value in request.env}
    found: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in (values | own).items()]
    if request.token_secret:
        reference = {"secretKeyRef": {"name": request.token_secret, "key": TOKEN_KEY}}
        found.append({"name": TOKEN_VARIABLE, "valueFrom": reference})
    return found


def env_from(request: K8sRequest) -> dict[str, Any]:
    """Secrets whose keys become variables."""
    return {"envFrom": [{"secretRef": {"name": name}} for name in request.env_secrets]} if request.env_secrets else {}


def resources(request: K8sRequest) -> dict[str, Any]:
    """Memory is requested and limited alike; cores are not limited, for a throttled rank holds up all others."""
    limits: dict[str, Any] = {"memory": request.memory_limit}
    if request.num_gpus:
        limits[GPU_RESOURCE] = request.num_gpus
    if request.rdma:
        name, count = request.rdma
        limits[name] = count
    return {"requests": {"cpu": request.cpu_request, "memory": request.memory_limit}, "limits": limits}


def volumes(request: K8sRequest, *, config_text: str) -> list[dict[str, Any]]:
    """Shared memory, caches, run folders, and the config if it goes along."""
    runs = {"persistentVolumeClaim": {"claimName": request.claim}} if request.claim else {"emptyDir": {}}
    found: list[dict[str, Any]] = [
        {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": request.shm_size}},
        {"name": "cache", "emptyDir": {}},
        {"name": "runs", **runs},
    ]
    for number, (claim, _, read_only) in enumerate(request.mounts):
        source = {"claimName": claim} | ({"readOnly": True} if read_only else {})
        found.append({"name": f"mount-{number}", "persistentVolumeClaim": source})
    if request.embed_config:
        found.append({"name": "config", "configMap": {"name": config_map_name(request, config_text)}})
    return found


def volume_mounts(request: K8sRequest) -> list[dict[str, Any]]:
    """Return the mounts of the volumes in the container."""
    found: list[dict[str, Any]] = [
        {"name": "dshm", "mountPath": "/dev/shm"},
        {"name": "cache", "mountPath": CACHE_PATH},
        {"name": "runs", "mountPath": request.run_path},
    ]
    for number, (_, path, read_only) in enumerate(request.mounts):
        found.append({"name": f"mount-{number}", "mountPath": path} | ({"readOnly": True} if read_only else {}))
    if request.embed_config:
        found.append({"name": "config", "mountPath": _CONFIG_PATH, "readOnly": True})
    return found
