"""Forward passes of the models that a run config can name, layer by layer as `layers()` lists them,
on a tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any, Final

from framework.config import model as models
from framework.plan.operations import Tape, Value

# Name of a layer, what it does, and how many like it follow one after the other.
Run = Callable[[Tape, Any], Any]
Layers = Iterator[tuple[str, Run, int]]


@dataclass(frozen=True)
class RankShare:
    """Division of a model over ranks: of its heads, inner units and vocabulary, and of the
    positions of a sequence.

    Attributes:
        tensor: ranks that share every weight that is divided.
        sequence: ranks that share every sequence.
        tile: positions that have logits at once; 0: all.
    """

    tensor: int = 1
    sequence: int = 1
    tile: int = 0

    def of(self, size: int) -> int:
        """Return the largest share of a size that is divided."""
        return ceil(size / self.tensor)

    def logits(self, tape: Tape, value: Value, count: int) -> Value:
        """Apply the output layer: logits of this rank's tokens, or in tiles their loss."""
        if self.tile:
            return tape.tiled_loss(value, self.of(count), self.tile)
        split = True if self.tensor > 1 else None
        return tape.linear(value, self.of(count), has_bias=False, split=split)

    def heads(self, tape: Tape, value: Value, head_size: int) -> Value:
        """Map (batch, own positions, size) to (batch, own heads, all positions, head size)."""
        batch, length, size = value.shape
        num_heads = size // head_size
        heads = value.view(batch, num_heads, length, head_size)
        own_heads = max(num_heads // self.sequence, 1)
        return self._exchanged(tape, heads, (batch, own_heads, length * self.sequence))

    def rows(self, tape: Tape, heads: Value, size: int) -> Value:
        """Map `heads` back to (batch, own positions, size)."""
        batch, num_heads, length, _ = heads.shape
        positions = length // self.sequence
        back = self._exchanged(tape, heads, (batch, num_heads * self.sequence, positions))
        return back.view(batch, positions, size)

    def _exchanged(self, tape: Tape, value: Value, shape: tuple[int, ...]) -> Value:
        if self.sequence == 1:
            return value
        return tape.run(value, shape=(*shape, value.shape[-1]))


UNDIVIDED: Final = RankShare()


def forward_of(model: models.ModelSection, share: RankShare = UNDIVIDED) -> Layers | None:
    """Return the layers of a named model, or of a rank's share of it; None for a model of the
    user's, and for a share of a model that is not divided.
    """
    if isinstance(model, models.GPT):
        return _gpt(model, share)
    if isinstance(model, models.BERT):
        return _bert(model, share)
    forward = _FORWARDS.get(type(model))
    if forward is None or share != UNDIVIDED:
        return None
    return forward(model)


def num_layers(model: models.ModelSection) -> int | None:
    """Count the layers between which a pipeline can cut a named model; None for a model of the
    user's.
    """
    layers = forward_of(model)
    if layers is None:
        return None
    return sum(count for *_, count in layers)


def _flatten(tape: Tape, value: Value) -> Value:
    return value.view(value.shape[0], prod(value.shape[1:]))


def _with(operation: Callable[..., Value], *args: Any, **options: Any) -> Run:
    """Return an operation of a tape with arguments behind the value."""
    return lambda tape, value: operation(tape, value, *args, **options)


def _lenet(model: models.LeNet) -> Layers:
    padding = (32 - model.image_size) // 2
    yield "conv1", _with(Tape.convolution, 6, kernel=5, padding=padding, has_bias=True), 1
    yield "relu1", Tape.relu, 1
    yield "pool1", _with(Tape.max_pool, 2, 2), 1
    yield "conv2", _with(Tape.convolution, 16, kernel=5, padding=0, has_bias=True), 1
    yield "relu2", Tape.relu, 1
    yield "pool2", _with(Tape.max_pool, 2, 2), 1
    yield "flatten", _flatten, 1
    for number, outputs in ((1, 120), (2, 84)):
        yield f"fc{number}", _with(Tape.linear, outputs), 1
        yield f"relu{number + 2}", Tape.relu, 1
    yield "fc3", _with(Tape.linear, model.num_classes), 1


def _mlp(model: models.MLP) -> Layers:
    yield "flatten", _flatten, 1
    for number, outputs in enumerate(model.hidden_sizes, start=1):
        yield f"fc{number}", _with(Tape.linear, outputs), 1
        yield f"relu{number}", Tape.relu, 1
        yield f"dropout{number}", _with(Tape.dropout, model.dropout), 1
    yield "classifier", _with(Tape.linear, model.num_classes), 1


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
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512), counts, strict=True), start=1):
        for block in range(count):
            stride = 2 if stage > 1 and block == 0 else 1
            name = names.format(stage, block, block + 1)
            yield name, _residual(width, stride=stride, **options), 1


