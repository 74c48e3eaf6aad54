"""Parameter groups of an optimizer, and the optimizer that runs Muon and AdamW on its groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import deepspeed
import torch
from torch import nn

from framework.config.base import is_plain
from framework.config.freezing import entry_of, scheduled
from framework.config.groups import group_values, in_order, refuse_unmatched_groups
from framework.config.optimizer import Muon, has_groups
from framework.config.training import FreezeEntry
from framework.engine.schedules import LR_RATIO

FROZEN_BY: Final = "frozen_by"
"""Key of a parameter group that is frozen in some steps, until the engine is built: the number of
the entry of `training.freeze`.
"""
BY_MUON: Final = "by_muon"
"""Key of a parameter group of `MuonWithAdamW`: whether Muon steps it."""


def parameter_groups(
    named_parameters: Mapping[str, nn.Parameter],
    optimizer: Any,
    *,
    layers: Sequence[str] | None = None,
    freeze: Sequence[FreezeEntry] = (),
    shapes_elsewhere: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """Return the parameters that require a gradient: a plain list if the optimizer steps all of
    them with the same values, otherwise parameter groups.

    Args:
        named_parameters: name in the plain module -> parameter.
        optimizer: the config's section of the optimizer that steps them.
        layers: names of all layers of the model, where the parameters are a pipeline stage's.
        freeze: entries of `training.freeze`. Weights that are trained in some steps get groups of
            their own, marked with the number of the entry (`FROZEN_BY`).
        shapes_elsewhere: shapes of the weights that other ranks train alone, by name: a pattern may
            match one of these.

    Raises:
        ConfigError: kind ``group-matches-nothing``.
    """
    trained = {
        name: parameter for name, parameter in named_parameters.items() if parameter.requires_grad
    }
    # ZeRO-3 leaves a flat, empty tensor, and notes its shape.
    shapes = {
        name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in trained.items()
    }
    if layers is None:
        refuse_unmatched_groups({**shapes, **shapes_elsewhere}, optimizer)
    has_steps = bool(scheduled(freeze))
    if not has_groups(optimizer):
        parameters = list(trained.values())
        if has_steps:
            return _divide_by_freeze_entry([{"params": parameters}], trained, freeze)
        return parameters
    # Frozen layers count as well: their names are among all, and not among the trained ones.
    values_by_name = group_values(shapes, optimizer, layers=layers or list(named_parameters))
    values_of_groups = in_order(values_by_name.values())
    groups: list[dict[str, Any]] = []
    for values in values_of_groups:
        group: dict[str, Any] = {"params": [], "weight_decay": values.weight_decay}
        if isinstance(optimizer, Muon):
            group[BY_MUON] = values.by_muon
        if values.lr_ratio != 1.0:
            group["lr"] = optimizer.lr * values.lr_ratio
            group[LR_RATIO] = values.lr_ratio
        groups.append(group)
    for name, parameter in trained.items():
        index = values_of_groups.index(values_by_name[name])
        groups[index]["params"].append(parameter)
    if has_steps:
        return _divide_by_freeze_entry(groups, trained, freeze)
    return groups


def _divide_by_freeze_entry(
    groups: Sequence[Mapping[str, Any]],
    named_parameters: Mapping[str, nn.Parameter],
    freeze: Sequence[FreezeEntry],
) -> list[dict[str, Any]]:
    """Divide groups so that weights that are frozen in some steps have groups of their own.

    Groups with weights that are trained in all steps come first.
    """
    entry_of_parameter = {
        parameter: entry_of(name, freeze) for name, parameter in named_parameters.items()
    }
    divided: list[dict[str, Any]] = []
    for group in groups:
        divided.append(dict(group))
    for number in scheduled(freeze):
        for group in groups:
            divided.append(dict(group) | {FROZEN_BY: number})
    for group in divided:
        entry = group.get(FROZEN_BY)
        group["params"] = [
            parameter for parameter in group["params"] if entry_of_parameter[parameter] == entry
        ]
    return [group for group in divided if group["params"]]


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer for DeepSpeed: Muon for the groups marked `BY_MUON`, torch's AdamW for the
    others. Muon is torch's where weights are whole, and `MuonOfShares` elsewhere.

    Both step the same groups and keep the same state as this one, so that schedules, checkpoints
    and the fp32 copies of half precision see one optimizer.
    """

    def __init__(
        self, groups: list[dict[str, Any]], section: Muon, *, has_shares: bool = False
    ) -> None:
        """Take groups of weights.

        Args:
            groups: marked `BY_MUON`.
            section: the config's.
            has_shares: whether ZeRO will put a share of each group in the place of its weights, or
                a tensor group divides them; then `take_shares` is called before the first step.
        """
        super().__init__(groups, {"lr": section.lr, "weight_decay": section.weight_decay})
        first_beta, second_beta = section.betas
        muon_class: Callable[..., torch.optim.Optimizer] = torch.optim.Muon
        packs_experts = any(
            weight.ndim != 2 for group in self._groups(True) for weight in group["params"]
        )
        if has_shares or packs_experts:
            from framework.engine.muon_shares import MuonOfShares

            muon_class = MuonOfShares
        classes: dict[bool, Callable[..., torch.optim.Optimizer]] = {
            True: partial(
                muon_class,
                momentum=section.momentum,
                nesterov=section.nesterov,
                ns_steps=section.ns_steps,
                adjust_lr_fn=section.adjust_lr,
            ),
            False: partial(torch.optim.AdamW, betas=(first_beta, second_beta), eps=section.eps),
        }
        # The inner optimizers write their options into the groups. A pipeline's stage may have
        # weights of one kind only.
        self._inner: dict[bool, torch.optim.Optimizer] = {}
        for by_muon, make_optimizer in classes.items():
            if self._groups(by_muon):
                self._inner[by_muon] = make_optimizer(self._groups(by_muon))

    def _groups(self, by_muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group[BY_MUON] is by_muon]

    def take_shares(self, engine: deepspeed.DeepSpeedEngine) -> None:
        """Learn where the matrices lie that ZeRO, or a tensor group, has divided over the ranks."""
        from framework.engine.muon_shares import MuonOfShares, matrix_shares

        muon = self._inner.get(True)
        if not isinstance(muon, MuonOfShares):
            return  # a stage of a pipeline without such matrices
        is_stepped = [group[BY_MUON] for group in self.param_groups]
        muon.shares = matrix_shares(engine, self, is_stepped)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for by_muon, inner in self._inner.items():
            # Loading a checkpoint has replaced the state and the groups of this optimizer.
            inner.state = self.state
            inner.param_groups = self._groups(by_muon)
            inner.step()


def plain_options(
    engine: deepspeed.DeepSpeedEngine, *, left_out: Collection[str]
) -> list[dict[str, Any]]:
    """Return the plain values in each group of the optimizer, without those `left_out`."""
    all_options = []
    for group in getattr(engine.optimizer, "param_groups", []):
        options = {}
        for name, value in group.items():
            if name not in left_out and is_plain(value):
                options[name] = value
        all_options.append(options)
    return all_options
