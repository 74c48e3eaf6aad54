"""The objects of a job: an Indexed Job with its Service, a JobSet, or a Kubeflow TrainJob."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from deepspeed_lint.text.document import parse_document
from framework.deploy.k8s.read_manifests import lines_of
from framework.deploy.k8s.request import CONFIG_PATH, TOKEN_PATH, K8sRequest
from framework.deploy.options import as_config_key, parse_quantity
from framework.errors import EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_STOPPED, EXIT_USAGE

# Text that needs no quotes for any reader. The one of Kubernetes (Go) takes 1e3 for a number and y
# for a truth value, which PyYAML writes without quotes; so everything that does not look like a
# word or a quantity gets them.
_PLAIN: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_./@:=+-]*|--?[a-z_]+|[0-9]+(m|[KMGT]i)")
_TRUTH: Final = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
_LONG: Final = 10_000


class _ManifestDumper(yaml.SafeDumper):
    """Writes YAML without aliases, lists indented below their key, and text quoted for Go."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Write text as a block if it has several lines, without quotes if no reader mistakes it, else
    in double quotes.
    """
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _TRUTH and not text.endswith(":")
    if "\n" in text:
        style = "|"
    elif is_plain:
        style = None
    else:
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: yaml.SafeDumper, values: Sequence[Any]) -> yaml.SequenceNode:
    """Write numbers, or a single text, on the key's line; other lists one item a line."""
    is_single_text = len(values) == 1 and isinstance(values[0], str)
    on_one_line = is_single_text or all(isinstance(value, int) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=on_one_line)


_ManifestDumper.add_representer(str, _represent_text)
_ManifestDumper.add_representer(list, _represent_list)


def write_yaml(
    documents: Iterable[Mapping[str, Any]], *, heading: str = "", reasons: Mapping[str, str]
) -> str:
    """Return the text of a file with these documents, keys in the order they have.

    Args:
        documents: the objects.
        heading: comment at the top of the file.
        reasons: comments by key; each document has one above the first place of the key.
    """
    text = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
    return text + "---\n".join(_with_reasons(document, reasons) for document in documents)


def _first_lines(text: str, keys: Collection[str]) -> dict[str, int]:
    """Return the first line of each key in a YAML text, from 1 on."""
    first_lines: dict[str, int] = {}
    for path, number in lines_of(parse_document(text, name="")).items():
        if path and path[-1] in keys:
            key = str(path[-1])
            first_lines[key] = min(number, first_lines.get(key, number))
    return first_lines


