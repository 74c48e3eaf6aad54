"""Work of a model in one micro-batch, part by part: what it computes, moves and keeps for the
backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import chain
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Final, Literal

from framework.config.model import ModelSection
from framework.config.precision import BF16, FP16, Autocast, PrecisionSection, fp8_of
from framework.config.run_config import RunConfig
from framework.config.training import LoRA, always_frozen
from framework.plan.compiling import compile_choice
from framework.plan.layers import UNDIVIDED, Layers, RankShare, Run, forward_of
from framework.plan.operations import Shape, Tape, Value
from framework.plan.plan import Plan, loss_tile

if TYPE_CHECKING:
    from framework.plan.balance import LayerFacts
    from framework.plan.rank_work import Collective, WorkOfRank

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
        split_bytes: the part of `saved_bytes` that tensor parallelism splits.
        peak_bytes: bytes at most at any moment of its forward pass, beside what it keeps in the
            end.
        output_bytes: bytes of its output: what recomputation keeps, and a pipeline sends.
        along_bytes: bytes that a pipeline sends along with it, such as positions.
        count: how many equal parts there are, one after the other; every figure is of one of them.
        input_bytes: the part of `saved_bytes` that is its input, which recomputation keeps as the
            output before it.
        backward_bytes: bytes at most at any moment of its backward pass, beside what it has saved:
            gradients of values, without gradients of weights.
        passing_bytes: bytes at most at any moment of a forward pass that keeps nothing.
        shared_params: trained elements that it shares with an earlier part.
        shares: name of that part.
        may_start_stage: whether a pipeline may be cut before it.
        masked_flops: the part of `flops` that fused kernels of causal attention leave out.
        frozen_flops: operations that its backward pass leaves out, of twice `flops`, as weights are
            not trained.
        score_flops: the part of `flops` of products without a weight, such as the scores of
            attention, without masked ones.
        frozen_score_flops: the part of `frozen_flops` of such products.
        is_product: whether it is one product with one weight: the weight's gradient is made while
            its output's is there.
        product_bytes: bytes of the outputs of its products, which selective recomputation keeps.
        selective_bytes: bytes at most at any moment of a forward pass that keeps the outputs of
            products alone, these included.
        gradient_bytes: bytes of gradients of values at most at any moment of its backward pass.
        widest_bytes: bytes of the largest tensor that it saves.
        again_flops: the part of `flops` that runs again in the backward pass in any case.
        again_bytes: bytes that other operations move in the backward pass for it.
        num_operations: operations that the host starts in its forward pass.
    """

    name: str
    num_params: int = 0
    flops: int = 0
    moved_bytes: int = 0
    saved_bytes: int = 0
    split_bytes: int = 0
    peak_bytes: int = 0
    output_bytes: int = 0
    along_bytes: int = 0
    count: int = 1
    input_bytes: int = 0
    backward_bytes: int = 0
    passing_bytes: int = 0
    shared_params: int = 0
    shares: str = ""
    may_start_stage: bool = True
    masked_flops: int = 0
    frozen_flops: int = 0
    is_product: bool = False
    product_bytes: int = 0
    selective_bytes: int = 0
    gradient_bytes: int = 0
    widest_bytes: int = 0
    again_flops: int = 0
    again_bytes: int = 0
    score_flops: int = 0
    frozen_score_flops: int = 0
    num_operations: int = 0

    @property
    def weight_flops(self) -> int:
        """Operations of its products with weights, trained or frozen."""
        return self.flops - self.masked_flops - self.score_flops

    @property
    def backward_weight_flops(self) -> int:
        """Operations of their gradients: two products for each one with a trained weight, one with
        a frozen one, none where nothing trained comes before.
        """
        return 2 * self.weight_flops - (self.frozen_flops - self.frozen_score_flops)

    @property
    def backward_score_flops(self) -> int:
        """Operations of the gradients of products without a weight: two for each one."""
        return max(2 * self.score_flops - self.frozen_score_flops, 0)

    def scaled(self, count: int, num_samples: int) -> LayerWork:
        """Return the work on `count` samples, of that on `num_samples`."""
        sizes = {name: getattr(self, name) * count // num_samples for name in _GROWS}
        return replace(self, **sizes)


# What grows with the samples of a micro-batch: all but weights.
_GROWS: Final = tuple(
    name for name in LayerWork.__dataclass_fields__ if name.endswith(("flops", "_bytes"))
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
        of_ranks: of a model of the user's own: the work of one rank of tensor and sequence groups.
        collectives: of such a rank.
        can_recompute: whether the model has layers that a run can recompute.
    """

    weights: Mapping[str, Shape]
    buffer_bytes: int
    parts: tuple[LayerWork, ...]
    num_samples: int
    num_tokens: int | None = None
    frozen: Mapping[str, Shape] = field(default_factory=dict)
    of_ranks: tuple[WorkOfRank, ...] = ()
    collectives: tuple[Collective, ...] = ()
    can_recompute: bool = True

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward pass."""
        return sum(part.flops * part.count for part in self.parts)

    @property
    def trained_flops(self) -> int:
        """Floating-point operations of a forward and a backward pass: each product has two in the
        backward pass, less those for weights that are not trained.
        """
        return sum((3 * part.flops - part.frozen_flops) * part.count for part in self.parts)

    def of_samples(self, count: int) -> ModelWork:
        """Return the work on a micro-batch of another number of samples.

        All but the weights grows with it; here alone the copies of weights that autocast keeps grow
        too.
        """
        if count == self.num_samples or not self.num_samples:
            return self
        parts = tuple(part.scaled(count, self.num_samples) for part in self.parts)
        num_tokens = None
        if self.num_tokens is not None:
            num_tokens = self.num_tokens * count // self.num_samples
        collectives = []
        for each in self.collectives:
            num_bytes = each.num_bytes * count // self.num_samples
            collectives.append(replace(each, num_bytes=num_bytes))
        return replace(
            self,
            parts=parts,
            num_samples=count,
            num_tokens=num_tokens,
            of_ranks=tuple(share.of_samples(count) for share in self.of_ranks),
            collectives=tuple(collectives),
        )

    def of_rank(self, tensor: int, sequence: int) -> WorkOfRank | None:
        """Return the work of a rank of groups of these sizes; None if none was looked at."""
        for share in self.of_ranks:
            if (share.tensor, share.sequence) == (tensor, sequence):
                return share
        return None

    @cached_property
    def num_params(self) -> int:
        """Trained elements."""
        return sum(map(prod, self.weights.values()))

    @cached_property
    def places(self) -> dict[str, int]:
        """Name of a weight -> its place, frozen ones last."""
        return {name: place for place, name in enumerate(chain(self.weights, self.frozen))}

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        """Layer, or any other prefix of dotted names -> names of the weights under it."""
        names: dict[str, list[str]] = {}
        for name in self.places:
            prefix = name.rpartition(".")[0]
            while prefix:
                names.setdefault(prefix, []).append(name)
                prefix = prefix.rpartition(".")[0]
        return names

    def names_of(self, layer: LayerWork) -> list[str]:
        """Return the names of a layer's weights, shared ones included."""
        names = list(self._names.get(layer.name, ()))
        if layer.shares:
            names += self._names.get(layer.shares, ())
        return names

    def num_frozen(self, layer: LayerWork) -> int:
        """Return the elements of a layer's frozen weights, shared ones included."""
        key = layer.name, layer.shares
        if key not in self._nums_frozen:
            sizes = [
                prod(self.frozen[name]) for name in self.names_of(layer) if name in self.frozen
            ]
            self._nums_frozen[key] = sum(sizes)
        return self._nums_frozen[key]

    @cached_property
    def _nums_frozen(self) -> dict[tuple[str, str], int]:
        """Numbers that `num_frozen` has counted: a search asks for each many times."""
        return {}

    @cached_property
    def facts(self) -> tuple[LayerFacts, ...]:
        """Facts about each layer, without the loss, as a cut into stages takes them."""
        from framework.plan.balance import LayerFacts

        shared = {layer.shares for layer in self.layers}
        facts = []
        for layer in self.layers[:-1]:
            tied = layer.shares
            if layer.name in shared:
                tied = layer.name
            facts.append(
                LayerFacts(
                    layer.name,
                    layer.name,
                    layer.num_params + layer.shared_params,
                    output_bytes=layer.output_bytes + layer.along_bytes,
                    flops=layer.flops,
                    tied=tied,
                    may_start_stage=layer.may_start_stage,
                    groups=self._groups_of(layer),
                )
            )
        return tuple(facts)

    def _groups_of(self, layer: LayerWork) -> frozenset[str]:
        """Return the groups of `LayerFacts.groups` that have trained weights of a layer."""
        groups = set()
        for name in self.names_of(layer):
            if name in self.weights:
                is_matrix = len(self.weights[name]) > 1
                groups.add("matrices" if is_matrix else "biases and norms")
        return frozenset(groups)

    @cached_property
    def layers(self) -> tuple[LayerWork, ...]:
        """Every part by itself, as often as it is there; the names of equal ones are numbered from
        the first one's number on.
        """
        layers = []
        for part in self.parts:
            if part.count == 1:
                layers.append(part)
                continue
            path, _, first = part.name.rpartition(".")
            for number in range(part.count):
                layers.append(replace(part, name=f"{path}.{int(first) + number}", count=1))
        return tuple(layers)


def named_work(
    config: RunConfig,
    micro_size: int,
    *,
    device: Device = "cuda",
    share: RankShare = UNDIVIDED,
    texts_per_row: float = 1.0,
) -> ModelWork | None:
    """Return the work of a run's model, or of a rank's share of it, on a micro-batch of
    `micro_size` samples; None as `model_work`.

    If only the user's own data has the length of sequences, the model's longest is taken; a loss of
    the user's own counts as the one that belongs to the model. `texts_per_row` is `Plan`'s, and
    counts where rows are packed.
    """
    texts = 0.0
    if getattr(config.data, "packing", False):
        texts = texts_per_row
    return model_work(
        config.model,
        micro_size=micro_size,
        sequence_length=getattr(config.data, "sequence_length", None),
        image_size=_image_size(config),
        arithmetic=_arithmetic(config.precision),
        device=device,
        freeze=always_frozen(config.training.freeze),
        lora=config.training.lora,
        zero_stage=config.zero.stage,
        rounded_widths=_rounded_widths(config, device),
        share=replace(
            share,
            mlp_tile=config.training.mlp_tile,
            tile=loss_tile(config, micro_size),
            texts=texts,
        ),
    )


def _image_size(config: RunConfig) -> int | None:
    """Return height and width of images as the model takes them, or else as the data has them."""
    image_size: int | None = getattr(config.model, "image_size", None)
    if image_size:
        return image_size
    image_shape = config.data.image_shape()
    return image_shape.size if image_shape else None


# Bytes of an element of the two operands of a product in fp8. As written the second one has two
# copies in fp32 on its way, and emulated the first one is in fp32 by then.
_ROUNDED_COMPILED: Final = (1, 1)
_ROUNDED_AS_WRITTEN: Final = (5, 9)


def _rounded_widths(config: RunConfig, device: Device) -> tuple[int, int] | None:
    section = fp8_of(config.precision)
    if section is None:
        return None
    if section.emulate or compile_choice(config, device).section is None:
        return _ROUNDED_AS_WRITTEN
    return _ROUNDED_COMPILED


def _arithmetic(precision: PrecisionSection) -> Arithmetic:
    if isinstance(precision, BF16 | FP16):
        return "half"
    if isinstance(precision, Autocast):
        return "autocast"
    return "fp32"


def work_of_rank(plan: Plan) -> ModelWork | None:
    """Return `work_of` a rank of a tensor or sequence group; None also for undivided models."""
    layout = plan.layout
    share = RankShare(layout.tensor_size, layout.sequence_size)
    return named_work(
        plan.config,
        layout.micro_size,
        device=_device_of(plan),
        share=share,
        texts_per_row=plan.texts_per_row,
    )


def work_of(plan: Plan) -> ModelWork | None:
    """Return the work of a plan's model on its micro-batch and kind of device, GPUs if it names
    none; None as `named_work`.
    """
    return named_work(
        plan.config,
        plan.layout.micro_size,
        device=_device_of(plan),
        texts_per_row=plan.texts_per_row,
    )


def _device_of(plan: Plan) -> Device:
    return "cpu" if plan.cluster.device == "cpu" else "cuda"


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
    rounded_widths: tuple[int, int] | None = None,
    share: RankShare = UNDIVIDED,
) -> ModelWork | None:
    """Return the work of a named model of any shape, by its forward pass on a tape.

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
        rounded_widths: as `Tape` has it.
        share: how many ranks share the model; the work is one rank's.

    Returns:
        The work; None for a model of the user's own, and for images of unknown size.
    """
    sections = _Sections(f"{model!r} {lora!r}", model, lora)
    # Layers of a tensor group call torch's own product, also at stage 3.
    is_stage3 = zero_stage == 3 and share.tensor == 1
    return _work(
        sections,
        micro_size,
        sequence_length,
        image_size,
        arithmetic,
        device,
        tuple(freeze),
        is_stage3,
        rounded_widths,
        share,
    )


@dataclass(frozen=True)
class _Sections:
    """Sections of a config, which are equal if their texts are."""

    text: str
    model: ModelSection = field(compare=False)
    lora: LoRA | None = field(compare=False)


@lru_cache(maxsize=256)  # a search needs few works, thousands of times
def _work(
    sections: _Sections,
    micro_size: int,
    sequence_length: int | None,
    image_size: int | None,
    arithmetic: Arithmetic,
    device: Device,
    freeze: tuple[str, ...],
    is_stage3: bool,
    rounded_widths: tuple[int, int] | None,
    share: RankShare,
) -> ModelWork | None:
    """Return the work that `model_work` describes, kept for later calls."""
    model = sections.model
    lora = sections.lora
    layers = forward_of(model, share)
    if layers is None:
        return None
    width = 2 if arithmetic == "half" else 4
    num_tokens = None
    max_positions = getattr(model, "max_positions", None)
    if max_positions:
        length = ceil((sequence_length or max_positions) / share.sequence)
        num_tokens = micro_size * length
        inputs = Value((micro_size, length), 8, has_gradient=False)
    elif image_size:
        inputs = _images(model, micro_size, image_size, width)
    else:
        return None
    is_trained = _test_of_trained(freeze, lora)
    product_width = 2 if arithmetic == "autocast" else width
    tape = Tape(width, product_width, device, is_trained, is_stage3, lora, rounded_widths)
    parts = tuple(_parts(tape, layers, inputs))
    trained: dict[str, Shape] = {}
    frozen: dict[str, Shape] = {}
    for name, shape in tape.weights.items():
        weights = trained if is_trained(name) else frozen
        weights[name] = shape
    return ModelWork(
        weights=trained,
        buffer_bytes=tape.buffer_bytes,
        parts=parts,
        num_samples=micro_size,
        num_tokens=num_tokens,
        frozen=frozen,
    )


def _images(model: Any, micro_size: int, size: int, width: int) -> Value:
    return Value((micro_size, model.in_channels, size, size), width, has_gradient=False)


def _test_of_trained(freeze: tuple[str, ...], lora: LoRA | None) -> Callable[[str], bool]:
    """Return a function that checks whether a weight of a name is trained."""
    if lora is None:
        return cache(lambda name: not any(re.fullmatch(pattern, name) for pattern in freeze))
    from framework.config.groups import LORA, is_inside_saved

    return cache(lambda name: LORA in name or is_inside_saved(name, lora))


def weights_alone(
    model: ModelSection, freeze: Sequence[str] = (), lora: LoRA | None = None
) -> ModelWork | None:
    """Return the weights and buffers of a named model, the same for images of every size; None for
    a model of the user's own.
    """
    image_size = getattr(model, "image_size", 32)
    work = model_work(model, micro_size=1, image_size=image_size, freeze=freeze, lora=lora)
    if work is None:
        return None
    return replace(work, parts=(LayerWork(""),), num_samples=0)


def trained_shapes(config: RunConfig) -> dict[str, Shape]:
    """Return name -> shape of what a named model trains; empty for a model of the user's own."""
    work = weights_alone(config.model, always_frozen(config.training.freeze), config.training.lora)
    if work is None:
        return {}
    return dict(work.weights)


def _parts(tape: Tape, layers: Layers, inputs: Value) -> Iterator[LayerWork]:
    """Yield the parts of all layers and of the loss; equal layers with the same trained weights are
    one part with a count.
    """
    value: Any = inputs
    for name, run, count in layers:
        places = [name.format(number) for number in range(count)]
        value = yield from _like_parts(tape, places, run, value)
    outputs = value if isinstance(value, tuple) else (value,)
    yield _part(tape, "loss", _loss, outputs)[0]


def _like_parts(
    tape: Tape, places: Iterable[str], run: Run, value: Any
) -> Generator[LayerWork, None, Any]:
    """Yield the parts of layers that do the same, one after the other; return the last outputs.

    `places`: names of the layers; equal ones are run once, and counted.
    """
    part: LayerWork | None = None
    shapes: dict[str, Shape] = {}  # of the weights of `part`, named within it
    kind: Any = None  # which weights of `part` are trained, whether its input has a gradient
    for place in places:
        weights = {f"{place}.{weight}": shape for weight, shape in shapes.items()}
        flows = getattr(value, "has_gradient", True)
        if part is not None and kind == ([tape.is_trained(full) for full in weights], flows):
            tape.weights |= weights
            part = replace(part, count=part.count + 1)
            continue
        if part is not None:
            yield part
        before = len(tape.weights)
        part, value = _part(tape, place, run, value)
        new_names = list(tape.weights)[before:]
        shapes = {full.removeprefix(f"{place}."): tape.weights[full] for full in new_names}
        kind = ([tape.is_trained(f"{place}.{weight}") for weight in shapes], flows)
    if part is not None:
        yield part
    return value


def _loss(tape: Tape, outputs: tuple[Value, ...]) -> Value:
    """Add up the cross-entropies of the outputs, with classes in their last dimension."""
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
    """Run one layer on the tape; return its work and its outputs."""
    before = len(tape.weights)
    tape.start(name)
    made = run(tape, value)
    inputs = _values(value)
    outputs = _values(made)
    ends = inputs + outputs
    new_names = [full for full in list(tape.weights)[before:] if tape.is_trained(full)]
    shares = ""
    shared_params = 0
    if tape.prefix != name:  # the layer uses the weights of an earlier one
        shares = tape.prefix
        shared_params = _shared_params(tape)
    part = LayerWork(
        name,
        num_params=sum(prod(tape.weights[full]) for full in new_names),
        flops=tape.flops,
        moved_bytes=tape.moved_bytes,
        saved_bytes=tape.saved_bytes,
        split_bytes=tape.split_bytes,
        peak_bytes=tape.forward_bytes(ends),
        output_bytes=sum(output.num_bytes for output in outputs),
        along_bytes=tape.along_bytes,
        input_bytes=_saved_input_bytes(tape, inputs),
        backward_bytes=tape.backward_bytes(outputs),
        passing_bytes=tape.forward_bytes(ends, keeps=False),
        shared_params=shared_params,
        shares=shares,
        may_start_stage=not isinstance(value, tuple),
        masked_flops=tape.masked_flops,
        frozen_flops=tape.frozen_flops,
        is_product=tape.products == 1,
        product_bytes=tape.product_bytes,
        selective_bytes=tape.forward_bytes(ends, keeps=False, keeps_products=True),
        gradient_bytes=tape.backward_bytes(outputs, keeps=False),
        widest_bytes=tape.widest_bytes,
        again_flops=tape.again_flops,
        again_bytes=tape.again_bytes,
        score_flops=tape.score_flops,
        num_operations=tape.num_operations,
        frozen_score_flops=tape.frozen_score_flops,
    )
    return part, made


def _values(value: Any) -> tuple[Value, ...]:
    """Return what goes into a layer, or comes out of it, as a tuple."""
    if isinstance(value, tuple):
        return value
    return (value,)


def _saved_input_bytes(tape: Tape, inputs: tuple[Value, ...]) -> int:
    """Return the bytes of a part's first input if the part is the first to save it, else 0."""
    if inputs and tape.saves_first(inputs[0]):
        return inputs[0].storage.num_bytes
    return 0


def _shared_params(tape: Tape) -> int:
    """Count the trained elements of the earlier layer that the tape's part has used."""
    shared = tape.place("")
    if not tape.prefix or not tape.is_trained(shared):
        return 0
    return prod(tape.weights[shared])
