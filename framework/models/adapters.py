"""Low-rank adapters in any `nn.Module`, by peft, and out of it again: added to the weights that
they belong to.

peft puts a module of its own in the place of each that it adapts: ``query.weight`` becomes
``query.base_layer.weight``, beside ``query.lora_A.default.weight``. `base_name` gives a weight the
name that it has in the plain model.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import nn

from framework.config.groups import LORA, is_saved, tied_problem, unmatched_modules
from framework.config.training import LoRA
from framework.errors import ConfigError
from framework.models.layers import LayeredModel

_BASE: Final = "base_layer."
_ADAPTER: Final = ".default"
_CHUNK: Final = 1 << 22
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers that mix well (Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators"),
# as int64.
_PLACE: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX: Final = 0xBF58476D1CE4E5B9 - (1 << 64)


def base_name(name: str) -> str:
    """The name in the plain model of a weight that is no adapter."""
    return name.replace(_BASE, "")


def is_adapter(name: str) -> bool:
    """Check whether a weight is one of an adapter's two."""
    return LORA in name


def peft_name(name: str) -> str:
    """The name of a trained weight in peft's own files."""
    module, mark, rest = base_name(name).partition(LORA)
    return f"base_model.model.{module}{mark}{rest.replace(_ADAPTER, '')}"


def add_adapters(model: nn.Module, lora: LoRA, *, seed: int) -> nn.Module:
    """Put adapters into a model, and freeze everything but them and `lora.modules_to_save`.

    Args:
        model: with the weights that it starts from, partitioned by ZeRO-3 or not; the adapters are
            not partitioned.
        lora: which modules, and how.
        seed: what the adapters are drawn under, at every ZeRO stage the same.

    Returns:
        The model, changed in place.

    Raises:
        ConfigError: kinds ``lora-matches-nothing``, ``lora-not-adaptable``, ``lora-tied``.
    """
    # here: it imports transformers, which takes seconds
    from peft import LoraConfig, inject_adapter_in_model

    modules = [name for name, _ in model.named_modules() if name]
    problems = unmatched_modules(lora, modules)
    if problems:
        raise ConfigError(problems)
    tied = _tied(model)
    trained = [module for name, module in model.named_modules() if name and is_saved(name, lora)]
    config = LoraConfig(**lora.model_dump(exclude={"modules_to_save"}))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # of layers that store W transposed: peft sets its own switch
        warnings.simplefilter("ignore")
        torch.manual_seed(seed + 1)
        try:
            model = inject_adapter_in_model(config, model)
        except ValueError as error:
            reason = str(error).partition(". ")[0]
            fix = "name linear layers, convolutions or embeddings"
            key = "training.lora.target_modules"
            if "4 dimensions" in reason:
                fix = "set zero.stage: 2 for convolutions"  # 3 spreads kernels
            raise ConfigError.of(
                "lora-not-adaptable", reason, fix, key, lora.target_modules
            ) from error
    adapted = sorted(
        tied & {name.partition(LORA)[0] for name, _ in model.named_parameters() if is_adapter(name)}
    )
    if adapted:
        raise ConfigError([tied_problem(adapted[0], lora.target_modules)])
    # torch's encoder layers would read frozen weights in evaluation themselves, past all modules
    # and their adapters.
    torch.backends.mha.set_fastpath_enabled(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for parameter in (parameter for module in trained for parameter in module.parameters()):
        parameter.requires_grad_(True)
    return model


def _tied(model: nn.Module) -> set[str]:
    """Names of modules whose weight is used in another place too."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    tied = {name for names in owners.values() if len(names) > 1 for name in names}
    if isinstance(model, LayeredModel):
        return tied | {layer.name for layer in model.recipes if layer.tied}
    return tied


def merge_adapters(model: nn.Module) -> nn.Module:
    """Add every adapter to its weight, W + lora_alpha / r x B A, and put the plain modules back;
    the model, changed.
    """
    from peft.tuners.lora import LoraLayer

    adapted: dict[str, Any] = {
        name: one for name, one in model.named_modules() if isinstance(one, LoraLayer)
    }
    for name, module in adapted.items():
        # in torch's attention, which merges it itself
        if any(name.startswith(f"{other}.") for other in adapted):
            continue
        if hasattr(module, "unload_and_optionally_merge_module"):
            plain = module.unload_and_optionally_merge_module(
                merge=True, safe_merge=True, adapter_names=None
            )
        else:
            module.merge(safe_merge=True)
            plain = module.get_base_layer()
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, plain)
    return model


def fingerprint(
    model: nn.Module, gathered: Callable[[list[nn.Parameter]], AbstractContextManager[Any]]
) -> str:
    """SHA-256 over names, shapes, types and numbers of all frozen weights: the same at every ZeRO
    stage.

    `gathered` makes weights whole within it, module by module. Of a weight's numbers a sum is taken
    that depends on the place of each, in 64 bits and on the device: a hash of the bytes would take
    a second for each GB.
    """
    lines = []
    for module_name, module in model.named_modules():
        frozen = {
            name: one
            for name, one in module.named_parameters(recurse=False)
            if not one.requires_grad
        }
        with gathered(list(frozen.values())):
            for name, parameter in frozen.items():
                full = base_name(f"{module_name}.{name}" if module_name else name)
                lines.append(
                    f"{full} {tuple(parameter.shape)} {parameter.dtype} {_sum(parameter.detach())}"
                )
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _sum(tensor: torch.Tensor) -> int:
    flat = tensor.contiguous().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].view(_BITS[flat.element_size()]).to(torch.int64)
        mixed = bits + torch.arange(start, start + len(bits), device=bits.device) * _PLACE
        mixed = (mixed ^ (mixed >> 30)) * _MIX
        total += (mixed ^ (mixed >> 27)).sum()
    return int(total)


def put_trained(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load what a checkpoint holds of a model with adapters: everything but the frozen weights.

    Raises:
        ValueError: it holds other names than the model has.
    """
    refuse_other_names(model, weights)
    model.load_state_dict(dict(weights), strict=False)


def refuse_other_names(model: nn.Module, held: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that lacks something that is trained, or holds what the model has not; a
    ValueError.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    # of a weight with several names one is held
    there = {id(named[name]) for name in held.keys() & named.keys()}
    may_lack = {name for name, one in named.items() if not one.requires_grad or id(one) in there}
    state = model.state_dict().keys()
    wrong = sorted((state - may_lack - held.keys()) | (held.keys() - state))
    if wrong:
        raise ValueError(
            f"it {'holds' if wrong[0] in held else 'lacks'} {wrong[0]}, unlike the model"
        )


def untrained_adapters(weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Names of the modules whose B is all zero, as it is drawn: nothing has ever come through their
    adapters.
    """
    for name in weights:
        if (".lora_B." in name or ".lora_embedding_B." in name) and not bool(weights[name].any()):
            yield name.partition(LORA)[0]
