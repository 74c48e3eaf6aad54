"""Work of a model in one micro-batch, part by part: what it computes, moves and keeps for the
backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from math import ceil, prod
from typing import Any, Final, Literal

from framework.config.freezing import always_frozen
from framework.config.groups import LORA, is_inside_saved
from framework.config.model import ModelSection
from framework.config.precision import BF16, FP16, Autocast
from framework.config.run_config import RunConfig
from framework.config.training import LoRA
from framework.plan.balance import LayerFacts
from framework.plan.operations import Shape, Tape, Value
from framework.plan.plan import Plan, loss_tile
from framework.plan.shipped_models import UNDIVIDED, Layers, RankShare, Run, forward_of

Device = Literal["cpu", "cuda"]
Arithmetic = Literal["fp32", "half", "autocast"]


@dataclass(frozen=True)
class LayerWork:
    """One part of a model, such as a transformer block, in the forward pass of one micro-batch on
    one rank.

    Attributes:
        name: of the layer, as `layers()` names it where the model has such.
        num_params: trained elements; those that it shares with an earlier part are counted there.
        flops: floating-point operations of its matrix products and convolutions; a multiplication
            with an addition is two.
        moved_bytes: bytes that all its other operations read and write.
        saved_bytes: bytes that autograd keeps for the backward pass, without weights, and without
            what an earlier part keeps already.
        split_bytes: those of `saved_bytes` that tensor parallelism splits.
        peak_bytes: bytes at most at any moment of its forward pass, beside what it keeps in the
            end.
        output_bytes: bytes of its output: what recomputation keeps, and a pipeline sends.
        count: so many parts alike, one after the other; every figure is of one of them.
        input_bytes: those of `saved_bytes` that are its input, which recomputation keeps as the
            output before it.
        backward_bytes: bytes at most at any moment of its backward pass, beside what it has saved:
            gradients of values, without those of weights.
        passing_bytes: bytes at most at any moment of a forward pass that keeps nothing.
        shared_params: trained elements that it shares with an earlier part.
        shares: name of that part.
        may_start_stage: whether a pipeline may be cut before it.
        masked_flops: those of `flops` that fused kernels of causal attention leave out.
        is_product: whether it is one product with one weight, whose gradient is made beside that of
            its output.
    """

    name: str
    num_params: int = 0
    flops: int = 0
    moved_bytes: int = 0
    saved_bytes: int = 0
    split_bytes: int = 0
    peak_bytes: int = 0
    output_bytes: int = 0
    count: int = 1
    input_bytes: int = 0
    backward_bytes: int = 0
    passing_bytes: int = 0
    shared_params: int = 0
    shares: str = ""
    may_start_stage: bool = True
    masked_flops: int = 0
    is_product: bool = False


# What grows with the samples of a micro-batch: all but weights.
_GROWS: Final = frozenset(
    {
        "flops",
        "masked_flops",
        *(name for name in LayerWork.__dataclass_fields__ if name.endswith("_bytes")),
    }
)


@dataclass(frozen=True)
class ModelWork:
    """A model and its loss, on one micro-batch.

    Attributes:
        weights: name -> shape of every trained weight, in the model's order, shared ones once.
        buffer_bytes: bytes of what is kept beside weights, such as statistics of batch norms.
        parts: in the order in which they run; the loss is the last one.
        num_samples: of the micro-batch.
        num_tokens: of the micro-batch; None for models that know none.
        frozen: name -> shape of the weights that are not trained.
    """

    weights: Mapping[str, Shape]
    buffer_bytes: int
    parts: tuple[LayerWork, ...]
    num_samples: int
    num_tokens: int | None = None
    frozen: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward pass."""
        return sum(part.flops * part.count for part in self.parts)

    def of_samples(self, count: int) -> ModelWork:
        """The same of a micro-batch of so many samples: all but its weights grows with them, and so
        do, here alone, the copies of weights that autocast keeps.
        """
        if count == self.num_samples or not self.num_samples:
            return self

        def grown(part: LayerWork) -> LayerWork:
            sizes = {
                name: size * count // self.num_samples
                for name, size in vars(part).items()
                if name in _GROWS
            }
            return replace(part, **sizes)

        if self.num_tokens is None:
            tokens = None
        else:
            tokens = self.num_tokens * count // self.num_samples
        return replace(
            self, parts=tuple(map(grown, self.parts)), num_samples=count, num_tokens=tokens
        )

    @cached_property
    def num_params(self) -> int:
        """Trained elements."""
        return sum(map(prod, self.weights.values()))

    @cached_property
    def places(self) -> dict[str, int]:
        """Name of a weight -> its place, frozen ones last."""
        return {name: place for place, name in enumerate((*self.weights, *self.frozen))}

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        """Layer, or any other part of a dotted name -> the weights under it."""
        found: dict[str, list[str]] = {}
        for name in (*self.weights, *self.frozen):
            place = name
            while place := place.rpartition(".")[0]:
                found.setdefault(place, []).append(name)
        return found

    def names_of(self, layer: LayerWork) -> list[str]:
        """Names of the weights of a layer, with those that it shares."""
        return [
            *self._names.get(layer.name, ()),
            *(self._names.get(layer.shares, ()) if layer.shares else ()),
        ]

    @cached_property
    def facts(self) -> tuple[LayerFacts, ...]:
        """Facts about each layer, without the loss, as a cut into stages takes them."""
        found = []
        for layer in list(self.layers())[:-1]:
            shapes = [self.weights[name] for name in self.names_of(layer) if name in self.weights]
            groups = frozenset(
                "matrices" if len(shape) > 1 else "biases and norms" for shape in shapes
            )
            num_params = layer.num_params + layer.shared_params
            may_start = layer.may_start_stage
            found.append(
                LayerFacts(
                    layer.name, layer.name, num_params, may_start_stage=may_start, groups=groups
                )
            )
        return tuple(found)

    def layers(self) -> Iterator[LayerWork]:
        """Every part by itself, as often as it is there; of several alike the names count on."""
        for part in self.parts:
            path, _, first = part.name.rpartition(".")
            for number in range(part.count):
                if part.count == 1:
                    name = part.name
                else:
                    name = f"{path}.{int(first) + number}"
                yield replace(part, name=name, count=1)


