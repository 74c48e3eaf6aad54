"""Survey of a model's layers, made before anything trains, and the comparison of `layers()` with
`forward()`.

The layers run once on torch's meta device, which computes shapes and types and touches no memory.
If one of them needs real numbers for that, all of them run for real on the one batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from framework.errors import ConfigError, in_one_line
from framework.models.layers import Layer, as_layers

# What DeepSpeed's pipeline can send (runtime/pipe/engine.py `ID_TO_DTYPE`), less bool, which NCCL
# cannot.
_SENDABLE: Final = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16)
) | frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
# DeepSpeed describes all tensors that cross to the next stage in 256 numbers (pipe/engine.py
# `TENSOR_META_SIZE`).
_LONGEST_DESCRIPTION: Final = 256


@dataclass(frozen=True)
class Surveyed:
    """One layer.

    Attributes:
        kind: class name of its module.
        place: the layer's name, and so the prefix of its weights' names; for a tied layer that of
            the first one.
        params: name within the layer -> shape, of the parameters that require a gradient.
        state: name within the layer -> shape, of everything that a checkpoint holds.
        param_bytes: bytes of parameters and buffers.
        output_bytes: bytes of the output for the batch that was run.
        cannot_send: why the output cannot cross to another stage; empty where it can.
        flops: floating-point operations of its forward pass in matrix products and convolutions;
            None where it was not counted.
    """

    layer: Layer
    kind: str
    place: str
    params: Mapping[str, torch.Size]
    state: Mapping[str, torch.Size]
    param_bytes: int
    output_bytes: int
    cannot_send: str
    flops: int | None


def survey(
    layers: Sequence[Layer],
    inputs: Any,
    *,
    seed: int,
    float_bytes: int = 4,
    frozen: Collection[str] = (),
) -> list[Surveyed]:
    """Weigh every layer and look at what it passes on.

    Args:
        inputs: what the first layer gets, one micro-batch on the CPU: a tensor or a tuple of
            tensors.
        float_bytes: bytes per number of floating tensors in the run; 2 for bf16 and fp16.
        frozen: full names of parameters that will not be trained.

    Raises:
        ConfigError: naming the layer. Kind ``layer-failed`` if it cannot be built or does not run
            on the output of the one before; ``tied-weight-missing``, ``tied-weight-left-out`` or
            ``tied-layers-differ``.
    """
    look = partial(_walk, layers, float_bytes=float_bytes, frozen=frozen)
    try:
        return list(
            look(
                _on_meta(inputs), make=lambda n: _meta_module(layers[n], n, seed), counts_flops=True
            )
        )
    except Exception:  # whatever a layer's code does with tensors that hold no numbers
        with torch.random.fork_rng(devices=[]):
            return list(look(inputs, make=lambda n: layers[n].make_copy(n, seed=seed)))


def _walk(
    layers: Sequence[Layer],
    value: Any,
    *,
    make: Callable[[int], nn.Module],
    float_bytes: int,
    frozen: Collection[str],
    counts_flops: bool = False,
) -> Iterator[Surveyed]:
    firsts: dict[str, tuple[Layer, nn.Module]] = {}
    for number, layer in enumerate(layers):
        try:
            module = make(number)
        except Exception as error:
            reason = f"the layer cannot be built: {in_one_line(error)}"
            raise ConfigError.of(
                "layer-failed", reason, "mend what builds it", "model", layer.name
            ) from error
        place = layer.name
        if layer.tied:
            first, first_module = firsts.setdefault(layer.tied, (layer, module))
            _refuse_bad_tie(first, first_module, layer, module)
            place = first.name
            module = first_module
        for name, parameter in module.named_parameters():
            if f"{place}.{name}" in frozen:
                parameter.requires_grad_(False)
        if counts_flops:
            counter = FlopCounterMode(display=False)
        else:
            counter = None
        try:
            with counter or nullcontext():
                value = layer.apply(module, value)
        except Exception as error:
            reason = (
                f"the layer fails on the output of the layer before, {_shown(value)}: "
                f"{in_one_line(error)}"
            )
            fix = "mend the layer, or the order of the layers"
            name = f"{layer.name} ({type(module).__name__})"
            raise ConfigError.of("layer-failed", reason, fix, "model", name) from error
        if isinstance(value, tuple):
            tensors = value
        else:
            tensors = (value,)
        yield Surveyed(
            layer=layer,
            kind=type(module).__name__,
            place=place,
            params={
                name: parameter.shape
                for name, parameter in module.named_parameters()
                if parameter.requires_grad
            },
            state={
                name: kept.shape
                for name, kept in module.state_dict().items()
                if isinstance(kept, Tensor)
            },
            param_bytes=sum(
                _bytes(tensor, float_bytes) for tensor in (*module.parameters(), *module.buffers())
            ),
            output_bytes=sum(
                _bytes(tensor, float_bytes) for tensor in tensors if isinstance(tensor, Tensor)
            ),
            cannot_send=_why_not(value, tensors),
            flops=None if counter is None else int(counter.get_total_flops()),
        )


def _why_not(value: Any, tensors: Sequence[Any]) -> str:
    """Describe what DeepSpeed's pipeline would fail at, or hang on, in the middle of the first
    step.
    """
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        other = next(type(tensor).__name__ for tensor in tensors if not isinstance(tensor, Tensor))
        if isinstance(value, tuple):
            kinds = f"a tuple with a {other}"
        else:
            kinds = f"a {other}"
        return f"it returns {kinds}, not a tensor or a tuple of tensors"
    for tensor in tensors:
        if tensor.dtype not in _SENDABLE:
            return (
                f"it returns a tensor of {tensor.dtype}, which cannot be sent; use an integer "
                "or a floating type"
            )
        if tensor.is_floating_point() and not tensor.requires_grad:
            return (
                "it returns a floating tensor that no gradient flows through; make it an "
                "integer tensor"
            )
    if not any(tensor.is_floating_point() for tensor in tensors):
        return "it returns no floating tensor, so no gradient could come back"
    if sum(2 + tensor.ndim for tensor in tensors) + 2 > _LONGEST_DESCRIPTION:
        return f"it returns {len(tensors)} tensors, too many to describe to the next stage"
    return ""


def _refuse_bad_tie(first: Layer, first_module: nn.Module, layer: Layer, module: nn.Module) -> None:
    """Refuse tied weights that are absent, differ between both ends, or are not all that the ends
    share.
    """
    weights = dict(first_module.named_parameters())
    own = dict(module.named_parameters())
    refusal = partial(ConfigError.of, key="model", value=f"{layer.name} ({type(module).__name__})")
    for name in layer.tied_weights:
        if name not in own:
            reason = f"it is tied as {layer.tied} by {name}, and has no such parameter"
            fix = f"tied_weights may be of {', '.join(own) or 'nothing: it has none'}"
            raise refusal("tied-weight-missing", reason, fix)
        shape, other = tuple(own[name].shape), tuple(weights[name].shape)
        if shape != other:
            reason = (
                f"its {name} has the shape {shape}, and that of {first.name}, to which it is "
                f"tied, {other}"
            )
            raise refusal("tied-layers-differ", reason, "build both alike")
    left_out = [name for name in (*weights, *own) if name not in layer.tied_weights]
    if left_out:
        reason = (
            f"it is tied as {layer.tied}, and its {left_out[0]} is not: every stage would "
            "train one of its own"
        )
        raise refusal(
            "tied-weight-left-out",
            reason,
            "add it to tied_weights, or put it into a layer of its own",
        )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return f"a {type(value).__name__}"


def _bytes(tensor: Tensor, float_bytes: int) -> int:
    return tensor.numel() * (float_bytes if tensor.is_floating_point() else tensor.element_size())


def _on_meta(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_on_meta, value))
    return value.to("meta")


def _meta_module(layer: Layer, number: int, seed: int) -> nn.Module:
    if not layer.is_built:
        with torch.device("meta"):
            return layer.make(number, seed=seed)
    module = layer.build()
    # A copy of the structure only: deepcopy takes what is in its memo for a copy already made.
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()
    }
    memo |= {id(buffer): buffer.detach().to("meta") for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


# The same operations on the same device give the same numbers; a module may still write them down
# in another way.
_RELATIVE: Final = 1e-4
_FEW_SAMPLES: Final = 2
# Beyond these nothing is compared: a start must not wait for minutes, nor hold such a model three
# times.
_MOST_WEIGHTS: Final = 500_000_000
_MOST_PRODUCTS: Final = 100_000_000_000  # weights x tokens: some seconds on one thread


def refuse_untrue_layers(model: nn.Module, inputs: Any, *, seed: int) -> None:
    """Run `forward()` and the layers once, in evaluation mode, on a few samples, and compare what
    comes out.

    A pipeline and recomputation run the layers only: what `forward()` does beside calling them
    would be left out, and another model be trained. Both run on copies, because modules may keep
    things (a cache, a counter). Where one of them does not run here, where copies cannot be made,
    where the model is very large or gives other numbers each time, nothing can be compared and
    nothing is said. The inputs are of one micro-batch, on the CPU: a tensor or a tuple.

    Raises:
        ConfigError: kind ``layers-differ-from-forward``.
    """
    inputs = _few(inputs)
    if _is_too_much(model, inputs):
        return

    def outputs(run: Callable[[nn.Module, Any], Any]) -> tuple[list[Any], Any]:
        own, values = copy.deepcopy((model, inputs))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            return tree_flatten(run(own.eval(), values))

    try:
        own = outputs(_forward)
        reported = outputs(_in_turn)
        difference = _difference(own, reported)
        # Thrice: two draws of a noise may happen to be alike.
        is_noise = bool(difference) and any(_difference(own, outputs(_forward)) for _ in range(3))
    except Exception:  # whatever code for another device raises here
        return
    if difference and not is_noise:
        raise ConfigError.of(
            "layers-differ-from-forward",
            "its layers(), one after the other, do not give what its forward() gives: "
            f"{difference}",
            "put what forward() does beside calling them (a relu, a flatten) into modules, and "
            "name those in layers() too",
            "model",
            type(model).__name__,
        )


def _is_too_much(model: nn.Module, inputs: Any) -> bool:
    """By its weights, and for token numbers by how many of them pass each weight."""
    num_weights = sum(weight.numel() for weight in model.parameters())
    if isinstance(inputs, tuple):
        first = inputs[0]
    else:
        first = inputs
    if first.is_floating_point():
        num_tokens = 1
    else:
        num_tokens = first.numel()
    return num_weights > _MOST_WEIGHTS or num_weights * num_tokens > _MOST_PRODUCTS


def _forward(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


def _in_turn(model: nn.Module, value: Any) -> Any:
    for layer in as_layers(model):
        value = layer.apply(layer.build().eval(), value)
    return value


def _few(inputs: Any) -> Any:
    """The first samples, where the tensors agree on how many there are: a whole batch takes its
    time on a CPU.
    """
    if isinstance(inputs, tuple):
        tensors = inputs
    else:
        tensors = (inputs,)
    if any(tensor.ndim == 0 or len(tensor) != len(tensors[0]) for tensor in tensors):
        return inputs
    few = tuple(tensor[:_FEW_SAMPLES] for tensor in tensors)
    if isinstance(inputs, tuple):
        return few
    return few[0]


def _difference(own: tuple[list[Any], Any], reported: tuple[list[Any], Any]) -> str:
    """In words; empty where there is none, and where they say different things: ``(logits, None)``
    of a forward() that may be given targets, a dict, logits of the last position only.
    """
    outputs, others = (
        [leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves, _ in (own, reported)
    )
    is_same_form = own[1] == reported[1]
    if not is_same_form and (
        len(outputs) != 1 or len(others) != 1 or outputs[0].shape != others[0].shape
    ):
        return ""
    for one, other in zip(outputs, others, strict=True):
        if one.shape != other.shape:
            return f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
        one = one.double()
        other = other.double()
        largest, scale = (
            float(numbers.abs().nan_to_num(0.0).max()) if one.numel() else 0.0
            for numbers in (one - other, one)
        )
        if not torch.equal(one.isnan(), other.isnan()) or largest > _RELATIVE * (scale + 1e-30):
            return f"numbers that differ by {largest:.3g}"
    return ""
