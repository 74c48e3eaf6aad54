"""How ZeRO++ gathers the weights of stage 3 (Wang et al. 2023): from second copies, which a few
ranks that are close to each other share (hpZ, `zero_hpz_partition_size`), and in 8 bits
(`zero_quantized_weights`).

The backward pass gathers weights from second copies, and the network between hosts has the forward
pass alone. DeepSpeed 0.19.8 makes its groups of consecutive ranks of the world (utils/groups.py
`_create_zero_param_parallel_group`), and has one group for all weights (`zero.Init`). Here a group
is of ranks that follow each other among those that hold the same part of the weights. Experts have
groups of their own, of those ranks in a group that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles
from deepspeed.utils import groups

from framework.checkpoint.state.weight_names import Names
from framework.engine.rank_groups import make_group
from framework.errors import ConfigError
from framework.plan.layout import Layout
from framework.plan.zero_plus_plus import uneven_shares


def make_copy_groups(layout: Layout, size: int) -> Any:
    """Make the groups of `size` ranks that share second copies, and let DeepSpeed have this rank's.
    Return this rank's group for experts, or None where experts are not divided. Collective.
    """
    size = min(size, layout.num_replicas)
    shape = (layout.num_replicas // layout.expert_size, layout.expert_size, layout.tensor_size)
    ranks = torch.arange(layout.world_size).view(shape)
    same_part = ranks.flatten(0, 1).T  # one row for each part of a tensor group
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = make_group(same_part.reshape(-1, size))
    if layout.expert_size == 1:
        return None
    same_experts = ranks.permute(2, 1, 0).flatten(0, 1)
    return make_group(same_experts.reshape(-1, size // layout.expert_size))


@contextmanager
def copying_in(group: Any) -> Iterator[None]:
    """Let a `zero.Init` that is made within the block share second copies in a group."""
    of_all_weights = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group
    try:
        yield
    finally:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = of_all_weights


def prepare_gathering(engine: deepspeed.DeepSpeedEngine, names: Names) -> None:
    """Have every weight gathered in its own group, and second copies forgotten where weights become
    others than by DeepSpeed's step.

    Raises:
        ConfigError: kind ``quantized-share``: DeepSpeed's quantizer does not take a weight.
    """
    if engine.zero_quantized_weights():
        _refuse_uneven_shares(engine, names)
    _gather_apart(engine)
    optimizer = engine.optimizer
    reassign = optimizer._reassign_or_swap_out_partitioned_parameters

    def reassign_and_forget(number: int) -> None:
        reassign(number)
        for weight in optimizer.fp16_groups[number]:
            weight.ds_secondary_tensor = None

    optimizer._reassign_or_swap_out_partitioned_parameters = reassign_and_forget


def forget_copies(engine: deepspeed.DeepSpeedEngine) -> None:
    """Forget all second copies: the next gathering takes the weights themselves. DeepSpeed's load
    leaves those of frozen weights as they were.
    """
    for weight in engine.module.parameters():
        weight.ds_secondary_tensor = None


def _refuse_uneven_shares(engine: deepspeed.DeepSpeedEngine, names: Names) -> None:
    sizes = []
    for weight in engine.module.parameters():
        ranks = torch.distributed.get_world_size(weight.ds_process_group)
        if not weight.ds_persist:
            sizes.append((names.get(weight, "a weight"), weight.ds_numel, ranks))
    problems = uneven_shares(sizes, kept_whole=0)
    if problems:
        raise ConfigError(problems)


def _gather_apart(engine: deepspeed.DeepSpeedEngine) -> None:
    """Have each weight gathered by the `zero.Init` that has spread it. DeepSpeed gathers a list of
    weights, and spreads it again, by that of the first one.
    """
    gathers: dict[Any, Callable[..., Any]] = {}
    spreads: dict[Any, Callable[..., None]] = {}
    for weight in engine.module.parameters():
        gathers[weight] = weight.all_gather_coalesced
        spreads[weight] = weight.partition
    if len({weight.ds_zero_param_process_group for weight in gathers}) == 1:
        return

    def gather(weights: Iterable[Any], **options: Any) -> MultipleAllGatherHandles:
        handles = []
        for members in _by_copy_group(weights):
            handles.append(gathers[members[0]](members, **options))
        return MultipleAllGatherHandles(handles)

    def spread(weight: Any, param_list: Iterable[Any] | None = None, **options: Any) -> None:
        for members in _by_copy_group(param_list or [weight]):
            spreads[members[0]](members, **options)

    for weight in gathers:
        weight.all_gather_coalesced = gather
        weight.partition = partial(spread, weight)


def _by_copy_group(weights: Iterable[Any]) -> list[list[Any]]:
    """Return the weights in lists of those with one group for their second copies."""
    members: dict[int, list[Any]] = {}
    for weight in weights:
        members.setdefault(id(weight.ds_zero_param_process_group), []).append(weight)
    return list(members.values())
