"""Request of ``launch k8s``: its fields are the options, its properties are derived from them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from framework.deploy import options
from framework.deploy.options import JobRequest
from framework.hosts.topology import DEFAULT_PORT
from framework.system.arguments import option

# Time that the kubelet gives a pod beyond one step and one save: to deliver the signal, to write
# the last messages, to unmount.
_GRACE_MARGIN_SECONDS: Final = 60
_HOST_PORTS: Final = range(20_000, 29_000, 2)
# Folder of compilers and downloads, on the node itself: on a network volume a lock that is left
# behind stops every rank.
CACHE_PATH: Final = "/cache"
CONFIG_PATH: Final = "/etc/dsf-trainer"
TOKEN_PATH: Final = "/etc/dsf-token"


@dataclass(frozen=True)
class K8sRequest(JobRequest):
    """A job to describe to Kubernetes, or manifests to judge."""

    lint: bool = option("the words are manifests: say what is wrong with them, exit code 2")
    json: bool = option("with --lint: findings as JSON")

    device: str = option("cpu is the same as --gpus 0", choices=("cuda", "cpu"))
    memory: str = option(
        "of a pod, request and limit (16Gi a GPU, 4Gi a rank on CPU)", "M", options.quantity
    )
    shm: str = option("/dev/shm, part of the memory (a quarter of it)", "SIZE", options.quantity)
    cpus: str = option("cores requested (4 a GPU, 1 a rank on CPU)", "C", options.quantity)
    rdma: tuple[str, int] | None = option(
        "resource of an RDMA device plugin, for example rdma/hca_shared_devices_a",
        "RESOURCE[=N]",
        options.rdma,
        default=None,
    )

    ckpt_pvc: str = option(
        "PersistentVolumeClaim for run folders, ReadWriteMany", "CLAIM", options.object_name
    )
    ckpt_path: str = option(
        "where it is in the pod; run.output_dir (/checkpoints)",
        "PATH",
        options.mount_path,
        default="/checkpoints",
    )
    ckpt_size: str = option("describe the claim as well, of this size", "SIZE", options.quantity)
    storage_class: str = option("of that claim", "NAME", options.object_name)
    mount: Sequence[tuple[str, str, bool]] = option(
        "further claim, for example of data; ro: it is only read",
        "CLAIM:/PATH[:ro]",
        options.mount,
        many=True,
    )

    save_seconds: int = option(
        "longest step and one save together (240)", "S", options.count, default=240
    )
    grace: int = option(
        "between stop request and SIGKILL (save_seconds and 60)", "S", options.count, default=0
    )
    restarts: int = option(
        "failures of a pod after which it starts again (supervision.max_restarts, or 3)",
        "R",
        options.whole,
        default=-1,
    )
    deadline: int = option(
        "the job ends then, whatever it does (2592000, thirty days)",
        "S",
        options.count,
        default=30 * 86_400,
    )

    kind: str = option(
        "Indexed Job (default), JobSet, or Kubeflow TrainJob",
        choices=("job", "jobset", "trainjob"),
        default="job",
    )
    runtime: str = option(
        "of a TrainJob: a ClusterTrainingRuntime such as torch-distributed, not an own one",
        "NAME",
        options.object_name,
    )
    namespace: str = option("written into every object", "NAME", options.service_name)
    queue: str = option("Kueue's LocalQueue: all pods start, or none", "Q", options.object_name)
    topology: str = option(
        "node label that pods should share, for example topology.kubernetes.io/zone",
        "LABEL",
        options.qualified,
    )
    node_selector: Sequence[tuple[str, str]] = option(
        "label that nodes must have", "LABEL=VALUE", options.label, many=True
    )
    toleration: Sequence[str] = option(
        "taint that pods accept", "KEY[=VALUE][:EFFECT]", options.toleration, many=True
    )
    share_nodes: bool = option(
        "pods of the job may be on one node; otherwise each has a node of its own"
    )
    scheduler: str = option("of the pods, for example volcano", "NAME", options.object_name)
    priority_class: str = option("of the pods", "NAME", options.object_name)
    host_network: bool = option("the network of the nodes, with ports of the job's own")
    master_port: int | None = option(
        "where ranks meet (29500); the next one is the agents'", "P", options.port, default=None
    )

    image: str = option("with a tag that stays, or better a digest", "I", options.image)
    name: str = option("of the job (run.name)", "X", options.service_name)
    config_map: bool = option(
        "send CONFIG along as a ConfigMap; otherwise it is a path in the image"
    )
    env_secret: Sequence[str] = option(
        "all keys of a Secret as variables", "SECRET", options.object_name, many=True
    )
    token_secret: str = option(
        "Secret whose key `token`, 16 bytes or more, nodes prove themselves with (one is made)",
        "S",
        options.object_name,
    )
    no_network_policy: bool = option(
        "let pods of others connect; a NetworkPolicy keeps them out otherwise"
    )
    label: Sequence[tuple[str, str]] = option(
        "on the job and its pods", "KEY=VALUE", options.own_label, many=True
    )
    annotation: Sequence[tuple[str, str]] = option(
        "on the job and its pods, for example for Multus or Volcano",
        "KEY=VALUE",
        options.annotation,
        many=True,
    )
    pull_secret: str = option("to pull the image with", "S", options.object_name)
    service_account: str = option(
        "account of the pods (the default one, without its token)", "NAME", options.object_name
    )
    run_as_user: int = option("user of the processes (1000)", "UID", options.whole, default=1000)

    token: str = ""  # for the Secret, if one is printed along

    @property
    def on_cpu(self) -> bool:
        """True if the pods have no GPUs."""
        return self.device == "cpu" or super().on_cpu

    @property
    def has_token(self) -> bool:
        """True if agents authenticate each other; the agent of a single pod has no peers."""
        return self.nodes > 1 or bool(self.token_secret)

    @property
    def makes_token(self) -> bool:
        """True if a Secret with the token is printed along."""
        return self.has_token and not self.token_secret

    @property
    def grace_seconds(self) -> int:
        """Seconds between a stop request and SIGKILL."""
        return self.grace or self.save_seconds + _GRACE_MARGIN_SECONDS

    @property
    def port(self) -> int:
        """Port where ranks meet; the next one is the agents'.

        On a node's network it depends on the job's name, so that two jobs rarely share one.
        """
        if self.master_port is not None:
            return self.master_port
        if self.host_network:
            return _HOST_PORTS[zlib.crc32(self.name.encode()) % len(_HOST_PORTS)]
        return DEFAULT_PORT

    def refuse_contradictions(self) -> None:
        """Raise UsageError for options that contradict each other or lack another one."""
        config = "".join(self.words[:1])
        idle = ", ".join(self._own_runtime_options())
        taken = ", ".join(self._paths_of_several_volumes())
        mistakes = (
            (
                not self.image,
                "name the image with --image, for example --image registry.example/team/train:1",
            ),
            (
                self.on_cpu and (self.gpus or self.device == "cuda"),
                "--gpus and --device contradict each other",
            ),
            (
                self.ckpt_size and not self.ckpt_pvc,
                "--ckpt_size needs the claim's name, --ckpt_pvc",
            ),
            (
                self.storage_class and not self.ckpt_size,
                "--storage_class is of a claim that --ckpt_size describes",
            ),
            (self.runtime and self.kind != "trainjob", "--runtime goes with --kind trainjob"),
            (
                self.kind == "trainjob" and (self.host_network or self.port != DEFAULT_PORT),
                f"Kubeflow sets port {DEFAULT_PORT} itself; leave --host_network and "
                "--master_port out, or take --kind jobset",
            ),
            (
                self.runtime and idle,
                f"a TrainJob cannot write {idle} into another's runtime; leave --runtime out",
            ),
            (
                self.grace and self.grace < self.save_seconds,
                "--grace is shorter than --save_seconds",
            ),
            (
                self.config_map and not Path(config).is_file(),
                f"--config_map: there is no file {config}",
            ),
            (taken, f"--mount: two volumes at {taken}; mount each somewhere else"),
            (
                self.queue and self.scheduler,
                "--queue is Kueue's, which starts all pods or none; leave --scheduler out",
            ),
        )
        self.refuse_mistakes("launch k8s", mistakes)

    def _own_runtime_options(self) -> list[str]:
        """Return the options in use that a TrainJob can write into its own runtime only."""
        options_and_values = {
            "--env_secret": self.env_secret,
            "--scheduler": self.scheduler,
            "--priority_class": self.priority_class,
        }
        return [name for name, value in options_and_values.items() if value]

    def _paths_of_several_volumes(self) -> list[str]:
        paths = Counter(("/dev/shm", CACHE_PATH, CONFIG_PATH, TOKEN_PATH, self.ckpt_path))
        paths.update(path for _, path, _ in self.mount)
        return [path for path, count in paths.items() if count > 1]