def _with_reasons(document: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return the YAML text of a document, with a comment above the first line of each key in
    `reasons`.
    """
    text = yaml.dump(
        dict(document), Dumper=_ManifestDumper, sort_keys=False, width=_LONG, allow_unicode=True
    )
    lines = text.splitlines(keepends=True)
    for key, number in _first_lines(text, reasons).items():
        line = lines[number - 1]
        indent = line[: len(line) - len(line.lstrip(" "))]
        comment = "".join(f"{indent}# {reason}\n" for reason in reasons[key].splitlines())
        lines[number - 1] = comment + line
    return "".join(lines)


# The two lists of the pod failure policy: codes of errors that a retry repeats, and of ends that
# are no failure.
NEVER_RETRY: Final = (EXIT_USAGE, EXIT_NO_PROGRESS, EXIT_CONFIG)
NOT_COUNTED: Final = (EXIT_STOPPED,)
# Why a Job of a JobSet failed, where all of it would fail again.
FINAL_REASONS: Final = ("PodFailurePolicy", "DeadlineExceeded", "MaxFailedIndexesExceeded")
GPU_RESOURCE: Final = "nvidia.com/gpu"
BUDGET_ANNOTATION: Final = "dsf-trainer/save-budget-seconds"
JOB_NAME_LABEL: Final = "batch.kubernetes.io/job-name"
JOBSET_NAME_LABEL: Final = "jobset.sigs.k8s.io/jobset-name"
CACHE_VARIABLES: Final = (
    "HOME",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
)
_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
_KUEUE_TOPOLOGY: Final = "kueue.x-k8s.io/podset-required-topology"
_EXCLUSIVE_TOPOLOGY: Final = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_VOLCANO_GANG: Final = "scheduling.volcano.sh/group-min-member"
_REPORT_SECONDS: Final = 30
_EMPTY: Final[tuple[Any, ...]] = (None, "", {}, [])
_TEXT: Final = Path(__file__).with_name("objects.yaml").read_text(encoding="utf-8")
_OBJECTS: Final = yaml.safe_load(_TEXT)
# A key of an object with the comments above it; a comment may begin with its condition.
_REASON: Final = re.compile(r"(?m)^((?: +# .+\n)+) +(\w+)")


def manifest(request: K8sRequest, *, heading: str) -> str:
    """Return the objects as YAML text, in the order to create them in, below the comment
    `heading`.
    """
    values = _Values(request)
    values["resources"] = values.filled(_OBJECTS["resources"])
    values["environment"] = _environment(request, values.filled(_OBJECTS["variables"]))
    for name in ("container", "pod_template", "job_spec", "jobset_spec", "patch"):
        values[name] = values.filled(_OBJECTS[name])
    documents = [values.filled(_OBJECTS[name]) for name in _object_names(request)]
    return write_yaml(documents, heading=heading, reasons=_reasons(values))


def _environment(request: K8sRequest, defaults: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the variables of a container: `defaults`, and the request's own, which win."""
    variables = dict(defaults)
    for name, value in request.env:
        variables[name] = _without_expansion(value)
    return [{"name": name, "value": value} for name, value in variables.items()]


def _object_names(request: K8sRequest) -> list[str]:
    """Return the names in ``objects.yaml`` of the objects to print."""
    is_printed = {
        "config_map": request.config_map,
        "secret": request.makes_token,
        "claim": request.ckpt_size,
        "network_policy": not request.no_network_policy and not request.host_network,
        "service": request.kind == "job",
        "runtime": request.kind == "trainjob" and not request.runtime,
        request.kind: True,
    }
    return [name for name, is_due in is_printed.items() if is_due]


def _reasons(values: _Values) -> dict[str, str]:
    """Return the comment above each key of ``objects.yaml``, with values filled in, without lines
    with a condition that does not hold.
    """
    reasons = {}
    for match in _REASON.finditer(_TEXT):
        comments = re.findall(r"# (?:if (\w+): )?(.+)", match[1])
        lines = [line for condition, line in comments if not condition or values[condition]]
        text = "\n".join(lines)
        reasons[match[2]] = re.sub(r"\$(\w+)", lambda name: str(values[name[1]]), text)
    return reasons


class _Values(dict[str, Any]):
    """Values of the objects by name: those made of several options, and the request's fields."""

    def __init__(self, request: K8sRequest) -> None:
        super().__init__()
        self.request = request
        self.update(_sizes(request))
        self.update(_labels(request))
        self.update(_annotations(request))
        self.update(_conditions(request))
        self.update(_names(request))
        self.update(_lists(request))

    def __missing__(self, name: str) -> Any:
        return getattr(self.request, name)

    def filled(self, node: Any) -> Any:
        """Return a node of an object with its values in; an empty value leaves it out."""
        if isinstance(node, str) and node.startswith("$"):
            return self[node.lstrip("$*")]
        if isinstance(node, list):
            return self._filled_list(node)
        if isinstance(node, dict):
            return self._filled_mapping(node)
        return node

    def _filled_list(self, items: Sequence[Any]) -> list[Any]:
        """Return a list with its values in; ``$*name`` becomes several items."""
        values: list[Any] = []
        for item in items:
            value = self.filled(item)
            if str(item).startswith("$*"):
                values.extend(value)
            else:
                values.append(value)
        return [value for value in values if value not in _EMPTY]

    def _filled_mapping(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return a mapping with its values in, without keys with a condition that does not hold
        (``key if NAME``), and without empty values.
        """
        values = {}
        for key, item in node.items():
            name, _, condition = key.partition(" ")
            if not self._holds(condition):
                continue
            value = self.filled(item)
            if value not in _EMPTY or item == {}:  # {} is meant, as in emptyDir: {}
                values[self.filled(name)] = value
        return values

    def _holds(self, condition: str) -> bool:
        """Return whether ``if NAME`` or ``unless NAME`` holds; an empty condition does."""
        if not condition:
            return True
        word, name = condition.split()
        if word == "if":
            return bool(self[name])
        return not self[name]


def _is_within_topology(request: K8sRequest) -> bool:
    """Return whether Kueue chooses nodes by topology; it ignores affinity then, and pods hang."""
    return bool(request.queue and request.topology)


def _sizes(request: K8sRequest) -> dict[str, str]:
    """Return cores and memory of a pod, and /dev/shm, which counts against the memory."""
    if request.on_cpu:
        cores_per_rank = 1
        gibibytes_per_rank = 4
    else:
        cores_per_rank = 4
        gibibytes_per_rank = 16
    cpus = request.cpus or str(request.ranks * cores_per_rank)
    memory = request.memory or f"{request.ranks * gibibytes_per_rank}Gi"
    return {
        "cpu_request": cpus,
        "threads": str(max(1, int((parse_quantity(cpus) or 0) / request.ranks))),
        "memory_limit": memory,
        "shm_size": request.shm or _quarter_of(memory),
    }


def _quarter_of(memory: str) -> str:
    """Return a quarter of a quantity of memory, at least 64 MiB."""
    mebibytes = max(64, int((parse_quantity(memory) or 0) / 4) >> 20)
    if mebibytes % 1024:
        return f"{mebibytes}Mi"
    return f"{mebibytes >> 10}Gi"


def _labels(request: K8sRequest) -> dict[str, Any]:
    """Return the labels by the names that stand for them in ``objects.yaml``."""
    labels = {
        "app.kubernetes.io/name": "dsf-trainer",
        "app.kubernetes.io/instance": request.name,
    }
    head_labels = labels | dict(request.label)
    if request.queue:
        # This label gives the job to Kueue, which starts all pods or none.
        head_labels |= {_QUEUE_LABEL: request.queue}
    # The label sidecar.istio.io/inject keeps Istio's proxy off the ports of the ranks.
    pod_labels = labels | {"sidecar.istio.io/inject": "false"} | dict(request.label)
    pod_name_label = JOB_NAME_LABEL if request.kind == "job" else JOBSET_NAME_LABEL
    return {
        "labels": labels,
        "head_labels": head_labels,
        "pod_labels": pod_labels,
        "runtime_labels": labels | {"trainer.kubeflow.org/framework": "torch"},
        "own_pods": {pod_name_label: request.name},
        "node_labels": dict(request.node_selector),
    }


def _own_annotations(request: K8sRequest) -> dict[str, str]:
    """Return the annotations of job and pods alike."""
    annotations: dict[str, str] = {}
    if request.scheduler == "volcano" and request.nodes > 1:
        # Volcano reads there how many pods start together, and takes 1 without it.
        annotations[_VOLCANO_GANG] = str(request.nodes)
    return annotations | dict(request.annotation)


def _annotations(request: K8sRequest) -> dict[str, Any]:
    """Return the annotations of the head and of the pods, by their names in ``objects.yaml``."""
    annotations = _own_annotations(request)
    head_annotations: dict[str, str] = {}
    if request.kind == "jobset" and request.topology and not request.queue:
        head_annotations[_EXCLUSIVE_TOPOLOGY] = request.topology
    head_annotations |= annotations

    pod_annotations = {BUDGET_ANNOTATION: str(request.save_seconds)} | annotations
    if _is_within_topology(request):
        pod_annotations |= {_KUEUE_TOPOLOGY: request.topology}
    return {"head_annotations": head_annotations, "pod_annotations": pod_annotations}


def _conditions(request: K8sRequest) -> dict[str, Any]:
    """Return the names that stand after ``if`` and ``unless`` in ``objects.yaml``."""
    kind = request.kind
    is_root = request.run_as_user == 0
    needs_own_node = request.nodes > 1 and not request.share_nodes
    return {
        "is_job": kind == "job",
        "is_jobset": kind == "jobset",
        "is_trainjob": kind == "trainjob",
        # A JobSet starts all pods again after a failure. A lost pod alone starts again in a Job,
        # and where agents wait for it.
        "by_pod": kind == "job" or request.max_restarts > 0,
        "is_apart": needs_own_node and not _is_within_topology(request),
        "is_near": request.topology and not request.queue and kind != "jobset",
        "is_not_root": not is_root,
        "may_pin": request.rdma and is_root,
        "may_not_pin": request.rdma and not is_root,
        "no_account": not request.runtime and not request.service_account,
    }


def _names(request: K8sRequest) -> dict[str, Any]:
    """Return names of objects, ports and resources, and the content of the ConfigMap."""
    config_map_name = _name_with_hash(request, "config", request.config_text)
    token_name = _name_with_hash(request, "token", request.token)
    rdma_name = None
    rdma_count = None
    if request.rdma:
        rdma_name, rdma_count = request.rdma
    return {
        "agent_port": request.port + 1,
        "config_map_name": config_map_name,
        "config_key": as_config_key(request.config),
        "config_text": request.config_text or "\n",
        "token_name": request.token_secret or token_name,
        "runtime_name": request.runtime or f"{request.name}-runtime",
        "runtime_kind": "ClusterTrainingRuntime" if request.runtime else "TrainingRuntime",
        "rdma_name": rdma_name,
        "rdma_count": rdma_count,
    }


def _lists(request: K8sRequest) -> dict[str, list[Any]]:
    """Return the lists of ``objects.yaml`` by name: exit codes, tolerations, command, volumes and
    mounts.
    """
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    for number, (claim, path, is_read_only) in enumerate(request.mount):
        options = {"readOnly": True} if is_read_only else {}
        name = f"mount-{number}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim} | options})
        mounts.append({"name": name, "mountPath": path} | options)
    return {
        "never_retry": list(NEVER_RETRY),
        "not_counted": list(NOT_COUNTED),
        "final_reasons": list(FINAL_REASONS),
        "tolerations": [_toleration(text) for text in request.toleration],
        "command": _command(request),
        "env_from": [{"secretRef": {"name": name}} for name in request.env_secret],
        "claims": volumes,
        "mounts": mounts,
    }


def _toleration(text: str) -> dict[str, str]:
    """Return the toleration that ``KEY[=VALUE][:EFFECT]`` describes."""
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    if equals:
        toleration = {"key": key, "operator": "Equal", "value": value}
    else:
        toleration = {"key": key, "operator": "Exists"}
    if effect:
        toleration["effect"] = effect
    return toleration


def _command(request: K8sRequest) -> list[str]:
    """Return the command of one node; its rank comes from the environment."""
    if request.config_map:
        config = f"{CONFIG_PATH}/{as_config_key(request.config)}"
    else:
        config = request.config
    # The pod with node rank 0, as DNS knows it; the domain is the Service, which has the name of
    # the job.
    pod_infix = "" if request.kind == "job" else "node-0-"
    master_addr = f"{request.name}-{pod_infix}0.{request.name}"
    # Less than the kubelet gives the agent, so that the agent can still report why it ends.
    margin = min(_REPORT_SECONDS, request.grace_seconds // 5)
    options: dict[str, Any] = {
        "--nnodes": request.nodes,
        "--num_gpus": request.ranks,
        "--master_addr": master_addr,
        "--master_port": request.port,
        "--grace_seconds": request.grace_seconds - margin,
    }
    if request.has_token:
        options["--token_file"] = f"{TOKEN_PATH}/token"
    words = ["python", "-m", "framework", "launch", "node", config]
    words += request.overrides
    for name, value in options.items():
        words += [name, str(value)]
    return [_without_expansion(word) for word in words]


def _without_expansion(text: str) -> str:
    """Return text that Kubernetes passes on as it is: it expands ``$(NAME)``, and ``$$`` to
    ``$``.
    """
    return text.replace("$", "$$")


def _name_with_hash(request: K8sRequest, part: str, content: str) -> str:
    """Return a name that changes with the content, so that pods which start again get what the
    running job started with.
    """
    return f"{request.name}-{part}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
