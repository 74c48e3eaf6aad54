"""Experts divided over ranks: DeepSpeed's groups, and its ZeRO optimizers, for the framework's
mixtures and for packed experts of other models.

The ranks of a group have consecutive numbers, and each holds equally many whole experts. Ranks of
different groups that hold the same experts average their gradients. DeepSpeed 0.19.8 divides these
gradients by the number of all ranks, not only of these (runtime/zero/stage_1_and_2.py
`average_tensor`): as an expert's gradient is the sum over the tokens of its whole group, that is
the gradient of the mean over all ranks. Its norm adds the gradients of all ranks, so each expert
counts once.

At stage 3 an expert is spread over the ranks that hold it, and its gradients are divided and its
norm is counted in the same way, where a weight has the marks that DeepSpeed gives its AutoEP
layers (runtime/engine.py `_partition_autoep_zero3_experts`; stage3.py
`_gradient_averaging_world_size`, `get_grad_norm_direct`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.utils import groups

from framework.checkpoint.names import EXPERT, shift_expert
from framework.checkpoint.state.tensor_split import RankPart
from framework.checkpoint.state.weight_names import Names
from framework.checkpoint.state.weight_parts import expert_part_of
from framework.config.freezing import entry_of
from framework.config.training import FreezeEntry
from framework.engine.distributed import gather_in
from framework.engine.rank_groups import make_expert_groups
from framework.errors import ConfigError
from framework.models.experts import (
    MixtureOfExperts,
    dividing_experts,
    is_elsewhere,
    names_elsewhere,
)
from framework.models.freezing import frozen_names
from framework.plan.plan import Plan


@contextmanager
def building_experts(plan: Plan, *, varies: bool) -> Iterator[None]:
    """Make the groups of ranks by which DeepSpeed knows experts, and build models within the block
    with this rank's experts only. Collective.

    `varies`: micro-batches of the ranks may differ in their number of tokens.
    """
    name = _group_name(plan.layout.expert_size)
    made = make_expert_groups(plan.layout)
    for groups_of, ranks_of, group in (
        (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS, made.experts),
        (
            groups._EXPERT_DATA_PARALLEL_GROUP,
            groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
            made.replicas,
        ),
    ):
        groups_of[name] = group
        ranks_of[name] = torch.distributed.get_process_group_ranks(group)
    with dividing_experts(made.experts, varies=varies):
        yield


def expert_group(plan: Plan) -> Any:
    """Return the ranks that share experts with this one, once `building_experts` has made them."""
    return groups._get_expert_parallel_group(_group_name(plan.layout.expert_size))


def group_of_part(part: RankPart) -> Any:
    """Return the ranks that share the experts of which this rank has a part."""
    return groups._get_expert_parallel_group(_group_name(part.size))


def _group_name(size: int) -> str:
    return f"ep_size_{size}"  # by which DeepSpeed finds the group, and its size


def _divided_mixtures(model: torch.nn.Module) -> dict[str, MixtureOfExperts]:
    """Return the mixtures of a model with experts that are divided over ranks, by name."""
    mixtures: dict[str, MixtureOfExperts] = {}
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts) and module.group is not None:
            mixtures[name] = module
    return mixtures


def _expert_parts(model: torch.nn.Module) -> dict[str, RankPart]:
    """Return the parts of packed experts that this rank has, by the names of their weights."""
    parts: dict[str, RankPart] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        part = expert_part_of(weight)
        if part is not None:
            parts[name] = part
    return parts


def _divided_weights(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, str]]:
    """Yield this rank's weights of experts, each with the name of the group that shares them."""
    for mixture in _divided_mixtures(model).values():
        for parameter in mixture.experts.parameters():
            yield parameter, _group_name(mixture.size)
    for parameter in model.parameters():
        part = expert_part_of(parameter)
        if part is not None:
            yield parameter, _group_name(part.size)


def place_experts(model: torch.nn.Module) -> None:
    """Mark the experts of a model so that stage 3 spreads each over the ranks that hold it."""
    for parameter, name in _divided_weights(model):
        vars(parameter).update(
            ds_zero_placement_family="autoep_expert",
            ds_zero_partition_group_name=name,
            ds_zero_partition_process_group=groups._get_expert_data_parallel_group(name),
        )


def with_expert_groups(model: torch.nn.Module, parameters: list[Any]) -> list[Any]:
    """Mark this rank's experts for the optimizer of stages 1 and 2, and return the parameter groups
    with the experts in groups of their own, which come last.

    `parameters`: weights, or parameter groups; returned as they are if no experts are divided.
    """
    expert_weights: set[torch.nn.Parameter] = set()
    group_name = ""
    for parameter, name in _divided_weights(model):
        group_name = name
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


