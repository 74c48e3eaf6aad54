"""Mistakes in memory, volumes and files of a pod. One function, one kind of finding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from framework.deploy.k8s.manifests import Part, Rule, Workload
from framework.deploy.k8s.pod import CACHE_VARIABLES
from framework.deploy.k8s.values import is_config_key, parse_quantity
from framework.errors import Problem


def shared_memory(work: Workload) -> Iterator[Problem]:
    """Ranks of a node and data loaders talk through /dev/shm; the default is 64 MiB."""
    volume = work.volume("/dev/shm")
    if volume is None or volume.get("emptyDir", "medium") != "Memory":
        yield work.container.problem(
            "shm",
            "volumeMounts",
            reason="/dev/shm has 64 MiB: NCCL and data loaders die in it",
            fix="mount an emptyDir with medium: Memory at /dev/shm",
        )
        return
    size, memory = parse_quantity(volume.get("emptyDir", "sizeLimit")), parse_quantity(_memory(work))
    if size is None:
        yield volume.problem(
            "shm",
            "emptyDir",
            "sizeLimit",
            reason="it may take all of the node's memory",
            fix="sizeLimit: a part of the memory limit",
        )
    elif memory is not None and size >= memory:
        yield volume.problem(
            "shm",
            "emptyDir",
            "sizeLimit",
            reason="what is in it counts against the memory limit, which it would fill",
            fix="less than limits.memory",
        )


def shared_storage(work: Workload) -> Iterator[Problem]:
    """Every rank of every pod writes its part of a checkpoint into one folder."""
    if work.num_nodes < 2:
        return
    folder = next((word.partition("=")[2] for word in reversed(work.command) if word.startswith("run.output_dir=")), "")
    volume = work.volume(folder) if folder.startswith("/") else None
    if volume is None or "emptyDir" in volume.mapping():
        yield work.program.problem(
            "shared-storage",
            "command",
            reason=f"run.output_dir {folder or 'is left out'}: each pod would keep its own part",
            fix="run.output_dir=PATH in a volume that all pods share",
        )
        return
    claim = volume.get("persistentVolumeClaim", "claimName")
    for manifest in work.manifests:
        modes = Part(manifest).words("spec", "accessModes")
        if manifest.kind == "PersistentVolumeClaim" and manifest.name == claim and "ReadWriteMany" not in modes:
            yield Part(manifest).problem(
                "shared-storage",
                "spec",
                "accessModes",
                reason="pods on other nodes could not mount it",
                fix="accessModes: [ReadWriteMany]",
            )


def caches(work: Workload) -> Iterator[Problem]:
    """Caches of compiled and downloaded files belong on the node."""
    found = {str(part.get("name")): part for part in work.variables()}
    for name in CACHE_VARIABLES:
        value = found[name].get("value") if name in found else None
        volume = work.volume(value) if isinstance(value, str) else None
        if volume is None or "emptyDir" not in volume.mapping():
            part, keys = (found[name], ("value",)) if name in found else (work.container, ("env",))
            yield part.problem(
                "caches",
                *keys,
                reason=f"{name} must be a folder that the user may write, on the node: locks on network volumes stay "
                "behind",
                fix=f"{name}: a path in an emptyDir",
            )


def mounts(work: Workload) -> Iterator[Problem]:
    """Every mount has its volume. A schema does not compare them."""
    names = [volume.get("name") for volume in work.pod.items("volumes")]
    for mount in work.container.items("volumeMounts"):
        if mount.get("name") not in names:
            yield mount.problem(
                "mount",
                "name",
                reason="the pod has no volume of this name",
                fix=f"one of {', '.join(sorted(map(str, names)))}",
            )


def host_path(work: Workload) -> Iterator[Problem]:
    """A device that a plugin hands out is not mounted as well, and nothing of the node is."""
    for volume in work.pod.items("volumes"):
        if "hostPath" in volume.mapping():
            yield volume.problem(
                "host-path",
                "hostPath",
                reason="it opens the node to the pod; devices come from their plugin's resource",
                fix="a claim, or resources such as rdma/...",
            )


def config_file(work: Workload) -> Iterator[Problem]:
    """The config that the command names is in the ConfigMap, whose keys are names that the API server takes."""
    words = work.command
    config = words[words.index("node") + 1] if "node" in words[:-1] else ""
    volume = work.volume(config) if config.startswith("/") else None
    name = volume.get("configMap", "name") if volume is not None else None
    for manifest in work.manifests:
        keys = Part(manifest).mapping("data")
        wrong = [
            key for key in keys if manifest.kind == "ConfigMap" and manifest.name == name and not is_config_key(key)
        ]
        if wrong:
            yield Part(manifest).problem(
                "config-file",
                "data",
                reason=f"no key can be {wrong[0]!r}",
                fix="letters, digits, - _ and ., at most 253 of them",
            )
        if manifest.kind == "ConfigMap" and manifest.name == name and PurePosixPath(config).name not in keys:
            yield work.program.problem(
                "config-file",
                "command",
                reason=f"{config}: ConfigMap {name} holds {', '.join(map(str, keys)) or 'nothing'}",
                fix="name a file that it holds",
            )


def _memory(work: Workload) -> object:
    return work.program.get(work.resources, "limits", "memory")


def memory(work: Workload) -> Iterator[Problem]:
    """A pod with less requested than used is evicted first."""
    requested = work.program.get(work.resources, "requests", "memory")
    limit = parse_quantity(_memory(work))
    if limit is None or (requested is not None and parse_quantity(requested) != limit):
        yield work.program.problem(
            "memory",
            work.resources,
            reason="a pod that may use more memory than it requests is evicted first",
            fix="the same memory under requests and limits",
        )


STORAGE_RULES: Final[tuple[Rule, ...]] = (
    shared_memory,
    memory,
    shared_storage,
    caches,
    mounts,
    host_path,
    config_file,
)
