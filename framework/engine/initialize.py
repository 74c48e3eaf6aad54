"""The call of `deepspeed.initialize`, and the models that are refused before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed
import torch

from framework.checkpoint.state.weight_names import Names
from framework.config.deepspeed_words import SCHEDULES
from framework.config.optimizer import Adafactor, Lamb, Muon, has_groups
from framework.engine.schedules import LR_RATIO, MakeSchedule, client_schedule
from framework.engine.step_batches import HALF
from framework.engine.workarounds.grad_scaler import forget_autocast
from framework.engine.workarounds.idle_measurements import leave_out_measurements
from framework.engine.workarounds.module_buffers import share_buffers
from framework.errors import ConfigError, explaining
from framework.plan.plan import Plan
from framework.plan.render import is_made_here

if TYPE_CHECKING:
    from framework.engine.rank_groups import RankGroups

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""The user's optimizer, if the JSON names none."""


def initialize(
    plan: Plan,
    model: torch.nn.Module,
    *,
    ds_config: Mapping[str, Any],
    make_optimizer: MakeOptimizer | None,
    make_schedule: MakeSchedule | None = None,
    names: Names,
    layers: Sequence[str] | None = None,
    groups: RankGroups | None = None,
) -> deepspeed.DeepSpeedEngine:
    """Wrap a model, or a stage of it, with `deepspeed.initialize`, and give all data-parallel
    ranks the same buffers. Collective.

    Args:
        plan: the plan of the run.
        model: the whole model, or this rank's stage.
        ds_config: DeepSpeed's JSON.
        make_optimizer: makes the user's optimizer; None if the JSON names one.
        make_schedule: makes the user's schedule.
        names: plain names of the model's weights.
        layers: names of all layers, if the model is a stage.
        groups: process groups of the ranks, if a tensor group divides weights.

    Raises:
        ConfigError: DeepSpeed cannot train this model.
    """
    _refuse_number_types(plan, model)
    _refuse_renorms(plan, model)
    forget_autocast()
    deepspeed.utils.groups.mpu = None  # DeepSpeed keeps that of an earlier engine of the process
    _refuse_nothing_to_train(model)
    binding = _binding_columns(plan, model)
    parameters = _parameters_to_step(plan, model, names, layers)
    make_optimizer = make_optimizer or _own_optimizer(plan)
    if make_optimizer is not None:
        from framework.engine.optimizer_weights import make_over_all

        make_optimizer = partial(
            make_over_all,
            make_optimizer,
            names=names,
            section=plan.config.optimizer,
            is_stage=layers is not None,
        )
    with (
        refusing_scalars(),
        _sending_scalars(),
        _declaring_experts(plan, model),
        _taking_zero_optimizer(plan),
        binding,
        _taking_no_empty_step(plan),
        _keeping_adagrad(plan),
    ):
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=parameters,
            optimizer=make_optimizer,
            lr_scheduler=client_schedule(plan, make_schedule),
            dist_init_required=False,
            config=_with_group_rates(ds_config, parameters),
            mpu=groups,
        )
    _complete_optimizer(plan, engine)
    leave_out_measurements(engine)
    share_buffers(engine, unsaved=True)  # DeepSpeed has made the weights equal, and nothing else
    return engine


def _parameters_to_step(
    plan: Plan, model: torch.nn.Module, names: Names, layers: Sequence[str] | None
) -> list[Any]:
    """Return the weights to train, or the optimizer's groups of them where the config has any."""
    section = plan.config.optimizer
    freeze = plan.config.training.freeze
    if has_groups(section) or freeze:
        from framework.engine.parameter_groups import parameter_groups

        named = {names[parameter]: parameter for parameter in model.parameters()}
        shapes: Mapping[str, Sequence[int]] = {}
        if plan.layout.expert_size > 1 and layers is None:
            from framework.engine.expert_parallel import shapes_elsewhere

            shapes = shapes_elsewhere(model, named, freeze)
        parameters = parameter_groups(
            named, section, layers=layers, freeze=freeze, shapes_elsewhere=shapes
        )
    else:
        parameters = [weight for weight in model.parameters() if weight.requires_grad]
    if _divides_experts_below_stage_3(plan):
        from framework.engine.expert_parallel import with_expert_groups

        parameters = with_expert_groups(model, parameters)
    if plan.layout.expert_size > 1:
        from framework.engine.expert_parallel import refuse_unlike_experts

        refuse_unlike_experts(plan, names, parameters)
    return parameters