def shapes_elsewhere(
    model: torch.nn.Module,
    named_parameters: Mapping[str, torch.nn.Parameter],
    freeze: Sequence[FreezeEntry],
) -> dict[str, Sequence[int]]:
    """Return the shapes of the weights of experts that other ranks train, by their names."""
    here_by_name = names_elsewhere(model)
    frozen = frozen_names([*named_parameters, *here_by_name], freeze)
    shapes: dict[str, Sequence[int]] = {}
    for name, name_here in here_by_name.items():
        if name not in frozen:
            weight = named_parameters[name_here]
            shapes[name] = getattr(weight, "ds_shape", weight.shape)
    return shapes


def refuse_unlike_experts(plan: Plan, names: Names, parameters: list[Any]) -> None:
    """Refuse a run in which ranks that share experts have unlike parameter groups, or freeze others
    of their weights at stage 3. Collective among them.

    Args:
        plan: of the run.
        names: of this rank's weights.
        parameters: weights to step, or parameter groups.

    Raises:
        ConfigError: kind ``expert-with-other``.
    """
    options: list[dict[str, Any]] = []
    if parameters and isinstance(parameters[0], dict):
        for group in parameters:
            options.append({key: value for key, value in group.items() if key != "params"})
    freeze = plan.config.training.freeze
    frozen_by: list[int | None] = []
    if plan.config.zero.stage == 3:
        frozen_by = [entry_of(name, freeze) for name in names.values() if EXPERT.search(name)]
    of_ranks = gather_in(expert_group(plan), (options, frozen_by))
    if all(of_rank == (options, frozen_by) for of_rank in of_ranks):
        return
    key = "training.freeze" if freeze else "optimizer.groups"
    reason = (
        "it names other weights of one rank's experts than of another's, and ZeRO sends gradients "
        "and norms of the same weights and groups on all ranks, or waits for ever "
        "(deepspeed/runtime/zero/stage_1_and_2.py `get_grad_norm_direct`, stage3.py "
        "`__avg_scatter_grads`)"
    )
    size = plan.layout.expert_size
    fix = f"name the same weights of every expert, or set parallel.expert: 1 in place of {size}"
    raise ConfigError.of("expert-with-other", reason, fix, key)


@contextmanager
def declaring_experts(model: torch.nn.Module) -> Iterator[None]:
    """Let engines that are built within the block see experts: DeepSpeed looks for modules of its
    own only. Afterwards an engine sees none again, and its optimizer has them in groups of their
    own. It saves the experts of all ranks in one state, and loads its own from it.
    """
    mixtures = _divided_mixtures(model)
    if not mixtures and not _expert_parts(model):
        yield
        return
    # Under adapters none are trained, and DeepSpeed would miss their parameter groups. It sends
    # experts to the ranks that hold the same ones by their marks alone.
    are_trained = any(weight.requires_grad for weight, _ in _divided_weights(model))
    send = deepspeed.DeepSpeedEngine._broadcast_model
    built: list[deepspeed.DeepSpeedEngine] = []

    def send_all(engine: deepspeed.DeepSpeedEngine) -> None:
        engine.has_moe_layers = are_trained
        built.append(engine)
        send(engine)

    deepspeed.DeepSpeedEngine._broadcast_model = send_all
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine._broadcast_model = send
    for engine in built:
        engine.has_moe_layers = False
        if isinstance(engine, deepspeed.PipelineEngine):
            module = engine.module
            module.save_state_dict = partial(_save_layers, engine, module.save_state_dict)
            for mixture in _divided_mixtures(module).values():
                mixture.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                    _leave_others_out
                )
            for packed in _packed_modules(module):
                packed.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                    _take_part
                )
            continue
        engine.module_state_dict = partial(_whole_state, engine)
        load = engine.load_module_state_dict
        engine.load_module_state_dict = partial(_load_rank_state, engine, load)


def count_all_parts(engine: deepspeed.DeepSpeedEngine) -> None:
    """Have stage 3 add up the norm of experts over a tensor group as well.

    DeepSpeed's own experts lie over the tensor ranks too, and it takes these for such (0.19.8,
    stage3.py `_grad_norm_counts_every_rank`).
    """
    engine.optimizer._grad_norm_counts_every_rank = lambda params, process_group: False


def _whole_state(engine: deepspeed.DeepSpeedEngine, **options: Any) -> Mapping[str, torch.Tensor]:
    """Return the model's state; on the ranks that write it, of each part of a tensor group one,
    with the experts of all ranks, in host memory. Collective.
    """
    rank_state = deepspeed.DeepSpeedEngine.module_state_dict(engine, **options)
    state: dict[str, torch.Tensor] = OrderedDict()
    mixtures = {
        f"{name}.experts": mixture for name, mixture in _divided_mixtures(engine.module).items()
    }
    packed = _expert_parts(engine.module)
    for name, tensor in rank_state.items():
        if name in packed:
            group = group_of_part(packed[name])
            writer = torch.distributed.get_global_rank(group, 0)
            if writer < engine.mp_world_size:  # the group writes the model's file
                state |= _joined_experts(name, tensor, packed[name])
            continue
        expert = EXPERT.search(name)
        mixture = None
        if expert:
            mixture = mixtures.get(name[: expert.start(2) - 1])
        if mixture is None:
            state[name] = tensor
        elif _writer_of(mixture) < engine.mp_world_size:
            state |= _gathered_experts(name, tensor, mixture)
    return state


