"""Low-rank adapters: added to any `nn.Module` by peft, and merged into its weights again.

peft puts its own module in place of each module that it adapts: ``query.weight`` becomes
``query.base_layer.weight``, beside ``query.lora_A.default.weight``. `base_name` of
config/groups.py returns a weight's name in the plain model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from framework.config.groups import (
    ALL_LINEAR,
    LORA,
    is_named,
    is_saved,
    tied_problem,
    unmatched_modules,
)
from framework.config.training import LoRA
from framework.errors import ConfigError
from framework.models.layers import LayeredModel
from framework.system.log import without_warnings_of

_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_adapter(name: str) -> bool:
    """Check whether a weight is one of an adapter's two."""
    return LORA in name


def add_adapters(model: nn.Module, lora: LoRA, *, seed: int) -> nn.Module:
    """Put adapters into a model, and freeze everything but them and `lora.modules_to_save`. For the
    whole process it turns off torch's fast path of attention, which would pass adapters by.

    Args:
        model: with its initial weights, partitioned by ZeRO-3 or not; the adapters are not
            partitioned.
        lora: which modules, and how.
        seed: the adapters are drawn under it, the same at every ZeRO stage.

    Returns:
        The model, changed in place.

    Raises:
        ConfigError: kinds ``lora-matches-nothing``, ``lora-not-adaptable``, ``lora-tied``.
    """
    module_names = [name for name, _ in model.named_modules() if name]
    problems = unmatched_modules(lora, module_names)
    if problems:
        raise ConfigError(problems)
    tied_modules = _tied_modules(model)
    trained_modules = [
        module for name, module in model.named_modules() if name and is_saved(name, lora)
    ]
    model = _inject(model, lora, seed=seed)
    adapted_modules = {
        name.partition(LORA)[0] for name, _ in model.named_parameters() if is_adapter(name)
    }
    tied_and_adapted = sorted(tied_modules & adapted_modules)
    if tied_and_adapted:
        raise ConfigError([tied_problem(tied_and_adapted[0], lora.target_modules)])
    # In evaluation torch's encoder layers would read frozen weights themselves, past all modules
    # and their adapters.
    torch.backends.mha.set_fastpath_enabled(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for module in trained_modules:
        for parameter in module.parameters():
            parameter.requires_grad_(True)
    return model


def _inject(model: nn.Module, lora: LoRA, *, seed: int) -> nn.Module:
    """Let peft put its adapters into a model.

    Raises:
        ConfigError: kind ``lora-not-adaptable``: peft has no adapter for a module.
    """
    # Imported here: peft imports transformers, which takes seconds, and torchao where it is
    # installed; torch 2.15 logs a note about it on each start.
    with without_warnings_of("torch.utils._pytree"):
        from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(**lora.of_peft())
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft warns of layers that store W transposed, and sets its option for them itself.
        warnings.simplefilter("ignore")
        torch.manual_seed(seed + 1)
        try:
            adapted: nn.Module = inject_adapter_in_model(config, model)
        except ValueError as error:
            reason = str(error).partition(". ")[0]
            fix = "name linear layers, convolutions or embeddings"
            key = "training.lora.target_modules"
            if _adapts_partitioned_kernels(model, lora):
                fix = "set zero.stage: 2 for convolutions"
            raise ConfigError.of(
                "lora-not-adaptable", reason, fix, key, lora.target_modules
            ) from error
    return adapted


def _adapts_partitioned_kernels(model: nn.Module, lora: LoRA) -> bool:
    """Check whether a convolution that is to be adapted lacks the dimensions of its kernel: ZeRO
    stage 3 partitions it, and leaves a flat weight.
    """
    if lora.target_modules == ALL_LINEAR:  # peft passes convolutions by
        return False
    for name, module in model.named_modules():
        if not isinstance(module, _CONVOLUTIONS) or not is_named(name, lora.target_modules):
            continue
        if module.weight.dim() < 2 + len(module.kernel_size):
            return True
    return False


def _tied_modules(model: nn.Module) -> set[str]:
    """Return the names of modules with a weight that another module uses, too."""
    modules_of_weight: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        modules_of_weight.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    tied: set[str] = set()
    for modules in modules_of_weight.values():
        if len(modules) > 1:
            tied.update(modules)
    if isinstance(model, LayeredModel):
        tied.update(layer.name for layer in model.recipes if layer.tied)
    return tied


def merge_adapters(model: nn.Module) -> nn.Module:
    """Add every adapter to its weight, W + lora_alpha / r x B A, and put the plain modules back.

    Returns:
        The model, changed in place.
    """
    from peft.tuners.lora import LoraLayer

    adapted: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    for name, module in adapted.items():
        # An adapted layer inside an adapted module (torch's attention) is merged by that module.
        if any(name.startswith(f"{other}.") for other in adapted):
            continue
        if hasattr(module, "unload_and_optionally_merge_module"):
            plain = module.unload_and_optionally_merge_module(
                merge=True, safe_merge=True, adapter_names=None
            )
        else:
            module.merge(safe_merge=True)
            plain = module.get_base_layer()
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, plain)
    return model


def put_trained(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load a checkpoint of a model with adapters, which holds everything but the frozen weights.

    Raises:
        ValueError: its names are not those that the model needs.
    """
    refuse_other_names(model, weights)
    model.load_state_dict(dict(weights), strict=False)


def refuse_other_names(model: nn.Module, held: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that lacks a trained weight, or holds a name that the model has not.

    Raises:
        ValueError: with the first such name.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # Of a weight with several names, a checkpoint holds one.
    held_parameters = {id(parameters[name]) for name in held.keys() & parameters.keys()}
    may_lack = {
        name
        for name, parameter in parameters.items()
        if not parameter.requires_grad or id(parameter) in held_parameters
    }
    names = model.state_dict().keys()
    missing = names - may_lack - held.keys()
    unknown = held.keys() - names
    wrong_names = sorted(missing | unknown)
    if wrong_names:
        name = wrong_names[0]
        verb = "holds" if name in held else "lacks"
        raise ValueError(f"it {verb} {name}, unlike the model")


def untrained_adapters(weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield the names of modules with adapters that were never trained: B is zero, as drawn."""
    for name in weights:
        is_b = ".lora_B." in name or ".lora_embedding_B." in name
        if is_b and not bool(weights[name].any()):
            yield name.partition(LORA)[0]
