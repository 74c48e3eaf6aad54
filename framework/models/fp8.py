"""Linear products of a model's blocks in fp8 (`precision.fp8`), by torchao's casts and products.

An operand x is rounded to q = fp8(s x) with the scale s = largest number of fp8 / largest |x|, of
all of x or of each row, and a product is q_a q_b / (s_a s_b), summed up in fp32 and rounded to
bf16 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). Of a layer that is the product
forward, and both of its backward pass. Scales follow from the numbers at hand: nothing is kept
between steps, and weights keep their names, types and places.

Layers are torch's with another forward pass. torchao's own `Float8Linear` keeps a view of
the weight for the backward pass, which at ZeRO stage 3 would keep the gathered weights of the whole
model; here the weight itself is kept, as DeepSpeed's own linear layer of stage 3 does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from framework.config.precision import FP8, FP8_ALIGNED
from framework.errors import ConfigError, missing_package
from framework.models.compilation import repeated_blocks
from framework.system.log import without_warnings_of


@dataclass(frozen=True)
class InFP8:
    """What computes in fp8.

    Attributes:
        converted: names of the linear layers that do.
        left_out: name -> reason, of layers of blocks that stay in bf16.
    """

    converted: tuple[str, ...]
    left_out: dict[str, str]

    def __str__(self) -> str:
        text = f"{len(self.converted)} linear layers compute in fp8"
        if not self.left_out:
            return text
        name, reason = next(iter(self.left_out.items()))
        count = len(self.left_out)
        verb = "stays" if count == 1 else "stay"
        return f"{text}, and {count} of the blocks {verb} in bf16, as {name}: {reason}"


def compute_in_fp8(model: nn.Module, section: FP8) -> InFP8:
    """Let the linear layers of a model's repeated blocks compute in fp8, by another class with the
    same name.

    Args:
        model: its weights may be partitioned by ZeRO-3.
        section: how.

    Raises:
        ConfigError: kind ``package-missing``, or ``fp8-no-layers``: no layer fits.
    """
    Products.like(section.scaling, section.emulate)  # before any layer: torchao may be missing
    # One for all layers of a class, as compiled graphs are for all objects of one.
    classes: dict[type[nn.Linear], type[nn.Linear]] = {}
    converted = []
    left_out = {}
    for name, layer in _linear_layers(model):
        reason = _reason_against(layer)
        if reason:
            left_out[name] = reason
            continue
        kind = type(layer)
        if kind not in classes:
            classes[kind] = type(kind.__name__, (_InFP8, kind), {})
        layer.__class__ = classes[kind]
        vars(layer)["fp8_scaling"] = section.scaling
        vars(layer)["fp8_emulates"] = section.emulate
        converted.append(name)
    if not converted:
        reason = f"{type(model).__name__} has no linear layers in blocks that repeat"
        if left_out:
            name = next(iter(left_out))
            reason = f"no linear layer of its blocks fits; {name}: {left_out[name]}"
        raise ConfigError.of(
            "fp8-no-layers", reason, "set precision.fp8: false", "precision.fp8", True
        )
    return InFP8(tuple(converted), left_out)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of the blocks with their names, each once; without routers of
    experts, whose choices hang on small differences.
    """
    names = {module: name for name, module in model.named_modules()}
    found = set()
    for block in repeated_blocks(model):
        for parent in block.modules():
            has_experts = any(name == "experts" for name, _ in parent.named_children())
            for child in parent.children():
                if isinstance(child, nn.Linear) and not has_experts and child not in found:
                    found.add(child)
                    yield names[child], child


def _reason_against(layer: nn.Linear) -> str:
    """Return why a layer stays in bf16; empty if it does not."""
    if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
        return f"{type(layer).__name__} has a forward pass of its own"
    if layer.in_features % FP8_ALIGNED or layer.out_features % FP8_ALIGNED:
        return (
            f"{layer.in_features} inputs and {layer.out_features} outputs are no multiples of "
            f"{FP8_ALIGNED}"
        )
    return ""


class _InFP8:
    """A linear layer that computes its products in fp8."""

    fp8_scaling: str
    fp8_emulates: bool

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        if not input.numel():
            plain: Callable[[Tensor], Tensor] = super().forward  # type: ignore[misc]
            return plain(input)
        output: Tensor = _Linear.apply(input, layer.weight, self.fp8_scaling, self.fp8_emulates)
        if layer.bias is None:
            return output
        biased: Tensor = output + layer.bias
        return biased