def _complete_optimizer(plan: Plan, engine: deepspeed.DeepSpeedEngine) -> None:
    """Have the optimizer that DeepSpeed has built know how the weights are divided, and step as a
    resumed one does.
    """
    if isinstance(plan.config.optimizer, Muon | Adafactor | Lamb):
        _take_shares(engine)
    if plan.layout.expert_size > 1 and plan.config.zero.stage == 3:
        from framework.engine.expert_parallel import count_all_parts

        count_all_parts(engine)
    if _steps_by_host_kernel(plan):
        from framework.engine.workarounds.powers_of_beta import take_powers_of_count

        take_powers_of_count(engine.optimizer.optimizer)
    if plan.config.zero.is_stepped_in_parts:
        from framework.engine.twin_flow import join_parts

        join_parts(engine)


def _steps_by_host_kernel(plan: Plan) -> bool:
    """Check whether DeepSpeed's own Adam steps on the host. ZenFlow has another one."""
    zero = plan.config.zero
    is_on_host = zero.stage > 0 and zero.offload_optimizer.device != "none"
    is_own = getattr(plan.config.optimizer, "implementation", "") == "deepspeed"
    return is_on_host and is_own and zero.zenflow is None


def _divides_experts_below_stage_3(plan: Plan) -> bool:
    return plan.layout.expert_size > 1 and plan.config.zero.stage < 3


# Contexts of the call of `deepspeed.initialize`.


def _declaring_experts(plan: Plan, model: torch.nn.Module) -> AbstractContextManager[None]:
    if not _divides_experts_below_stage_3(plan):
        return nullcontext()
    from framework.engine.expert_parallel import declaring_experts

    return declaring_experts(model)


def _taking_zero_optimizer(plan: Plan) -> AbstractContextManager[None]:
    if plan.config.precision.dtype != "bf16":
        return nullcontext()
    from framework.engine.workarounds.fp32_sums import taking_zero_optimizer

    return taking_zero_optimizer()


