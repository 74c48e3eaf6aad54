"""Bytes that all parts of a model save, in sum."""

from __future__ import annotations

from framework.plan.work import ModelWork


def saved_bytes(work: ModelWork, recompute_every: int = 0) -> int:
    """Bytes that are kept for the backward pass, at the fullest moment.

    Args:
        work: of one micro-batch.
        recompute_every: layers of a group that keeps only its input and runs again in the backward
            pass; 0: none.

    Returns:
        Everything that is saved; with recomputation the inputs of the groups up to the fullest one,
        and what that one saves when it has run again. The loss belongs to no group.
    """
    *layers, loss = work.layers
    if not recompute_every:
        return sum(part.saved_bytes for part in (*layers, loss))
    inputs, most = 0, 0
    for start in range(0, len(layers), recompute_every):
        group = layers[start : start + recompute_every]
        inputs += layers[start - 1].output_bytes if start else 0
        own = sum(part.saved_bytes for part in group) - (group[0].input_bytes if start else 0)
        is_last = start + recompute_every >= len(layers)
        most = max(most, inputs + own + (loss.saved_bytes if is_last else 0))
    return most
