"""How the weights of a model are divided over a tensor group: the plan of the config, or one that
the model brings along.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from framework.config.training import TensorSplit
from framework.engine.transformers_plans import Plan, plan_of_blocks, refuse_heads
from framework.errors import ConfigError
from framework.models.layers import Layer, LayeredModel, first_of_ties
from framework.models.packed_experts import find_packed

PLAN_KEY: Final = "parallel.tensor_plan"
# Names of splits in transformers' `tp_plan` -> here.
_TRANSFORMERS_SPLITS: Final = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gathered",
    "colwise_rep": "column_gathered",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "summed",
    "rowwise_split_input": "replicated",  # after norms over joined outputs of column layers
}


@dataclass(frozen=True)
class KnownPlan:
    """What is known of a model as a whole before it is cut.

    Attributes:
        model: name of its class.
        entries: its plan.
        is_own: whether the plan came with the model, and is not of the config.
        is_shipped: whether nothing but nn.Dropout is known to draw random numbers in it.
        heads: names of the embeddings that are its output layer as well.
    """

    model: str
    entries: Plan
    is_own: bool
    is_shipped: bool
    heads: frozenset[str]


def known_plan(
    model: Any, config_plan: Plan | None, *, size: int, layers: Sequence[Layer] = ()
) -> KnownPlan:
    """Return the plan of the config, or else the model's own, for tensor groups of `size` ranks;
    `layers` are the model's, where stages run them.

    Raises:
        ConfigError: kind ``tensor-plan`` without a plan; kind ``tensor-not-divisible``.
    """
    name = type(model).__name__
    plan = config_plan or _own_plan(model, size=size)
    if not plan:
        reason = f"{name} has no plan of its own for parallel.tensor"
        fix = 'name its layers, such as {"blocks.*.up": column, "blocks.*.down": row}'
        raise ConfigError.of("tensor-plan", reason, fix, PLAN_KEY, None)
    if isinstance(model, LayeredModel):
        layers = model.recipes
    heads: set[str] = set()
    first = first_of_ties(layers)
    for layer in layers:
        if layer.tied and first[layer.tied] != layer.name:
            heads.add(first[layer.tied])
    return KnownPlan(
        name, plan, config_plan is None, hasattr(type(model), "tensor_plan"), frozenset(heads)
    )


def _own_plan(model: Any, *, size: int) -> Plan:
    """Return the plan of a model's own: of a shipped model, or of the model of transformers that it
    is or holds, which may be known here by its blocks; empty without one.
    """
    shipped = getattr(type(model), "tensor_plan", None)
    if shipped is not None:
        return {name: TensorSplit(split=split) for name, split in shipped.items()}
    if not isinstance(model, nn.Module):
        return {}
    for name, module in model.named_modules():
        splits = getattr(module, "_tp_plan", None)
        if splits:
            return _transformers_plan(module, splits, prefix=f"{name}." if name else "", size=size)
    return plan_of_blocks(model, size=size)


def _transformers_plan(
    module: nn.Module, splits: Mapping[str, str], *, prefix: str, size: int
) -> Plan:
    """Return the plan that a model of transformers has, with names that begin with a prefix."""
    # Packed experts are divided whole, whatever the plan has for their matrices.
    packed = find_packed(module)
    splits = {key: split for key, split in splits.items() if not _is_within(key, packed)}
    unknown = sorted(set(splits.values()) - _TRANSFORMERS_SPLITS.keys())
    if unknown:
        reason = (
            f"the plan of {type(module).__name__} splits layers as {unknown[0]}, which is not "
            "done here"
        )
        fix = "set parallel.tensor: 1, or write a plan"
        raise ConfigError.of("tensor-plan", reason, fix, PLAN_KEY, None)
    refuse_heads(getattr(module, "config", None), size)
    plan: dict[str, TensorSplit] = {}
    for key, split in splits.items():
        entry = TensorSplit.model_validate({"split": _TRANSFORMERS_SPLITS[split]})
        plan[f"{prefix}{key}"] = entry
    return plan


def _is_within(pattern: str, names: Collection[str]) -> bool:
    """Check whether a pattern of a plan is for one of these modules, or for a weight of one."""
    regex = _regex_of(pattern)
    outer = _regex_of(pattern.rpartition(".")[0])
    return any(regex.fullmatch(name) or outer.fullmatch(name) for name in names)


def _regex_of(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]*"))


def entries_by_name(
    plan: Plan, names: Sequence[str]
) -> tuple[frozenset[str], dict[str, TensorSplit]]:
    """Return the patterns of a plan that match a name of a module or weight, and the plan's entry
    by name; the last pattern that matches counts.
    """
    entries: dict[str, TensorSplit] = {}
    matched: set[str] = set()
    for pattern, entry in plan.items():
        regex = _regex_of(pattern)
        matches = [name for name in names if name and regex.fullmatch(name)]
        if matches:
            matched.add(pattern)
        entries |= dict.fromkeys(matches, entry)
    return frozenset(matched), entries
