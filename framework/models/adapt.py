"""Changes that a config makes to any `nn.Module` before the engine takes it, and its optimizer's
parameter groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from framework.config.freezing import (
    always_frozen,
    entry_of,
    everything_frozen,
    refuse_bad_freeze,
    scheduled,
)
from framework.config.groups import group_values, has_groups, in_order, refuse_unmatched_groups
from framework.config.optimizer import Muon
from framework.config.training import Compile, FreezeEntry, Training
from framework.errors import ConfigError, in_one_line
from framework.models.layers import LayeredModel, as_layers
from framework.models.sync_batch_norm import with_sync_batch_norm

LR_RATIO: Final = "lr_ratio"
"""Key of a parameter group with a learning rate of its own: the rate as a share of the
optimizer's.
"""
FROZEN_BY: Final = "frozen_by"
"""Key of a parameter group that is frozen in some steps, until the engine is built: the number of
the entry of `training.freeze`.
"""
BY_MUON: Final = "by_muon"
"""Key of a parameter group of `MuonWithAdamW`: whether Muon steps it."""


def prepare_model(model: nn.Module, training: Training) -> nn.Module:
    """Freeze, synchronise batch norms, recompute: whatever `training` asks for.

    `channels_last` changes the images alone (the function below), and convolutions follow them.
    Weights stay as they are: DeepSpeed 0.19.8 refuses others (runtime/engine.py `_broadcast_model`
    views them as bytes).

    Returns:
        The model, changed in place (it may be partitioned by ZeRO-3), or a `LayeredModel` around
        the same layers, with the same names of weights, where recomputation needs one.

    Raises:
        ConfigError: a pattern of `freeze` matches nothing or all, or a model that cannot be cut
            shall be recomputed.
    """
    freeze(model, training.freeze)
    if training.sync_batch_norm:
        model = with_sync_batch_norm(model)
    return with_recompute(model, every=training.recompute_every)


def as_fp32(model: nn.Module) -> nn.Module:
    """Make fp32 of weights in half precision, in place, one by one."""
    for parameter in model.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return model


def channels_last(images: Tensor) -> Tensor:
    """Images (batch, channels, height, width) with the channels last in memory; convolutions give
    their output the same order.

    A single channel lies in both orders at once, and convolutions then take the strides at their
    word.
    """
    images = images.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = images.shape
    if channels > 1:
        return images
    return images.as_strided(images.shape, (height * width, 1, width, 1))


def freeze(model: nn.Module, entries: Sequence[FreezeEntry]) -> None:
    """Take the gradient from every parameter that an entry keeps from training in all steps; those
    that are trained in some have one. Errors as of `refuse_bad_freeze`.
    """
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    frozen = frozen_names(parameters, entries)
    if entries and not set(trained) - frozen:
        raise everything_frozen(entries)
    for name in frozen:
        parameters[name].requires_grad_(False)
    for name, parameter in parameters.items():
        if name not in frozen and entry_of(name, entries) is not None:
            parameter.requires_grad_(True)


def frozen_names(names: Iterable[str], entries: Sequence[FreezeEntry]) -> set[str]:
    """The names of what is never trained; errors as of `refuse_bad_freeze`."""
    names = list(names)
    refuse_bad_freeze(names, entries)
    patterns = always_frozen(entries)
    return {name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns)}


def with_recompute(model: nn.Module, *, every: int) -> nn.Module:
    """Keep only the input of every group of so many layers for the backward pass; 0: keep
    everything.

    A model that cannot be cut into layers, and has a method of its own for it as transformers'
    models have, is set to recompute each of its layers.

    Raises:
        ConfigError: kind ``recompute-needs-layers``.
    """
    if not every:
        return model
    if not isinstance(model, LayeredModel):
        try:
            model = LayeredModel(as_layers(model), taken_from=model)
        except ConfigError as error:
            return _with_own_checkpointing(model, every=every, refusal=error)
    model.recompute_every = every
    return model


def _with_own_checkpointing(model: nn.Module, *, every: int, refusal: ConfigError) -> nn.Module:
    """Turn on the recomputation that the model brings along, in itself or in parts of it."""
    (problem,) = refusal.problems
    reason = f"the model ({problem.value}) cannot be cut into layers: {problem.reason}"
    fix = f"{problem.fix}; or set training.recompute_every: 0"
    enablers = list(_checkpointing_methods(model))
    try:
        if every == 1:
            for enable in enablers:
                enable()
    except Exception as error:  # a ValueError of transformers, or what other code raises
        reason += f"; and its own recomputation cannot be turned on: {in_one_line(error)}"
        enablers = []
    if enablers and every == 1:
        return model
    if enablers:
        reason += "; its own recomputation (gradient_checkpointing_enable) is of each layer"
        fix = "set training.recompute_every: 1, or 0"
    raise ConfigError.of(
        "recompute-needs-layers", reason, fix, "training.recompute_every", every
    ) from refusal


def _checkpointing_methods(model: nn.Module) -> Iterator[Callable[[], Any]]:
    """Yield the methods that turn on recomputation, of the outermost modules that have one."""
    # transformers has renamed it; both names are there until its version 6.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        method = getattr(model, name, None)
        if callable(method):
            yield method
            return
    for child in model.children():
        yield from _checkpointing_methods(child)


def compile_model(model: nn.Module, asked: Compile, *, after_first_pass: bool = False) -> None:
    """Let torch compile a model or its blocks in place; of one that recomputes, the layers: no
    graph holds that.

    `after_first_pass`: the first forward pass runs as it is. At ZeRO stage 3 DeepSpeed learns in it
    which weights a module reads that are another one's, and gathers them before that module from
    then on; in a graph it learns nothing (0.19.8, runtime/zero/parameter_offload.py
    `ZeROOrderedDict.__getitem__`).

    Raises:
        ConfigError: kind ``no-blocks``.
    """
    torch.compiler.reset()  # graphs of earlier runs count as well
    if asked.per == "model":
        parts = [model]
    else:
        parts = list(_blocks(model))
    if isinstance(model, LayeredModel) and model.recompute_every:
        parts = [layer.build() for layer in model.layers()]
    if not parts:
        reason = f"{type(model).__name__} has no two blocks of one class"
        fix = "set training.compile.per: model"
        raise ConfigError.of("no-blocks", reason, fix, "training.compile.per", asked.per)

    def compile_parts() -> None:
        for part in parts:
            part.compile(**asked.model_dump(exclude={"per"}))

    if not after_first_pass:
        compile_parts()
        return

    def compile_once(*_: Any) -> None:
        compile_parts()
        handle.remove()

    handle = model.register_forward_hook(compile_once)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules with siblings of their class, none of torch's."""
    own = [
        type(one) for one in model.children() if not type(one).__module__.startswith("torch.nn.")
    ]
    for one in model.children():
        yield from [one] if own.count(type(one)) > 1 else _blocks(one)