def _small_resnet18(model: models.SmallResNet18) -> Layers:
    yield "conv", _with(Tape.convolution, 64, kernel=3), 1
    yield "norm", Tape.batch_norm, 1
    yield "relu", Tape.relu, 1
    names = {"norm": "norm", "shortcut": "shortcut"}
    yield from _residual_blocks(
        "block{0}_{2}", counts=(2, 2, 2, 2), kernels=(3, 3), expansion=1, **names
    )
    yield "pool", Tape.mean, 1
    yield "flatten", _flatten, 1
    yield "classifier", _with(Tape.linear, model.num_classes), 1


def _resnet(model: models.Classifier, **shape: Any) -> Layers:
    yield "conv1", _with(Tape.convolution, 64, kernel=7, stride=2), 1
    yield "bn1", Tape.batch_norm, 1
    yield "relu", Tape.relu, 1
    yield "maxpool", _with(Tape.max_pool, 3, 2, 1), 1
    yield from _residual_blocks("layer{0}.{1}", **shape, norm="bn", shortcut="downsample")
    yield "avgpool", Tape.mean, 1
    yield "flatten", _flatten, 1
    yield "fc", _with(Tape.linear, model.num_classes), 1


def _gpt(model: models.GPT, share: RankShare) -> Layers:
    def norm(tape: Tape, value: Value, name: str = "") -> Value:
        if model.norm == "rmsnorm":
            return tape.rms_norm(value, name)
        return tape.layer_norm(value, name, has_bias=model.bias)

    def positions(tape: Tape, value: Value) -> Value:
        flows = tape.own((model.max_positions, model.hidden_size)) or value.has_gradient
        added = tape.run(value, shape=value.shape, has_gradient=flows, passes=True)
        return tape.dropout(added, model.dropout)

    def embed(tape: Tape, tokens: Value) -> Value:
        return tape.embedding(tokens, share.of(model.vocab_size), model.hidden_size)

    def head(tape: Tape, value: Value) -> Value:
        if model.tie_embeddings:
            tape.prefix = "embed"
        return share.logits(tape, value, model.vocab_size)

    yield "embed", embed, 1
    if model.positions == "learned":
        yield "positions", positions, 1
    else:
        yield "dropout", _with(Tape.dropout, model.dropout), 1
    if model.moe is None or model.moe.every == 1:
        yield "blocks.{}", partial(_gpt_block, model, share, norm, model.moe), model.num_layers
    else:
        for block in range(model.num_layers):
            moe = model.moe if model.moe.is_in(block) else None
            yield f"blocks.{block}", partial(_gpt_block, model, share, norm, moe), 1
    yield "norm", norm, 1
    yield "head", head, 1


