"""Bytes that values take in the forward and backward pass of a micro-batch. The fullest moment
depends on what else is there, so all moments that may be the fullest are listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from framework.plan.work import LayerWork


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
    """

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    kept_bytes: int


def passes_over(
    layers: Sequence[LayerWork], loss: LayerWork | None, *, recompute_every: int = 0
) -> Passes:
    """List the moments that may be the fullest.

    Args:
        layers: of the rank, each by itself.
        loss: None if it is on another rank.
        recompute_every: layers of a group that keeps only its input and runs again in the backward
            pass; 0: none.
    """
    every = recompute_every or len(layers)
    if not layers:
        return Passes((Moment(0),), (Moment(0),), 0)
    groups = [layers[start : start + every] for start in range(0, len(layers), every)]
    input_bytes = [0]  # of each layer: the output of the layer before
    input_bytes += [layer.output_bytes for layer in layers]
    held = list(accumulate(input_bytes[::every][: len(groups)]))  # by the groups up to each one
    if recompute_every:
        kept = held[-1]
    else:
        kept = sum(layer.saved_bytes for layer in layers)
    forward = []
    backward = []
    num_done = 0  # elements of the weights of later layers, which have their gradients
    names = {layer.name for layer in layers}
    ties = dict[str, int]()  # earlier layer -> elements that it adds to
    if loss is not None:
        forward = [Moment(kept, loss.saved_bytes + loss.peak_bytes)]
        backward = [Moment(kept, loss.saved_bytes + loss.backward_bytes)]
    for number in reversed(range(len(groups))):
        group = groups[number]
        done_before_group = num_done
        held_here = held[number]
        if number:
            held_here -= group[0].input_bytes
        saved = list(accumulate((layer.saved_bytes for layer in group), initial=held_here))
        for place in reversed(range(len(group))):
            layer = group[place]
            layer_input = input_bytes[number * every + place]
            is_last = loss is not None and number * every + place == len(layers) - 1
            here = saved[place + 1]
            if recompute_every:
                passing = layer.passing_bytes
                running_again = layer.peak_bytes + group[-1].output_bytes
                if place == 0:  # the group's input is counted as held
                    passing -= layer_input
                    if not layer.input_bytes:
                        running_again -= layer_input
                forward.append(_moment(held[number], passing, 0, is_last))
                backward.append(_moment(here, running_again, done_before_group, is_last))
            else:
                forward.append(_moment(here, layer.peak_bytes, 0, is_last))
            num_own = layer.num_params + layer.shared_params
            backward.append(
                _moment(
                    here,
                    layer.backward_bytes,
                    num_done,
                    is_last,
                    # a tied weight's gradient waits
                    own=layer.num_params if layer.shares in names else num_own,
                    waiting=sum(ties.values()),
                    beside=num_own if layer.is_product else 0,
                )
            )
            if layer.shares in names:
                ties[layer.shares] = layer.shared_params
            ties.pop(layer.name, None)
            num_done += num_own
            waiting = sum(ties.values())
            backward.append(_moment(saved[place], layer_input, num_done, False, waiting=waiting))
    return Passes(tuple(forward), tuple(backward), kept)


def _moment(
    saved: int,
    passing: int,
    gradients: int,
    is_logits: bool,
    own: int = 0,
    waiting: int = 0,
    beside: int = 0,
) -> Moment:
    """Make a moment; what passes through the last layer is counted as logits."""
    activations = saved
    loss = 0
    if is_logits:
        loss = passing
    else:
        activations += passing
    return Moment(activations, loss, gradients, own, waiting, beside)
