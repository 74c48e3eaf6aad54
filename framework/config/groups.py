"""Parameter groups: which weights are stepped with which learning rate and which weight decay. And
which modules have adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from framework.config.optimizer import Group, Muon
from framework.config.training import LoRA
from framework.errors import ConfigError, Problem
from framework.text.typos import nearest, unmatched_pattern

# A weight of a layer inside a numbered block; the layers of a plain sequence are not inside
# anything.
_INSIDE_BLOCK: Final = re.compile(r"(.*[._])?\d+(\.\w+){2,}")
_NUMBERED: Final = re.compile(r"(?:.*?[._])??\d+(?=\.|$)")


class GroupValues(NamedTuple):
    """Values that the weights of a group share.

    Attributes:
        lr_ratio: learning rate as a share of `optimizer.lr`.
        weight_decay: as torch's optimizers take it.
        by_muon: whether Muon steps them.
    """

    lr_ratio: float
    weight_decay: float
    by_muon: bool = False


def is_matrix(shape: Sequence[int]) -> bool:
    """Check whether a tensor has two dimensions or more: others are biases, or belong to norms."""
    return len(shape) >= 2


def has_groups(optimizer: Any) -> bool:
    """Check whether weights may have values of their own: not where all are stepped alike."""
    decays_some = getattr(optimizer, "weight_decay_on", "all") != "all" and bool(
        optimizer.weight_decay
    )
    return (
        isinstance(optimizer, Muon)
        or decays_some
        or bool(getattr(optimizer, "groups", ()))
        or getattr(optimizer, "layer_decay", 1.0) != 1.0
    )


def group_values(
    shapes: Mapping[str, Sequence[int]], optimizer: Any, *, layers: Iterable[str] = ()
) -> dict[str, GroupValues]:
    """Decide what each weight is stepped with.

    Args:
        shapes: name in the plain module -> shape, in the model's order.
        optimizer: a section of the config; of the user's own code all weights have the same values.
        layers: names of all layers of the model in order, where `shapes` has those of a pipeline's
            stage only.
    """
    decay = getattr(optimizer, "weight_decay", 0.0)
    base = getattr(optimizer, "lr", None) or 1.0
    on_all = getattr(optimizer, "weight_decay_on", "all") == "all"
    groups: Sequence[Group] = getattr(optimizer, "groups", ())
    each_layer = getattr(optimizer, "layer_decay", 1.0)
    if each_layer < 1.0:
        depths = layer_depths(layers or shapes)
    else:
        depths = {}
    most = max(depths.values(), default=0)
    found = {}
    for name, shape in shapes.items():
        group = next((group for group in groups if re.fullmatch(group.match, name)), None)
        by_muon = isinstance(optimizer, Muon) and stepped_by_muon(name, shape, optimizer)
        if isinstance(optimizer, Muon) and not by_muon:
            rate = optimizer.adam_lr
        else:
            rate = base
        ratio = (rate if group is None or group.lr is None else group.lr) / base
        if depths:
            ratio *= each_layer ** (most - _depth_of(name, depths))
        if on_all or is_matrix(shape):
            own = decay
        else:
            own = 0.0
        if group is None or group.weight_decay is None:
            own = own
        else:
            own = group.weight_decay
        found[name] = GroupValues(ratio, own, by_muon)
    return found


def stepped_by_muon(name: str, shape: Sequence[int], optimizer: Muon) -> bool:
    """Check whether Muon steps a weight of this name.

    Raises:
        ConfigError: kind ``muon-needs-matrices``: a pattern names it, and it has not two
            dimensions.
    """
    named = next(
        (at for at, pattern in enumerate(optimizer.matrices) if re.fullmatch(pattern, name)), None
    )
    if named is not None and len(shape) != 2:
        reason = f"{name} has the shape {tuple(shape)}, and Muon steps matrices"
        key = f"optimizer.matrices.{named}"
        fix = "leave it out, for example with .*weight, or name single weights"
        raise ConfigError.of("muon-needs-matrices", reason, fix, key, optimizer.matrices[named])
    is_inside = (
        not optimizer.matrices and len(shape) == 2 and _INSIDE_BLOCK.fullmatch(name) is not None
    )
    return named is not None or is_inside


def in_order(values: Iterable[GroupValues]) -> list[GroupValues]:
    """The different ones, in the order of the optimizer's groups: those at its own learning rate
    first.
    """
    return sorted(
        set(values),
        key=lambda each: (
            each.lr_ratio != 1.0,
            each.lr_ratio,
            -each.weight_decay,
            not each.by_muon,
        ),
    )


def refuse_unmatched_groups(shapes: Mapping[str, Sequence[int]], optimizer: Any) -> None:
    """Refuse groups that have none of the weights of these names and shapes.

    Raises:
        ConfigError: kind ``group-matches-nothing``, for each of them, or ``muon-needs-matrices``.
    """
    names = list(shapes)
    patterns = {
        f"groups.{number}.match": group.match
        for number, group in enumerate(getattr(optimizer, "groups", ()))
    }
    patterns |= {
        f"matrices.{number}": pattern
        for number, pattern in enumerate(getattr(optimizer, "matrices", ()))
    }
    problems = [
        Problem(
            "group-matches-nothing",
            "no trained parameter of the model has such a name",
            unmatched_pattern(pattern, names),
            f"optimizer.{key}",
            pattern,
        )
        for key, pattern in patterns.items()
        if not any(re.fullmatch(pattern, name) for name in names)
    ]
    if isinstance(optimizer, Muon) and not problems:
        muon = optimizer
    else:
        muon = None
    if muon and not sum(stepped_by_muon(name, shape, muon) for name, shape in shapes.items()):
        reason = (
            "no trained matrix of the model is in a layer inside a numbered block, such as "
            "blocks.3.mlp.up.weight"
        )
        fix = "name the weights that Muon steps, or use adamw"
        problems = [
            Problem("muon-needs-matrices", reason, fix, "optimizer.matrices", muon.matrices)
        ]
    if problems:
        raise ConfigError(problems)


def layer_depths(names: Iterable[str]) -> dict[str, int]:
    """Number the layers of a model from its input: each name -> the place of its layer.

    What has a number in its name is a layer (``blocks.3``, ``layer1.0``); what stands before the
    first of them is one (embeddings), and so is what follows (the last norm and the head), as in
    BEiT's and timm's layer decay.
    """
    depths: dict[str, int] = {}
    places: dict[str, int] = {}
    numbered = 0
    for name in names:
        found = _NUMBERED.match(name)
        numbered += found is not None and found.group() not in places
        depths[name] = places.setdefault(
            found.group() if found else f"after {numbered}", len(places)
        )
    return depths


def _depth_of(name: str, depths: Mapping[str, int]) -> int:
    """The place of a weight, by its own name or by that of the layer that holds it."""
    while name not in depths:
        name = name.rpartition(".")[0]
    return depths[name]


# Adapters, matched as peft matches (its `check_target_module_exists`).

ALL_LINEAR: Final = "all-linear"
LORA: Final = ".lora_"
"""Part of the names of all weights of adapters, behind the name of the module that they belong
to.
"""


def is_named(module: str, names: Sequence[str] | str) -> bool:
    """Check whether a module is meant by a list of names or their ends, or by a regular
    expression.
    """
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def is_adapted(linear: str, lora: LoRA) -> bool:
    """Check whether a linear layer has an adapter."""
    return lora.target_modules == ALL_LINEAR or is_named(linear, lora.target_modules)


def is_saved(module: str, lora: LoRA) -> bool:
    """Check whether a module is one of `modules_to_save`: there peft compares ends wherever they
    begin.
    """
    return module.endswith(tuple(lora.modules_to_save))


def is_inside_saved(weight: str, lora: LoRA) -> bool:
    """Check whether a weight belongs to one of `modules_to_save`, or to a module inside them."""
    return any(
        is_saved(parent, lora) for parent in accumulate(weight.split(".")[:-1], "{}.{}".format)
    )


def unmatched_modules(lora: LoRA, modules: Sequence[str]) -> list[Problem]:
    """A problem of kind ``lora-matches-nothing`` for everything that names no module of a model."""
    targets = lora.target_modules
    known = [*{module.rpartition(".")[2]: None for module in modules}, *modules]
    if isinstance(targets, str):
        listed: Sequence[str] = []
    else:
        listed = targets
    missing = [
        ("target_modules", name)
        for name in listed
        if not any(is_named(one, [name]) for one in modules)
    ]
    missing += [
        ("modules_to_save", name)
        for name in lora.modules_to_save
        if not any(m.endswith(name) for m in modules)
    ]
    found = {
        (
            f"{key}.{getattr(lora, key).index(name)}",
            name,
        ): f"did you mean {nearest(name, known) or known[0]}?"
        for key, name in missing
    }
    if (
        isinstance(targets, str)
        and targets != ALL_LINEAR
        and not any(is_named(module, targets) for module in modules)
    ):
        found["target_modules", targets] = unmatched_pattern(targets, modules)
    reason = "no module of the model has such a name"
    return [
        Problem("lora-matches-nothing", reason, fix, f"training.lora.{key}", value)
        for (key, value), fix in found.items()
    ]


def tied_problem(module: str, value: Any) -> Problem:
    """A weight in two places would be adapted in one of them, and merged into both."""
    reason = f"the weight of {module} is used in another place too, where no adapter would be"
    fix = "leave it out, or train it whole: training.lora.modules_to_save"
    return Problem("lora-tied", reason, fix, "training.lora.target_modules", value)
