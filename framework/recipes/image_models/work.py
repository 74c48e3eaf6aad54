"""Layers of the image classifiers on a tape, as `layers()` of the models lists them: name, function
of the tape and the layer's input, and how many such layers follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from framework.config.model import Classifier
from framework.plan.layers import UNDIVIDED, Layers, RankShare, Run, flatten, with_arguments
from framework.plan.operations import Tape, Value
from framework.recipes.image_models.kinds import MLP, LeNet, ResNet18, ResNet50, SmallResNet18


def _lenet(model: LeNet) -> Layers:
    padding = (32 - model.image_size) // 2
    yield "conv1", with_arguments(Tape.convolution, 6, kernel=5, padding=padding, has_bias=True), 1
    yield "relu1", Tape.relu, 1
    yield "pool1", with_arguments(Tape.max_pool, 2, 2), 1
    yield "conv2", with_arguments(Tape.convolution, 16, kernel=5, padding=0, has_bias=True), 1
    yield "relu2", Tape.relu, 1
    yield "pool2", with_arguments(Tape.max_pool, 2, 2), 1
    yield "flatten", flatten, 1
    for number, outputs in ((1, 120), (2, 84)):
        yield f"fc{number}", with_arguments(Tape.linear, outputs), 1
        yield f"relu{number + 2}", Tape.relu, 1
    yield "fc3", with_arguments(Tape.linear, model.num_classes), 1


def _mlp(model: MLP) -> Layers:
    yield "flatten", flatten, 1
    for number, outputs in enumerate(model.hidden_sizes, start=1):
        yield f"fc{number}", with_arguments(Tape.linear, outputs), 1
        yield f"relu{number}", Tape.relu, 1
        yield f"dropout{number}", with_arguments(Tape.dropout, model.dropout), 1
    yield "classifier", with_arguments(Tape.linear, model.num_classes), 1


def _residual(
    width: int, *, kernels: Sequence[int], expansion: int, stride: int, norm: str, shortcut: str
) -> Run:
    """Return a residual block: a convolution and a norm for each kernel; the first kernel of 3
    pixels has the stride.
    """
    strided = kernels.index(3)
    last = len(kernels) - 1
    channels = width * expansion

    def run(tape: Tape, images: Value) -> Value:
        value = images
        for number, kernel in enumerate(kernels):
            value = tape.convolution(
                value,
                channels if number == last else width,
                f"conv{number + 1}",
                kernel=kernel,
                stride=stride if number == strided else 1,
            )
            value = tape.batch_norm(value, f"{norm}{number + 1}")
            if number < last:
                value = tape.relu(value)
        if stride > 1 or images.shape[1] != channels:
            images = tape.convolution(images, channels, f"{shortcut}.0", kernel=1, stride=stride)
            images = tape.batch_norm(images, f"{shortcut}.1")
        return tape.relu(tape.add(value, images))

    return run


def _residual_blocks(names: str, *, counts: Sequence[int], **options: Any) -> Layers:
    """Yield the blocks of the four stages, `counts` of them in each; `options` are of `_residual`.

    `names` is a format of a block's name: {0} is the stage from 1 on, {1} the block in it from 0
    on, {2} the block from 1 on.
    """
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512), counts, strict=True), start=1):
        for block in range(count):
            stride = 2 if stage > 1 and block == 0 else 1
            name = names.format(stage, block, block + 1)
            yield name, _residual(width, stride=stride, **options), 1


def _small_resnet18(model: SmallResNet18) -> Layers:
    yield "conv", with_arguments(Tape.convolution, 64, kernel=3), 1
    yield "norm", Tape.batch_norm, 1
    yield "relu", Tape.relu, 1
    names = {"norm": "norm", "shortcut": "shortcut"}
    yield from _residual_blocks(
        "block{0}_{2}", counts=(2, 2, 2, 2), kernels=(3, 3), expansion=1, **names
    )
    yield "pool", Tape.mean, 1
    yield "flatten", flatten, 1
    yield "classifier", with_arguments(Tape.linear, model.num_classes), 1


def _resnet(model: Classifier, **shape: Any) -> Layers:
    yield "conv1", with_arguments(Tape.convolution, 64, kernel=7, stride=2), 1
    yield "bn1", Tape.batch_norm, 1
    yield "relu", Tape.relu, 1
    yield "maxpool", with_arguments(Tape.max_pool, 3, 2, 1), 1
    yield from _residual_blocks("layer{0}.{1}", **shape, norm="bn", shortcut="downsample")
    yield "avgpool", Tape.mean, 1
    yield "flatten", flatten, 1
    yield "fc", with_arguments(Tape.linear, model.num_classes), 1


_LAYERS: Final[Mapping[type[Classifier], Callable[[Any], Layers]]] = {
    LeNet: _lenet,
    MLP: _mlp,
    SmallResNet18: _small_resnet18,
    ResNet18: partial(_resnet, counts=(2, 2, 2, 2), kernels=(3, 3), expansion=1),
    ResNet50: partial(_resnet, counts=(3, 4, 6, 3), kernels=(1, 3, 1), expansion=4),
}


def layers_of(model: Classifier, share: RankShare) -> Layers | None:
    """Return the layers of an image classifier; None for a share of one, which none of them has."""
    if share != UNDIVIDED:
        return None
    return _LAYERS[type(model)](model)
