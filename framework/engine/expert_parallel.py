"""Experts divided over ranks: DeepSpeed's groups, and its ZeRO optimizer of stages 1 and 2, for
mixtures of ours.

The ranks of a group have consecutive numbers, and each holds as many whole experts; ranks of other
groups that hold the same ones average their gradients. DeepSpeed 0.19.8 divides those by the number
of all ranks, and not only of these (runtime/zero/stage_1_and_2.py `average_tensor`): as an expert's
gradient is the sum over the tokens of its whole group, that is the gradient of the mean over all
ranks. Its norm adds what all ranks hold, so each expert counts once.
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
def building_experts(plan: Plan, *, varies: bool) -> Iterator[bool]:
    """Build models meanwhile with this rank's experts only, where a plan divides them; whether it
    does. Collective.
    """
    size = plan.layout.expert_size
    if size == 1:
        yield False
        return
    for known in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
        known.pop(_name(size), None)  # of an earlier run in this process
    groups._create_expert_and_data_parallel(size)
    with dividing_experts(groups._get_expert_parallel_group(_name(size)), varies=varies):
        yield True


def _name(size: int) -> str:
    return f"ep_size_{size}"  # by which DeepSpeed finds the group, and its size


def _divided(model: torch.nn.Module) -> dict[str, MixtureOfExperts]:
    mixtures = (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts)
    )
    return {name: module for name, module in mixtures if module.group is not None}


def with_expert_groups(model: torch.nn.Module, parameters: list[Any]) -> list[Any]:
    """Mark this rank's experts for DeepSpeed, and give them parameter groups of their own, which
    come last.
    """
    marked: set[torch.nn.Parameter] = set()
    for mixture in _divided(model).values():
        for parameter in mixture.experts.parameters():
            parameter.allreduce, parameter.group_name = False, _name(mixture.size)  # type: ignore[attr-defined]
            marked.add(parameter)
    if not marked:
        return parameters
    if isinstance(parameters[0], dict):
        whole = parameters
    else:
        whole = [{"params": parameters}]
    name = next(iter(marked)).group_name  # type: ignore[attr-defined]
    parts = [
        {
            **group,
            **options,
            "params": [one for one in group["params"] if (one in marked) is bool(options)],
        }
        for options in ({}, {"moe": True, "name": name})
        for group in whole
    ]
    return [group for group in parts if group["params"]]


@contextmanager
def declaring_experts(model: torch.nn.Module) -> Iterator[None]:
    """Let engines that are built meanwhile see experts: DeepSpeed looks for modules of its own
    only. Afterwards its engine sees none again, and saves and loads as for any model; its optimizer
    knows.
    """
    if not _divided(model):
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
        engine.load_module_state_dict = partial(_load_own, engine, load)


def _whole_state(engine: deepspeed.DeepSpeedEngine, **options: Any) -> Mapping[str, torch.Tensor]:
    """The model's state, on rank 0 with the experts of all ranks, in host memory. Collective."""
    own = deepspeed.DeepSpeedEngine.module_state_dict(engine, **options)
    found: dict[str, torch.Tensor] = OrderedDict()
    mixtures = {f"{name}.experts": mixture for name, mixture in _divided(engine.module).items()}
    for name, tensor in own.items():
        mixture = mixtures.get(
            name[: found_at.start(2) - 1] if (found_at := EXPERT.search(name)) else ""
        )
        if mixture is None:
            found[name] = tensor
        elif (rank := torch.distributed.get_rank()) < mixture.size:  # of the first group
            if rank == 0:
                parts = [torch.empty_like(tensor) for _ in range(mixture.size)]
            else:
                parts = None
            torch.distributed.gather(tensor.detach(), parts, dst=0, group=mixture.group)
            found |= {
                shift_expert(name, at * mixture.num_own): part.cpu()
                for at, part in enumerate(parts or ())
            }
    return found


def _load_own(
    engine: deepspeed.DeepSpeedEngine, load: Any, checkpoint: Mapping[str, Any], **options: Any
) -> None:
    elsewhere = is_elsewhere(engine.module)
    own = {name: tensor for name, tensor in checkpoint["module"].items() if not elsewhere(name)}
    load({**checkpoint, "module": own}, **options)
