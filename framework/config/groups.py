"""Parameter groups: the learning rate and weight decay of each weight; and the modules with
adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from framework.config.optimizer import Group, Muon
from framework.config.training import LoRA
from framework.errors import ConfigError, Problem

# A weight of a layer inside a numbered block; the layers of a plain sequence are not inside
# anything.
_INSIDE_BLOCK: Final = re.compile(r"(.*[._])?\d+(\.\w+){2,}")
# A weight that packs the experts of a layer; the weights of a single expert have its number there.
_PACKED_EXPERTS: Final = re.compile(r"(.*\.)?experts\.[^.\d][^.]*")
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


def group_values(
    shapes: Mapping[str, Sequence[int]], optimizer: Any, *, layers: Iterable[str] = ()
) -> dict[str, GroupValues]:
    """Return the values with which each weight is stepped, by its name.

    Args:
        shapes: name in the plain module -> shape, in the model's order.
        optimizer: a section of the config; with the user's own code all weights have the same
            values.
        layers: names of all layers of the model, or of all its weights, in order, where `shapes`
            has only the weights of a pipeline's stage, or the trained ones.

    Raises:
        ConfigError: kind ``muon-needs-matrices``, see `stepped_by_muon`.
    """
    base_lr = getattr(optimizer, "lr", None) or 1.0
    groups: Sequence[Group] = getattr(optimizer, "groups", ())
    layer_decay = getattr(optimizer, "layer_decay", 1.0)
    depths: dict[str, int] = {}
    if layer_decay < 1.0:
        depths = layer_depths(layers or shapes)
    last_depth = max(depths.values(), default=0)
    values: dict[str, GroupValues] = {}
    for name, shape in shapes.items():
        by_muon = isinstance(optimizer, Muon) and stepped_by_muon(name, shape, optimizer)
        lr = base_lr
        if isinstance(optimizer, Muon) and not by_muon:
            lr = optimizer.adam_lr
        decay = _decay_of(shape, optimizer)
        group = _group_of(name, groups)
        if group is not None:
            lr = lr if group.lr is None else group.lr
            decay = decay if group.weight_decay is None else group.weight_decay
        lr_ratio = lr / base_lr
        if depths:
            lr_ratio *= layer_decay ** (last_depth - _depth_of(name, depths))
        values[name] = GroupValues(lr_ratio, decay, by_muon)
    return values


def _decay_of(shape: Sequence[int], optimizer: Any) -> float:
    """Return the weight decay of a weight outside of groups."""
    decays_all = getattr(optimizer, "weight_decay_on", "all") == "all"
    if decays_all or is_matrix(shape):
        weight_decay: float = getattr(optimizer, "weight_decay", 0.0)
        return weight_decay
    return 0.0


def _group_of(name: str, groups: Sequence[Group]) -> Group | None:
    for group in groups:
        if re.fullmatch(group.match, name):
            return group
    return None


def stepped_by_muon(name: str, shape: Sequence[int], optimizer: Muon) -> bool:
    """Check whether Muon steps a weight of this name.

    Raises:
        ConfigError: kind ``muon-needs-matrices``: a pattern names it, and it has not two
            dimensions.
    """
    if not optimizer.matrices:
        if _packs_experts(name) and name.endswith("bias"):  # a vector for each expert
            return False
        return _is_stepped_as_matrices(name, shape) and _INSIDE_BLOCK.fullmatch(name) is not None
    for number, pattern in enumerate(optimizer.matrices):
        if re.fullmatch(pattern, name):
            if _is_stepped_as_matrices(name, shape):
                return True
            reason = f"{name} has the shape {tuple(shape)}, and Muon steps matrices"
            fix = "leave it out, for example with .*weight, or name single weights"
            key = f"optimizer.matrices.{number}"
            raise ConfigError.of("muon-needs-matrices", reason, fix, key, pattern)
    return False


def _is_stepped_as_matrices(name: str, shape: Sequence[int]) -> bool:
    """Check for a matrix, or a weight with the matrices of a layer's experts."""
    return len(shape) == 2 or (len(shape) == 3 and _packs_experts(name))


def _packs_experts(name: str) -> bool:
    return _PACKED_EXPERTS.fullmatch(name) is not None