def parameter_groups(
    named: Mapping[str, nn.Parameter],
    optimizer: Any,
    *,
    layers: Sequence[str] | None = None,
    freeze: Sequence[FreezeEntry] = (),
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """The parameters that require a gradient, where all are stepped with the same values; otherwise
    in groups.

    Args:
        named: name in the plain module -> parameter.
        optimizer: what they are stepped with.
        layers: names of all layers of the model, where `named` is a pipeline's stage.
        freeze: entries of `training.freeze`: weights that are trained in some steps have groups of
            their own, marked with the number of the entry (`FROZEN_BY`).

    Raises:
        ConfigError: kind ``group-matches-nothing``.
    """
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    # ZeRO-3 leaves a flat, empty tensor, and notes its shape.
    shapes = {
        name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in trained.items()
    }
    if layers is None:
        refuse_unmatched_groups(shapes, optimizer)
    has_steps = bool(scheduled(freeze))
    if not has_groups(optimizer):
        plain = list(trained.values())
        if has_steps:
            return _apart([{"params": plain}], trained, freeze)
        return plain
    values = group_values(shapes, optimizer, layers=layers or ())
    each = in_order(values.values())
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": one.weight_decay} for one in each
    ]
    for one, group in zip(each, groups, strict=True):
        if isinstance(optimizer, Muon):
            group[BY_MUON] = one.by_muon
        if one.lr_ratio != 1.0:
            group |= {"lr": optimizer.lr * one.lr_ratio, LR_RATIO: one.lr_ratio}
    for name, parameter in trained.items():
        groups[each.index(values[name])]["params"].append(parameter)
    if has_steps:
        return _apart(groups, trained, freeze)
    return groups


def _apart(
    groups: Sequence[Mapping[str, Any]],
    named: Mapping[str, nn.Parameter],
    freeze: Sequence[FreezeEntry],
) -> list[dict[str, Any]]:
    """Divide groups so that weights with steps of their own are apart; what is trained in all steps
    comes first.
    """
    entry_of_weight = {parameter: entry_of(name, freeze) for name, parameter in named.items()}
    found = [dict(group) for group in groups]
    for number in scheduled(freeze):
        found += [{**group, FROZEN_BY: number} for group in groups]
    for group in found:
        own = group.get(FROZEN_BY)
        group["params"] = [one for one in group["params"] if entry_of_weight[one] == own]
    return [group for group in found if group["params"]]


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer for DeepSpeed: torch's Muon for the groups marked `BY_MUON`, torch's AdamW for
    the others.

    Both step the same groups and keep the same state as this one, so that schedules, checkpoints
    and the fp32 copies of half precision see one optimizer.
    """

    def __init__(self, groups: list[dict[str, Any]], section: Muon) -> None:
        super().__init__(groups, {"lr": section.lr, "weight_decay": section.weight_decay})
        names, (first, second) = {"momentum", "nesterov", "ns_steps"}, section.betas
        makers: dict[bool, Callable[..., torch.optim.Optimizer]] = {
            True: partial(
                torch.optim.Muon,
                adjust_lr_fn=section.adjust_lr,
                **section.model_dump(include=names),
            ),
            False: partial(torch.optim.AdamW, betas=(first, second), eps=section.eps),
        }
        # They write their options into the groups; a pipeline's stage may have weights of one kind
        # only.
        self._inner = {
            kind: make(self._groups(kind)) for kind, make in makers.items() if self._groups(kind)
        }

    def _groups(self, by_muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group[BY_MUON] is by_muon]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for by_muon, inner in self._inner.items():
            # loading has replaced them
            inner.state = self.state
            inner.param_groups = self._groups(by_muon)
            inner.step()