def named_work(
    config: RunConfig, micro_size: int, *, device: Device = "cuda", share: RankShare = UNDIVIDED
) -> ModelWork | None:
    """Work of a run's model, or of a rank's share of it, on a micro-batch of so many samples; None
    as `model_work`.

    Where only the user's own data knows the length of sequences, the model's longest is taken; a
    loss of the user's own counts as the one that belongs to the model.
    """
    shape = config.data.image_shape()
    model = config.model
    image_size = getattr(model, "image_size", None) or (shape.size if shape else None)
    share = replace(share, tile=loss_tile(config, micro_size))
    if isinstance(config.precision, BF16 | FP16):
        in_half: Arithmetic = "half"
    else:
        in_half = "fp32"
    return model_work(
        model,
        micro_size=micro_size,
        sequence_length=getattr(config.data, "sequence_length", None),
        image_size=image_size,
        arithmetic="autocast" if isinstance(config.precision, Autocast) else in_half,
        device=device,
        freeze=always_frozen(config.training.freeze),
        lora=config.training.lora,
        zero_stage=config.zero.stage,
        share=share,
    )


def work_of_rank(plan: Plan) -> ModelWork | None:
    """`work_of` a rank of a tensor or sequence group; None as that, and where the model is not
    divided.
    """
    layout = plan.layout
    config = plan.config
    device: Device = "cpu" if plan.cluster.device == "cpu" else "cuda"
    share = RankShare(layout.tensor_size, layout.sequence_size)
    return named_work(config, layout.micro_size, device=device, share=share)


def work_of(plan: Plan) -> ModelWork | None:
    """Work of a plan's model on its micro-batch and kind of device, GPUs where it names none; None
    as `named_work`.
    """
    return named_work(
        plan.config,
        plan.layout.micro_size,
        device="cpu" if plan.cluster.device == "cpu" else "cuda",
    )


def model_work(
    model: ModelSection,
    *,
    micro_size: int,
    sequence_length: int | None = None,
    image_size: int | None = None,
    arithmetic: Arithmetic = "half",
    device: Device = "cuda",
    freeze: Sequence[str] = (),
    lora: LoRA | None = None,
    zero_stage: int = 0,
    share: RankShare = UNDIVIDED,
) -> ModelWork | None:
    """Work of a named model of any shape, by its forward pass on a tape.

    Args:
        model: the section of a run config that describes it.
        micro_size: samples in a micro-batch.
        sequence_length: tokens in a sample; left out: as many as the model has positions.
        image_size: height and width of an image in pixels.
        arithmetic: weights and values in fp32, in bf16 or fp16 (``half``), or fp32 weights under
            torch's autocast.
        device: what it runs on: attention, dropout and norms keep other things on each.
        freeze: patterns of the whole names of weights that are not trained.
        lora: adapters, which are trained in place of all others.
        zero_stage: at 3 DeepSpeed has linear layers of its own.
        share: how many ranks share it; of one of them is the work.

    Returns:
        The work; None for a model of the user's own, and for images of unknown size.
    """
    asked = _Asked(f"{model!r} {lora!r}", model, lora)
    is_stage3 = zero_stage == 3
    return _work(
        asked,
        micro_size,
        sequence_length,
        image_size,
        arithmetic,
        device,
        tuple(freeze),
        is_stage3,
        share,
    )


@dataclass(frozen=True)
class _Asked:
    """Sections of a config, equal where they are written alike."""

    text: str
    model: ModelSection = field(compare=False)
    lora: LoRA | None = field(compare=False)


