"""The operations of models, on tensors without numbers: what each computes, moves and saves.

Each operation saves what PyTorch 2.15 saves of it (its `derivatives.yaml`), as saved-tensor hooks
show on a CPU. CPU and GPU differ in attention, dropout and RMSNorm: their fused forms on GPUs keep
less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil, prod
from typing import Final

from framework.config.precision import FP8_ALIGNED
from framework.config.training import HALF_ROWS, LoRA, fills_rows
from framework.plan.recording import Operation, Recording
from framework.plan.recording import Shape as Shape
from framework.plan.recording import Value as Value

_FP32: Final = 4
_INT64: Final = 8
_TIED: Final = "embed.weight"
"""Weight of a head that is tied to the embedding: no linear layer, so no adapter either."""
# Bytes that a tiled loss reads (r) and writes (w) of each logit beside its products, which have
# operations of their own (`VocabularyPart.exponentials`, `_write_gradient`): the largest
# logit r4; the difference to it r4 w4; exponentials r4 w4; their sum r4; the gradient r4 w4.
_TILE_BYTES_OF_LOGIT: Final = 32
# The same with logits and gradients of two bytes, and fp32 between: r2; r2 w4; r4 w4; r4; r4 w2.
_TILE_BYTES_OF_HALF_LOGIT: Final = 26
# Adding a tile's product in half precision to the fp32 gradient of the weight: r2 r4 w4 of each
# element. In fp32 the product itself adds.
_TILE_BYTES_OF_WEIGHT: Final = 10


class Tape(Recording):
    """Records operations by their names in torch."""

    def place(self, name: str, weight: str = "weight") -> str:
        """Return the full name of a weight of this part."""
        return ".".join(word for word in (self.prefix, name, weight) if word)

    def own(
        self, shape: Shape, name: str = "", weight: str = "weight", *, has_bias: bool = False
    ) -> bool:
        """Record a weight of this part, and its bias; return whether one of them has a gradient."""
        shapes = {self.place(name, weight): shape}
        if has_bias:
            shapes[self.place(name, "bias")] = shape[:1]
        for full_name, weight_shape in shapes.items():
            self.weights.setdefault(full_name, weight_shape)
        return any(self.is_trained(full_name) for full_name in shapes)

    def embedding(
        self, tokens: Value, count: int, size: int, name: str = "", *, whole: int = 0
    ) -> Value:
        """Map tokens (...) to (..., size).

        `count`: rows of the weight; `whole`: of all ranks of a tensor group, which an adapter has.
        """
        flows = self.own((count, size), name)
        shape = tokens.with_more(size)
        made = self.run(
            tokens, shape=shape, width=self.weight_width, saves=[tokens], has_gradient=flows
        )
        lora = self._adapts(name, is_linear=False)
        if lora is None:
            return made
        self.weights[self.place(name, "lora_embedding_A.default")] = (lora.r, whole or count)
        self.weights[self.place(name, "lora_embedding_B.default")] = (size, lora.r)
        if lora.use_dora:
            self._magnitude(name, (size,))
        rows = self.run(
            tokens,
            shape=tokens.with_more(lora.r),
            width=made.width,
            saves=[tokens],
            has_gradient=True,
        )
        added = self.run(rows, shape=shape, saves=[rows], flops=2 * prod(shape) * lora.r)
        added = self.run(added, shape=shape)
        if lora.use_dora:
            made = self._scaled(made)
            added = self._scaled(added)
        return self.add(made, added)

    def linear(
        self,
        value: Value,
        outputs: int,
        name: str = "",
        *,
        has_bias: bool = True,
        split: bool | None = None,
    ) -> Value:
        """Map (..., inputs) to (..., outputs).

        `split`: whether tensor parallelism divides the outputs; None: as the inputs are.
        """
        shape = value.with_last(outputs)
        weight = (outputs, value.shape[-1])
        is_tied = self.place(name) == _TIED
        lora = None if is_tied else self._adapts(name)
        in_few_bits = lora is not None and lora.quantization is not None
        made = self._product(
            value, shape, weight, name, has_bias=has_bias, split=split, in_few_bits=in_few_bits
        )
        if lora is None:
            return made
        low = self._adapter_product(value, name, value.with_last(lora.r), (lora.r, weight[1]))
        return self._with_adapter(made, low, name, (outputs, lora.r))

    def convolution(
        self,
        value: Value,
        outputs: int,
        name: str = "",
        *,
        kernel: int,
        stride: int = 1,
        padding: int | None = None,
        has_bias: bool = False,
    ) -> Value:
        """Map (batch, channels, height, width) to (batch, outputs, ...).

        `padding` left out: half of the kernel.
        """
        if padding is None:
            padding = kernel // 2
        batch, channels = value.shape[:2]
        height, width = convolved(value.shape[2:], kernel, stride, padding)
        weight = (outputs, channels, kernel, kernel)
        shape = (batch, outputs, height, width)
        made = self._product(value, shape, weight, name, has_bias=has_bias)
        lora = self._adapts(name, is_linear=False)
        if lora is None:
            return made
        low_shape = (batch, lora.r, height, width)
        low = self._adapter_product(value, name, low_shape, (lora.r, channels, kernel, kernel))
        return self._with_adapter(made, low, name, (outputs, lora.r, 1, 1))

    def _adapts(self, name: str, *, is_linear: bool = True) -> LoRA | None:
        """Return the adapters' section if it adapts this module of the part, else None."""
        if self.lora is None:
            return None
        from framework.config.groups import ALL_LINEAR, is_named

        if self.lora.target_modules == ALL_LINEAR:
            is_adapted = is_linear
        else:
            is_adapted = is_named(self.place(name, ""), self.lora.target_modules)
        return self.lora if is_adapted else None

    def _adapter_product(self, value: Value, name: str, shape: Shape, weight: Shape) -> Value:
        """Apply an adapter's A, of shape `weight`, to the inputs of its module."""
        assert self.lora is not None
        dropped = self.dropout(value, self.lora.lora_dropout)
        full_name = f"{name}.lora_A.default".lstrip(".")
        return self._product(dropped, shape, weight, full_name, has_bias=False)

    def _with_adapter(self, made: Value, low: Value, name: str, weight: Shape) -> Value:
        """Add what an adapter's B makes of `low`, scaled, to `made`, what its module makes."""
        assert self.lora is not None
        full_name = f"{name}.lora_B.default".lstrip(".")
        added = self._product(low, made.shape, weight, full_name, has_bias=False)
        if not self.lora.use_dora:
            return self.add(made, self.run(added, shape=added.shape, is_split=made.is_split))
        shape = weight[:1]
        if len(weight) > 2:
            shape = (1, weight[0], 1, 1)
        self._magnitude(name, shape)
        # peft: made + (m - 1) (made - bias) + m added x scaling, with a factor m for each row
        scaled = self._scaled(self.run(made, shape=made.shape))
        added = self.run(self._scaled(added), shape=added.shape, is_split=made.is_split)
        return self.add(made, self.add(scaled, added))

    def _magnitude(self, name: str, shape: Shape) -> None:
        """Record the lengths of DoRA of a module."""
        self.weights[self.place(name, "lora_magnitude_vector.default.weight")] = shape

    def _scaled(self, value: Value) -> Value:
        """Multiply by DoRA's trained factors, whose gradient takes the value."""
        return self.run(value, shape=value.shape, saves=[value], has_gradient=True)

    def _product(
        self,
        value: Value,
        shape: Shape,
        weight: Shape,
        name: str,
        *,
        has_bias: bool,
        split: bool | None = None,
        in_few_bits: bool = False,
    ) -> Value:
        """Multiply by a weight of shape `weight`, or convolve with it, in `product_width`; return
        the result, of shape `shape`. A weight in few bits is made anew in both passes.
        """
        flows = self.own(weight, name, has_bias=has_bias)
        is_trained = self.is_trained(self.place(name))
        cast_value = self.cast(value, self.product_width)
        saves = [cast_value] if is_trained else []
        temporary = 0
        is_linear = len(weight) == 2 and self.place(name) != _TIED  # not one of DeepSpeed's
        if in_few_bits:
            temporary = self.count * prod(weight) * (2 * _FP32 + self.product_width)
        elif self.keeps_inputs and is_linear:
            saves = [value]
        elif self.product_width < self.weight_width:  # autograd keeps the copy of the weight
            copy = self._copy_for_autocast(weight, is_split=split is not None)
            if cast_value.has_gradient or len(weight) > 2:
                saves.append(copy)
            temporary = copy.num_bytes
        reads = [cast_value]
        if self.rounded_widths is not None and self._may_round(weight):
            rounded, temporary = self._rounded(self.rounded_widths, cast_value, weight, shape)
            reads.append(rounded)
        product_flops = 2 * prod(shape) * prod(weight[1:])
        if not is_trained:
            self.frozen_flops += (1 if cast_value.has_gradient else 2) * product_flops
        made = self.run(
            *reads,
            shape=shape,
            saves=saves,
            flops=product_flops,
            temporary=temporary,
            has_gradient=flows or cast_value.has_gradient,
            is_split=split,
        )
        self.note_product(made)
        return made

    def _copy_for_autocast(self, weight: Shape, *, is_split: bool) -> Value:
        """Count the copy of a weight in the type of products, and return it."""
        self.moved_bytes += self.count * prod(weight) * (self.weight_width + self.product_width)
        return Value((self.count, *weight), self.product_width, is_split=is_split)

    def _rounded(
        self, widths: tuple[int, int], inputs: Value, weight: Shape, outputs: Shape
    ) -> tuple[Value, int]:
        """Return the operands of a product rounded to fp8, and the bytes that its backward pass
        takes beside gradients; `widths` as `rounded_widths`.
        """
        first, second = widths
        num_weights = self.count * prod(weight)
        num_inputs = prod(inputs.shape)
        rounded = Value((first * num_inputs + second * num_weights,), 1, has_gradient=False)
        return rounded, first * prod(outputs) + second * max(num_inputs, num_weights)

    def _may_round(self, weight: Shape) -> bool:
        """Check whether a linear layer with this weight may compute in fp8 (`models/fp8.py`)."""
        is_of_block = self.prefix.rpartition(".")[2].isdigit()
        fits = len(weight) == 2 and not any(size % FP8_ALIGNED for size in weight)
        return is_of_block and fits

    def cast(self, value: Value, width: int) -> Value:
        if value.width == width:
            return value
        return self.run(value, shape=value.shape, width=width)

    def shared_input(self, value: Value, *names: str) -> Value:
        """Cast the input of linear layers that are applied together (models/products.py) once."""
        if self.keeps_inputs or any(self._adapts(name) for name in names):
            return value
        return self.cast(value, self.product_width)

    def add(self, *values: Value) -> Value:
        width = max(value.width for value in values)
        return self.run(*values, shape=values[0].shape, width=width, passes=True)

    def multiply(self, first: Value, second: Value) -> Value:
        saves = []  # the gradient of each factor takes the other one
        if second.has_gradient:
            saves.append(first)
        if first.has_gradient:
            saves.append(second)
        return self.run(first, second, shape=first.shape, saves=saves)

    def gelu(self, value: Value) -> Value:
        """Apply GELU, SiLU or another function with a derivative that takes its input."""
        return self.run(value, shape=value.shape, saves=[value])

    def relu(self, value: Value) -> Value:
        """Apply ReLU, tanh or another function with a derivative that takes its output."""
        return self.save_output(self.run(value, shape=value.shape))

    def dropout(self, value: Value, probability: float) -> Value:
        if not probability:
            return value
        mask = Value(value.shape, 1 if self.device == "cuda" else value.width, has_gradient=False)
        return self.run(value, shape=value.shape, saves=[mask])

    def layer_norm(self, value: Value, name: str = "", *, has_bias: bool = True) -> Value:
        width = _FP32 if self.device == "cuda" else value.width
        flows = self.own(value.shape[-1:], name, has_bias=has_bias)
        return self._norm(value, flows, Value((2, *value.shape[:-1]), width, has_gradient=False))

    def rms_norm(self, value: Value, name: str = "") -> Value:
        statistics = Value(value.shape[:-1], _FP32, has_gradient=False)
        flows = self.own(value.shape[-1:], name)
        if self.device == "cuda":
            return self._norm(value, flows, statistics)
        # on CPUs it is several operations, all in fp32; the last one is a product with the weight
        wide = self.cast(value, _FP32)
        scaled = self.run(wide, shape=value.shape, saves=[wide, statistics])
        saves = [scaled] if flows else []
        flows = flows or scaled.has_gradient
        made = self.run(scaled, shape=value.shape, saves=saves, has_gradient=flows)
        return self.cast(made, value.width)

    def batch_norm(self, value: Value, name: str = "") -> Value:
        width = self.weight_width if self.device == "cpu" else _FP32
        channels = value.shape[1]
        self.buffer_bytes += 2 * _FP32 * channels + _INT64
        flows = self.own((channels,), name, has_bias=True)
        return self._norm(value, flows, Value((2, channels), width, has_gradient=False))

    def _norm(self, value: Value, flows: bool, *statistics: Value) -> Value:
        flows = flows or value.has_gradient
        saves = [value]
        saves += statistics
        return self.run(value, shape=value.shape, saves=saves, has_gradient=flows)

    def max_pool(self, value: Value, kernel: int, stride: int, padding: int = 0) -> Value:
        shape = value.shape[:2] + convolved(value.shape[2:], kernel, stride, padding)
        return self.run(value, shape=shape, saves=[value, Value(shape, _INT64, has_gradient=False)])

    def mean(self, value: Value) -> Value:
        """Map (batch, channels, height, width) to (batch, channels, 1, 1)."""
        batch, channels = value.shape[:2]
        return self.run(value, shape=(batch, channels, 1, 1))

    def turns(self, value: Value, head_size: int, *, differ: bool) -> Value:
        """Keep the table of rotary positions for (batch, sequence, size): one for all parts.

        `differ`: each sample of the batch has positions of its own.
        """
        if self._turns is None:
            batch, length, _ = value.shape
            shape = (2, batch if differ else 1, length, head_size // 2)
            self._turns = Value(shape, _FP32, has_gradient=False)
            self._save([self._turns])
            self._operations.append(Operation((), self._turns, (self._turns,), 0, False, ()))
        return self._turns

    def rotate(self, turns: Value, *heads: Value) -> list[Value]:
        """Apply rotary positions to queries and keys, in halves, with sums in fp32."""
        rotated = []
        for head in heads:
            half = head.with_last(head.shape[-1] // 2)
            product = self.run(head, shape=half, width=_FP32, has_gradient=False)
            self.moved_bytes += 2 * product.num_bytes  # of the second half
            made = self.run(
                head,
                product,
                shape=head.shape,
                width=head.width,
                saves=[turns],
                temporary=product.num_bytes,
            )
            rotated.append(made)
        return rotated

    def attention(
        self,
        query: Value,
        key: Value,
        value: Value,
        *,
        dropout: float,
        mask: Value | None = None,
        is_causal: bool = False,
        texts: float = 0,
        ring: int = 1,
    ) -> Value:
        """Map queries (batch, heads, sequence, head size), and fewer heads of keys and values, to
        the shape of the queries.

        `texts`: number of texts of equal length in each row; no text sees another; 0: one. `ring`:
        number of ranks with such a chunk of the sequence each, around which keys and values go.
        """
        if ring > 1:
            return self._ring_attention(query, key, value, mask, is_causal=is_causal, ring=ring)
        # Without dropout it is fused on CPUs, too.
        if self.device == "cuda" or not dropout:
            mixed = self._fused_attention(
                query, key, value, mask, is_causal=is_causal, texts=max(texts, 1)
            )
        else:
            mixed = self._attention_in_steps(query, key, value, texts=max(texts, 1))
        has_kernel = self.device == "cuda" and self.product_width < _FP32
        if texts > 1 and not has_kernel:  # they are computed one by one, and put end to end
            mixed = self.run(mixed, shape=mixed.shape)
        return mixed

    def _fused_attention(
        self,
        query: Value,
        key: Value,
        value: Value,
        mask: Value | None,
        *,
        is_causal: bool,
        texts: float,
    ) -> Value:
        """Apply attention in one kernel, which keeps inputs, output and a sum for each row."""
        batch, heads, length, _ = query.shape
        flops = int(_attention_flops(query) / texts)
        hidden = masked(flops, ceil(length / texts)) if is_causal else 0
        sums = Value((batch, heads, length), _FP32, has_gradient=False)
        saves = [query, key, value, sums]
        if mask is not None:
            saves.append(Value(mask.shape, query.width, has_gradient=False))
        made = self.run(query, key, value, shape=query.shape, saves=saves, flops=flops)
        self._note_scores(flops, hidden, flows=made.has_gradient)
        self.note_product(made, sums)
        return self.save_output(made)

    def _ring_attention(
        self,
        query: Value,
        key: Value,
        value: Value,
        mask: Value | None,
        *,
        is_causal: bool,
        ring: int,
    ) -> Value:
        """Apply attention around a ring of ranks, chunk by chunk (`models/ring.py`): keys and
        values are sent and received in one tensor each, results are added in fp32, and gradients
        of keys and values travel in fp32.
        """
        batch, heads, length, _ = query.shape
        flops = ring * _attention_flops(query)
        hidden = masked(flops, length * ring) if is_causal else 0
        travelling = (prod(key.shape) + prod(value.shape),)
        wide = self.run(query, shape=query.shape, width=_FP32, has_gradient=False)
        sent = self.run(key, value, shape=travelling, has_gradient=False)
        coming = self.run(sent, shape=travelling)
        repeats = query.shape[1] // key.shape[1]
        repeated = key.num_bytes + value.num_bytes if repeats > 1 else 0
        # Gradients of queries; of keys and values the one that is here, the one that is sent and
        # the one that comes; and what one chunk makes of all three, from keys and values that are
        # repeated for queries.
        in_fp32 = _FP32 * (prod(query.shape) + 3 * travelling[0])
        of_chunk = query.num_bytes + 2 * repeats * repeated
        if repeats == 1:
            of_chunk += sent.num_bytes
        sums = Value((batch, heads, length), _FP32, has_gradient=False)
        saves = [query, key, value, sums]
        if mask is not None:
            saves.append(Value(mask.shape, 1, has_gradient=False))
        made = self.run(
            query,
            key,
            value,
            shape=query.shape,
            saves=saves,
            flops=flops,
            temporary=in_fp32 + of_chunk + 2 * sent.num_bytes,
            holds=[wide, sent, coming],
        )
        self._note_scores(flops, hidden, flows=made.has_gradient)
        self.note_product(made, sums)
        return self.save_output(made)

    def _attention_in_steps(self, query: Value, key: Value, value: Value, *, texts: float) -> Value:
        """Apply attention step by step in fp32, as CPUs do with dropout; each step keeps its
        inputs.
        """
        batch, heads, length, _ = query.shape
        product_flops = int(_attention_flops(query) / texts / 2)
        wide = [self.cast(tensor, _FP32) for tensor in (query, key, value)]
        queries, keys, values = [self.run(tensor, shape=query.shape) for tensor in wide]
        square = (batch, heads, length, ceil(length / texts))
        scores = self.run(queries, keys, shape=square, saves=[queries, keys], flops=product_flops)
        weights = self.relu(scores)  # softmax, which keeps its output as ReLU does
        noise = Value(square, _FP32, has_gradient=False)
        dropped = self.run(weights, shape=square, saves=[noise])
        mixed = self.run(
            dropped,
            values,
            shape=query.shape,
            saves=[dropped, values],
            flops=product_flops,
            holds=[*wide, queries, keys],
        )
        self._note_scores(2 * product_flops, 0, flows=mixed.has_gradient)
        return self.run(self.cast(mixed, query.width), shape=query.shape)

    def _note_scores(self, flops: int, hidden: int, *, flows: bool) -> None:
        """Count operations of attention as products without a weight; fused kernels leave out
        `hidden` of them, and without a gradient there is no backward pass.
        """
        self.masked_flops += hidden
        self.score_flops += flops - hidden
        if not flows:
            self.frozen_flops += 2 * flops
            self.frozen_score_flops += 2 * flops

    def cross_entropy(self, logits: Value, targets: Value) -> Value:
        """Map logits (samples, classes) and class numbers to a sum, in fp32.

        Of divided logits probabilities are kept, and become the gradient (`models.split`).
        """
        if not logits.is_split:
            # log-softmax, which keeps its output as ReLU does
            log_probabilities = self.relu(self.cast(logits, _FP32))
            return self.run(log_probabilities, shape=(), saves=[targets])
        probabilities = Value(logits.shape, _FP32)
        temporary = 0
        if logits.width == _FP32:
            temporary = -probabilities.num_bytes
        return self.run(logits, shape=(), saves=[probabilities, targets], temporary=temporary)

    def in_tiles(self, value: Value, run: Callable[[Tape, Value], Value], tile: int) -> Value:
        """Map (..., size) to the same shape by `run`, in tiles of positions that run again in the
        backward pass (`models.tiled_perceptron`); 0: all positions at once.

        What is kept are the inputs. The backward pass sums gradients of weights in fp32.
        """
        rows = prod(value.shape[:-1])
        if not tile or rows <= tile:
            return run(self, value)
        known = set(self.weights)
        inner = replace(self, saved=set())
        inner.start(self.prefix)
        inputs = Value((tile, value.shape[-1]), value.width, value.has_gradient)
        made = run(inner, inputs)
        new = {name: shape for name, shape in self.weights.items() if name not in known}
        trained = sum(prod(shape) for name, shape in new.items() if self.is_trained(name))
        flops = inner.flops * rows // tile
        self.frozen_flops += inner.frozen_flops * rows // tile
        self.score_flops += inner.score_flops * rows // tile
        self.frozen_score_flops += inner.frozen_score_flops * rows // tile
        self.again_flops += flops
        # Of the sum over tiles: it is read and written, and a tile's gradient is read.
        sums = ceil(rows / tile) * trained * (2 * _FP32 + value.width)
        self.again_bytes += inner.moved_bytes * rows // tile + sums
        before = self.moved_bytes + inner.moved_bytes * rows // tile
        forward = inner.forward_bytes([inputs, made], keeps=False)
        backward = inner.saved_bytes + inner.backward_bytes([made])
        values = self.run(value, shape=(forward,), width=1, has_gradient=False)
        self.moved_bytes = before
        return self.run(
            value,
            values,
            shape=(*value.shape[:-1], made.shape[-1]),
            width=made.width,
            saves=[value],
            flops=flops,
            temporary=backward + (_FP32 + value.width) * trained,
            has_gradient=made.has_gradient,
            is_split=False,
        )

    def _copies_for_tiles(self, value: Value, weight: Shape, filled: Shape) -> list[Value]:
        """Record the copies of the weight of a loss by tiles: for autocast, and with rows filled up
        to the shape `filled`; return them.
        """
        copies = []
        if self.product_width < self.weight_width:
            copies.append(self.run(value, shape=weight, has_gradient=False))
        if filled != weight:
            copies.append(self.run(value, shape=filled, has_gradient=False))
        return copies

    def _half_gradient(self, logits: Value) -> Value:
        """Turn a tile's logits in half precision into their gradient, by exponentials in fp32."""
        make = partial(self.run, shape=logits.shape, has_gradient=False)
        converted = []
        if self.device == "cpu":  # converts numbers of two types before they meet
            converted.append(make(logits, width=_FP32))
        exponentials = make(logits, *converted, width=_FP32)
        return make(exponentials, logits, *converted, width=logits.width)

    def logits(self, value: Value, outputs: int, *, split: bool | None = None) -> Value:
        """Map (..., inputs) to logits (..., outputs) by the weight of a layer without a bias: by
        that of an embedding with rows filled up where GPUs need it (`models.filled_rows`).
        """
        logits = self.linear(value, outputs, has_bias=False, split=split)
        is_half = self.device == "cuda" and self.product_width < _FP32
        is_filled = is_half and fills_rows(outputs, prod(value.shape[:-1]))
        if not is_filled or self.place("") != _TIED:
            return logits
        missing = -outputs % HALF_ROWS
        weight = Value((outputs + missing, value.shape[-1]), self.product_width, has_gradient=False)
        self.moved_bytes += 2 * weight.num_bytes
        if logits.has_gradient:
            # The gradient of logits is copied into rows of that length.
            gradient = Value(logits.with_last(outputs + missing), logits.width)
            product = self._operations[-1]
            product.saves = (*product.saves, weight)
            product.temporary += gradient.num_bytes
            self._save([weight])
        return logits

    def tiled_loss(self, value: Value, outputs: int, tile: int) -> Value:
        """Map (..., inputs) to the loss of `outputs` logits of each position, 0-d, by tiles
        (`models.tiled_loss`).

        What is kept are gradients of the inputs and, in fp32, of the weight.
        """
        inputs = value.shape[-1]
        rows = prod(value.shape[:-1])
        weight = (outputs, inputs)
        is_trained = self.own(weight)
        is_half = self.product_width < _FP32
        flows = value.has_gradient
        filled = weight
        bytes_of_logit = _TILE_BYTES_OF_LOGIT
        if is_half:
            bytes_of_logit = _TILE_BYTES_OF_HALF_LOGIT
            filled = (outputs + -outputs % HALF_ROWS, inputs)
        value = self.cast(value, self.product_width)
        flops = rows * prod(weight)  # half of the logits' operations: two operations record it
        if not is_trained:
            self.frozen_flops += 2 * flops
        input_gradient = Value((rows, inputs), value.width)
        weight_gradient = Value(filled, _FP32)
        before = self.moved_bytes
        make = partial(self.run, has_gradient=False)
        copies = self._copies_for_tiles(value, weight, filled)
        logits = make(value, shape=(tile, filled[0]), flops=flops)
        if is_half:
            logits = self._half_gradient(logits)
        moved = rows * filled[0] * bytes_of_logit
        products = []
        temporary = 0
        if is_half and is_trained:
            products.append(make(logits, shape=filled))
            num_tiles = ceil(rows / tile)
            moved += num_tiles * _TILE_BYTES_OF_WEIGHT * prod(filled)
            temporary += prod(filled) * value.width
        # Half of them: a backward pass is taken to move as much again, and here there is none.
        self.moved_bytes = before + moved // 2
        saves = []
        if flows:
            saves.append(input_gradient)
            temporary -= input_gradient.num_bytes
        if is_trained:
            saves.append(weight_gradient)
        return self.run(
            value,
            logits,
            *products,
            *copies,
            shape=(),
            width=_FP32,
            saves=saves,
            flops=flops,
            temporary=temporary,
            has_gradient=flows or is_trained,
        )


def _attention_flops(query: Value) -> int:
    batch, heads, length, size = query.shape
    return 4 * batch * heads * length * length * size


def masked(flops: int, length: int) -> int:
    """Return the operations of causal attention that fused kernels leave out."""
    return flops * (length - 1) // (2 * length)


def convolved(sizes: Shape, kernel: int, stride: int, padding: int) -> Shape:
    """Return height and width after a convolution or pooling."""
    return tuple((size + 2 * padding - kernel) // stride + 1 for size in sizes)