def _binding_columns(plan: Plan, model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return the context in which ZenFlow binds weights column by column; refuse other shapes than
    it steps.
    """
    if plan.config.zero.zenflow is None:
        return nullcontext()
    from framework.engine.zenflow import binding_columns, refuse_shapes

    refuse_shapes(model)
    return binding_columns()


def _keeping_adagrad(plan: Plan) -> AbstractContextManager[None]:
    """Return the context in which ZeRO steps an Adagrad, also one of the user's own, that it is
    given.
    """
    if plan.config.zero.stage == 0:
        return nullcontext()
    from framework.engine.workarounds.adagrad_groups import keeping_adagrad

    return keeping_adagrad()


def _taking_no_empty_step(plan: Plan) -> AbstractContextManager[None]:
    """Return the context in which optimizers in half precision at stage 0 take no empty step."""
    if plan.config.zero.stage > 0 or plan.config.precision.dtype not in HALF:
        return nullcontext()
    from framework.engine.workarounds.half_without_zero import taking_no_empty_step

    return taking_no_empty_step()


def _take_shares(engine: deepspeed.DeepSpeedEngine) -> None:
    """Have Muon, Adafactor or LAMB learn where weights lie, if ZeRO or a group divides them."""
    # Under ZeRO, and in half precision, DeepSpeed keeps it inside its own optimizer.
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if hasattr(base, "take_shares"):
        base.take_shares(engine)


def _own_optimizer(plan: Plan) -> MakeOptimizer | None:
    """Return what makes the named optimizer, where DeepSpeed does not."""
    if not is_made_here(plan) or isinstance(plan.config.optimizer, Muon):
        return None
    from framework.engine.own_optimizers import own_optimizer

    return own_optimizer(plan)


def _refuse_nothing_to_train(model: torch.nn.Module) -> None:
    """Refuse a model without a weight to train: torch's optimizers refuse the empty list with an
    error that does not explain it. Stages of a pipeline without such a weight are found when the
    model is cut.
    """
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    reason = "none of the model's weights is trained: requires_grad is False for all of them"
    fix = "set requires_grad_(True) for those that are to be trained, or training.lora"
    if not list(model.parameters()):
        reason = "the model has no weights"
        fix = "give it a layer with weights, such as nn.Linear"
    raise ConfigError.of("nothing-to-train", reason, fix, "model")


def _rate_names() -> set[str]:
    """Return the names of learning rates among the parameters of DeepSpeed's schedules."""
    names: set[str] = set()
    for _, deepspeed_keys in SCHEDULES.values():
        for key in ("min_lr", "max_lr"):
            if key in deepspeed_keys:
                names.add(deepspeed_keys[key])
    return names


def _with_group_rates(ds_config: Mapping[str, Any], groups: Sequence[Any]) -> dict[str, Any]:
    """Return the JSON with one rate per group for every rate of the schedule, if any group has a
    rate of its own: DeepSpeed's schedules give a single number to all groups.
    """
    ratios: list[float] = []
    for group in groups:
        if isinstance(group, dict):
            ratios.append(group.get(LR_RATIO, 1.0))
        else:
            ratios.append(1.0)
    schedule = ds_config.get("scheduler", {})
    if "params" not in schedule or all(ratio == 1.0 for ratio in ratios):
        return dict(ds_config)
    params = dict(schedule["params"])
    for name in _rate_names() & params.keys():
        rate = params[name]
        params[name] = [rate * ratio for ratio in ratios]
    scheduler = dict(schedule) | {"params": params}
    return dict(ds_config) | {"scheduler": scheduler}


def _refuse_number_types(plan: Plan, model: torch.nn.Module) -> None:
    """Refuse weights of types that DeepSpeed does not train: it reduces no doubles at stage 0, and
    its fp32 copies at stages 1 to 3 drop the imaginary part of complex numbers.
    """
    is_fp32 = plan.config.precision.dtype in ("fp32", "autocast")
    refuses_doubles = plan.config.zero.stage == 0 and is_fp32
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        dtype = str(parameter.dtype).removeprefix("torch.")
        reason = f"the model's weight {name} is {dtype}, which DeepSpeed cannot train"
        if parameter.is_complex():
            fix = "keep its real view (torch.view_as_real) as the weight, and join it in forward"
            raise ConfigError.of("weight-type", reason, fix, "model")
        if refuses_doubles and parameter.dtype == torch.float64:
            reason += " at zero.stage 0"
            raise ConfigError.of("weight-type", reason, "use .float()", "model")


def _refuse_renorms(plan: Plan, model: torch.nn.Module) -> None:
    """Refuse embeddings with `max_norm` on several ranks: torch shortens only the rows that a rank
    looks up, so that the ranks' copies of the weight would drift apart.
    """
    if plan.layout.data_parallel_size * plan.layout.sequence_size == 1:
        return
    for name, module in model.named_modules():
        is_embedding = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if is_embedding and module.max_norm is not None:
            reason = (
                f"{name} has max_norm, which shortens in each rank's copy the rows that its "
                "own batch looks up"
            )
            fix = (
                "leave it out and shorten all rows in a callback (docs/callbacks.md), or train "
                "on one rank"
            )
            raise ConfigError.of("weight-differs-between-ranks", reason, fix, "model")


def _scalar_refusal(error: BaseException) -> ConfigError | None:
    """Explain DeepSpeed's error for a weight without dimensions at stage 3, where it views weights
    as bytes in many places. Return None for other errors.
    """
    if "dim() cannot be 0 to view" not in str(error):
        return None
    return ConfigError.of(
        "scalar-weight",
        "the model has a weight without dimensions, which DeepSpeed cannot spread over ranks",
        "make it a vector of one number, torch.ones(1) instead of torch.tensor(1.0), or set "
        "zero.stage: 2",
        "zero.stage",
        3,
    )


refusing_scalars = partial(explaining, _scalar_refusal)


@contextmanager
def _sending_scalars() -> Iterator[None]:
    """Let weights without dimensions pass DeepSpeed's first broadcast, as vectors of one number.

    DeepSpeed sends every weight as bytes (0.19.8, `DeepSpeedEngine._broadcast_model`), and torch
    cannot view a tensor without dimensions as bytes: CLIP's `logit_scale` would end the start.
    """
    send = deepspeed.DeepSpeedEngine._broadcast_model

    def send_all(engine: deepspeed.DeepSpeedEngine) -> None:
        scalars = [parameter for parameter in engine.module.parameters() if parameter.ndim == 0]
        for parameter in scalars:
            parameter.data = parameter.data.view(1)
        send(engine)
        for parameter in scalars:
            parameter.data = parameter.data.view(())

    deepspeed.DeepSpeedEngine._broadcast_model = send_all
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine._broadcast_model = send
