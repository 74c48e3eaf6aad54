"""Command-line arguments of ``launch k8s`` as a `K8sRequest`; a group of options is a function."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any, Final

from framework.deploy.k8s.pod import OWN_PATHS
from framework.deploy.k8s.request import K8sRequest
from framework.errors import UsageError
from framework.launch.hosts.topology import DEFAULT_PORT

_VOLCANO_GANG: Final = "scheduling.volcano.sh/group-min-member"


def request_of(found: argparse.Namespace, *, name: str) -> K8sRequest:
    """The request that these arguments make; `name` where none was given.

    Raises:
        UsageError: two arguments contradict each other, or one is missing.
    """
    config, *overrides = found.words
    if found.image is None:
        raise UsageError("launch k8s: name the image with --image, for example --image registry.example/team/train:1")
    size = _size(found)
    _refuse_contradictions(found)
    return K8sRequest(
        config=config,
        overrides=tuple(overrides),
        name=found.name or name,
        image=found.image,
        **size,
        **_storage(found),
        **_ends(found),
        **_placement(found),
        **_container(found),
    )


def _size(found: argparse.Namespace) -> dict[str, Any]:
    on_cpu = _is_on_cpu(found)
    ranks = (found.ranks_per_node or 1) if on_cpu else found.gpus
    return {
        "nodes": found.nodes,
        "ranks_per_node": ranks,
        "device": "cpu" if on_cpu else "cuda",
        "memory": found.memory or "",
        "shared_memory": found.shm or "",
        "cpus": found.cpus or "",
        "rdma": found.rdma,
    }


def _storage(found: argparse.Namespace) -> dict[str, Any]:
    return {
        "claim": found.ckpt_pvc or "",
        "claim_size": found.ckpt_size or "",
        "storage_class": found.storage_class or "",
        "run_path": found.ckpt_path,
        "mounts": tuple(found.mount),
    }


def _ends(found: argparse.Namespace) -> dict[str, Any]:
    return {
        "save_seconds": found.save_seconds,
        "grace_seconds": found.grace or 0,
        "deadline_seconds": found.deadline,
        "restarts": found.restarts,
    }


def _placement(found: argparse.Namespace) -> dict[str, Any]:
    return {
        "kind": found.kind,
        "runtime": found.runtime or "",
        "namespace": found.namespace or "",
        "queue": found.queue or "",
        "topology": found.topology or "",
        "node_selector": tuple(found.node_selector),
        "tolerations": tuple(found.toleration),
        "share_nodes": found.share_nodes,
        "scheduler": found.scheduler or "",
        "priority_class": found.priority_class or "",
        "host_network": found.host_network,
        "port": found.master_port,
    }


def _container(found: argparse.Namespace) -> dict[str, Any]:
    return {
        "embed_config": found.config_map,
        "env": tuple(found.env),
        "env_secrets": tuple(found.env_secret),
        "labels": tuple(found.label),
        "annotations": _annotations(found),
        "token_secret": found.token_secret or "",
        "pull_secret": found.pull_secret or "",
        "service_account": found.service_account or "",
        "user": found.run_as_user,
    }


def _annotations(found: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Volcano reads at the pods' owner how many are to start together: one, unless it is told."""
    gang = ((_VOLCANO_GANG, str(found.nodes)),) if found.scheduler == "volcano" and found.nodes > 1 else ()
    given = {key for key, _ in found.annotation}
    return (*(pair for pair in gang if pair[0] not in given), *found.annotation)


def _is_on_cpu(found: argparse.Namespace) -> bool:
    on_cpu = found.device == "cpu" or found.gpus == 0
    if found.gpus is None and not on_cpu:
        raise UsageError("launch k8s: give the GPUs of a pod with --gpus G, or --device cpu --ranks_per_node N")
    if on_cpu and (found.gpus or found.device == "cuda"):
        raise UsageError("launch k8s: --gpus and --device contradict each other")
    if found.ranks_per_node and not on_cpu and found.ranks_per_node != found.gpus:
        raise UsageError("launch k8s: with GPUs there is one rank to each; leave --ranks_per_node out")
    return bool(on_cpu)


def _refuse_contradictions(found: argparse.Namespace) -> None:
    own_only = {
        "--env_secret": found.env_secret,
        "--scheduler": found.scheduler,
        "--priority_class": found.priority_class,
    }
    idle = ", ".join(name for name, value in own_only.items() if value)
    paths = Counter([*OWN_PATHS, found.ckpt_path, *(path for _, path, _ in found.mount)])
    taken = ", ".join(path for path, count in paths.items() if count > 1)
    pairs = (
        (found.ckpt_size and not found.ckpt_pvc, "--ckpt_size needs the claim's name, --ckpt_pvc"),
        (found.storage_class and not found.ckpt_size, "--storage_class is of a claim that --ckpt_size describes"),
        (found.runtime and found.kind != "trainjob", "--runtime goes with --kind trainjob"),
        (
            found.kind == "trainjob" and (found.host_network or found.master_port not in (None, DEFAULT_PORT)),
            f"Kubeflow sets port {DEFAULT_PORT} itself; leave --host_network and --master_port out, or take --kind "
            "jobset",
        ),
        (
            found.runtime and idle,
            f"a TrainJob cannot write {idle} into another's runtime; leave --runtime out",
        ),
        (found.grace is not None and found.grace < found.save_seconds, "--grace is shorter than --save_seconds"),
        (found.config_map and not Path(found.words[0]).is_file(), f"--config_map: there is no file {found.words[0]}"),
        (taken, f"--mount: two volumes at {taken}; mount each somewhere else"),
        (found.queue and found.scheduler, "--queue is Kueue's, which starts all pods or none; leave --scheduler out"),
    )
    for is_wrong, sentence in pairs:
        if is_wrong:
            raise UsageError(f"launch k8s: {sentence}")
