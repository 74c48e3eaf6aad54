"""The objects of a job: an Indexed Job with its Service, a JobSet, or a Kubeflow TrainJob."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from framework.deploy.k8s.manifests import lines_of
from framework.deploy.k8s.request import CACHE_PATH, CONFIG_PATH, TOKEN_PATH, K8sRequest
from framework.deploy.options import as_config_key, parse_quantity
from framework.errors import EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_STOPPED, EXIT_USAGE
from framework.text.document import parse_document

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
    places = lines_of(parse_document(text, name="")).items()
    found = sorted(((line, str(path[-1])) for path, line in places if path and path[-1] in reasons), reverse=True)
    lines = text.splitlines(keepends=True)
    for key, line in {key: line for line, key in found}.items():  # the first of a document has it
        written = lines[line - 1]
        indent = " " * (len(written) - len(written.lstrip(" ")))
        lines[line - 1] = "".join(f"{indent}# {reason}\n" for reason in reasons[key].splitlines()) + written
    return "".join(lines)


# What never becomes right by itself, and what is no failure: the two lists of the pod failure policy.
NEVER_RETRY: Final = (EXIT_USAGE, EXIT_NO_PROGRESS, EXIT_CONFIG)
NOT_COUNTED: Final = (EXIT_STOPPED,)
# Why a Job of a JobSet failed, where all of it would fail again.
FINAL_REASONS: Final = ("PodFailurePolicy", "DeadlineExceeded", "MaxFailedIndexesExceeded")
GPU_RESOURCE: Final = "nvidia.com/gpu"
BUDGET_ANNOTATION: Final = "dsf-trainer/save-budget-seconds"
JOB_NAME_LABEL: Final = "batch.kubernetes.io/job-name"
JOBSET_NAME_LABEL: Final = "jobset.sigs.k8s.io/jobset-name"
CACHE_VARIABLES: Final = ("HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
# A day at least: with the job its logs go.
_TTL_SECONDS: Final = 7 * 86_400
# A node that does not answer: its pod is missed after 15 s, and the default of 300 s would only make the others wait.
_LOST_NODE: Final = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
_LOST_NODE_TAINTS: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_ABOUT_RDMA: Final = """\
RDMA pins memory. The container runtime must allow that (LimitMEMLOCK=infinity):
IPC_LOCK does nothing for a user other than root."""

_EMPTY: Final[tuple[Any, ...]] = (None, "", {}, [])
# Options that stand in an object as they are.
_AS_THEY_ARE: Final = re.findall(
    r"\w+",
    "name namespace nodes ranks restarts deadline port image run_as_user grace_seconds save_seconds ckpt_pvc ckpt_size "
    "storage_class priority_class scheduler service_account token",
)

_TEXT: Final = Path(__file__).with_name("objects.yaml").read_text(encoding="utf-8")
_FRAGMENTS: Final = yaml.safe_load(_TEXT)
# Key of a manifest -> the comment above it.
_REASONS: Final = {key: reason for reason, key in re.findall(r"^ +# (.+)\n +(\w+):", _TEXT, re.MULTILINE)}


def manifest(request: K8sRequest, *, heading: str) -> str:
    """The objects as YAML text, in the order to create them in; `heading` is a comment at the top."""
    values = _values(request)
    container = "patched_container" if request.runtime else "container"
    for name in (container, "pod_template", "job_spec", "jobset_spec", "patch"):
        values[name.removeprefix("patched_")] = _filled(_FRAGMENTS[name], values)
    values["patches"] = [values["patch"]] if request.runtime else None
    is_printed = {
        "config_map": request.config_map,
        "secret": request.makes_token,
        "claim": request.ckpt_size,
        "network_policy": request.has_policy,
        "service": request.kind == "job",
        "runtime": request.kind == "trainjob" and not request.runtime,
        request.kind: True,
    }
    found = [_filled(_FRAGMENTS[name], values) for name, is_in in is_printed.items() if is_in]
    reasons = {key: re.sub(r"\$(\w+)", lambda name: str(values[name[1]]), text) for key, text in _REASONS.items()}
    return write_yaml(found, heading=heading, reasons=reasons)


def _filled(node: Any, values: Mapping[str, Any]) -> Any:
    """The fragment with its values in; empty: nobody has asked for anything in it."""
    if isinstance(node, str) and node.startswith("$"):
        return values[node[1:]]
    if isinstance(node, dict) and node:
        pairs = ((_filled(key, values), _filled(item, values), item) for key, item in node.items())
        return {key: value for key, value, item in pairs if value not in _EMPTY or item == {}}
    return [_filled(item, values) for item in node] if isinstance(node, list) else node


def _values(request: K8sRequest) -> dict[str, Any]:
    """What stands in the objects, by name: options as they were given, and all that follows from them."""
    labels = {"app.kubernetes.io/name": "dsf-trainer", "app.kubernetes.io/instance": request.name}
    # This label gives the job to Kueue, which starts all pods or none.
    queue = {"kueue.x-k8s.io/queue-name": request.queue} if request.queue else {}
    places_whole = request.kind == "jobset" and request.topology and not request.queue
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": request.topology} if places_whole else {}
    within = {"kueue.x-k8s.io/podset-required-topology": request.topology} if request.queue and request.topology else {}
    # A JobSet starts everything again; where agents wait for one pod that was lost, that one alone.
    by_pod = request.kind == "job" or request.max_restarts > 0
    own, user = not request.runtime, request.run_as_user
    options = {name: getattr(request, name) for name in _AS_THEY_ARE}
    volumes = _volumes(request)
    return options | {
        "labels": labels,
        "head_labels": labels | dict(request.label) | queue,
        "head_annotations": exclusive | request.annotations,
        # One label keeps a proxy off the ports of the ranks.
        "pod_labels": labels | {"sidecar.istio.io/inject": "false"} | dict(request.label),
        "pod_annotations": {BUDGET_ANNOTATION: str(request.save_seconds)} | request.annotations | within,
        "runtime_labels": labels | {"trainer.kubeflow.org/framework": "torch"},
        "own_pods": _own_pods(request),
        "agent_port": request.port + 1,
        "config_map_name": _named(request, "config", request.config_text),
        "config_key": _config_key(request),
        "config_text": request.config_text or "\n",
        "token_name": _token_name(request),
        "runtime_name": request.runtime or f"{request.name}-runtime",
        "runtime_kind": "ClusterTrainingRuntime" if request.runtime else "TrainingRuntime",
        "trainer_step": "trainer" if request.kind == "trainjob" else None,
        "restarts_of_pods": request.restarts if by_pod else None,
        "max_failed_pods": 0 if by_pod else None,
        "backoff_limit": None if by_pod else 0,
        "never_retry": list(NEVER_RETRY),
        "not_counted": list(NOT_COUNTED),
        "final_reasons": list(FINAL_REASONS),
        "job_ttl": _TTL_SECONDS if request.kind == "job" else None,
        "jobset_ttl": _TTL_SECONDS if request.kind == "jobset" else None,
        "restart_policy": "Never" if own else None,
        "service_links": False if own else None,
        "account_token": False if own and not request.service_account else None,
        "subdomain": request.name if request.kind == "job" else None,  # JobSet writes its own
        "pull_secrets": [{"name": request.pull_secret}] if request.pull_secret else None,
        "node_selector": dict(request.node_selector),
        "tolerations": [
            *map(_toleration, request.toleration),
            *({"key": key, **_LOST_NODE} for key in _LOST_NODE_TAINTS),
        ],
        **_affinity(request),
        "host_network": request.host_network or None,
        "dns_policy": "ClusterFirstWithHostNet" if request.host_network else None,
        "no_root": user != 0,
        "about_rdma": _ABOUT_RDMA if request.rdma and user else "",
        "about_ports": "Of this job alone: it is a port of the node." if request.host_network else "",
        "capabilities": ["IPC_LOCK"] if request.rdma and user == 0 else None,
        "resources": _resources(request),
        "command": _command(request),
        "env": _environment(request),
        "env_from": [{"secretRef": {"name": name}} for name in request.env_secret],
        "patched_deadline": None if own else request.deadline,
        "patched_env": None if own else _environment(request),
        "volumes": [volume for volume, _ in volumes],
        "mounts": [mount for _, mount in volumes],
    }


def _own_pods(request: K8sRequest) -> dict[str, str]:
    return {JOB_NAME_LABEL if request.kind == "job" else JOBSET_NAME_LABEL: request.name}


def _affinity(request: K8sRequest) -> dict[str, Any]:
    def own_pods(topology: str) -> dict[str, Any]:
        return {"labelSelector": {"matchLabels": _own_pods(request)}, "topologyKey": topology}

    # Where Kueue chooses the nodes by topology it does not look at affinity, and pods would hang.
    is_apart = request.nodes > 1 and not request.share_nodes and not (request.queue and request.topology)
    is_near = request.topology and not request.queue and request.kind != "jobset"
    return {
        "apart": [own_pods("kubernetes.io/hostname")] if is_apart else None,
        "together": [{"weight": 100, "podAffinityTerm": own_pods(request.topology)}] if is_near else None,
    }


def _toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    found = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return found | ({"effect": effect} if effect else {})


def _resources(request: K8sRequest) -> dict[str, Any]:
    # Memory is requested and limited alike; cores are not limited, for a throttled rank holds up all others.
    limits: dict[str, Any] = {"memory": request.memory_limit}
    if not request.on_cpu:
        limits[GPU_RESOURCE] = request.ranks
    limits |= dict([request.rdma] if request.rdma else [])
    return {"requests": {"cpu": request.cpu_request, "memory": request.memory_limit}, "limits": limits}


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
    if request.has_token:
        options["--token_file"] = f"{TOKEN_PATH}/token"
    words = ["python", "-m", "framework", "launch", "node", config, *request.overrides]
    return [_as_it_is(str(word)) for word in (*words, *(part for pair in options.items() for part in pair))]


def _as_it_is(text: str) -> str:
    """Kubernetes puts variables in the place of ``$(NAME)``, and one sign in that of two."""
    return text.replace("$", "$$")


def _config_key(request: K8sRequest) -> str:
    """The file's name in the ConfigMap, and so in the container."""
    return as_config_key(PurePosixPath(request.config).name)