@torch._dynamo.allow_in_graph
class _Linear(torch.autograd.Function):
    """Product of an input (..., in_features) with a weight (out_features, in_features).

    Graphs of torch.compile hold it as one operation, so that beside tensors it takes constants.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, scaling: str, emulates: bool) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.products = Products.like(scaling, emulates)
        output: Tensor = ctx.products.output(input.reshape(-1, input.shape[-1]), weight)
        return output.view(*input.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input: Tensor | None = None
        of_weight: Tensor | None = None
        if ctx.needs_input_grad[0]:
            of_input = ctx.products.input_gradient(rows, weight).view(input.shape)
        if ctx.needs_input_grad[1]:
            input_rows = input.reshape(-1, input.shape[-1])
            of_weight = ctx.products.weight_gradient(rows, input_rows)
        return of_input, of_weight, None, None


class Products:
    """The three products of a linear layer, of rows (rows, features), by torchao.

    Tensors are cast as they are and transposed afterwards, so that a compiled graph has one cast
    where two products take the same rounded tensor.
    """

    @staticmethod
    @cache
    def like(scaling: str, emulates: bool) -> Products:
        """Return those of `precision.fp8` with these values, which are made once."""
        return Products(scaling, emulates=emulates)

    def __init__(self, scaling: str, *, emulates: bool) -> None:
        """Load torchao; ConfigError of kind ``package-missing`` if that fails."""
        torchao = _load_torchao()
        config = torchao.config.Float8LinearConfig.from_recipe_name(scaling)
        roles = torchao.float8_training_tensor.GemmInputRole
        self._torchao = torchao
        self._emulates = emulates
        self._config = config
        self._input = (config.cast_config_input, roles.INPUT)
        self._weight = (config.cast_config_weight, roles.WEIGHT)
        self._gradient = (config.cast_config_grad_output, roles.GRAD_OUTPUT)
        by_row = torchao.config.ScalingGranularity.AXISWISE
        self._scales_rows = config.cast_config_input.scaling_granularity is by_row
        self._options = self._make_options(pads=False)
        self._padding_options = self._make_options(pads=True)

    def output(self, input: Tensor, weight: Tensor) -> Tensor:
        """Compute (rows, out_features)."""
        transposed = self._cast(weight, self._weight, axis=-1).t()
        return torch.mm(self._cast(input, self._input, axis=-1), transposed)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Compute (rows, in_features) of the gradient of the output."""
        cast = self._cast(gradient, self._gradient, axis=-1)
        return torch.mm(cast, self._cast(weight, self._weight, axis=0))

    def weight_gradient(self, gradient: Tensor, input: Tensor) -> Tensor:
        """Compute (out_features, in_features) of the gradient of the output."""
        # It sums over rows, whose number is any; GPUs take multiples of 16.
        pads = len(input) % FP8_ALIGNED != 0
        transposed = self._cast(gradient, self._gradient, axis=0, pads=pads).t()
        return torch.mm(transposed, self._cast(input, self._input, axis=0, pads=pads))

    def _cast(self, tensor: Tensor, how: tuple[Any, Any], *, axis: int, pads: bool = False) -> Any:
        """Round a tensor to fp8, with a scale for each vector along `axis` where rows have one."""
        config, role = how
        return self._torchao.float8_scaling_utils.hp_tensor_to_float8_dynamic(
            tensor,
            config.target_dtype,
            self._padding_options if pads else self._options,
            gemm_input_role=role,
            scaling_granularity=config.scaling_granularity,
            axiswise_dim=axis if self._scales_rows else None,
            round_scales_to_power_of_2=self._config.round_scales_to_power_of_2,
        )

    def _make_options(self, *, pads: bool) -> Any:
        """Return torchao's options of the three products; `pads`: fill up what they sum over."""
        tensors = self._torchao.float8_training_tensor

        def options_of(product: Any) -> Any:
            return tensors.ScaledMMConfig(
                emulate=self._emulates,
                use_fast_accum=product.use_fast_accum,
                pad_inner_dim=pads,
            )

        return tensors.LinearMMConfig(
            output=options_of(self._config.gemm_config_output),
            grad_input=options_of(self._config.gemm_config_grad_input),
            grad_weight=options_of(self._config.gemm_config_grad_weight),
        )


def _load_torchao() -> Any:
    """Return the package of torchao's fp8 training, all its modules loaded.

    Raises:
        ConfigError: kind ``package-missing``.
    """
    try:
        # torch 2.15 logs a note on each start that an enumeration of torchao is registered twice.
        with without_warnings_of("torch.utils._pytree"):
            from torchao import float8
            from torchao.float8 import _inductor_patch
    except ImportError as error:
        raise missing_package("torchao", what="precision.fp8", extra="fp8") from error
    # Triton (its issue 11111) stores wrong bytes of fp8 beside a minimum or maximum of inductor's.
    _inductor_patch._patch_inductor_min_max_codegen()
    return float8