def _writer_of(mixture: MixtureOfExperts) -> int:
    """Return the first rank of the group that shares a mixture's experts."""
    assert mixture.group is not None
    return torch.distributed.get_global_rank(mixture.group, 0)


def _gathered_experts(
    name: str, tensor: torch.Tensor, mixture: MixtureOfExperts
) -> dict[str, torch.Tensor]:
    """Return one weight of the experts of all ranks of a group, by name, on its first rank; nothing
    on the others. Collective in the group.
    """
    experts: dict[str, torch.Tensor] = {}
    for position, part in enumerate(_gathered(tensor, mixture.group)):
        experts[shift_expert(name, position * mixture.num_own)] = part
    return experts


def _gathered(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Return the tensors of all ranks of a group, in host memory, on its first rank; none on the
    others. Collective in the group.
    """
    writer = torch.distributed.get_global_rank(group, 0)
    if torch.distributed.get_rank() != writer:
        torch.distributed.gather(tensor.detach(), None, dst=writer, group=group)
        return []
    size = torch.distributed.get_world_size(group)
    parts = [torch.empty_like(tensor) for _ in range(size)]
    torch.distributed.gather(tensor.detach(), parts, dst=writer, group=group)
    return [part.cpu() for part in parts]


def _save_layers(
    engine: deepspeed.PipelineEngine, save: Callable[..., None], *places: Any, **options: Any
) -> None:
    """Stand in for `PipelineModule.save_state_dict`, which one data-parallel rank of a stage calls
    for its layers: give it the experts of all ranks, in host memory. Collective.
    """
    writer = torch.distributed.get_global_rank(engine.grid.get_data_parallel_group(), 0)
    hooks = []
    for mixture in _divided_mixtures(engine.module).values():
        if _writer_of(mixture) != writer:
            continue
        experts: dict[str, torch.Tensor] = {}
        for name, tensor in mixture.experts.state_dict().items():
            experts |= _gathered_experts(f".experts.{name}", tensor, mixture)
        hook = mixture.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
            partial(_put_experts, experts)
        )
        hooks.append(hook)
    for packed in _packed_modules(engine.module):
        whole: dict[str, torch.Tensor] = {}
        for name, part in _expert_parts(packed).items():
            group = group_of_part(part)
            if torch.distributed.get_global_rank(group, 0) == writer:
                parts = _gathered(packed.get_parameter(name), group)
                if parts:
                    whole[f".{name}"] = part.split.whole(parts)
        hook = packed.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
            partial(_put_experts, whole)
        )
        hooks.append(hook)
    try:
        save(*places, **options)
    finally:
        for hook in hooks:
            hook.remove()


def _put_experts(
    experts: Mapping[str, torch.Tensor], module: Any, state: Any, prefix: str, _: Any
) -> None:
    """Put the experts of all ranks into the state of a module that holds some, as a hook of it.
    Their names begin with a dot.
    """
    for name, tensor in experts.items():
        state[f"{prefix}{name[1:]}"] = tensor


def _leave_others_out(mixture: Any, state: Any, prefix: str, *_: Any) -> None:
    """Remove the experts of other ranks from a state that a mixture loads, as a hook of it."""
    elsewhere = is_elsewhere(mixture)
    for name in list(state):
        if name.startswith(prefix) and elsewhere(f".{name.removeprefix(prefix)}"):
            del state[name]


def _packed_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules with packed experts that are divided over ranks."""
    for module in model.modules():
        weights = module.parameters(recurse=False)
        if any(expert_part_of(weight) is not None for weight in weights):
            yield module


def _take_part(packed: torch.nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """Leave this rank's experts in a state that a module loads, as a hook of it."""
    for name, part in _expert_parts(packed).items():
        if f"{prefix}{name}" in state:
            state[f"{prefix}{name}"] = part.of(state[f"{prefix}{name}"])


def _joined_experts(name: str, tensor: torch.Tensor, part: RankPart) -> dict[str, torch.Tensor]:
    """Return a weight with the packed experts of all ranks of a group, by name, on its first rank;
    nothing on the others. Collective in the group.
    """
    parts = _gathered(tensor, group_of_part(part))
    if not parts:
        return {}
    return {name: part.split.whole(parts)}


def _load_rank_state(
    engine: deepspeed.DeepSpeedEngine, load: Any, checkpoint: Mapping[str, Any], **options: Any
) -> None:
    """Load a state without the experts of other ranks."""
    elsewhere = is_elsewhere(engine.module)
    packed = _expert_parts(engine.module)
    rank_state: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint["module"].items():
        if name in packed:
            rank_state[name] = packed[name].of(tensor)
        elif not elsewhere(name):
            rank_state[name] = tensor
    load(dict(checkpoint) | {"module": rank_state}, **options)
