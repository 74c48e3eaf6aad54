"""Operations on tensors without numbers, written down one after the other: what they compute and
move, what autograd saves of them, and what is alive at most meanwhile. Without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Literal

from framework.config.training import LoRA

Shape = tuple[int, ...]


@dataclass(eq=False)
class Value:
    """A tensor without numbers.

    Attributes:
        shape: sizes of its dimensions.
        width: bytes of an element.
        has_gradient: whether a gradient flows back to it.
        of: the tensor that this one is a view of; None: it has memory of its own.
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
        if self.of is None:
            return self
        return self.of.storage

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.width

    def with_more(self, *sizes: int) -> Shape:
        """Return its shape with further dimensions."""
        return self.shape + sizes

    def with_last(self, size: int) -> Shape:
        """Return its shape with another last dimension."""
        return (*self.shape[:-1], size)

    def view(self, *shape: int) -> Value:
        """Return a view of the same memory in another shape, or of a part of it."""
        return Value(shape, self.width, self.has_gradient, self, self.is_split)


@dataclass
class Operation:
    """One operation of a recording.

    Attributes:
        reads: values that it takes.
        made: the value that it returns.
        saves: values that autograd saves for its backward pass.
        temporary: bytes that its backward pass takes beside gradients.
        passes: whether its gradient is passed on unchanged.
        holds: values that are still alive, though nothing reads them later.
    """

    reads: tuple[Value, ...]
    made: Value
    saves: tuple[Value, ...]
    temporary: int
    passes: bool
    holds: tuple[Value, ...]

    def storages(self) -> set[Value]:
        """Return the tensors that it reads, makes and saves."""
        values = chain(self.reads, [self.made], self.saves)
        return {value.storage for value in values}


