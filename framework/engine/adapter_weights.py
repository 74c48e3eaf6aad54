"""Adapters that a run starts from, loaded into a model; and what ZeRO stage 3 has to know of those
that read more than their own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn

from framework.checkpoint.adapter_files import KEY, noted_base, other_shapes
from framework.checkpoint.state.weight_files import shapes_of
from framework.config.groups import is_inside_saved, peft_name
from framework.config.training import LoRA, Quantization
from framework.engine.weights import gives, is_base, load_part, needed_shapes
from framework.errors import ConfigError, counted
from framework.models.quantized import QuantizedLinear, quantizable
from framework.models.split import DividedLinear, part_of


def put_adapter(model: nn.Module, weights: Mapping[str, torch.Tensor], lora: LoRA) -> None:
    """Load the adapters of one of peft's files, and what it holds whole, into a model that has
    adapters; partitioned by ZeRO-3 or not, and shared by a tensor group or not. Collective.

    Raises:
        ConfigError: kind ``adapter-differs``: names or shapes differ; nothing was changed.
    """
    trained = dict(_trained(model, lora))
    held = shapes_of(weights)
    # buffers keep their first numbers
    weights_of_model = {
        name: tensor for name, tensor in trained.items() if isinstance(tensor, nn.Parameter)
    }
    expected = needed_shapes(weights_of_model, held)
    problems = list(other_shapes(expected, held, lora))
    if problems:
        raise ConfigError(problems)
    part = part_of(model)
    tensor_group = None if part is None else part.group
    for name in (name for name in held if name in trained):
        tensor = trained[name]
        is_spread = hasattr(tensor, "ds_id")
        with (
            deepspeed.zero.GatheredParameters([tensor], modifier_rank=0, enabled=is_spread),
            torch.no_grad(),
        ):
            if gives(tensor):
                load_part(tensor, weights[name], tensor_group)


def _trained(model: nn.Module, lora: LoRA) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is trained, under its names in peft's files, and the buffers beside it."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            yield peft_name(name), parameter
    for name, buffer in model.named_buffers():
        if is_inside_saved(name, lora):
            yield peft_name(name), buffer


def refuse_adapter_of_other_base(config: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Refuse adapters to start from that `export --adapter` wrote of other frozen weights than
    `base`, if those were rounded alike. Others' files do not note theirs.

    Raises:
        ConfigError: kind ``base-differs``.
    """
    folder = config["training"]["lora"]["init_adapter"]
    if folder is None:
        return
    noted = noted_base(folder)
    here = (config["precision"]["dtype"], config["training"]["lora"]["quantization"])
    is_comparable = (noted.get("base_dtype"), noted.get("base_quantization")) == here
    if is_comparable and not is_base(noted["base"], base):
        reason = f"the adapters in {folder} were trained on other frozen weights"
        fix = "set checkpoint.init_weights (or run.seed, of a drawn base) as it was"
        raise ConfigError.of("base-differs", reason, fix, KEY, folder)


def quantize_adapted(
    model: nn.Module,
    form: Quantization,
    *,
    dtype: torch.dtype,
    spread: Callable[[nn.Module], object] = lambda module: None,
) -> str:
    """Put the linear layers under adapters into few bits, one by one, their numbers first rounded
    to `dtype`; `spread` partitions one again, at ZeRO stage 3. Layers of a pipeline's other stages,
    which have no numbers here, stay as they are. Collective.

    Returns:
        What was done, and the share of the weights' norm that was lost.

    Raises:
        ConfigError: kind ``quantizes-nothing``: no adapted module is a linear layer.
    """
    adapted = quantizable(model)
    if not adapted:
        reason = "no module with an adapter is a linear layer"
        fix = "leave it out"
        raise ConfigError.of("quantizes-nothing", reason, fix, "training.lora.quantization", form)
    lost = torch.zeros((), dtype=torch.float64)
    whole = torch.zeros((), dtype=torch.float64)
    here = {name: module for name, module in adapted.items() if not _is_elsewhere(module)}
    for name, module in here.items():
        weight = module.base_layer.weight
        with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")):
            of_lost, of_whole = _quantize(module, form, dtype=dtype, name=name)
        lost += of_lost
        whole += of_whole
        spread(module.base_layer)
    share = 0.0
    if here:
        share = float((lost / whole).sqrt())
    layers = counted(len(here), "linear layer")
    return f"{layers} in {form}, which leaves out {share:.2%} of the norm of their weights"


def _quantize(
    module: Any, form: Quantization, *, dtype: torch.dtype, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put one adapted linear layer into few bits; return the sums of the squares that were lost,
    and of all. Nothing of the layer is alive afterwards but its bytes.
    """
    base: Any = module.base_layer
    if isinstance(base, DividedLinear):
        from framework.engine.tensor_quantized import quantize_part

        numbers, held = quantize_part(base, form, dtype=dtype, name=name)
    else:
        module.base_layer = QuantizedLinear(base, form, dtype=dtype)
        held = module.base_layer.matrix(torch.float32)
        numbers = base.weight.detach().to(dtype).float()
    lost = held.sub_(numbers).square_().sum(dtype=torch.float64)
    return lost.cpu(), numbers.square().sum(dtype=torch.float64).cpu()


def _is_elsewhere(module: Any) -> bool:
    """Check whether a layer of a pipeline has its numbers on other ranks."""
    is_meta: bool = module.base_layer.weight.is_meta
    return is_meta


@contextmanager
def gathering_in_peft() -> Iterator[None]:
    """Let peft gather a weight that ZeRO stage 3 has partitioned while it measures its rows, for
    DoRA: it asks transformers whether stage 3 is on.
    """
    from transformers.integrations import deepspeed as asked

    is_on = {"zero_optimization": {"stage": 3}}
    answer = asked.HfDeepSpeedConfig(is_on)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        asked.unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
        del answer  # transformers holds it by a weak reference


def register_read_weights(model: nn.Module) -> None:
    """Have ZeRO stage 3 gather, for each adapted module with DoRA, the weights of the modules in
    it, which it reads beside calling them.
    """
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if not isinstance(module, LoraLayer) or not module.lora_magnitude_vector:
            continue
        for parameter in module.parameters():
            if hasattr(parameter, "ds_id"):
                deepspeed.zero.register_external_parameter(module, parameter)
