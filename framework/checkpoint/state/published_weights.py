"""Weights of transformers' models as ours, and ours as theirs: renamed, joined and transposed when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from framework.checkpoint.published import Form, Joined
from framework.checkpoint.state.shard_map import Stored
from framework.checkpoint.state.weight_files import LazyWeights


def as_ours(found: LazyWeights, form: Form) -> LazyWeights:
    """What is found under their names, under ours; names that are neither's stay, to be refused, and further names of
    one weight go. A vocabulary that ours exceeds gets the mean of its rows for the others, as transformers does it; of
    more positions than ours has the first are taken. Heads that are not there are in `may_lack`.
    """
    held = form.plain_names(found)
    missing, extra = form.missing_and_extra(found)
    shapes, read = {}, {}
    for name in extra:
        first = held.get(form.table["ties"].get(name, ""))
        if first is None or not torch.equal(found[name], found[first]):
            shapes[name], read[name] = found.shapes[name], partial(found.__getitem__, name)
    for one in form.weights.values():
        if one.theirs not in held:
            continue
        name, rows = held[one.theirs], getattr(form.model, one.rows) if one.rows else None
        whole = found.shapes[name]
        shape = torch.Size(reversed(whole)) if one.transposed else whole
        for number, ours in enumerate(one.ours):
            num_rows = _num_rows(one, shape[0] // len(one.ours), rows)
            shapes[ours] = torch.Size((num_rows, *shape[1:]))
            read[ours] = partial(_part, found, name, one, number, num_rows)
    names = (ours for one in missing if form.is_head(one) for ours in one.ours)
    return LazyWeights(shapes, read, may_lack=frozenset(names))


def as_theirs(
    held: Mapping[str, torch.Tensor], stored: Mapping[str, Stored | torch.Tensor], form: Form
) -> tuple[LazyWeights, dict[str, torch.Tensor]]:
    """Ours under their names; and the same without numbers, for what is known of them before they are read."""
    described = {}
    for theirs, one in form.weights.items():
        first = stored[one.ours[0]]
        rows = sum(stored[name].shape[0] for name in one.ours)
        shape = (rows, *first.shape[1:])
        described[theirs] = torch.empty(shape[::-1] if one.transposed else shape, dtype=first.dtype, device="meta")
    shapes = {name: tensor.shape for name, tensor in described.items()}
    return LazyWeights(shapes, {name: partial(_whole, held, one) for name, one in form.weights.items()}), described


def _num_rows(one: Joined, there: int, wanted: int | None) -> int:
    """A token that ours has not, and a position that theirs has not, are left to be refused."""
    if wanted is None:
        return there
    return max(there, wanted) if one.rows == "vocab_size" else min(there, wanted)


def _part(found: LazyWeights, name: str, one: Joined, number: int, rows: int) -> torch.Tensor:
    whole = found[name].T if one.transposed else found[name]
    if (more := rows - len(whole)) > 0:
        mean = whole.float().mean(0, keepdim=True).to(whole.dtype)
        return torch.cat((whole, mean.expand(more, *whole.shape[1:])))
    return whole.narrow(0, number * rows, rows).contiguous()


def _whole(held: Mapping[str, torch.Tensor], one: Joined) -> torch.Tensor:
    joined = torch.cat([held[name] for name in one.ours]) if one.ours[1:] else held[one.ours[0]]
    return joined.T if one.transposed else joined
