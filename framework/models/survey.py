"""Survey of a model's layers, made before anything trains, and the comparison of `layers()` with
`forward()`.

The layers run once on torch's meta device, which computes shapes and types and touches no memory.
If one of them needs real numbers for that, all of them run for real on the one batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from framework.errors import ConfigError, in_one_line
from framework.models.layer_lists import as_layers
from framework.models.layers import Layer

# What DeepSpeed's pipeline can send (runtime/pipe/engine.py `ID_TO_DTYPE`), less bool, which NCCL
# cannot.
_SENDABLE_FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_SENDABLE_INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SENDABLE: Final = frozenset(_SENDABLE_FLOATS + _SENDABLE_INTEGERS)
# DeepSpeed describes all tensors that cross to the next stage in 256 numbers (pipe/engine.py
# `TENSOR_META_SIZE`).
_LONGEST_DESCRIPTION: Final = 256


@dataclass(frozen=True)
class Surveyed:
    """Sizes and costs of one layer.

    Attributes:
        layer: the layer.
        kind: class name of its module.
        place: prefix of its weights' names: the layer's name, or for a tied layer the name of the
            first layer of its tie.
        params: name within the layer -> shape, of the parameters that require a gradient.
        state: name within the layer -> shape, of everything that a checkpoint holds.
        param_bytes: bytes of parameters and buffers.
        output_bytes: bytes of the output for the batch that was run.
        cannot_send: why the output cannot be sent to another stage; empty if it can.
        flops: floating-point operations of its forward pass in matrix products and convolutions;
            None if they were not counted.
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
    leave: Callable[[Any], Any] | None = None,
) -> list[Surveyed]:
    """Run every layer once, and measure its weights and its output.

    Args:
        layers: in the order in which they are run.
        inputs: of the first layer, one micro-batch on the CPU: a tensor or a tuple of tensors.
        seed: of the weights.
        float_bytes: bytes per number of floating tensors in the run; 2 for bf16 and fp16.
        frozen: full names of parameters that will not be trained.
        leave: turns a layer's output into what a stage that ends with it sends.

    Raises:
        ConfigError: naming the layer. Kind ``layer-failed`` if it cannot be built or does not run
            on the output of the one before; ``tied-weight-missing``, ``tied-weight-left-out`` or
            ``tied-layers-differ``.
    """

    def make_on_meta(number: int) -> nn.Module:
        return meta_module(layers[number], number, seed)

    def make_copy(number: int) -> nn.Module:
        return layers[number].make_copy(number, seed=seed)

    survey_layers = partial(
        _survey_layers, layers, float_bytes=float_bytes, frozen=frozen, leave=leave
    )
    try:
        return list(survey_layers(_on_meta(inputs), make=make_on_meta, counts_flops=True))
    except Exception:  # a layer's own code may raise anything on tensors that hold no numbers
        with torch.random.fork_rng(devices=[]):
            return list(survey_layers(inputs, make=make_copy))


def _survey_layers(
    layers: Sequence[Layer],
    value: Any,
    *,
    make: Callable[[int], nn.Module],
    float_bytes: int,
    frozen: Collection[str],
    leave: Callable[[Any], Any] | None,
    counts_flops: bool = False,
) -> Iterator[Surveyed]:
    """Run layer after layer, and yield what each has shown; arguments are as in `survey`.

    `value` is the input of the first layer; `make` returns the module of the layer of a number. The
    weights in `frozen` lose their gradient.

    Raises:
        ConfigError: as `survey`.
    """
    first_of_tie: dict[str, tuple[Layer, nn.Module]] = {}
    for number, layer in enumerate(layers):
        module = _build(layer, number, make)
        place = layer.name
        if layer.tied:
            first, first_module = first_of_tie.setdefault(layer.tied, (layer, module))
            _refuse_bad_tie(first, first_module, layer, module)
            place = first.name
            module = first_module
        for name, parameter in module.named_parameters():
            if f"{place}.{name}" in frozen:
                parameter.requires_grad_(False)
        flops: int | None = None
        if counts_flops:
            with FlopCounterMode(display=False) as counter:
                value = _run(layer, module, value)
            flops = int(counter.get_total_flops())
        else:
            value = _run(layer, module, value)
        sent = value
        if leave is not None:
            sent = leave(value)
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
                name: entry.shape
                for name, entry in module.state_dict().items()
                if isinstance(entry, Tensor)
            },
            param_bytes=_total_bytes(chain(module.parameters(), module.buffers()), float_bytes),
            output_bytes=_total_bytes(_as_tuple(sent), float_bytes),
            cannot_send=_why_not_sendable(sent),
            flops=flops,
        )


