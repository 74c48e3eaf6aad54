"""Layers of GPT and BERT on a tape, as `layers()` of the models lists them: name, function of the
tape and the layer's input, and how many such layers follow each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Final

from framework.config.model import MoE
from framework.plan.layers import Layers, RankShare
from framework.plan.operations import Tape, Value
from framework.recipes.language_models.kinds import BERT, GPT

_PROJECTIONS: Final = ("attention.query", "attention.key", "attention.value")


def gpt(model: GPT, share: RankShare) -> Layers:
    """List the layers of a GPT, or of a rank's share of one."""

    def norm(tape: Tape, value: Value, name: str = "") -> Value:
        if model.norm == "rmsnorm":
            return tape.rms_norm(value, name)
        return tape.layer_norm(value, name, has_bias=model.bias)

    def positions(tape: Tape, value: Value) -> Value:
        is_trained = tape.own((model.max_positions, model.hidden_size))
        if share.texts:
            places = Value(value.shape[:2], 8, has_gradient=False)
            vectors = tape.run(
                places,
                shape=value.shape,
                width=tape.weight_width,
                saves=[places],
                has_gradient=is_trained,
            )
            return tape.dropout(tape.add(value, vectors), model.dropout)
        flows = is_trained or value.has_gradient
        added = tape.run(value, shape=value.shape, has_gradient=flows, passes=True)
        return tape.dropout(added, model.dropout)

    def dropout(tape: Tape, value: Value) -> Value:
        tape.turns(value, model.hidden_size // model.num_heads, differ=share.texts > 0)
        return tape.dropout(value, model.dropout)

    def embed(tape: Tape, tokens: Value) -> Value:
        size = model.vocab_size
        if share.texts:  # places of the tokens in their texts
            tape.along_bytes = tokens.num_bytes
        return tape.embedding(tokens, share.of(size), model.hidden_size, whole=size)

    def last_norm(tape: Tape, value: Value) -> Value:
        tape.along_bytes = 0
        return norm(tape, value)

    def head(tape: Tape, value: Value) -> Value:
        if model.tie_embeddings:
            tape.prefix = "embed"
        return share.logits(tape, value, model.vocab_size)

    yield "embed", embed, 1
    if model.positions == "learned":
        yield "positions", positions, 1
    else:
        yield "dropout", dropout, 1
    if model.moe is None or model.moe.every == 1:
        yield "blocks.{}", partial(_gpt_block, model, share, norm, model.moe), model.num_layers
    else:
        for block in range(model.num_layers):
            moe = model.moe if model.moe.is_in(block) else None
            yield f"blocks.{block}", partial(_gpt_block, model, share, norm, moe), 1
    yield "norm", last_norm, 1
    yield "head", head, 1


def _gpt_block(
    model: GPT,
    share: RankShare,
    norm: Callable[[Tape, Value, str], Value],
    moe: MoE | None,
    tape: Tape,
    hidden: Value,
) -> Value:
    size = model.hidden_size
    head_size = max(1, model.hidden_size // model.num_heads)  # 0 is refused by a rule
    rank_size = share.of(model.hidden_size)

    def linear(value: Value, outputs: int, name: str, *, split: bool) -> Value:
        return tape.linear(value, outputs, name, has_bias=model.bias, split=split)

    normed = norm(tape, hidden, "attention_norm")
    normed = tape.shared_input(normed, *_PROJECTIONS)
    kv_size = share.of(head_size * model.num_kv_heads)

    def heads(name: str, outputs: int) -> Value:
        projected = linear(normed, outputs, f"attention.{name}", split=True)
        return share.heads(tape, projected, head_size, rank_size // head_size)

    query = heads("query", rank_size)
    key = heads("key", kv_size)
    value = heads("value", kv_size)
    if model.positions == "rotary":
        turns = tape.turns(hidden, head_size, differ=share.texts > 0)
        query, key = tape.rotate(turns, query, key)
    mixed = tape.attention(
        query,
        key,
        value,
        dropout=model.dropout,
        is_causal=True,
        texts=share.texts,
        ring=share.ring(rank_size // head_size),
    )
    rows = share.rows(tape, mixed, rank_size)
    output = linear(rows, size, "attention.output", split=False)
    hidden = tape.add(hidden, tape.dropout(output, model.dropout))
    normed = norm(tape, hidden, "mlp_norm")
    if moe:
        added = _mixture(model, share, moe, tape, normed)
    else:
        perceptron = partial(_perceptron, model, share, name="mlp")
        added = tape.in_tiles(normed, perceptron, share.mlp_tile)
    return tape.add(hidden, tape.dropout(added, model.dropout))


def _perceptron(model: GPT, share: RankShare, tape: Tape, value: Value, name: str) -> Value:
    linear = partial(tape.linear, has_bias=model.bias)
    inner_size = share.of(model.mlp_size)
    has_gate = model.mlp == "swiglu"
    if has_gate:  # the gate's weights come first in the model, and are used after `up`'s
        tape.own((inner_size, model.hidden_size), f"{name}.gate", has_bias=model.bias)
        value = tape.shared_input(value, f"{name}.gate", f"{name}.up")
    inner = linear(value, inner_size, f"{name}.up", split=True)
    if has_gate:
        gate = tape.gelu(linear(value, inner_size, f"{name}.gate", split=True))
        inner = tape.multiply(gate, inner)
    else:
        inner = tape.gelu(inner)
    return linear(inner, model.hidden_size, f"{name}.down", split=False)


def _mixture(model: GPT, share: RankShare, moe: MoE, tape: Tape, normed: Value) -> Value:
    """Apply a mixture of experts: every expert computes all rows that it has room for.

    `flops` are counted for the tokens, as if each of them found room.
    """
    size = model.hidden_size
    wide = share.of(model.mlp_size)
    tokens = prod(normed.shape[:-1])
    experts = moe.num_experts
    choices = moe.top_k * tokens
    rows = experts * moe.capacity(tokens)
    flat = normed.view(tokens, size)
    exact = tape.cast(flat, 4)
    is_trained = tape.own((experts, size), "mlp.router")
    flows = is_trained or normed.has_gradient
    work = 2 * tokens * experts * size
    if not is_trained:
        tape.frozen_flops += (1 if normed.has_gradient else 2) * work
    logits = tape.run(exact, shape=(tokens, experts), saves=[exact], flops=work, has_gradient=flows)
    tape.note_product(logits)
    chosen = Value((moe.top_k, choices), 8, has_gradient=False)
    weights = tape.run(tape.relu(logits), shape=(choices, 1), saves=[chosen])
    if moe.top_k > 1:
        weights = tape.multiply(weights, tape.save_output(weights))
    places = Value((choices,), 8, has_gradient=False)
    expert_rows = tape.run(flat, shape=(rows + 1, size), saves=[places])
    shapes = {"up": (wide, size), "down": (size, wide)}
    if model.mlp == "swiglu":
        shapes = {"gate": (wide, size)} | shapes
    # Weights first, in the order of the model; then the operations of all experts at once.
    for number in range(experts):
        for name, shape in shapes.items():
            tape.own(shape, f"mlp.experts.{number}.{name}", has_bias=model.bias)
    tape.count = experts
    before = tape.flops
    frozen_before = tape.frozen_flops
    made = _perceptron(model, share, tape, expert_rows.view(rows, size), "mlp.experts.0")
    tape.count = 1
    # Operations on rows without a token are not counted, but take time: `flops - masked_flops`, by
    # which plan/time.py goes, stays as it is.
    idle = (tape.flops - before) * (rows - choices) // rows
    tape.flops -= idle
    tape.masked_flops -= idle
    tape.frozen_flops -= (tape.frozen_flops - frozen_before) * (rows - choices) // rows
    made = tape.run(tape.run(made, shape=made.shape), shape=(rows + 1, size))
    mixed = tape.multiply(tape.run(made, shape=(choices, size)), tape.cast(weights, made.width))
    if moe.top_k > 1:
        return tape.run(mixed, shape=normed.shape)
    return mixed.view(*normed.shape)


def bert(model: BERT, share: RankShare) -> Layers:
    """List the layers of a BERT, or of a rank's share of one."""
    size = model.hidden_size
    vocab_size = share.of(model.vocab_size)

    def embed(tape: Tape, tokens: Value) -> Value:
        tape.along_bytes = 2 * tokens.num_bytes  # segments and mask
        return tape.embedding(tokens, vocab_size, size)

    def embeddings(tape: Tape, value: Value) -> Value:
        tape.along_bytes //= 2  # the mask
        flows = tape.own((model.max_positions, size), weight="positions") or value.has_gradient
        type_numbers = Value(value.shape[:2], 8, has_gradient=False)
        types = tape.embedding(type_numbers, model.num_types, size, "types")
        value = tape.run(value, shape=value.shape, passes=True, has_gradient=flows)
        return tape.dropout(tape.layer_norm(tape.add(value, types), "norm"), model.dropout)

    def heads(tape: Tape, hidden: Value) -> Value:
        batch, length, _ = hidden.shape
        tape.along_bytes = 0
        # The pooler's weights come before the transform's in the model, and are used after them.
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

    yield "embed", embed, 1
    yield "embeddings", embeddings, 1
    yield "blocks.{}", partial(_bert_block, model, share), model.num_layers
    if model.num_classes:
        yield "classes", classes, 1
        return
    yield "heads", heads, 1
    yield "decoder", decoder, 1
    yield "outputs", outputs, 1


def _bert_block(model: BERT, share: RankShare, tape: Tape, hidden: Value) -> Value:
    size = model.hidden_size
    rank_size = share.of(size)
    head_size = max(1, size // model.num_heads)  # 0 is refused by a rule
    num_heads = rank_size // head_size
    batch, length, _ = hidden.shape
    projected_from = tape.shared_input(hidden, *_PROJECTIONS)

    def heads(name: str) -> Value:
        projected = tape.linear(projected_from, rank_size, f"attention.{name}", split=True)
        return share.heads(tape, projected, head_size, num_heads)

    query = heads("query")
    key = heads("key")
    value = heads("value")
    mask = Value((batch, 1, 1, length * share.sequence), 1, has_gradient=False)
    ring = share.ring(num_heads)
    mixed = tape.attention(query, key, value, dropout=model.dropout, mask=mask, ring=ring)
    rows = share.rows(tape, mixed, rank_size)
    output = tape.dropout(tape.linear(rows, size, "attention.output", split=False), model.dropout)
    hidden = tape.layer_norm(tape.add(hidden, output), "attention_norm")
    inner = tape.gelu(tape.linear(hidden, share.of(model.mlp_size), "up", split=True))
    inner = tape.dropout(tape.linear(inner, size, "down", split=False), model.dropout)
    return tape.layer_norm(tape.add(hidden, inner), "mlp_norm")
