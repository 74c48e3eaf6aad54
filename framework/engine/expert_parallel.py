"""Experts divided over ranks: DeepSpeed's groups, and its ZeRO optimizer of stages 1 and 2, for the
framework's mixtures.

The ranks of a group have consecutive numbers, and each holds equally many whole experts. Ranks of
different groups that hold the same experts average their gradients. DeepSpeed 0.19.8 divides these
gradients by the number of all ranks, not only of these (runtime/zero/stage_1_and_2.py
`average_tensor`): as an expert's gradient is the sum over the tokens of its whole group, that is
the gradient of the mean over all ranks. Its norm adds the gradients of all ranks, so each expert
counts once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.utils import groups

from framework.checkpoint.names import EXPERT, shift_expert
from framework.models.experts import MixtureOfExperts, dividing_experts, is_elsewhere
from framework.plan.plan import Plan


@contextmanager
def building_experts(plan: Plan, *, varies: bool) -> Iterator[None]:
    """Make DeepSpeed's expert groups, and build models within the block with this rank's experts
    only. Collective.

    `varies`: micro-batches of the ranks may differ in their number of tokens.
    """
    size = plan.layout.expert_size
    for known in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
        known.pop(_group_name(size), None)  # of an earlier run in this process
    groups._create_expert_and_data_parallel(size)
    with dividing_experts(groups._get_expert_parallel_group(_group_name(size)), varies=varies):
        yield


def _group_name(size: int) -> str:
    return f"ep_size_{size}"  # by which DeepSpeed finds the group, and its size


def _divided_mixtures(model: torch.nn.Module) -> dict[str, MixtureOfExperts]:
    """Return the mixtures of a model with experts that are divided over ranks, by name."""
    mixtures: dict[str, MixtureOfExperts] = {}
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts) and module.group is not None:
            mixtures[name] = module
    return mixtures


def with_expert_groups(model: torch.nn.Module, parameters: list[Any]) -> list[Any]:
    """Mark this rank's experts for DeepSpeed, and return the parameter groups with the experts in
    groups of their own, which come last.

    `parameters`: weights, or parameter groups; returned as they are if no experts are divided.
    """
    expert_weights: set[torch.nn.Parameter] = set()
    group_name = ""
    for mixture in _divided_mixtures(model).values():
        group_name = _group_name(mixture.size)
        for parameter in mixture.experts.parameters():
            vars(parameter).update(allreduce=False, group_name=group_name)
            expert_weights.add(parameter)
    if not expert_weights:
        return parameters
    all_groups: list[dict[str, Any]] = parameters
    if not isinstance(parameters[0], dict):
        all_groups = [{"params": parameters}]
    others: list[dict[str, Any]] = []
    expert_groups: list[dict[str, Any]] = []
    for group in all_groups:
        weights = group["params"]
        shared = [weight for weight in weights if weight not in expert_weights]
        divided = [weight for weight in weights if weight in expert_weights]
        if shared:
            others.append(dict(group) | {"params": shared})
        if divided:
            options = {"moe": True, "name": group_name, "params": divided}
            expert_groups.append(dict(group) | options)
    return others + expert_groups


@contextmanager
def declaring_experts(model: torch.nn.Module) -> Iterator[None]:
    """Let engines that are built within the block see experts: DeepSpeed looks for modules of its
    own only. Afterwards an engine sees none again, and its optimizer has them in groups of their
    own. It saves the experts of all ranks in one state, and loads its own from it.
    """
    if not _divided_mixtures(model):
        yield
        return
    send = deepspeed.DeepSpeedEngine._broadcast_model
    built: list[deepspeed.DeepSpeedEngine] = []

    def send_all(engine: deepspeed.DeepSpeedEngine) -> None:
        engine.has_moe_layers = True
        built.append(engine)
        send(engine)

    deepspeed.DeepSpeedEngine._broadcast_model = send_all
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine._broadcast_model = send
    for engine in built:
        engine.has_moe_layers = False
        engine.module_state_dict = partial(_whole_state, engine)
        load = engine.load_module_state_dict
        engine.load_module_state_dict = partial(_load_rank_state, engine, load)


def _whole_state(engine: deepspeed.DeepSpeedEngine, **options: Any) -> Mapping[str, torch.Tensor]:
    """Return the model's state; on rank 0 with the experts of all ranks, in host memory.
    Collective.
    """
    rank_state = deepspeed.DeepSpeedEngine.module_state_dict(engine, **options)
    state: dict[str, torch.Tensor] = OrderedDict()
    mixtures = {
        f"{name}.experts": mixture for name, mixture in _divided_mixtures(engine.module).items()
    }
    for name, tensor in rank_state.items():
        expert = EXPERT.search(name)
        mixture = None
        if expert:
            mixture = mixtures.get(name[: expert.start(2) - 1])
        if mixture is None:
            state[name] = tensor
        elif torch.distributed.get_rank() < mixture.size:  # of the first group
            state |= _gathered_experts(name, tensor, mixture)
    return state


def _gathered_experts(
    name: str, tensor: torch.Tensor, mixture: MixtureOfExperts
) -> dict[str, torch.Tensor]:
    """Return one weight of the experts of all ranks of a group, by name, on its rank 0; nothing on
    the others. Collective in the group.
    """
    if torch.distributed.get_rank() != 0:
        torch.distributed.gather(tensor.detach(), None, dst=0, group=mixture.group)
        return {}
    parts = [torch.empty_like(tensor) for _ in range(mixture.size)]
    torch.distributed.gather(tensor.detach(), parts, dst=0, group=mixture.group)
    experts: dict[str, torch.Tensor] = {}
    for position, part in enumerate(parts):
        experts[shift_expert(name, position * mixture.num_own)] = part.cpu()
    return experts


def _load_rank_state(
    engine: deepspeed.DeepSpeedEngine, load: Any, checkpoint: Mapping[str, Any], **options: Any
) -> None:
    """Load a state without the experts of other ranks."""
    elsewhere = is_elsewhere(engine.module)
    state = checkpoint["module"]
    rank_state = {name: tensor for name, tensor in state.items() if not elsewhere(name)}
    load(dict(checkpoint) | {"module": rank_state}, **options)