def _build(layer: Layer, number: int, make: Callable[[int], nn.Module]) -> nn.Module:
    try:
        return make(number)
    except Exception as error:
        reason = f"the layer cannot be built: {in_one_line(error)}"
        raise ConfigError.of(
            "layer-failed", reason, "correct what builds it", "model", layer.name
        ) from error


def _run(layer: Layer, module: nn.Module, value: Any) -> Any:
    try:
        return layer.apply(module, value)
    except Exception as error:
        reason = (
            f"the layer fails on the output of the layer before, {_shown(value)}: "
            f"{in_one_line(error)}"
        )
        fix = "correct the layer, or the order of the layers"
        name = f"{layer.name} ({type(module).__name__})"
        raise ConfigError.of("layer-failed", reason, fix, "model", name) from error


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    return (value,)


def _why_not_sendable(value: Any) -> str:
    """Describe why a layer's output cannot be sent to the next stage; empty if it can.

    DeepSpeed's pipeline would fail or hang in the middle of the first step.
    """
    tensors = _as_tuple(value)
    for item in tensors:
        if not isinstance(item, Tensor):
            kind = f"a {type(item).__name__}"
            if isinstance(value, tuple):
                kind = f"a tuple with {kind}"
            return f"it returns {kind}, not a tensor or a tuple of tensors"
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
    """Refuse tied weights that are absent, that differ between the two layers, or that leave out a
    weight of one of them.
    """
    first_weights = dict(first_module.named_parameters())
    weights = dict(module.named_parameters())
    refusal = partial(ConfigError.of, key="model", value=f"{layer.name} ({type(module).__name__})")
    for name in layer.tied_weights:
        if name not in weights:
            reason = f"it is tied as {layer.tied} by {name}, and has no such parameter"
            fix = f"tied_weights may be of {', '.join(weights) or 'nothing: it has none'}"
            raise refusal("tied-weight-missing", reason, fix)
        shape = tuple(weights[name].shape)
        first_shape = tuple(first_weights[name].shape)
        if shape != first_shape:
            reason = (
                f"its {name} has the shape {shape}, and that of {first.name}, to which it is "
                f"tied, {first_shape}"
            )
            raise refusal("tied-layers-differ", reason, "build both alike")
    all_names = chain(first_weights, weights)
    left_out = [name for name in all_names if name not in layer.tied_weights]
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


