"""Request of ``launch k8s``: one frozen value, complete, with every default decided."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final, Literal

from framework.deploy.k8s.values import parse_quantity
from framework.launch.hosts.topology import DEFAULT_PORT
from framework.plan.cluster import Cluster

Kind = Literal["job", "jobset", "trainjob"]

# What the kubelet gives a pod beyond one step and one save: start of the signal, last words, unmounting.
GRACE_MARGIN_SECONDS: Final = 60
_LAST_WORD_SECONDS: Final = 30
_HOST_PORTS: Final = range(20_000, 29_000, 2)


@dataclass(frozen=True)
class K8sRequest:
    """A job to describe to Kubernetes.

    Attributes:
        config: path of the run config: in the image, or here with `embed_config`.
        overrides: ``key=value`` settings.
        name: of the job and of everything that belongs to it.
        nodes: pods.
        ranks_per_node: ranks in a pod, one to a GPU.
        device: ``cuda``, or ``cpu`` for a job without GPUs.
        image: what runs; complete with tag or digest.
        kind: which object describes the job.
        namespace: written into every object; empty: kubectl's own.
        claim: PersistentVolumeClaim for run folders; empty: none.
        claim_size: with it the claim is described as well, for example ``500Gi``.
        storage_class: of that claim; empty: the cluster's default.
        run_path: where run folders are in the pod.
        mounts: further claims, each with its path in the pod and whether it is only read.
        memory: of a pod, request and limit; empty: 16Gi a GPU, 4Gi a rank on CPU.
        shared_memory: size of /dev/shm; empty: a quarter of the memory.
        cpus: cores that a pod requests; empty: 4 a GPU, 1 a rank on CPU.
        rdma: resource of an RDMA device plugin and how many; None: no RDMA.
        queue: Kueue's LocalQueue; empty: no Kueue.
        topology: node label whose value all pods should share; empty: anywhere.
        node_selector: labels that nodes must have.
        tolerations: taints that pods accept, as ``KEY[=VALUE][:EFFECT]``.
        share_nodes: pods of the job may be on one node.
        scheduler: of the pods; empty: the cluster's default.
        priority_class: of the pods; empty: the cluster's default.
        labels, annotations: on the job and its pods.
        save_seconds: the longest step and one save together.
        grace_seconds: between a stop request and SIGKILL; 0: `save_seconds` and a minute.
        deadline_seconds: the job ends then, whatever it does.
        restarts: failures of the job after which it starts again.
        token_secret: Secret whose key ``token`` nodes prove themselves with; empty: none.
        env: variables of the training container.
        env_secrets: Secrets all of whose keys become variables.
        pull_secret: Secret to pull the image with; empty: none.
        service_account: empty: the namespace's default, without its token.
        user: numeric user of the processes; 0 is root.
        host_network: pods use the network of their nodes.
        port: where ranks meet; None: 29500, or one of the job's own with `host_network`. The next one is the agents'.
        embed_config: the text of the config goes along as a ConfigMap.
        runtime: ClusterTrainingRuntime for a TrainJob; empty: one of its own is described as well.
    """

    config: str
    name: str
    nodes: int
    ranks_per_node: int
    image: str
    overrides: tuple[str, ...] = ()
    device: Literal["cuda", "cpu"] = "cuda"
    kind: Kind = "job"
    namespace: str = ""
    claim: str = ""
    claim_size: str = ""
    storage_class: str = ""
    run_path: str = "/checkpoints"
    mounts: tuple[tuple[str, str, bool], ...] = ()
    memory: str = ""
    shared_memory: str = ""
    cpus: str = ""
    rdma: tuple[str, int] | None = None
    queue: str = ""
    topology: str = ""
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[str, ...] = ()
    share_nodes: bool = False
    scheduler: str = ""
    priority_class: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    save_seconds: int = 240
    grace_seconds: int = 0
    deadline_seconds: int = 7 * 86_400
    restarts: int = 3
    token_secret: str = ""
    env: tuple[tuple[str, str], ...] = ()
    env_secrets: tuple[str, ...] = ()
    pull_secret: str = ""
    service_account: str = ""
    user: int = 1000
    host_network: bool = False
    port: int | None = None
    embed_config: bool = False
    runtime: str = ""

    @property
    def cluster(self) -> Cluster:
        """The cluster that the pods make."""
        return Cluster(num_hosts=self.nodes, devices_per_host=self.ranks_per_node, device=self.device)

    @property
    def num_gpus(self) -> int:
        """GPUs of a pod."""
        return self.ranks_per_node if self.device == "cuda" else 0

    @property
    def memory_limit(self) -> str:
        """Memory of a pod."""
        return self.memory or f"{self.ranks_per_node * (16 if self.device == 'cuda' else 4)}Gi"

    @property
    def shm_size(self) -> str:
        """Size of /dev/shm, which counts against the memory."""
        mebibytes = max(64, int((parse_quantity(self.memory_limit) or 0) / 4) >> 20)
        return self.shared_memory or (f"{mebibytes}Mi" if mebibytes % 1024 else f"{mebibytes >> 10}Gi")

    @property
    def cpu_request(self) -> str:
        """Cores of a pod."""
        return self.cpus or str(self.ranks_per_node * (4 if self.device == "cuda" else 1))

    @property
    def grace(self) -> int:
        """Seconds between a stop request and SIGKILL."""
        return self.grace_seconds or self.save_seconds + GRACE_MARGIN_SECONDS

    @property
    def agent_grace(self) -> int:
        """Seconds that our agent gives the ranks: less than the kubelet gives the agent, so that the last word is
        ours.
        """
        return self.grace - min(_LAST_WORD_SECONDS, self.grace // 5)

    @property
    def master_port(self) -> int:
        """Port where ranks meet. On the network of a node, jobs must not meet each other."""
        if self.port is not None:
            return self.port
        return _HOST_PORTS[zlib.crc32(self.name.encode()) % len(_HOST_PORTS)] if self.host_network else DEFAULT_PORT

    @property
    def service(self) -> str:
        """Name of the headless Service, which is the domain of the pods."""
        return self.name

    @property
    def master_addr(self) -> str:
        """Name of the pod with node rank 0, as DNS knows it."""
        if self.kind == "job":
            return f"{self.name}-0.{self.service}"
        return f"{self.name}-{REPLICATED_JOB}-0-0.{self.service}"


# Kubeflow's torch runtimes call the job and its container so; JobSet takes any name.
REPLICATED_JOB: Final = "node"