@dataclass
class Recording:
    """Operations of one part of a model, which `start` begins; counts are of that part.

    Attributes:
        weight_width: bytes of a weight's element.
        product_width: bytes of an element in matrix products and convolutions; less than
            `weight_width` with autocast.
        device: what it runs on.
        rounded_widths: bytes that an element of the first and of the second operand of a linear
            layer in a block takes beside the operand while it is rounded to fp8 and multiplied;
            None: none are rounded.
        is_trained: whether a weight of that name has a gradient.
        keeps_inputs: whether linear layers keep their inputs as they are, and no copy of a weight:
            DeepSpeed's do at ZeRO stage 3.
        saved: what parts up to here have saved.
        weights: name -> shape of all weights up to here, in the model's order, shared ones once.
        prefix: of the names of the part's weights.
        flops: operations of its matrix products and convolutions.
        masked_flops: the part of `flops` that fused kernels of causal attention leave out.
        moved_bytes: bytes that all its other operations read and write.
        frozen_flops: operations that the backward pass leaves out, of twice `flops`: gradients of
            weights that are not trained, and of inputs that nothing trained comes before.
        score_flops: the part of `flops` of products without a weight, such as the scores of
            attention, without masked ones.
        frozen_score_flops: the part of `frozen_flops` of such products.
        again_flops: the part of `flops` that runs again in the backward pass in any case.
        again_bytes: bytes that other operations move in the backward pass for it.
        products: matrix products and convolutions of the part.
        count: equal linear layers that one operation stands for, each on its own rows.
        lora: which modules have adapters; None: none have.
        buffer_bytes: bytes of what is kept beside weights: the statistics of batch norms, fp32, and
            their counts, int64.
        along_bytes: bytes of what goes along with the output of a layer to the next one, such as
            positions; a layer sets them for itself and for those after it.
    """

    weight_width: int
    product_width: int
    device: Literal["cpu", "cuda"]
    is_trained: Callable[[str], bool] = lambda name: True
    keeps_inputs: bool = False
    lora: LoRA | None = None
    rounded_widths: tuple[int, int] | None = None
    saved: set[Value] = field(default_factory=set)
    weights: dict[str, Shape] = field(default_factory=dict)
    buffer_bytes: int = 0
    along_bytes: int = 0
    prefix: str = ""
    count: int = 1
    flops: int = 0
    masked_flops: int = 0
    moved_bytes: int = 0
    frozen_flops: int = 0
    score_flops: int = 0
    frozen_score_flops: int = 0
    again_flops: int = 0
    again_bytes: int = 0
    products: int = 0
    _new: list[Value] = field(default_factory=list)
    _of_products: set[Value] = field(default_factory=set)
    _operations: list[Operation] = field(default_factory=list)
    _turns: Value | None = None

    def start(self, prefix: str) -> None:
        """Begin a part; the names of its weights begin with the prefix."""
        self.prefix = prefix
        self.flops = 0
        self.masked_flops = 0
        self.moved_bytes = 0
        self.frozen_flops = 0
        self.score_flops = 0
        self.frozen_score_flops = 0
        self.again_flops = 0
        self.again_bytes = 0
        self.products = 0
        self._new = []
        self._of_products = set()
        self._operations = []

    @property
    def num_operations(self) -> int:
        """Operations that the host starts for the part."""
        return len(self._operations)

    @property
    def saved_bytes(self) -> int:
        """Bytes that the part saves, and none before it."""
        return sum(value.num_bytes for value in self._new)

    @property
    def split_bytes(self) -> int:
        """Those of `saved_bytes` that tensor parallelism divides."""
        return sum(value.num_bytes for value in self._new if value.is_split)

    @property
    def product_bytes(self) -> int:
        """Bytes of the outputs of the part's products, which selective recomputation keeps."""
        return total_bytes(self._of_products)

    @property
    def widest_bytes(self) -> int:
        """Bytes of the largest tensor that the part saves, and none before it."""
        return max((value.num_bytes for value in self._new), default=0)

    def note_product(self, *made: Value) -> None:
        """Count the outputs of the last operation as a product's (`models.kept_products`)."""
        self._of_products.update(value.storage for value in made)

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
        """Record an operation and return the value that it makes.

        Args:
            reads: values that it takes.
            shape: of what it makes.
            width: bytes of an element of what it makes; 0: as of the first value that it takes.
            saves: values that autograd saves, if a gradient flows.
            flops: floating-point operations; 0: it counts by the bytes that it moves.
            temporary: bytes that its backward pass takes beside gradients.
            has_gradient: whether a gradient flows; None: if one flows to a value that it takes.
            passes: whether its gradient is passed on unchanged.
            is_split: whether tensor parallelism divides it; None: if a value that it takes is.
            holds: values that are still alive, though nothing reads them later.
        """
        if has_gradient is None:
            has_gradient = any(value.has_gradient for value in reads)
        if is_split is None:
            is_split = any(value.is_split for value in reads)
        made = Value(shape, width or reads[0].width, has_gradient, is_split=is_split)
        saved = tuple(saves) if has_gradient else ()
        self._save(saved)
        self._operations.append(Operation(reads, made, saved, temporary, passes, tuple(holds)))
        if flops:
            self.flops += flops
            self.products += 1
        else:
            beside = set(saves) - set(reads)
            self.moved_bytes += total_bytes(reads) + made.num_bytes + total_bytes(beside)
        return made

    def _save(self, saves: Sequence[Value]) -> None:
        for value in saves:
            storage = value.storage
            if storage not in self.saved:
                self.saved.add(storage)
                self._new.append(storage)

    def save_output(self, made: Value) -> Value:
        """Let the last operation save what it made, too."""
        operation = self._operations[-1]
        if made.has_gradient:
            operation.saves = (*operation.saves, made)
            self._save([made])
        return made

    def forward_bytes(
        self, ends: Sequence[Value], *, keeps: bool = True, keeps_products: bool = False
    ) -> int:
        """Return the bytes at the fullest moment of the forward pass, beside what the part saves.

        Args:
            ends: what the part is given and what it returns: it stays.
            keeps: whether the pass saves values for a backward pass.
            keeps_products: whether a pass that saves none keeps the outputs of products; they
                count.
        """
        last_use = self._last_uses()
        stays = {end.storage for end in ends}
        kept = self.saved if keeps else set[Value]()
        if keeps_products:
            stays |= self._of_products
        kept_before = kept.difference(self._new)
        live = set[Value]()
        most = 0
        for number, operation in enumerate(self._operations):
            live |= operation.storages()
            most = max(most, total_bytes(live - kept_before))
            for value in live - kept - stays:
                if last_use.get(value, number) <= number:
                    live.remove(value)
        if keeps:
            return most - self.saved_bytes
        return most

    def _last_uses(self) -> dict[Value, int]:
        """Map each tensor to the last operation that needs it in the forward pass."""
        last_use: dict[Value, int] = {}
        for number, operation in enumerate(self._operations):
            for value in chain(operation.reads, [operation.made], operation.holds):
                last_use[value.storage] = number
        return last_use

    def backward_bytes(self, outputs: Sequence[Value], *, keeps: bool = True) -> int:
        """Return the bytes at the fullest moment of the backward pass, beside what the part has
        saved: gradients of values, without gradients of weights.

        `keeps`: what the part has saved is in this memory until it was read; else only gradients
        count.
        """
        first_save = self._first_saves()
        gradients = _output_gradients(outputs)
        saved = self.saved_bytes if keeps else 0
        before = saved
        most = saved + sum(gradients.values())
        for number in reversed(range(len(self._operations))):
            operation = self._operations[number]
            inputs = []
            if operation.made.storage in gradients:
                inputs = [value for value in operation.reads if value.has_gradient]
            output_gradient = gradients.pop(operation.made.storage, 0)
            made = 0 if operation.passes else total_bytes(inputs)
            here = saved + sum(gradients.values()) + output_gradient + made
            most = max(most, here + operation.temporary)
            sizes = _sizes_of_gradients(inputs, output_gradient, passes=operation.passes)
            for value, size in zip(inputs, sizes, strict=True):
                gradients[value.storage] = max(gradients.get(value.storage, 0), size)
            if keeps:
                saved -= total_bytes([value for value in self._new if first_save[value] == number])
        return most - before

    def _first_saves(self) -> dict[Value, int]:
        """Map each tensor that is saved to the first operation that saves it."""
        first_save: dict[Value, int] = {}
        for number, operation in enumerate(self._operations):
            for value in operation.saves:
                first_save.setdefault(value.storage, number)
        return first_save


def _output_gradients(outputs: Iterable[Value]) -> dict[Value, int]:
    """Map each tensor that a part returns to the bytes of its gradient."""
    gradients = {}
    for output in outputs:
        gradients[output.storage] = output.num_bytes if output.has_gradient else 0
    return gradients


def _sizes_of_gradients(
    inputs: Sequence[Value], output_gradient: int, *, passes: bool
) -> list[int]:
    """List the bytes of each input's gradient; one that is passed on stands for all inputs."""
    if not passes:
        return [value.num_bytes for value in inputs]
    return [output_gradient if value is inputs[0] else 0 for value in inputs]


def total_bytes(values: Iterable[Value]) -> int:
    return sum(value.num_bytes for value in values)