@lru_cache(maxsize=256)  # a search asks for few works, thousands of times
def _work(
    asked: _Asked,
    micro_size: int,
    sequence_length: int | None,
    image_size: int | None,
    arithmetic: Arithmetic,
    device: Device,
    freeze: tuple[str, ...],
    is_stage3: bool,
    share: RankShare,
) -> ModelWork | None:
    model = asked.model
    lora = asked.lora
    layers = forward_of(model, share)
    if layers is None:
        return None
    tokens = getattr(model, "max_positions", None) and (sequence_length or model.max_positions)  # type: ignore[union-attr]
    tokens = tokens and ceil(tokens / share.sequence)
    half = 2 if arithmetic == "half" else 4
    if tokens:
        inputs = Value((micro_size, tokens), 8, has_gradient=False)
    elif image_size:
        channels = model.in_channels  # type: ignore[union-attr]
        inputs = Value((micro_size, channels, image_size, image_size), half, has_gradient=False)
    else:
        return None

    @cache
    def is_trained(name: str) -> bool:
        if lora is None:
            return not any(re.fullmatch(pattern, name) for pattern in freeze)
        return LORA in name or is_inside_saved(name, lora)

    tape = Tape(half, half if arithmetic != "autocast" else 2, device, is_trained, is_stage3, lora)
    parts = tuple(_parts(tape, layers, inputs))
    trained, frozen = (
        {name: shape for name, shape in tape.weights.items() if is_trained(name) is kind}
        for kind in (True, False)
    )
    num_tokens = micro_size * tokens if tokens else None
    return ModelWork(trained, tape.buffer_bytes, parts, micro_size, num_tokens, frozen)


def weights_alone(
    model: ModelSection, freeze: Sequence[str] = (), lora: LoRA | None = None
) -> ModelWork | None:
    """Weights and buffers of a named model, the same for images of every size; None for a model of
    the user's own.
    """
    work = model_work(
        model, micro_size=1, image_size=getattr(model, "image_size", 32), freeze=freeze, lora=lora
    )
    return work and replace(work, parts=(LayerWork(""),), num_samples=0)


def _parts(tape: Tape, layers: Layers, inputs: Value) -> Iterator[LayerWork]:
    """Parts of all layers and of the loss; like layers with the same trained weights are one part
    with a count.
    """
    value: Any = inputs
    for name, run, count in layers:
        parts: list[LayerWork] = []
        key: Any = None
        own: dict[str, Shape] = {}
        for number in range(count):
            place = name.format(number)
            weights = {f"{place}.{weight}": shape for weight, shape in own.items()}
            same = ([*map(tape.is_trained, weights)], getattr(value, "has_gradient", True))
            if parts and same == key:
                tape.weights |= weights
                parts[-1] = replace(parts[-1], count=parts[-1].count + 1)
                continue
            before = len(tape.weights)
            flows = getattr(value, "has_gradient", True)
            part, value = _part(tape, place, run, value)
            parts.append(part)
            own = {
                full.removeprefix(f"{place}."): tape.weights[full]
                for full in [*tape.weights][before:]
            }
            key = ([tape.is_trained(f"{place}.{weight}") for weight in own], flows)
        yield from parts
    if isinstance(value, tuple):
        outputs = value
    else:
        outputs = (value,)
    yield _part(tape, "loss", _loss, outputs)[0]


def _loss(tape: Tape, outputs: tuple[Value, ...]) -> Value:
    """Cross-entropy of each output, whose last dimension is classes."""
    sums = []
    for logits in outputs:
        if not logits.shape:  # a loss already
            sums.append(logits)
            continue
        rows = prod(logits.shape[:-1])
        targets = Value((rows,), 8, has_gradient=False)
        sums.append(tape.cross_entropy(logits.view(rows, logits.shape[-1]), targets))
    return tape.add(*sums)


def _part(tape: Tape, name: str, run: Run, value: Any) -> tuple[LayerWork, Any]:
    before = len(tape.weights)
    tape.start(name)
    made = run(tape, value)
    inputs, outputs = (each if isinstance(each, tuple) else (each,) for each in (value, made))
    shares = tape.prefix if tape.prefix != name else ""
    shared = tape.place("")
    is_new = bool(inputs) and tape.saves_first(inputs[0])
    part = LayerWork(
        name,
        num_params=sum(
            prod(tape.weights[full]) for full in [*tape.weights][before:] if tape.is_trained(full)
        ),
        flops=tape.flops,
        moved_bytes=tape.moved_bytes,
        saved_bytes=tape.saved_bytes,
        split_bytes=tape.split_bytes,
        peak_bytes=tape.forward_bytes(*inputs, *outputs),
        output_bytes=sum(output.num_bytes for output in outputs),
        input_bytes=inputs[0].storage.num_bytes if is_new else 0,
        backward_bytes=tape.backward_bytes(*outputs),
        passing_bytes=tape.forward_bytes(*inputs, *outputs, keeps=False),
        shared_params=prod(tape.weights[shared]) if shares and tape.is_trained(shared) else 0,
        shares=shares,
        may_start_stage=not isinstance(value, tuple),
        masked_flops=tape.masked_flops,
        is_product=tape.products == 1,
    )
    return part, made
