"""Names and shapes of the weights of the models that a run config can name, in closed form: no torch, no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Final

from framework.config import model as models

Shape = tuple[int, ...]
Weights = Iterator[tuple[str, Shape]]


def named_weights(model: models.ModelSection) -> dict[str, Shape] | None:
    """Name -> shape of every trained weight of a named model, shared ones once; None for a model of the user's."""
    found = _WEIGHTS.get(type(model))
    return None if found is None else dict(found(model))


def buffer_bytes(model: models.ModelSection) -> int:
    """Bytes of a named model's buffers, which stay in the type that they are built in: the statistics of batch norms,
    fp32, and their counts, int64.
    """
    if not getattr(model, "has_batch_norm", False):
        return 0
    norms = [shape for name, shape in (named_weights(model) or {}).items() if _is_batch_norm_scale(name)]
    return sum(2 * 4 * prod(shape) + 8 for shape in norms)


def _is_batch_norm_scale(name: str) -> bool:
    module = name.rpartition(".")[0].rpartition(".")[2]
    return name.endswith(".weight") and (module.startswith(("norm", "bn")) or name.endswith(_SHORTCUT_NORMS))


# The second module of a residual block's shortcut is its batch norm.
_SHORTCUT_NORMS: Final = ("shortcut.1.weight", "downsample.1.weight")


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Weights:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, size: int, *, bias: bool = True) -> Weights:
    yield f"{name}.weight", (size,)
    if bias:
        yield f"{name}.bias", (size,)


def _convolution(name: str, inputs: int, outputs: int, kernel: int, *, bias: bool = False) -> Weights:
    yield f"{name}.weight", (outputs, inputs, kernel, kernel)
    if bias:
        yield f"{name}.bias", (outputs,)


def _lenet(model: models.LeNet) -> Weights:
    yield from _convolution("conv1", model.in_channels, 6, 5, bias=True)
    yield from _convolution("conv2", 6, 16, 5, bias=True)
    for number, (before, after) in enumerate(pairwise((400, 120, 84, model.num_classes)), start=1):
        yield from _linear(f"fc{number}", before, after)


def _mlp(model: models.MLP) -> Weights:
    widths = [model.in_channels * model.image_size**2, *model.hidden_sizes]
    for number, (before, after) in enumerate(pairwise(widths), start=1):
        yield from _linear(f"fc{number}", before, after)
    yield from _linear("classifier", widths[-1], model.num_classes)


def _small_resnet18(model: models.SmallResNet18) -> Weights:
    yield from _convolution("conv", model.in_channels, 64, 3)
    yield from _norm("norm", 64)
    before = 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for block in (1, 2):
            name = f"block{stage}_{block}"
            for number, inputs in ((1, before), (2, width)):
                yield from _convolution(f"{name}.conv{number}", inputs, width, 3)
                yield from _norm(f"{name}.norm{number}", width)
            if before != width:
                yield from _convolution(f"{name}.shortcut.0", before, width, 1)
                yield from _norm(f"{name}.shortcut.1", width)
            before = width
    yield from _linear("classifier", before, model.num_classes)


def _torchvision_resnet(
    model: models.Classifier, *, kernels: Sequence[int], blocks: Sequence[int], expansion: int
) -> Weights:
    """Weights of torchvision's ResNet: a block is a convolution per kernel, the last one `expansion` times as wide."""
    yield from _convolution("conv1", model.in_channels, 64, 7)
    yield from _norm("bn1", 64)
    before = 64
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512), blocks, strict=True), start=1):
        for block in range(count):
            name, inputs, last = f"layer{stage}.{block}", before, width * expansion
            for number, kernel in enumerate(kernels, start=1):
                outputs = last if number == len(kernels) else width
                yield from _convolution(f"{name}.conv{number}", inputs, outputs, kernel)
                yield from _norm(f"{name}.bn{number}", outputs)
                inputs = outputs
            if before != last:
                yield from _convolution(f"{name}.downsample.0", before, last, 1)
                yield from _norm(f"{name}.downsample.1", last)
            before = last
    yield from _linear("fc", before, model.num_classes)


def _resnet18(model: models.ResNet18) -> Weights:
    return _torchvision_resnet(model, kernels=(3, 3), blocks=(2, 2, 2, 2), expansion=1)


def _resnet50(model: models.ResNet50) -> Weights:
    return _torchvision_resnet(model, kernels=(1, 3, 1), blocks=(3, 4, 6, 3), expansion=4)


def _gpt(model: models.GPT) -> Weights:
    size, bias = model.hidden_size, model.bias
    kv_size = size // model.num_heads * model.num_kv_heads
    norm_bias = bias and model.norm == "layernorm"
    yield "embed.weight", (model.vocab_size, size)
    if model.positions == "learned":
        yield "positions.weight", (model.max_positions, size)
    for number in range(model.num_layers):
        block = f"blocks.{number}"
        yield from _norm(f"{block}.attention_norm", size, bias=norm_bias)
        for name, outputs in (("query", size), ("key", kv_size), ("value", kv_size), ("output", size)):
            yield from _linear(f"{block}.attention.{name}", size, outputs, bias=bias)
        yield from _norm(f"{block}.mlp_norm", size, bias=norm_bias)
        for name in ("gate", "up") if model.mlp == "swiglu" else ("up",):
            yield from _linear(f"{block}.mlp.{name}", size, model.mlp_size, bias=bias)
        yield from _linear(f"{block}.mlp.down", model.mlp_size, size, bias=bias)
    yield from _norm("norm", size, bias=norm_bias)
    if not model.tie_embeddings:
        yield "head.weight", (model.vocab_size, size)


def _bert(model: models.BERT) -> Weights:
    size = model.hidden_size
    yield "embed.weight", (model.vocab_size, size)
    yield "embeddings.positions", (model.max_positions, size)
    yield "embeddings.types.weight", (model.num_types, size)
    yield from _norm("embeddings.norm", size)
    for number in range(model.num_layers):
        block = f"blocks.{number}"
        for name in ("query", "key", "value", "output"):
            yield from _linear(f"{block}.attention.{name}", size, size)
        yield from _norm(f"{block}.attention_norm", size)
        yield from _linear(f"{block}.up", size, model.mlp_size)
        yield from _linear(f"{block}.down", model.mlp_size, size)
        yield from _norm(f"{block}.mlp_norm", size)
    yield from _linear("heads.pooler", size, size)
    yield from _linear("heads.transform", size, size)
    yield from _norm("heads.norm", size)
    yield "outputs.bias", (model.vocab_size,)
    yield from _linear("outputs.next_sentence", size, 2)


_WEIGHTS: Final[Mapping[type, Callable[[Any], Weights]]] = {
    models.LeNet: _lenet,
    models.MLP: _mlp,
    models.SmallResNet18: _small_resnet18,
    models.ResNet18: _resnet18,
    models.ResNet50: _resnet50,
    models.GPT: _gpt,
    models.BERT: _bert,
}
