"""Bytes that values take in the forward and backward pass of a micro-batch: at which moment they
are most depends on what else is there, so all moments that may be the fullest are listed.
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
        gradients: elements of the weights whose gradients are there.
        waiting: those of `gradients` that wait for what an earlier layer adds to them.
        beside: those of `own` that are made while nothing of the part has gone.
        own: elements of the weights of the part at work, whose gradients it makes.
    """

    activations: int
    loss: int = 0
    gradients: int = 0
    own: int = 0
    waiting: int = 0
    beside: int = 0


@dataclass(frozen=True)
class Passes:
    """Moments of the forward and of the backward pass over the layers of one rank; `kept_bytes`:
    what one micro-batch leaves for its backward pass.
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
        loss: where the rank has it.
        recompute_every: layers of a group that keeps only its input and runs again in the backward
            pass; 0: none.
    """
    every = recompute_every or len(layers)
    if not layers:
        return Passes((Moment(0),), (Moment(0),), 0)
    groups = [layers[start : start + every] for start in range(0, len(layers), every)]
    outputs = [0, *(layer.output_bytes for layer in layers)]  # of the layer before
    held = list(accumulate(outputs[::every][: len(groups)]))  # inputs of the groups up to each one
    if recompute_every:
        kept = held[-1]
    else:
        kept = sum(layer.saved_bytes for layer in layers)
    forward = []
    backward = []
    behind = 0
    names = {layer.name for layer in layers}
    ties = dict[str, int]()
    if loss is not None:
        forward = [Moment(kept, loss.saved_bytes + loss.peak_bytes)]
        backward = [Moment(kept, loss.saved_bytes + loss.backward_bytes)]
    for number in reversed(range(len(groups))):
        group = groups[number]
        reduced = behind
        beside = held[number] - (group[0].input_bytes if number else 0)
        saved = list(accumulate((layer.saved_bytes for layer in group), initial=beside))
        for place in reversed(range(len(group))):
            layer = group[place]
            before = outputs[number * every + place]
            is_last = loss is not None and number * every + place == len(layers) - 1
            here = saved[place + 1]
            own = layer.num_params + layer.shared_params
            if recompute_every:
                forward.append(
                    _moment(
                        held[number], layer.passing_bytes - (0 if place else before), 0, is_last
                    )
                )
                beside_held = layer.peak_bytes - (0 if place or layer.input_bytes else before)
                backward.append(
                    _moment(here, beside_held + group[-1].output_bytes, reduced, is_last)
                )
            else:
                forward.append(_moment(here, layer.peak_bytes, 0, is_last))
            beside = own if layer.is_product else 0
            # a tied weight's gradient waits
            reduced_now = layer.num_params if layer.shares in names else own
            waiting = sum(ties.values())
            backward.append(
                _moment(here, layer.backward_bytes, behind, is_last, reduced_now, waiting, beside)
            )
            if layer.shares in names:
                ties[layer.shares] = layer.shared_params
            ties.pop(layer.name, None)
            behind += own
            backward.append(
                _moment(saved[place], before, behind, is_logits=False, waiting=sum(ties.values()))
            )
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
    """Count the last layer's output as logits."""
    activations, loss = (saved, passing) if is_logits else (saved + passing, 0)
    return Moment(activations, loss, gradients, own, waiting, beside)
