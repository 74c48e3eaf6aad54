"""The command line of ``launch k8s``; whatever could break a manifest or a shell is refused here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from framework.deploy.k8s import values
from framework.system.arguments import CommandParser


def parser() -> CommandParser:
    """Every option, in both spellings."""
    found = CommandParser(
        prog="python -m framework launch k8s",
        allow_abbrev=False,
        description="Print the Kubernetes objects of a run, or check manifests with --lint.",
    )
    found.add_argument(
        "words", nargs="*", metavar="CONFIG key=value", help="the run config, and settings that win over it"
    )
    found.add_argument(
        "--lint", action="store_true", help="the words are manifests: say what is wrong with them, exit code 2"
    )
    found.add_argument("--json", action="store_true", help="with --lint: findings as JSON")

    def add(name: str, **how: object) -> None:
        found.option(f"--{name}", **how)

    add("out", metavar="FILE", help="write there instead of printing")
    add("dry_run", action="store_true", help="print and write nothing; without --out it is what happens anyway")
    for group in (_add_size, _add_storage, _add_ends, _add_placement, _add_container):
        group(add)
    return found


_Add = Callable[..., None]
# An option that may be given as often as needed.
_MANY: Final[Mapping[str, Any]] = {"action": "append", "default": []}


def _add_size(add: _Add) -> None:
    add("nodes", type=values.count, default=1, metavar="N", help="pods (1)")
    add("gpus", type=values.whole, metavar="G", help="GPUs of each, one rank to a GPU; 0: none, then --ranks_per_node")
    add("ranks_per_node", type=values.count, metavar="N", help="ranks in a pod without GPUs (1)")
    add("device", choices=("cuda", "cpu"), help="cpu is the same as --gpus 0")
    add("memory", type=values.quantity, metavar="M", help="of a pod, request and limit (16Gi a GPU, 4Gi a rank on CPU)")
    add("shm", type=values.quantity, metavar="SIZE", help="/dev/shm, part of the memory (a quarter of it)")
    add("cpus", type=values.quantity, metavar="C", help="cores requested (4 a GPU, 1 a rank on CPU)")
    add(
        "rdma",
        type=values.rdma,
        metavar="RESOURCE[=N]",
        help="resource of an RDMA device plugin, for example rdma/hca_shared_devices_a",
    )


def _add_storage(add: _Add) -> None:
    add(
        "ckpt_pvc",
        type=values.object_name,
        metavar="CLAIM",
        help="PersistentVolumeClaim for run folders, ReadWriteMany",
    )
    add(
        "ckpt_path",
        type=values.mount_path,
        default="/checkpoints",
        metavar="PATH",
        help="where it is in the pod; run.output_dir (/checkpoints)",
    )
    add("ckpt_size", type=values.quantity, metavar="SIZE", help="describe the claim as well, of this size")
    add("storage_class", type=values.object_name, metavar="NAME", help="of that claim")
    add(
        "mount",
        type=values.mount,
        metavar="CLAIM:/PATH[:ro]",
        help="further claim, for example of data; ro: it is only read",
        **_MANY,
    )


def _add_ends(add: _Add) -> None:
    add("save_seconds", type=values.count, default=240, metavar="S", help="longest step and one save together (240)")
    add("grace", type=values.count, metavar="S", help="between stop request and SIGKILL (save_seconds and 60)")
    add("restarts", type=values.whole, default=3, metavar="R", help="failures after which the job starts again (3)")
    add(
        "deadline",
        type=values.count,
        default=7 * 86_400,
        metavar="S",
        help="the job ends then, whatever it does (604800, a week)",
    )


def _add_placement(add: _Add) -> None:
    add(
        "kind",
        choices=("job", "jobset", "trainjob"),
        default="job",
        help="Indexed Job (default), JobSet, or Kubeflow TrainJob",
    )
    add(
        "runtime",
        type=values.object_name,
        metavar="NAME",
        help="of a TrainJob: a ClusterTrainingRuntime such as torch-distributed, not an own one",
    )
    add("namespace", type=values.service_name, metavar="NAME", help="written into every object")
    add("queue", type=values.object_name, metavar="Q", help="Kueue's LocalQueue: all pods start, or none")
    add(
        "topology",
        type=values.qualified,
        metavar="LABEL",
        help="node label that pods should share, for example topology.kubernetes.io/zone",
    )
    add("node_selector", type=values.label, metavar="LABEL=VALUE", help="label that nodes must have", **_MANY)
    add("toleration", type=values.toleration, metavar="KEY[=VALUE][:EFFECT]", help="taint that pods accept", **_MANY)
    add(
        "share_nodes",
        action="store_true",
        help="pods of the job may be on one node; otherwise each has a node of its own",
    )
    add("scheduler", type=values.object_name, metavar="NAME", help="of the pods, for example volcano")
    add("priority_class", type=values.object_name, metavar="NAME", help="of the pods")
    add("host_network", action="store_true", help="the network of the nodes, with ports of the job's own")
    add("master_port", type=values.port, metavar="P", help="where ranks meet (29500); the next one is the agents'")


def _add_container(add: _Add) -> None:
    add("image", type=values.image, metavar="I", help="with a tag that stays, or better a digest")
    add("name", type=values.service_name, metavar="X", help="of the job (run.name)")
    add("config_map", action="store_true", help="send CONFIG along as a ConfigMap; otherwise it is a path in the image")
    add("env", type=values.variable, metavar="NAME=VALUE", help="variable of the container", **_MANY)
    add("env_secret", type=values.object_name, metavar="SECRET", help="all keys of a Secret as variables", **_MANY)
    add(
        "token_secret",
        type=values.object_name,
        metavar="S",
        help="Secret whose key `token` nodes prove themselves with",
    )
    add("label", type=values.own_label, metavar="KEY=VALUE", help="on the job and its pods", **_MANY)
    add(
        "annotation",
        type=values.annotation,
        metavar="KEY=VALUE",
        help="on the job and its pods, for example for Multus or Volcano",
        **_MANY,
    )
    add("pull_secret", type=values.object_name, metavar="S", help="to pull the image with")
    add(
        "service_account",
        type=values.object_name,
        metavar="NAME",
        help="account of the pods (the default one, without its token)",
    )
    add("run_as_user", type=values.whole, default=1000, metavar="UID", help="user of the processes (1000)")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line; options and settings may stand in any order."""
    return parser().parse_intermixed_args(list(words))