def _total_bytes(values: Iterable[Any], float_bytes: int) -> int:
    """Sum the bytes of the tensors among `values`."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            bytes_each = float_bytes if value.is_floating_point() else value.element_size()
            total += value.numel() * bytes_each
    return total


def _on_meta(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_on_meta, value))
    return value.to("meta")


def meta_module(layer: Layer, number: int, seed: int) -> nn.Module:
    """Return a layer's module with weights on the meta device; one that is built already stays
    unchanged.
    """
    if not layer.is_built:
        with torch.device("meta"):
            return layer.make(number, seed=seed)
    module = layer.build()
    # A copy of the structure only: deepcopy takes an entry of its memo for a copy already made.
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        on_meta = parameter.detach().to("meta")
        memo[id(parameter)] = nn.Parameter(on_meta, parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(module, memo)


# The same operations on the same device give the same numbers; a module may still write them down
# in another way.
_RELATIVE_TOLERANCE: Final = 1e-4
_FEW_SAMPLES: Final = 2
# Beyond these nothing is compared: a start must not wait for minutes, nor hold such a model three
# times.
_MOST_WEIGHTS: Final = 500_000_000
_MOST_PRODUCTS: Final = 100_000_000_000  # weights x tokens: some seconds on one thread


def refuse_untrue_layers(model: nn.Module, inputs: Any, *, seed: int) -> None:
    """Refuse a model if its `layers()`, run one after the other, give other outputs than its
    `forward()`.

    A pipeline and recomputation run the layers only: anything that `forward()` does beside calling
    them would be left out, and another model be trained. Both run once, in evaluation mode, on a
    few samples, and on copies, because modules may keep things (a cache, a counter). Nothing is
    refused where they cannot be compared: one of them does not run here, copies cannot be made, the
    model is very large, or it gives other numbers each time.

    `inputs` are one micro-batch, on the CPU: a tensor or a tuple.

    Raises:
        ConfigError: kind ``layers-differ-from-forward``.
    """
    inputs = _few_samples(inputs)
    if _is_too_large(model, inputs):
        return

    def outputs_of(run: Callable[[nn.Module, Any], Any]) -> tuple[list[Any], Any]:
        model_copy, inputs_copy = copy.deepcopy((model, inputs))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            return tree_flatten(run(model_copy.eval(), inputs_copy))

    try:
        expected = outputs_of(_run_forward)
        difference = _difference(expected, outputs_of(_run_layers))
        if not difference:
            return
        # Three times: two draws of a noise may happen to be alike.
        is_noise = any(_difference(expected, outputs_of(_run_forward)) for _ in range(3))
    except Exception:  # the model's own code, perhaps for another device, may raise anything here
        return
    if not is_noise:
        raise ConfigError.of(
            "layers-differ-from-forward",
            "its layers(), one after the other, do not give what its forward() gives: "
            f"{difference}",
            "put what forward() does beside calling them (a relu, a flatten) into modules, and "
            "name those in layers() too",
            "model",
            type(model).__name__,
        )


def _is_too_large(model: nn.Module, inputs: Any) -> bool:
    """Check the number of weights, and for tokens the products of weights and tokens."""
    num_weights = sum(weight.numel() for weight in model.parameters())
    first = _as_tuple(inputs)[0]
    if first.is_floating_point():
        num_tokens = 1
    else:
        num_tokens = first.numel()
    return num_weights > _MOST_WEIGHTS or num_weights * num_tokens > _MOST_PRODUCTS


def _run_forward(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


def _run_layers(model: nn.Module, value: Any) -> Any:
    for layer in as_layers(model):
        value = layer.apply(layer.build().eval(), value)
    return value


def _few_samples(inputs: Any) -> Any:
    """Return the first samples: a whole batch takes its time on a CPU.

    All samples are returned where the tensors differ in their number.
    """
    tensors = _as_tuple(inputs)
    if any(tensor.ndim == 0 or len(tensor) != len(tensors[0]) for tensor in tensors):
        return inputs
    few = tuple(tensor[:_FEW_SAMPLES] for tensor in tensors)
    if isinstance(inputs, tuple):
        return few
    return few[0]


def _difference(expected: tuple[list[Any], Any], actual: tuple[list[Any], Any]) -> str:
    """Describe how two flattened outputs, (leaves, structure), differ; empty if they do not.

    Empty also where they cannot be compared: ``(logits, None)`` of a `forward()` that takes targets
    too, a dict, logits of the last position only.
    """
    expected_leaves, expected_structure = expected
    actual_leaves, actual_structure = actual
    expected_tensors = [leaf for leaf in expected_leaves if isinstance(leaf, Tensor)]
    actual_tensors = [leaf for leaf in actual_leaves if isinstance(leaf, Tensor)]
    if expected_structure != actual_structure:
        if len(expected_tensors) != 1 or len(actual_tensors) != 1:
            return ""
        if expected_tensors[0].shape != actual_tensors[0].shape:
            return ""
    for first, second in zip(expected_tensors, actual_tensors, strict=True):
        if first.shape != second.shape:
            return f"shapes {tuple(first.shape)} and {tuple(second.shape)}"
        first = first.double()
        second = second.double()
        difference = _largest_magnitude(first - second)
        tolerance = _RELATIVE_TOLERANCE * (_largest_magnitude(first) + 1e-30)
        if not torch.equal(first.isnan(), second.isnan()) or difference > tolerance:
            return f"numbers that differ by {difference:.3g}"
    return ""


def _largest_magnitude(numbers: Tensor) -> float:
    """Return the largest absolute value; NaN counts as 0. Without numbers it is 0."""
    if not numbers.numel():
        return 0.0
    return float(numbers.abs().nan_to_num(0.0).max())
