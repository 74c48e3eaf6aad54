"""Folders of adapters as peft writes them, and `export --adapter`: names and options, read without
torch and held against `training.lora` (`init_adapter` is the path of one).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.json_objects import read_object
from framework.config.groups import (
    ALL_LINEAR,
    LORA,
    PEFT_PREFIX,
    is_inside_saved,
    is_named,
    pattern_error,
    peft_name,
)
from framework.config.training import LoRA
from framework.errors import Problem, counted, show_value

WEIGHTS: Final = "adapter_model.safetensors"
DESCRIPTION: Final = "adapter_config.json"
KEY: Final = "training.lora.init_adapter"
_EQUAL: Final = ("r", "lora_alpha", "use_rslora", "use_dora")
# Ways to draw adapters that change the weights below them too.
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq")
# Of peft's LoraConfig, beside the keys of `training.lora`: what has no effect on a trained adapter.
_HARMLESS: Final = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"),
        *("revision", "runtime_config", "task_type", "fan_in_fan_out", "exclude_modules"),
        *("init_lora_weights", "layers_pattern", "layers_to_transform", "lora_dropout"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "ensure_weight_tying"),
        *("megatron_config", "megatron_core", "qalora_group_size", "target_modules"),
        "modules_to_save",
    }
)


def adapter_problems(
    lora: LoRA | None, trained: Callable[[], Mapping[str, Sequence[int]]]
) -> list[Problem]:
    """Find the problems of the folder at `training.lora.init_adapter`, as far as its description
    and the header of its weights show them.

    `trained` returns name -> shape of what the model trains; empty if that is not known yet.
    """
    if lora is None or lora.init_adapter is None:
        return []
    if isinstance(lora.target_modules, str) and pattern_error(lora.target_modules):
        return []  # a problem by itself, of kind `bad-pattern`
    folder = Path(lora.init_adapter)
    problem = _absent(folder)
    if problem is not None:
        return [problem]
    described = read_object(folder / DESCRIPTION)
    if described is None:
        return [_damaged(folder / DESCRIPTION, folder)]
    shapes = _shapes_of_file(folder / WEIGHTS)
    if shapes is None:
        return [_damaged(folder / WEIGHTS, folder)]
    problems = list(_other_options(described, lora, folder))
    if not problems:
        problems += _other_modules(shapes, lora, folder)
    if not problems:
        expected = {peft_name(name): shape for name, shape in trained().items()}
        if expected:
            problems += other_shapes(expected, shapes, lora)
    return problems


def _shapes_of_file(file: Path) -> dict[str, tuple[int, ...]] | None:
    """Return name -> shape of the tensors of a safetensors file; None for a damaged one."""
    header = read_object(file, is_header=True)
    if header is None:
        return None
    try:
        return shapes_in(header)
    except TypeError:
        return None


def _absent(folder: Path) -> Problem | None:
    """Return the problem of a folder without adapters."""
    if (folder / DESCRIPTION).is_file() and (folder / WEIGHTS).is_file():
        return None
    fix = f"name a folder with {DESCRIPTION} and {WEIGHTS}"
    if (folder / "checkpoints").is_dir() or (folder / "manifest.json").is_file():
        reason = "it is a run or a checkpoint, and no folder of adapters"
        fix = f"write one: dsf export {folder} FOLDER --adapter"
    elif (folder / "adapter_model.bin").is_file():
        reason = "its weights are a pickle, which could be a program"
        fix = "load it with peft, and save_pretrained: it writes safetensors"
    elif folder.is_dir():
        reason = "the folder holds no adapters"
    else:
        reason = "there is no folder at that path"
    return Problem("adapter-not-found", reason, fix, KEY, str(folder))


def _differs(reason: str, fix: str, folder: Path, *, key: str = KEY, value: Any = None) -> Problem:
    return Problem("adapter-differs", reason, fix, key, str(folder) if value is None else value)


def _damaged(file: Path, folder: Path) -> Problem:
    return _differs(f"{file} is damaged, or no file of peft's", "write it again", folder)


def _other_options(described: Mapping[str, Any], lora: LoRA, folder: Path) -> Iterator[Problem]:
    """Find options of the folder that differ from the run's, or that the run has not."""
    kind = described.get("peft_type")
    if kind != "LORA":
        yield _differs(f"its peft_type is {show_value(kind)}", "name adapters of LoRA", folder)
        return
    yield from _other_values(described, lora, folder)
    drawn = described.get("init_lora_weights")
    if isinstance(drawn, str) and drawn.lower().startswith(_CHANGES_BASE):
        reason = f"they were begun by {drawn}, which changes the weights below adapters, too"
        fix = "convert it: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        yield _differs(reason, fix, folder)
    for name in sorted(described.keys() - _HARMLESS - {*_EQUAL}):
        value = described[name]
        if value and (name, value) != ("bias", "none"):
            reason = f"they have {name}: {show_value(value)}, which training.lora has not"
            yield _differs(reason, "train them with peft", folder)


def _other_values(described: Mapping[str, Any], lora: LoRA, folder: Path) -> Iterator[Problem]:
    """Find options that decide what adapters compute, and have another value than the run's."""
    for name in _EQUAL:
        here = getattr(lora, name)
        there = described.get(name, type(lora).model_fields[name].default)
        if there != here:
            reason = f"the adapters in {folder} have {name}: {there}"
            key = f"training.lora.{name}"
            yield _differs(reason, f"set {key}: {json.dumps(there)}", folder, key=key, value=here)


