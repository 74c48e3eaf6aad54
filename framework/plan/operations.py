"""Operations on tensors without numbers, written down one after the other: what they compute and
move, what autograd saves of them, and what is alive at most meanwhile. Without torch.

Each operation saves what PyTorch 2.15 saves of it (its `derivatives.yaml`), as saved-tensor hooks
show on a CPU. CPU and GPU differ in attention, dropout and RMSNorm: their fused forms on GPUs keep
less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, prod
from typing import Final, Literal

from framework.config.groups import ALL_LINEAR, is_named
from framework.config.training import HALF_ROWS, LoRA

Shape = tuple[int, ...]
_FP32: Final = 4
_INT64: Final = 8


@dataclass(eq=False)
class Value:
    """A tensor without numbers.

    Attributes:
        shape: of it.
        width: bytes of an element.
        has_gradient: whether a gradient flows back to it.
        of: the tensor whose memory it shows; None: it has its own.
        is_split: whether tensor parallelism divides it.
    """

    shape: Shape
    width: int
    has_gradient: bool = True
    of: Value | None = None
    is_split: bool = False

    @property
    def storage(self) -> Value:
        """The tensor that has the memory."""
        return self if self.of is None else self.of.storage

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.width

    def view(self, *shape: int) -> Value:
        """The same memory in another shape, or a part of it."""
        return Value(shape, self.width, self.has_gradient, self, self.is_split)


@dataclass
class _Operation:
    """`temporary`: bytes that its backward pass takes beside gradients; `passes`: its gradient goes
    on as it is; `holds`: what is still there, though nobody reads it.
    """

    reads: tuple[Value, ...]
    made: Value
    saves: tuple[Value, ...]
    temporary: int
    passes: bool
    holds: tuple[Value, ...]


@dataclass
class Tape:
    """Operations of one part of a model.

    Attributes:
        weight_width: bytes of a weight's element.
        product_width: bytes of an element in matrix products and convolutions; less than
            `weight_width` with autocast.
        device: what it runs on.
        is_trained: whether a weight of that name has a gradient.
        keeps_inputs: whether linear layers keep their inputs as they are, and no copy of a weight:
            DeepSpeed's do at ZeRO stage 3.
        saved: what parts up to here have saved.
        weights: name -> shape of all weights up to here, in the model's order, shared ones once.
        products: matrix products and convolutions of the part.
        count: linear layers alike that one operation stands for, each on its own rows.
        lora: which modules have adapters; None: none have.
        buffer_bytes: bytes of what is kept beside them: the statistics of batch norms, fp32, and
            their counts, int64.
    """

    weight_width: int
    product_width: int
    device: Literal["cpu", "cuda"]
    is_trained: Callable[[str], bool] = lambda name: True
    keeps_inputs: bool = False
    lora: LoRA | None = None
    saved: set[Value] = field(default_factory=set)
    weights: dict[str, Shape] = field(default_factory=dict)
    buffer_bytes: int = 0
    prefix: str = ""
    count: int = 1
    flops: int = 0
    masked_flops: int = 0
    moved_bytes: int = 0
    products: int = 0
    _new: list[Value] = field(default_factory=list)
    _operations: list[_Operation] = field(default_factory=list)

    def start(self, prefix: str) -> None:
        """Begin a part, whose weights' names begin like this."""
        self.prefix = prefix
        self.flops = 0
        self.masked_flops = 0
        self.moved_bytes = 0
        self.products = 0
        self._new = []
        self._operations = []

    @property
    def saved_bytes(self) -> int:
        """Bytes that the part saves, and none before it."""
        return sum(value.num_bytes for value in self._new)

    @property
    def split_bytes(self) -> int:
        """Those of `saved_bytes` that tensor parallelism divides."""
        return sum(value.num_bytes for value in self._new if value.is_split)

    def saves_first(self, value: Value) -> bool:
        """Check whether a tensor is saved by this part, and by none before it."""
        return value.storage in self._new

    def run(
        self,
        *reads: Value,
        shape: Shape,
        width: int = 0,
        saves: Sequence[Value] = (),
        flops: int = 0,
        temporary: int = 0,
        has_gradient: bool | None = None,
        passes: bool = False,
        is_split: bool | None = None,
        holds: Sequence[Value] = (),
    ) -> Value:
        """Write an operation down; returns what it makes. `width` 0: as what it reads first."""
        if has_gradient is None:
            flows = any(value.has_gradient for value in reads)
        else:
            flows = has_gradient
        if is_split is None:
            split = any(value.is_split for value in reads)
        else:
            split = is_split
        made = Value(shape, width or reads[0].width, flows, is_split=split)
        self._save(saves if flows else ())
        if flows:
            kept = tuple(saves)
        else:
            kept = ()
        self._operations.append(_Operation(reads, made, kept, temporary, passes, tuple(holds)))
        self.flops = self.flops + flops
        self.products = self.products + (flops > 0)
        if not flops:
            beside = {*saves} - {*reads}
            self.moved_bytes += sum(value.num_bytes for value in (*reads, made, *beside))
        return made

    def _save(self, saves: Sequence[Value]) -> None:
        for value in (each.storage for each in saves):
            if value not in self.saved:
                self.saved.add(value)
                self._new.append(value)

    def save_output(self, made: Value) -> Value:
        """Let the last operation save what it made, too."""
        operation = self._operations[-1]
        if made.has_gradient:
            operation.saves = (*operation.saves, made)
            self._save([made])
        return made

    def forward_bytes(self, *ends: Value, keeps: bool = True) -> int:
        """Bytes at most in the forward pass, beside what the part saves; or in one that saves
        nothing. What is given to it and what it returns, `ends`, stays.
        """
        last: dict[Value, int] = {}
        stays = {end.storage for end in ends}
        for number, operation in enumerate(self._operations):
            for value in (*operation.reads, operation.made, *operation.holds):
                last[value.storage] = number
        kept = self.saved if keeps else set[Value]()
        live = set[Value]()
        most = 0
        for number, operation in enumerate(self._operations):
            live |= {
                value.storage for value in (*operation.reads, operation.made, *operation.saves)
            }
            most = max(most, sum(v.num_bytes for v in live if v not in kept or v in self._new))
            live -= {
                v
                for v in live
                if last.get(v, number) <= number and v not in kept and v not in stays
            }
        return most - (self.saved_bytes if keeps else 0)

    def backward_bytes(self, *outputs: Value) -> int:
        """Bytes at most in the backward pass, beside what the part has saved: gradients, without
        those of weights.
        """
        firsts: dict[Value, int] = {}
        for number, operation in enumerate(self._operations):
            for value in operation.saves:
                firsts.setdefault(value.storage, number)
        gradients = {
            output.storage: output.num_bytes if output.has_gradient else 0 for output in outputs
        }
        saved = self.saved_bytes
        most = saved + sum(gradients.values())
        for number in range(len(self._operations) - 1, -1, -1):
            operation = self._operations[number]
            if operation.made.storage in gradients:
                reads = [v for v in operation.reads if v.has_gradient]
            else:
                reads = []
            given = gradients.pop(operation.made.storage, 0)
            if operation.passes:
                made = 0
            else:
                made = sum(value.num_bytes for value in reads)
            most = max(most, saved + sum(gradients.values()) + given + made + operation.temporary)
            # where it is passed on, one of them stands for all
            for place, value in enumerate(reads):
                if operation.passes:
                    size = given if place == 0 else 0
                else:
                    size = value.num_bytes
                gradients[value.storage] = max(gradients.get(value.storage, 0), size)
            saved -= sum(value.num_bytes for value in self._new if firsts[value] == number)
        return most - self.saved_bytes

    # Operations, named as torch names them.

    def place(self, name: str, weight: str = "weight") -> str:
        """The full name of a weight of this part."""
        return ".".join(filter(None, (self.prefix, name, weight)))

    def own(
        self, shape: Shape, name: str = "", weight: str = "weight", *, has_bias: bool = False
    ) -> bool:
        """Note a weight of this part, and its bias; returns whether one of them has a gradient."""
        own = {self.place(name, weight): shape} | (
            {self.place(name, "bias"): shape[:1]} if has_bias else {}
        )
        self.weights |= {full: each for full, each in own.items() if full not in self.weights}
        return any(map(self.is_trained, own))

    def embedding(self, tokens: Value, count: int, size: int, name: str = "") -> Value:
        flows = self.own((count, size), name)
        shape = (*tokens.shape, size)
        made = self.run(
            tokens, shape=shape, width=self.weight_width, saves=[tokens], has_gradient=flows
        )
        lora = self._adapts(name, is_linear=False)
        if lora is None:
            return made
        first, second = (self.place(name, f"lora_embedding_{each}.default") for each in "AB")
        self.weights |= {first: (lora.r, count), second: (size, lora.r)}
        rows = self.run(
            tokens,
            shape=(*tokens.shape, lora.r),
            width=made.width,
            saves=[tokens],
            has_gradient=True,
        )
        more = self.run(rows, shape=shape, saves=[rows], flops=2 * prod(shape) * lora.r)
        return self.add(made, self.run(more, shape=shape))

    def linear(
        self,
        value: Value,
        outputs: int,
        name: str = "",
        *,
        has_bias: bool = True,
        split: bool | None = None,
    ) -> Value:
        """(..., inputs) to (..., outputs); `split`: whether tensor parallelism divides its outputs,
        or its inputs.
        """
        shape = (*value.shape[:-1], outputs)
        is_first = self.place(name) not in self.weights
        weight = (outputs, value.shape[-1])
        made = self._product(value, shape, weight, name, has_bias=has_bias, split=split)
        if not is_first or (lora := self._adapts(name)) is None:  # a tied head is an embedding
            return made
        low = self._low(value, name, (*value.shape[:-1], lora.r), (lora.r, weight[1]))
        return self._adapted(made, low, name, (outputs, lora.r))

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
        """(batch, channels, height, width) to (batch, outputs, ...); `padding` left out: half of
        the kernel.
        """
        sizes = convolved(
            value.shape[2:], kernel, stride, kernel // 2 if padding is None else padding
        )
        weight = (outputs, value.shape[1], kernel, kernel)
        made = self._product(
            value, (value.shape[0], outputs, *sizes), weight, name, has_bias=has_bias
        )
        lora = self._adapts(name, is_linear=False)
        if lora is None:
            return made
        low = self._low(value, name, (value.shape[0], lora.r, *sizes), (lora.r, *weight[1:]))
        return self._adapted(made, low, name, (outputs, lora.r, 1, 1))

    def _adapts(self, name: str, *, is_linear: bool = True) -> LoRA | None:
        """How a module of this part is adapted, if it is."""
        if self.lora is None or self.lora.target_modules == ALL_LINEAR:
            return self.lora if is_linear else None
        if is_named(self.place(name, ""), self.lora.target_modules):
            return self.lora
        return None

    def _low(self, value: Value, name: str, shape: Shape, weight: Shape) -> Value:
        """What an adapter's A makes of the inputs of its module."""
        assert self.lora is not None
        given = self.dropout(value, self.lora.lora_dropout)
        return self._product(
            given, shape, weight, f"{name}.lora_A.default".lstrip("."), has_bias=False
        )

    def _adapted(self, made: Value, low: Value, name: str, weight: Shape) -> Value:
        """What a module makes, with what its adapter's B adds, scaled."""
        more = self._product(
            low, made.shape, weight, f"{name}.lora_B.default".lstrip("."), has_bias=False
        )
        return self.add(made, self.run(more, shape=more.shape))

    def _product(
        self,
        value: Value,
        shape: Shape,
        weight: Shape,
        name: str,
        *,
        has_bias: bool,
        split: bool | None = None,
    ) -> Value:
        flows = self.own(weight, name, has_bias=has_bias)
        is_trained = self.is_trained(self.place(name))
        given = value
        value = self.cast(value, self.product_width)
        saves = [value] if is_trained else []
        temporary = 0
        # which is no linear layer
        if self.keeps_inputs and len(weight) == 2 and self.place(name) != "embed.weight":
            saves = [given]
        elif self.product_width < self.weight_width:  # autograd keeps the copy of the weight
            copy = Value((self.count, *weight), self.product_width, is_split=split is not None)
            self.moved_bytes += self.count * prod(weight) * (self.weight_width + self.product_width)
            saves += [copy] if value.has_gradient or len(weight) > 2 else []
            temporary = copy.num_bytes
        return self.run(
            value,
            shape=shape,
            saves=saves,
            flops=2 * prod(shape) * prod(weight[1:]),
            temporary=temporary,
            has_gradient=flows or value.has_gradient,
            is_split=split,
        )

    def cast(self, value: Value, width: int) -> Value:
        if value.width == width:
            return value
        return self.run(value, shape=value.shape, width=width)

    def add(self, *values: Value) -> Value:
        return self.run(
            *values, shape=values[0].shape, width=max(each.width for each in values), passes=True
        )

    def multiply(self, one: Value, other: Value) -> Value:
        saves = [each for each, beside in ((one, other), (other, one)) if beside.has_gradient]
        return self.run(one, other, shape=one.shape, saves=saves)

    def gelu(self, value: Value) -> Value:
        """GELU, SiLU and others whose derivative takes their input."""
        return self.run(value, shape=value.shape, saves=[value])

    def relu(self, value: Value) -> Value:
        """ReLU, tanh and others whose derivative takes their output."""
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
        # on a processor it is made of several operations, all in fp32
        wide = self.cast(value, _FP32)
        scaled = self.run(wide, shape=value.shape, saves=[wide, statistics])
        return self.cast(self._norm(scaled, flows), value.width)

    def batch_norm(self, value: Value, name: str = "") -> Value:
        width = self.weight_width if self.device == "cpu" else _FP32
        channels = value.shape[1]
        self.buffer_bytes += 2 * _FP32 * channels + _INT64
        flows = self.own((channels,), name, has_bias=True)
        return self._norm(value, flows, Value((2, channels), width, has_gradient=False))

    def _norm(self, value: Value, flows: bool, *statistics: Value) -> Value:
        flows = flows or value.has_gradient
        return self.run(value, shape=value.shape, saves=[value, *statistics], has_gradient=flows)

    def max_pool(self, value: Value, kernel: int, stride: int, padding: int = 0) -> Value:
        shape = (*value.shape[:2], *convolved(value.shape[2:], kernel, stride, padding))
        return self.run(value, shape=shape, saves=[value, Value(shape, _INT64, has_gradient=False)])

    def mean(self, value: Value) -> Value:
        """(batch, channels, height, width) to (batch, channels, 1, 1)."""
        return self.run(value, shape=(*value.shape[:2], 1, 1))

    def rotate(self, *heads: Value) -> list[Value]:
        """Rotary positions: computed in fp32, with angles that are kept."""
        angles = Value((heads[0].shape[-2], heads[0].shape[-1]), _FP32, has_gradient=False)
        wide = [self.cast(each, _FP32) for each in heads]
        # products, sums and a copy, one after the other
        self.moved_bytes += 5 * sum(each.num_bytes for each in wide)
        halves = [self.run(each, shape=each.shape, saves=[angles]) for each in wide]
        return [self.cast(self.run(each, shape=each.shape), heads[0].width) for each in halves]

    def attention(
        self,
        query: Value,
        key: Value,
        value: Value,
        *,
        dropout: float,
        mask: Value | None = None,
        is_causal: bool = False,
    ) -> Value:
        """(batch, heads, sequence, head size), with fewer heads of key and value, to the shape of
        the query.
        """
        batch, heads, length, size = query.shape
        flops = 4 * batch * heads * length * length * size
        saves = [query, key, value]
        if mask is None:
            bias = []
        else:
            bias = [Value(mask.shape, query.width, has_gradient=False)]
        if self.device == "cuda" or not dropout:  # fused: keeps its output, and a sum for each row
            self.masked_flops += masked(flops, length) if is_causal else 0
            sums = Value((batch, heads, length), _FP32, has_gradient=False)
            made = self.run(*saves, shape=query.shape, saves=[*saves, sums, *bias], flops=flops)
            return self.save_output(made)
        # Without dropout alone it is fused on processors; else in steps, in fp32, of which each
        # keeps its inputs.
        wide = [self.cast(each, _FP32) for each in (query, key, value)]
        copies = [self.run(each, shape=query.shape) for each in wide]
        square = (batch, heads, length, length)
        scores = self.run(*copies[:2], shape=square, saves=copies[:2], flops=flops // 2)
        weights = self.relu(scores)
        noise = Value(square, _FP32, has_gradient=False)
        dropped = self.run(weights, shape=square, saves=[noise])
        kept = [dropped, copies[2]]
        mixed = self.run(
            *kept, shape=query.shape, saves=kept, flops=flops // 2, holds=[*wide, *copies[:2]]
        )
        return self.run(self.cast(mixed, query.width), shape=query.shape)

    def cross_entropy(self, logits: Value, targets: Value) -> Value:
        """Logits (samples, classes) and class numbers to a sum, in fp32; of divided logits
        probabilities are kept, and become the gradient (`models.split`).
        """
        if logits.is_split:
            kept = Value(logits.shape, _FP32)
            instead = -kept.num_bytes if logits.width == _FP32 else 0
            return self.run(logits, shape=(), saves=[kept, targets], temporary=instead)
        return self.run(self.relu(self.cast(logits, _FP32)), shape=(), saves=[targets])

    def tiled_loss(self, value: Value, outputs: int, tile: int) -> Value:
        """(..., inputs) to the loss of so many logits of each position, 0-d, by tiles
        (`models.tiled_loss`): what is kept are gradients of the inputs and, in fp32, of the weight.
        """
        weight = (outputs, value.shape[-1])
        rows = prod(value.shape[:-1])
        is_trained = self.own(weight)
        is_half = self.product_width < _FP32
        flows = value.has_gradient
        filled = outputs + is_half * (-outputs % HALF_ROWS), weight[1]
        value = self.cast(value, self.product_width)
        work = rows * prod(weight)
        of_rows = Value((rows, weight[1]), value.width)
        of_weight = Value(filled, _FP32)
        made = partial(self.run, has_gradient=False)
        before = self.moved_bytes
        copies = [made(value, shape=weight)] * (self.product_width < self.weight_width)
        copies += [made(value, shape=filled)] * (filled != weight)
        logits = made(value, shape=(tile, filled[0]), flops=work)
        if is_half:
            # Processors convert numbers of two kinds before they meet.
            converted = [made(logits, shape=logits.shape, width=_FP32)] * (self.device == "cpu")
            exponentials = made(logits, *converted, shape=logits.shape, width=_FP32)
            logits = made(exponentials, logits, *converted, shape=logits.shape, width=value.width)
        product = [made(logits, shape=filled)] * (is_half and is_trained)
        # Of every logit largest, difference, exponential, sum and gradient; of each tile the sum of
        # the weight's gradient. Half of it: a backward pass is taken to move as much again, and
        # here there is none.
        moved = rows * filled[0] * (26 if is_half else 32)
        moved += ceil(rows / tile) * 10 * prod(filled) * (is_half and is_trained)
        self.moved_bytes = before + moved // 2
        return self.run(
            *(value, logits, *product, *copies),
            shape=(),
            width=_FP32,
            saves=[of_rows] * flows + [of_weight] * is_trained,
            flops=work,
            temporary=prod(filled) * value.width * (is_half and is_trained)
            - of_rows.num_bytes * flows,
            has_gradient=flows or is_trained,
        )


def masked(flops: int, length: int) -> int:
    """Operations of causal attention that fused kernels leave out."""
    return flops * (length - 1) // (2 * length)


def convolved(sizes: Shape, kernel: int, stride: int, padding: int) -> Shape:
    """Height and width after a convolution or pooling."""
    return tuple((size + 2 * padding - kernel) // stride + 1 for size in sizes)