def in_order(values: Iterable[GroupValues]) -> list[GroupValues]:
    """List the different values in the order of the optimizer's groups: those at its own learning
    rate come first.
    """

    def sort_key(group: GroupValues) -> tuple[bool, float, float, bool]:
        return group.lr_ratio != 1.0, group.lr_ratio, -group.weight_decay, not group.by_muon

    return sorted(set(values), key=sort_key)


def refuse_unmatched_groups(shapes: Mapping[str, Sequence[int]], optimizer: Any) -> None:
    """Refuse groups that match none of the weights of these names and shapes.

    Raises:
        ConfigError: kind ``group-matches-nothing`` for each such group, or ``muon-needs-matrices``.
    """
    names = list(shapes)
    problems = []
    for key, pattern in _patterns_of(optimizer).items():
        if not any(re.fullmatch(pattern, name) for name in names):
            problems.append(
                Problem(
                    "group-matches-nothing",
                    "no trained parameter of the model has such a name",
                    _names_like(pattern, names),
                    f"optimizer.{key}",
                    pattern,
                )
            )
    if problems:
        raise ConfigError(problems)
    if isinstance(optimizer, Muon):
        _refuse_without_matrices(shapes, optimizer)


def _patterns_of(optimizer: Any) -> dict[str, str]:
    """Return the patterns of an optimizer's groups by their keys."""
    patterns: dict[str, str] = {}
    for number, group in enumerate(getattr(optimizer, "groups", ())):
        patterns[f"groups.{number}.match"] = group.match
    for number, pattern in enumerate(getattr(optimizer, "matrices", ())):
        patterns[f"matrices.{number}"] = pattern
    return patterns


def _refuse_without_matrices(shapes: Mapping[str, Sequence[int]], optimizer: Muon) -> None:
    """Refuse a model without a weight that Muon steps."""
    # All weights are looked at: a pattern that names a tensor other than a matrix is refused.
    are_stepped = [stepped_by_muon(name, shape, optimizer) for name, shape in shapes.items()]
    if any(are_stepped):
        return
    raise ConfigError.of(
        "muon-needs-matrices",
        "no trained matrix of the model is in a layer inside a numbered block, such as "
        "blocks.3.mlp.up.weight",
        "name the weights that Muon steps, or use adamw",
        "optimizer.matrices",
        optimizer.matrices,
    )


def _names_like(pattern: str, names: Sequence[str]) -> str:
    """Return the fix of a pattern that matches none of the names."""
    from deepspeed_lint.text.typos import unmatched_pattern  # for messages alone

    return unmatched_pattern(pattern, names)


def layer_depths(names: Iterable[str]) -> dict[str, int]:
    """Return the number of each name's layer, counted from the model's input.

    A number in a name makes it a layer (``blocks.3``, ``layer1.0``). The names before the first
    such layer are one layer (embeddings), and so are the names after the last (the last norm and
    the head), as in BEiT's and timm's layer decay.
    """
    depths: dict[str, int] = {}
    depth_of_layer: dict[str, int] = {}
    num_numbered = 0
    for name in names:
        numbered = _NUMBERED.match(name)
        if numbered is None:
            layer = f"after {num_numbered}"
        else:
            layer = numbered.group()
            if layer not in depth_of_layer:
                num_numbered += 1
        depths[name] = depth_of_layer.setdefault(layer, len(depth_of_layer))
    return depths


def _depth_of(name: str, depths: Mapping[str, int]) -> int:
    """Return the depth of a weight, by its name or by the name of the layer that holds it.

    Raises:
        KeyError: `depths` has neither.
    """
    layer = name
    while layer not in depths:
        layer, dot, _ = layer.rpartition(".")
        if not dot:
            raise KeyError(name)
    return depths[layer]


# Adapters, matched as peft matches (its `check_target_module_exists`).

ALL_LINEAR: Final = "all-linear"
LORA: Final = ".lora_"
"""Part of the names of all weights of adapters, after the name of the module that they belong
to.
"""