def _gpt_block(
    model: models.GPT,
    share: RankShare,
    norm: Callable[[Tape, Value, str], Value],
    moe: models.MoE | None,
    tape: Tape,
    hidden: Value,
) -> Value:
    size = model.hidden_size
    head_size = model.hidden_size // model.num_heads
    rank_size = share.of(model.hidden_size)

    def linear(value: Value, outputs: int, name: str, *, split: bool) -> Value:
        return tape.linear(value, outputs, name, has_bias=model.bias, split=split)

    normed = norm(tape, hidden, "attention_norm")
    kv_size = share.of(head_size * model.num_kv_heads)

    def heads(name: str, outputs: int) -> Value:
        projected = linear(normed, outputs, f"attention.{name}", split=True)
        return share.heads(tape, projected, head_size)

    query = heads("query", rank_size)
    key = heads("key", kv_size)
    value = heads("value", kv_size)
    if model.positions == "rotary":
        query, key = tape.rotate(query, key)
    mixed = tape.attention(query, key, value, dropout=model.dropout, is_causal=True)
    # its output lies as the rotated query does, and is copied into rows
    if model.positions == "rotary":
        mixed = tape.run(mixed, shape=mixed.shape)
    rows = share.rows(tape, mixed, rank_size)
    output = linear(rows, size, "attention.output", split=False)
    hidden = tape.add(hidden, tape.dropout(output, model.dropout))
    normed = norm(tape, hidden, "mlp_norm")
    if moe:
        added = _mixture(model, moe, tape, normed)
    else:
        added = _perceptron(model, share, tape, normed, "mlp")
    return tape.add(hidden, tape.dropout(added, model.dropout))


def _perceptron(model: models.GPT, share: RankShare, tape: Tape, value: Value, name: str) -> Value:
    linear = partial(tape.linear, has_bias=model.bias)
    inner_size = share.of(model.mlp_size)
    has_gate = model.mlp == "swiglu"
    if has_gate:  # it comes first in the model, and is used after `up`
        tape.own((inner_size, model.hidden_size), f"{name}.gate", has_bias=model.bias)
    inner = linear(value, inner_size, f"{name}.up", split=True)
    if has_gate:
        gate = tape.gelu(linear(value, inner_size, f"{name}.gate", split=True))
        inner = tape.multiply(gate, inner)
    else:
        inner = tape.gelu(inner)
    return linear(inner, model.hidden_size, f"{name}.down", split=False)


def _mixture(model: models.GPT, moe: models.MoE, tape: Tape, normed: Value) -> Value:
    """Apply a mixture of experts: every expert computes all rows that it has room for.

    `flops` are counted for the tokens, as if each of them found room.
    """
    size = model.hidden_size
    wide = model.mlp_size
    tokens = prod(normed.shape[:-1])
    experts = moe.num_experts
    choices = moe.top_k * tokens
    rows = experts * moe.capacity(tokens)
    flat = normed.view(tokens, size)
    exact = tape.cast(flat, 4)
    flows = tape.own((experts, size), "mlp.router") or normed.has_gradient
    work = 2 * tokens * experts * size
    logits = tape.run(exact, shape=(tokens, experts), saves=[exact], flops=work, has_gradient=flows)
    chosen = Value((moe.top_k, choices), 8, has_gradient=False)
    weights = tape.run(tape.relu(logits), shape=(choices, 1), saves=[chosen])
    if moe.top_k > 1:
        weights = tape.multiply(weights, tape.save_output(weights))
    places = Value((choices,), 8, has_gradient=False)
    expert_rows = tape.run(flat, shape=(rows + 1, size), saves=[places])
    shapes = {"up": (wide, size), "down": (size, wide)}
    if model.mlp == "swiglu":
        shapes = {"gate": (wide, size)} | shapes
    for number in range(experts):  # in the order of the model
        for name, shape in shapes.items():
            tape.own(shape, f"mlp.experts.{number}.{name}", has_bias=model.bias)
    tape.count = experts
    before = tape.flops
    made = _perceptron(model, RankShare(), tape, expert_rows.view(rows, size), "mlp.experts.0")
    tape.count = 1
    idle = (tape.flops - before) * (rows - choices) // rows
    tape.flops -= idle
    tape.masked_flops -= idle
    made = tape.run(tape.run(made, shape=made.shape), shape=(rows + 1, size))
    mixed = tape.multiply(tape.run(made, shape=(choices, size)), tape.cast(weights, made.width))
    if moe.top_k > 1:
        return tape.run(mixed, shape=normed.shape)
    return mixed.view(*normed.shape)


