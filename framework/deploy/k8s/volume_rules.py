"""Rules for memory, volumes and files of a pod."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from framework.deploy.k8s.manifest_rules import Findings, rule
from framework.deploy.k8s.read_manifests import ManifestPart, Workload
from framework.deploy.k8s.render import CACHE_VARIABLES
from framework.deploy.options import CONFIG_KEY, last_setting, parse_quantity


@rule
def _shm(work: Workload) -> Findings:
    volume = work.volume("/dev/shm")
    if volume is None or volume.get("emptyDir", "medium") != "Memory":
        reason = "/dev/shm has 64 MiB: NCCL and data loaders die in it"
        yield (
            work.container.at("volumeMounts"),
            reason,
            "mount an emptyDir with medium: Memory at /dev/shm",
        )
        return
    place = volume.at("emptyDir", "sizeLimit")
    size = parse_quantity(place.get())
    memory = parse_quantity(work.resources.get("limits", "memory"))
    if size is None:
        yield place, "it may take all of the node's memory", "sizeLimit: a part of the memory limit"
    elif memory is not None and size >= memory:
        reason = "what is in it counts against the memory limit, which it would fill"
        yield place, reason, "less than limits.memory"


@rule
def _memory(work: Workload) -> Findings:
    requested = work.resources.get("requests", "memory")
    limit = parse_quantity(work.resources.get("limits", "memory"))
    if limit is None or (requested is not None and parse_quantity(requested) != limit):
        reason = "a pod that may use more memory than it requests is evicted first"
        yield work.resources, reason, "the same memory under requests and limits"


@rule
def _shared_storage(work: Workload) -> Findings:
    if work.num_nodes < 2:
        return
    folder = last_setting(work.command, "run.output_dir") or ""
    volume = work.volume(folder) if folder.startswith("/") else None
    if volume is None or "emptyDir" in volume.mapping():
        reason = f"run.output_dir {folder or 'is left out'}: each pod would keep its own part"
        yield (
            work.program.at("command"),
            reason,
            "run.output_dir=PATH in a volume that all pods share",
        )
        return
    yield from _unshared_claims(work, volume.get("persistentVolumeClaim", "claimName"))


def _unshared_claims(work: Workload, claim_name: Any) -> Findings:
    for claim in work.objects("PersistentVolumeClaim"):
        modes = claim.at("spec", "accessModes")
        if claim.manifest.name == claim_name and "ReadWriteMany" not in modes.words():
            yield modes, "pods on other nodes could not mount it", "accessModes: [ReadWriteMany]"


@rule
def _caches(work: Workload) -> Findings:
    values = {str(variable.get("name")): variable.at("value") for variable in work.variables()}
    for name in CACHE_VARIABLES:
        place = values.get(name, work.container.at("env"))
        path = place.get()
        volume = work.volume(path) if isinstance(path, str) else None
        if volume is None or "emptyDir" not in volume.mapping():
            reason = (
                f"{name} must be a folder that the user may write, on the node: locks on network "
                "volumes stay behind"
            )
            yield place, reason, f"{name}: a path in an emptyDir"


@rule
def _mount(work: Workload) -> Findings:
    names = [volume.get("name") for volume in work.pod.items("volumes")]
    for mount in work.container.items("volumeMounts"):
        if mount.get("name") not in names:
            fix = f"one of {', '.join(sorted(map(str, names)))}"
            yield mount.at("name"), "the pod has no volume of this name", fix


@rule
def _config_file(work: Workload) -> Findings:
    config = _config_of(work.command)
    volume = work.volume(config) if config.startswith("/") else None
    if volume is None:
        return
    name = volume.get("configMap", "name")
    for config_map in work.objects("ConfigMap"):
        if config_map.manifest.name != name:
            continue
        data = config_map.at("data")
        yield from _odd_keys(data)
        keys = data.mapping()
        if PurePosixPath(config).name not in keys:
            reason = f"{config}: ConfigMap {name} holds {', '.join(map(str, keys)) or 'nothing'}"
            yield work.program.at("command"), reason, "name a file that it holds"


def _config_of(words: Sequence[str]) -> str:
    """Return the run config behind `launch node`; empty without one."""
    if "node" not in words[:-1]:
        return ""
    return words[words.index("node") + 1]


def _odd_keys(data: ManifestPart) -> Findings:
    for key in data.mapping():
        if not _is_config_key(key):
            yield data, f"no key can be {key!r}", "letters, digits, - _ and ., at most 253 of them"
            return


def _is_config_key(key: object) -> bool:
    return isinstance(key, str) and CONFIG_KEY.fullmatch(key) is not None
