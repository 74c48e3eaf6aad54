"""The objects of a job: an Indexed Job with its Service, a JobSet, or a Kubeflow TrainJob."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from framework.deploy.k8s.manifests import lines_of
from framework.deploy.k8s.request import CONFIG_PATH, TOKEN_PATH, K8sRequest
from framework.deploy.options import as_config_key, parse_quantity
from framework.errors import EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_STOPPED, EXIT_USAGE
from framework.text.document import parse_document

# Text that needs no quotes for any reader. The one of Kubernetes (Go) takes 1e3 for a number and y
# for a truth value, which PyYAML writes without quotes; so everything that does not look like a
# word or a quantity gets them.
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
    if "\n" in text:
        style = "|"
    elif plain:
        style = None
    else:
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _list(dumper: yaml.SafeDumper, values: Sequence[Any]) -> yaml.SequenceNode:
    flow = all(
        isinstance(value, int) or (isinstance(value, str) and len(values) == 1) for value in values
    )
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flow)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def write_yaml(
    documents: Iterable[Mapping[str, Any]], *, heading: str = "", reasons: Mapping[str, str]
) -> str:
    """The text of a file with these documents, keys in the order they have, below the comment
    `heading`; `reasons` are comments above keys, of which the first of a document has it.
    """
    top = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
    return top + "---\n".join(_with_reasons(document, reasons) for document in documents)


def _with_reasons(document: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    text = yaml.dump(
        dict(document), Dumper=_Dumper, sort_keys=False, width=_LONG, allow_unicode=True
    )
    places = lines_of(parse_document(text, name="")).items()
    found = sorted(
        ((line, str(path[-1])) for path, line in places if path and path[-1] in reasons),
        reverse=True,
    )
    lines = text.splitlines(keepends=True)
    for key, line in {key: line for line, key in found}.items():  # the first of a document has it
        written = lines[line - 1]
        indent = " " * (len(written) - len(written.lstrip(" ")))
        lines[line - 1] = (
            "".join(f"{indent}# {reason}\n" for reason in reasons[key].splitlines()) + written
        )
    return "".join(lines)


# What never becomes right by itself, and what is no failure: the two lists of the pod failure
# policy.
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
_VOLCANO_GANG: Final = "scheduling.volcano.sh/group-min-member"
_LAST_WORD_SECONDS: Final = 30
_EMPTY: Final[tuple[Any, ...]] = (None, "", {}, [])
_TEXT: Final = Path(__file__).with_name("objects.yaml").read_text(encoding="utf-8")
_OBJECTS: Final = yaml.safe_load(_TEXT)
# What is above a key of a manifest: comments, each with the name of what must be so for it, or
# none.
_REASON: Final = re.compile(r"(?m)^((?: +# .+\n)+) +(\w+)")


def manifest(request: K8sRequest, *, heading: str) -> str:
    """The objects as YAML text, in the order to create them in; `heading` is a comment at the
    top.
    """
    values = _Values(request)
    for name in (
        "resources",
        "variables",
        "container",
        "pod_template",
        "job_spec",
        "jobset_spec",
        "patch",
    ):
        values[name] = values.filled(_OBJECTS[name])
        if name == "variables":
            variables = values[name] | {key: _as_it_is(value) for key, value in request.env}
            values["environment"] = [
                {"name": key, "value": value} for key, value in variables.items()
            ]
    is_printed = {
        "config_map": request.config_map,
        "secret": request.makes_token,
        "claim": request.ckpt_size,
        "network_policy": not (request.no_network_policy or request.host_network),
        "service": request.kind == "job",
        "runtime": request.kind == "trainjob" and not request.runtime,
        request.kind: True,
    }
    found = [values.filled(_OBJECTS[name]) for name, is_in in is_printed.items() if is_in]
    return write_yaml(
        found, heading=heading, reasons=dict(map(values.reason, _REASON.finditer(_TEXT)))
    )


class _Values(dict[str, Any]):
    """Values of the objects by name: what follows from several options, and the request's own."""

    def __init__(self, request: K8sRequest) -> None:
        labels = {
            "app.kubernetes.io/name": "dsf-trainer",
            "app.kubernetes.io/instance": request.name,
        }
        kind = request.kind
        queue = request.queue
        topology = request.topology
        user = request.run_as_user
        # This label gives the job to Kueue, which starts all pods or none. Where it chooses the
        # nodes by topology, it does not look at affinity, and pods would hang.
        by_queue = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
        if queue and topology:
            within = {"kueue.x-k8s.io/podset-required-topology": topology}
        else:
            within = {}
        is_exclusive = kind == "jobset" and topology and not queue
        if is_exclusive:
            exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": topology}
        else:
            exclusive = {}
        # Volcano reads there how many are to start together: one, unless it is told.
        is_gang = request.scheduler == "volcano" and request.nodes > 1
        annotations = ({_VOLCANO_GANG: str(request.nodes)} if is_gang else {}) | dict(
            request.annotation
        )
        claims = [(f"mount-{number}", *mount) for number, mount in enumerate(request.mount)]
        read_only = {True: {"readOnly": True}, False: {}}
        self.request = request
        super().__init__(
            **_sizes(request),
            labels=labels,
            head_labels=labels | dict(request.label) | by_queue,
            head_annotations=exclusive | annotations,
            # One label keeps a proxy off the ports of the ranks.
            pod_labels=labels | {"sidecar.istio.io/inject": "false"} | dict(request.label),
            pod_annotations={BUDGET_ANNOTATION: str(request.save_seconds)} | annotations | within,
            runtime_labels=labels | {"trainer.kubeflow.org/framework": "torch"},
            own_pods={JOB_NAME_LABEL if kind == "job" else JOBSET_NAME_LABEL: request.name},
            is_job=kind == "job",
            is_jobset=kind == "jobset",
            is_trainjob=kind == "trainjob",
            # A JobSet starts everything again; where agents wait for one pod that was lost, that
            # one alone.
            by_pod=kind == "job" or request.max_restarts > 0,
            is_apart=request.nodes > 1 and not request.share_nodes and not within,
            is_near=topology and not queue and kind != "jobset",
            is_not_root=user != 0,
            may_pin=request.rdma and user == 0,
            no_account=not (request.runtime or request.service_account),
            may_not_pin=request.rdma and user != 0,
            agent_port=request.port + 1,
            config_map_name=_named(request, "config", request.config_text),
            config_key=as_config_key(request.config),
            config_text=request.config_text or "\n",
            token_name=request.token_secret or _named(request, "token", request.token),
            runtime_name=request.runtime or f"{request.name}-runtime",
            runtime_kind="ClusterTrainingRuntime" if request.runtime else "TrainingRuntime",
            never_retry=list(NEVER_RETRY),
            not_counted=list(NOT_COUNTED),
            final_reasons=list(FINAL_REASONS),
            node_labels=dict(request.node_selector),
            tolerations=[_toleration(text) for text in request.toleration],
            rdma_name=request.rdma and request.rdma[0],
            rdma_count=request.rdma and request.rdma[1],
            command=_command(request),
            env_from=[{"secretRef": {"name": name}} for name in request.env_secret],
            claims=[
                {"name": name, "persistentVolumeClaim": {"claimName": claim} | read_only[is_read]}
                for name, claim, _, is_read in claims
            ],
            mounts=[
                {"name": name, "mountPath": path} | read_only[is_read]
                for name, _, path, is_read in claims
            ],
        )

    def __missing__(self, name: str) -> Any:
        return getattr(self.request, name)

    def filled(self, node: Any) -> Any:
        """The node of an object with its values in; empty: there is nothing for it."""
        if isinstance(node, str) and node.startswith("$"):
            return self[node.lstrip("$*")]
        if isinstance(node, list):
            found = [(item, self.filled(item)) for item in node]
            parts = (value if str(item).startswith("$*") else [value] for item, value in found)
            return [value for part in parts for value in part if value not in _EMPTY]
        if isinstance(node, dict):
            return dict(self._pairs(node))
        return node

    def reason(self, found: re.Match[str]) -> tuple[str, str]:
        """A key, and the comment above it."""
        lines = re.findall(r"# (?:if (\w+): )?(.+)", found[1])
        text = "\n".join(line for condition, line in lines if not condition or self[condition])
        return found[2], re.sub(r"\$(\w+)", lambda name: str(self[name[1]]), text)

    def _pairs(self, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, item in node.items():
            name, *condition = key.split()
            value = self.filled(item)
            is_meant = not condition or bool(self[condition[1]]) == (condition[0] == "if")
            if is_meant and (value not in _EMPTY or item == {}):
                yield self.filled(name), value


def _sizes(request: K8sRequest) -> dict[str, str]:
    """Cores and memory of a pod, and /dev/shm, which counts against the memory."""
    cpus = request.cpus or str(request.ranks * (1 if request.on_cpu else 4))
    memory = request.memory or f"{request.ranks * (4 if request.on_cpu else 16)}Gi"
    mebibytes = max(64, int((parse_quantity(memory) or 0) / 4) >> 20)
    return {
        "cpu_request": cpus,
        "threads": str(max(1, int((parse_quantity(cpus) or 0) / request.ranks))),
        "memory_limit": memory,
        "shm_size": request.shm
        or (f"{mebibytes}Mi" if mebibytes % 1024 else f"{mebibytes >> 10}Gi"),
    }


def _toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    if equals:
        found = {"key": key, "operator": "Equal", "value": value}
    else:
        found = {"key": key, "operator": "Exists"}
    return found | ({"effect": effect} if effect else {})


def _command(request: K8sRequest) -> list[str]:
    """The command of one node; its rank comes from the environment."""
    if request.config_map:
        config = f"{CONFIG_PATH}/{as_config_key(request.config)}"
    else:
        config = request.config
    options = {
        "--nnodes": request.nodes,
        "--num_gpus": request.ranks,
        # The pod with node rank 0, as DNS knows it; the domain is the Service, which is called as
        # the job.
        "--master_addr": f"{request.name}-{'' if request.kind == 'job' else 'node-0-'}0.{request.name}",
        "--master_port": request.port,
        # Less than the kubelet gives the agent, so that the last word is ours.
        "--grace_seconds": request.grace_seconds
        - min(_LAST_WORD_SECONDS, request.grace_seconds // 5),
    }
    if request.has_token:
        options["--token_file"] = f"{TOKEN_PATH}/token"
    words = ["python", "-m", "framework", "launch", "node", config, *request.overrides]
    return [
        _as_it_is(str(word))
        for word in (*words, *(part for pair in options.items() for part in pair))
    ]


def _as_it_is(text: str) -> str:
    """Kubernetes puts variables in the place of ``$(NAME)``, and one sign in that of two."""
    return text.replace("$", "$$")


def _named(request: K8sRequest, what: str, content: str) -> str:
    """A name that changes with the content: a running job keeps what it started with, for pods that
    come again.
    """
    return f"{request.name}-{what}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