def shapes_in(header: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in the header of a safetensors file.

    Raises:
        TypeError: a shape is no list of whole numbers.
    """
    shapes = {}
    for name, entry in header.items():
        if name != "__metadata__" and isinstance(entry, dict) and "shape" in entry:
            shapes[name] = tuple(map(index, entry["shape"]))
    return shapes


def _other_modules(
    shapes: Mapping[str, Sequence[int]], lora: LoRA, folder: Path
) -> Iterator[Problem]:
    """Find modules that the folder has adapters for, or whole, and `training.lora` has not; or the
    reverse.
    """
    names = [name.removeprefix(PEFT_PREFIX) for name in shapes]
    adapted = sorted({name.partition(LORA)[0] for name in names if LORA in name})
    whole = sorted(name for name in names if LORA not in name)
    yield from _other_targets(adapted, lora, folder)
    yield from _other_whole_modules(whole, lora, folder)


def _other_targets(adapted: Sequence[str], lora: LoRA, folder: Path) -> Iterator[Problem]:
    """Compare the modules with adapters in the folder with `training.lora.target_modules`."""
    targets = lora.target_modules
    unnamed = [name for name in adapted if targets != ALL_LINEAR and not is_named(name, targets)]
    if unnamed:
        yield _of_modules("target_modules", f"adapters for {unnamed[0]}", unnamed, targets)
    if not isinstance(targets, str):
        for target in targets:
            if not any(is_named(name, [target]) for name in adapted):
                reason = f"{folder} has no adapters for {target}"
                fix = "leave it out, or name whole modules"
                key = "training.lora.target_modules"
                yield _differs(reason, fix, folder, key=key, value=targets)


def _other_whole_modules(whole: Sequence[str], lora: LoRA, folder: Path) -> Iterator[Problem]:
    """Compare the weights that the folder holds whole with `training.lora.modules_to_save`."""
    unsaved = [name for name in whole if not is_inside_saved(name, lora)]
    if unsaved:
        saved = lora.modules_to_save
        yield _of_modules("modules_to_save", f"{unsaved[0]} whole", unsaved, saved)
    for module in lora.modules_to_save:
        alone = lora.model_copy(update={"modules_to_save": [module]})
        if not any(is_inside_saved(name, alone) for name in whole):
            reason = f"{folder} does not hold {module} whole"
            fix = "leave it out"
            key = "training.lora.modules_to_save"
            yield _differs(reason, fix, folder, key=key, value=lora.modules_to_save)


def _of_modules(name: str, what: str, modules: Collection[str], value: Any) -> Problem:
    last_names = sorted({module.rpartition(".")[2] for module in modules})
    if name == "modules_to_save":  # of weights
        last_names = sorted({module.split(".")[-2] for module in modules if "." in module})
    more = f" and {counted(len(modules) - 1, 'more')}" if len(modules) > 1 else ""
    reason = f"init_adapter holds {what}{more}, which it does not name"
    fix = f"name {', '.join(last_names)} as well"
    return Problem("adapter-differs", reason, fix, f"training.lora.{name}", value)


def other_shapes(
    expected: Mapping[str, Sequence[int]], held: Mapping[str, Sequence[int]], lora: LoRA
) -> Iterator[Problem]:
    """Find what a model with adapters needs and a folder lacks, or has in another shape, or has
    and the model has not. Buffers of modules that are trained whole may be there.
    """
    fix = "name adapters of this model, or target_modules as they had"
    reason = _lacking_or_other(expected, held) or _foreign_weight(expected, held, lora)
    if reason:
        yield Problem("adapter-differs", reason, fix, KEY, lora.init_adapter)


def _lacking_or_other(
    expected: Mapping[str, Sequence[int]], held: Mapping[str, Sequence[int]]
) -> str:
    """Describe the first weight that a folder lacks, or has in another shape; empty if none is."""
    for name, shape in expected.items():
        plain = name.removeprefix(PEFT_PREFIX)
        if name not in held:
            return f"it lacks {plain}, which the model has with these target_modules"
        if tuple(held[name]) != tuple(shape):
            return (
                f"its {plain} has shape {tuple(held[name])}, and {tuple(shape)} in this model: "
                "they belong to another base"
            )
    return ""


def _foreign_weight(expected: Collection[str], held: Collection[str], lora: LoRA) -> str:
    """Describe the first weight of a folder that the model has not; empty if it has all."""
    for name in held:
        plain = name.removeprefix(PEFT_PREFIX)
        if name not in expected and not is_inside_saved(plain, lora):
            return f"it has {plain}, which this model has not: they belong to another base"
    return ""


def noted_base(folder: str) -> dict[str, str]:
    """Return what `export --adapter` noted of the frozen weights below the adapters: ``base``, a
    SHA-256, ``base_dtype`` and, of few bits, ``base_quantization``; empty for others' files.
    """
    header = read_object(Path(folder) / WEIGHTS, is_header=True) or {}
    noted = header.get("__metadata__")
    return noted if isinstance(noted, dict) and "base" in noted else {}