PEFT_PREFIX: Final = "base_model.model."
"""Before the names of weights in peft's files."""
_BASE: Final = "base_layer."
_ADAPTER: Final = ".default"
_MAGNITUDE: Final = ".lora_magnitude_vector.weight"


def base_name(name: str) -> str:
    """Return the name in the plain model of a weight that is no adapter's."""
    return name.replace(_BASE, "")


def peft_name(name: str) -> str:
    """Return the name of a trained weight in peft's own files."""
    module, mark, rest = base_name(name).partition(LORA)
    written = f"{PEFT_PREFIX}{module}{mark}{rest.replace(_ADAPTER, '')}"
    if written.endswith(_MAGNITUDE):  # peft keeps the name that it had as a parameter
        written = written.removesuffix(".weight")
    return written


NUMBERS_OF_A_BLOCK: Final = 64
"""Numbers of a frozen weight that share a scale in ``nf4``."""


def quantized_bytes(shape: Sequence[int], form: str) -> int:
    """Return the bytes of a matrix (rows, columns) in `training.lora.quantization`."""
    rows, columns = shape
    if form == "int8":
        return rows * columns + 4 * rows
    blocks = -(-rows * columns // NUMBERS_OF_A_BLOCK)
    return blocks * (NUMBERS_OF_A_BLOCK // 2 + 4)


def pattern_error(text: str) -> str:
    """Return why a text is no regular expression; empty if it is one."""
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return ""


def is_named(module: str, names: Sequence[str] | str) -> bool:
    """Check whether a module matches a regular expression, or a list of names or ends of names."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def is_adapted(linear: str, lora: LoRA) -> bool:
    """Check whether a linear layer has an adapter."""
    return lora.target_modules == ALL_LINEAR or is_named(linear, lora.target_modules)


def is_saved(module: str, lora: LoRA) -> bool:
    """Check whether a module is one of `modules_to_save`.

    peft compares the ends of names there, also in the middle of a word.
    """
    return module.endswith(tuple(lora.modules_to_save))


def is_inside_saved(weight: str, lora: LoRA) -> bool:
    """Check whether a weight belongs to one of `modules_to_save`, or to a module inside them."""
    parents = accumulate(weight.split(".")[:-1], "{}.{}".format)
    return any(is_saved(parent, lora) for parent in parents)


def unmatched_modules(lora: LoRA, modules: Sequence[str]) -> list[Problem]:
    """Return a problem of kind ``lora-matches-nothing`` for each name without a module."""
    problems = []
    targets = lora.target_modules
    if not isinstance(targets, str):
        for number, name in enumerate(targets):
            if not any(is_named(module, [name]) for module in modules):
                fix = _module_like(name, modules)
                problems.append(_matches_nothing(f"target_modules.{number}", name, fix))
    for number, name in enumerate(lora.modules_to_save):
        if not any(module.endswith(name) for module in modules):
            fix = _module_like(name, modules)
            problems.append(_matches_nothing(f"modules_to_save.{number}", name, fix))
    if isinstance(targets, str) and not _any_is_named(modules, targets):
        fix = _names_like(targets, modules)
        problems.append(_matches_nothing("target_modules", targets, fix))
    return problems


def _any_is_named(modules: Sequence[str], targets: str) -> bool:
    return targets == ALL_LINEAR or any(is_named(module, targets) for module in modules)


def _matches_nothing(key: str, name: str, fix: str) -> Problem:
    reason = "no module of the model has such a name"
    return Problem("lora-matches-nothing", reason, fix, f"training.lora.{key}", name)


def _module_like(name: str, modules: Sequence[str]) -> str:
    """Return the fix of a name without a module: one that resembles it."""
    if not modules:
        return "remove it"
    from deepspeed_lint.text.typos import nearest  # for messages alone

    last_names = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    known = last_names + list(modules)
    return f"did you mean {nearest(name, known) or known[0]}?"


def tied_problem(module: str, value: Any) -> Problem:
    """Return the problem of an adapted weight that is used in two places.

    It would be adapted in one of them, and merged into both.
    """
    reason = f"the weight of {module} is used in another place too, where no adapter would be"
    fix = "leave it out, or train it whole: training.lora.modules_to_save"
    return Problem("lora-tied", reason, fix, "training.lora.target_modules", value)