def _named(request: K8sRequest, what: str, content: str) -> str:
    """A name that changes with the content: a running job keeps what it started with, for pods that come again."""
    return f"{request.name}-{what}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def _token_name(request: K8sRequest) -> str:
    return request.token_secret or _named(request, "token", request.token)


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
    return [{"name": name, "value": value} for name, value in values.items()]


def _volumes(request: K8sRequest) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each volume and its mount."""
    runs = {"persistentVolumeClaim": {"claimName": request.ckpt_pvc}} if request.ckpt_pvc else {"emptyDir": {}}
    found: list[tuple[str, dict[str, Any], str, bool]] = [
        ("dshm", {"emptyDir": {"medium": "Memory", "sizeLimit": request.shm_size}}, "/dev/shm", False),
        ("cache", {"emptyDir": {}}, CACHE_PATH, False),
        ("runs", runs, request.ckpt_path, False),
    ]
    for number, (claim, path, is_read) in enumerate(request.mount):
        source = {"claimName": claim} | ({"readOnly": True} if is_read else {})
        found.append((f"mount-{number}", {"persistentVolumeClaim": source}, path, is_read))
    if request.config_map:
        source = {"name": _named(request, "config", request.config_text)}
        found.append(("config", {"configMap": source}, CONFIG_PATH, True))
    if request.has_token:
        source = _filled(_FRAGMENTS["token_volume"], {"token_name": _token_name(request)})
        found.append(("token", {"secret": source}, TOKEN_PATH, True))
    return [
        ({"name": name, **source}, {"name": name, "mountPath": path} | ({"readOnly": True} if is_read else {}))
        for name, source, path, is_read in found
    ]