def _bert(model: models.BERT, share: RankShare) -> Layers:
    size = model.hidden_size
    vocab_size = share.of(model.vocab_size)

    def embeddings(tape: Tape, value: Value) -> Value:
        flows = tape.own((model.max_positions, size), weight="positions") or value.has_gradient
        type_numbers = Value(value.shape[:2], 8, has_gradient=False)
        types = tape.embedding(type_numbers, model.num_types, size, "types")
        value = tape.run(value, shape=value.shape, passes=True, has_gradient=flows)
        return tape.dropout(tape.layer_norm(tape.add(value, types), "norm"), model.dropout)

    def heads(tape: Tape, hidden: Value) -> Value:
        batch, length, _ = hidden.shape
        # before the others in the model, and used after them
        tape.own((size, size), "pooler", has_bias=True)
        transformed = tape.layer_norm(tape.gelu(tape.linear(hidden, size, "transform")), "norm")
        pooled = tape.relu(tape.linear(hidden.view(batch, 1, size), size, "pooler"))
        pooled = tape.cast(pooled, transformed.width)
        return tape.run(pooled, transformed, shape=(batch, length + 1, size))

    def decoder(tape: Tape, value: Value) -> tuple[Value, Value]:
        batch, length, _ = value.shape
        tape.prefix = "embed"
        rows = tape.run(value, shape=(batch, length - 1, size), width=tape.product_width)
        return share.logits(tape, rows, model.vocab_size), value.view(batch, size)

    def outputs(tape: Tape, values: tuple[Value, Value]) -> tuple[Value, Value]:
        logits, pooled = values
        flows = tape.own((vocab_size,), weight="bias") or logits.has_gradient
        if share.tile:
            return logits, tape.linear(pooled, 2, "next_sentence")
        biased = tape.run(
            logits, shape=logits.shape, width=tape.weight_width, passes=True, has_gradient=flows
        )
        return biased, tape.linear(pooled, 2, "next_sentence")

    def classes(tape: Tape, hidden: Value) -> Value:
        pooled = tape.relu(tape.linear(hidden.view(hidden.shape[0], 1, size), size, "pooler"))
        return tape.linear(tape.dropout(pooled, model.dropout), model.num_classes or 0, "output")

    yield "embed", _with(Tape.embedding, vocab_size, size), 1
    yield "embeddings", embeddings, 1
    yield "blocks.{}", partial(_bert_block, model, share), model.num_layers
    if model.num_classes:
        yield "classes", classes, 1
        return
    yield "heads", heads, 1
    yield "decoder", decoder, 1
    yield "outputs", outputs, 1


def _bert_block(model: models.BERT, share: RankShare, tape: Tape, hidden: Value) -> Value:
    size = model.hidden_size
    rank_size = share.of(size)
    batch, length, _ = hidden.shape

    def heads(name: str) -> Value:
        projected = tape.linear(hidden, rank_size, f"attention.{name}", split=True)
        return share.heads(tape, projected, size // model.num_heads)

    query = heads("query")
    key = heads("key")
    value = heads("value")
    mask = Value((batch, 1, 1, length * share.sequence), 1, has_gradient=False)
    mixed = tape.attention(query, key, value, dropout=model.dropout, mask=mask)
    rows = share.rows(tape, mixed, rank_size)
    output = tape.dropout(tape.linear(rows, size, "attention.output", split=False), model.dropout)
    hidden = tape.layer_norm(tape.add(hidden, output), "attention_norm")
    inner = tape.gelu(tape.linear(hidden, share.of(model.mlp_size), "up", split=True))
    inner = tape.dropout(tape.linear(inner, size, "down", split=False), model.dropout)
    return tape.layer_norm(tape.add(hidden, inner), "mlp_norm")


_FORWARDS: Final[Mapping[type, Callable[[Any], Layers]]] = {
    models.LeNet: _lenet,
    models.MLP: _mlp,
    models.SmallResNet18: _small_resnet18,
    models.ResNet18: partial(_resnet, counts=(2, 2, 2, 2), kernels=(3, 3), expansion=1),
    models.ResNet50: partial(_resnet, counts=(3, 4, 6, 3), kernels=(1, 3, 1), expansion=4),
}
