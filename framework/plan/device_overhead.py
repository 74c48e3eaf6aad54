"""Memory of a device that no tensor holds: CUDA's context, the buffers of NCCL's communicators, and
what torch's allocator reserves beyond its tensors. Figures stand in `devices.json`, each with its
source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework.plan.devices import tables, value_of
from framework.plan.memory import Memory
from framework.plan.plan import Plan


def beside_tensors(
    memory: Memory, plan: Plan, device: str, memory_bytes: int | None = None
) -> dict[str, int]:
    """Estimate the bytes beside the tensors of a rank at its fullest moment, by component.

    Args:
        memory: of its tensors.
        plan: of the run.
        device: name of the GPU, as ``--gpu`` takes it; without published figures it has the figures
            of a device that the source does not name. Empty or ``cpu``: there is nothing beside
            tensors, or nothing is known.
        memory_bytes: of the device: tensors beyond it leave no pieces in it; None: not known.
    """
    if device in ("", "cpu") or plan.cluster.device == "cpu":
        return {}
    figures: Mapping[str, Any] = tables()["beside_tensors"]
    listed = {**figures["other"], **figures.get(device, {})}
    # Tensors that stay are allocated once; tensors of a micro-batch come and go in sizes that do
    # not fit each other.
    moment = memory.moments[memory.peak]
    passing = moment.get("activations", 0) + moment.get("logits and loss", 0)
    if memory_bytes is not None:
        passing = min(passing, memory_bytes)
    components = {
        "CUDA context": value_of(listed["context_bytes"]),
        "NCCL": num_communicators(plan) * value_of(listed["communicator_bytes"]),
        "fragmentation": int(value_of(figures["unused_share"]) * passing),
    }
    return {name: size for name, size in components.items() if size}


def num_communicators(plan: Plan) -> int:
    """Count the groups of ranks that NCCL has buffers for on the fullest rank.

    There are torch's group of all ranks (barriers) and DeepSpeed's own copy of it (utils/groups.py
    `_clone_world_group`). A pipeline has, beside torch's, groups of its stages (losses), of a
    model's ranks and of each pair of neighbours (runtime/pipe/{topology,p2p}.py), and a group of
    its copies if there are several. Tensor and sequence parallelism have a group each, and beside
    tensor parallelism the copies of a part have one.
    """
    layout = plan.layout
    if layout.world_size == 1:
        return 0
    if layout.pipe_size == 1:
        copies = layout.tensor_size > 1 and layout.num_replicas > 1
        return 2 + (layout.tensor_size > 1) + copies + (layout.sequence_size > 1)
    return 3 + min(layout.pipe_size - 1, 2) + (layout.data_parallel_size > 1)
