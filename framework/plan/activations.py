"""Bytes that values take in the forward and backward pass of a micro-batch. The fullest moment
depends on what else is there, so all moments that may be the fullest are listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from framework.plan.work import LayerWork

# Tensors on their way to the host or back (`models.host_activations`).
_WINDOW: Final = 2


@dataclass(frozen=True)
class Moment:
    """A moment of a pass.

    Attributes:
        activations: bytes that autograd has saved, and that the part at work takes.
        loss: bytes of logits and loss.
        gradients: elements of the weights that have a gradient by then.
        own: elements of the weights of the part at work: it makes their gradients.
        waiting: the part of `gradients` that an earlier layer still adds to.
        beside: the part of `own` that is made while nothing of the part is freed.
    """

    activations: int
    loss: int = 0
    gradients: int = 0
    own: int = 0
    waiting: int = 0
    beside: int = 0


@dataclass(frozen=True)
class Passes:
    """Moments of the forward and of the backward pass over the layers of one rank.

    Attributes:
        forward, backward: moments that may be the fullest.
        kept_bytes: what one micro-batch leaves for its backward pass.
        host_bytes: what it leaves in host memory.
    """

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    kept_bytes: int
    host_bytes: int = 0


def passes_over(
    layers: Sequence[LayerWork],
    loss: LayerWork | None,
    *,
    recompute_every: int = 0,
    keeps_products: bool = False,
    offloads: bool = False,
) -> Passes:
    """Find the moments of both passes of a micro-batch that may be the fullest.

    Args:
        layers: of the rank, each by itself.
        loss: None if it is on another rank.
        recompute_every: layers of a group that keeps only its input and runs again in the backward
            pass; 0: none.
        keeps_products: whether such a group keeps the outputs of its products, too.
        offloads: whether what autograd saves of the layers is held in host memory.
    """
    if not layers:
        return Passes((Moment(0),), (Moment(0),), 0)
    host_bytes = 0
    if offloads:
        host_bytes = _leaving_bytes(layers, recompute_every)
        if not recompute_every:
            layers = _on_host(layers)
    rank = _Layers(layers, loss, recompute_every, keeps_products=keeps_products, offloads=offloads)
    return Passes(tuple(rank.forward()), tuple(rank.backward()), rank.kept_bytes, host_bytes)


def _leaving_bytes(layers: Sequence[LayerWork], recompute_every: int) -> int:
    """Return the bytes that a micro-batch leaves in host memory: inputs of groups that run again,
    if they save anything, or else all that is saved. A loss by tiles keeps its gradients on the
    device.
    """
    if recompute_every:
        num_bytes = 0
        for start in range(recompute_every, len(layers), recompute_every):
            group = layers[start : start + recompute_every]
            if any(layer.saved_bytes for layer in group):
                num_bytes += layers[start - 1].output_bytes
        return num_bytes
    return sum(layer.saved_bytes for layer in layers[:-1])


def _on_host(layers: Sequence[LayerWork]) -> list[LayerWork]:
    """Return the layers with what they save on the host, but for the tensors on their way; the last
    one, which makes the logits, as it is.
    """
    moved = []
    for layer in layers[:-1]:
        moved.append(
            replace(
                layer,
                saved_bytes=0,
                input_bytes=0,
                peak_bytes=layer.passing_bytes + _WINDOW * layer.widest_bytes,
                backward_bytes=layer.gradient_bytes + (_WINDOW + 1) * layer.widest_bytes,
            )
        )
    return [*moved, layers[-1]]


class _Layers:
    """Layers of a rank, in groups that are recomputed together; without recomputation in one."""

    def __init__(
        self,
        layers: Sequence[LayerWork],
        loss: LayerWork | None,
        recompute_every: int,
        *,
        keeps_products: bool = False,
        offloads: bool = False,
    ) -> None:
        size = recompute_every or len(layers)
        self.layers = layers
        self.loss = loss
        # Bytes of the outputs of products that each layer keeps when it is recomputed.
        self.product_bytes = [0 for _ in layers]
        if keeps_products:
            self.product_bytes = [layer.product_bytes for layer in layers]
            if loss is not None:  # the last layer's outputs are the model's, and are not kept
                self.product_bytes[-1] = 0
        self.recomputes = recompute_every > 0
        self.starts = range(0, len(layers), size)  # first layer of each group
        self.groups = [layers[start : start + size] for start in self.starts]
        self.products = [sum(self.product_bytes[start : start + size]) for start in self.starts]
        # Bytes of the inputs of all groups up to and with each one, or of those that are not on the
        # host, and of the products of the groups before it.
        inputs = [self.input_bytes(start) for start in self.starts]
        held_inputs = list(accumulate(inputs))
        if offloads:
            numbers = range(len(inputs))
            held_inputs = [sum(inputs[max(n - _WINDOW, 0) : n + 1]) for n in numbers]
        products_before = accumulate(self.products[:-1], initial=0)
        self.held = [sum(pair) for pair in zip(held_inputs, products_before, strict=True)]

    def input_bytes(self, index: int) -> int:
        """Return the bytes of a layer's input: the output of the layer before on this rank."""
        if index == 0:
            return 0
        return self.layers[index - 1].output_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that a micro-batch leaves for its backward pass."""
        if self.recomputes:
            return self.held[-1] + self.products[-1]
        return sum(layer.saved_bytes for layer in self.layers)

    def saved(self, number: int) -> list[int]:
        """Return the bytes saved before each layer of a group runs, and after its last one."""
        before = self.held[number]
        if number > 0:  # the saved bytes of the group's first layer count its input again
            before -= self.groups[number][0].input_bytes
        return list(
            accumulate((layer.saved_bytes for layer in self.groups[number]), initial=before)
        )

    def makes_logits(self, index: int) -> bool:
        """Check whether a layer is the model's last one."""
        return self.loss is not None and index == len(self.layers) - 1

    def forward(self) -> Iterator[Moment]:
        """Yield the moments of the forward pass, from its end on."""
        if self.loss is not None:
            yield Moment(self.kept_bytes, self.loss.saved_bytes + self.loss.peak_bytes)
        for number in reversed(range(len(self.groups))):
            saved = self.saved(number)
            products = self.products[number]
            for place, layer in reversed(list(enumerate(self.groups[number]))):
                index = self.starts[number] + place
                is_logits = self.makes_logits(index)
                if not self.recomputes:
                    yield _moment(saved[place + 1], layer.peak_bytes, 0, is_logits)
                    continue
                own_products = self.product_bytes[index]
                products -= own_products
                passing = layer.selective_bytes if own_products else layer.passing_bytes
                if place == 0:  # the group's input is held
                    passing -= self.input_bytes(index)
                yield _moment(self.held[number] + products, passing, 0, is_logits)

    def backward(self) -> Iterator[Moment]:
        """Yield the moments of the backward pass."""
        if self.loss is not None:
            yield Moment(self.kept_bytes, self.loss.saved_bytes + self.loss.backward_bytes)
        names = {layer.name for layer in self.layers}
        num_done = 0  # elements of the weights of later layers, which have their gradients
        ties = dict[str, int]()  # earlier layer -> elements of its weight that wait for it
        for number in reversed(range(len(self.groups))):
            saved = self.saved(number)
            before_group = num_done
            later_products = 0  # of the layers of the group that have not run again
            for place, layer in reversed(list(enumerate(self.groups[number]))):
                index = self.starts[number] + place
                if self.recomputes:
                    again = self.running_again(number, place) + later_products
                    later_products += self.product_bytes[index]
                    is_logits = self.makes_logits(index)
                    yield _moment(saved[place + 1], again, before_group, is_logits)
                is_tied = layer.shares in names
                num_own = layer.num_params + layer.shared_params
                yield _moment(
                    saved[place + 1],
                    layer.backward_bytes,
                    num_done,
                    self.makes_logits(index),
                    own=layer.num_params if is_tied else num_own,
                    waiting=sum(ties.values()),
                    beside=num_own if layer.is_product else 0,
                )
                if is_tied:
                    ties[layer.shares] = layer.shared_params
                ties.pop(layer.name, None)
                num_done += num_own
                yield Moment(
                    saved[place] + self.input_bytes(index),
                    gradients=num_done,
                    waiting=sum(ties.values()),
                )

    def running_again(self, number: int, place: int) -> int:
        """Return the bytes that a layer takes when its group runs again in the backward pass."""
        group = self.groups[number]
        layer = group[place]
        running = layer.peak_bytes + group[-1].output_bytes
        if place == 0 and not layer.input_bytes:  # the group's input is held
            running -= self.input_bytes(self.starts[number])
        return running


def _moment(
    saved: int,
    passing: int,
    gradients: int,
    is_logits: bool,
    own: int = 0,
    waiting: int = 0,
    beside: int = 0,
) -> Moment:
    """Make a moment; `passing`, the bytes of the layer at work, are logits in the last layer."""
    activations = saved
    loss = 0
    if is_logits:
        loss = passing
    else:
        activations += passing
    return Moment(activations, loss, gradients, own, waiting, beside)
