"""Figures of every part of a traced model, from the records of its operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from framework.plan.work import LayerWork
from framework.setup.trace_ledger import Ledger, Record


def layer_works(ledger: Ledger, model: nn.Module) -> Iterator[LayerWork]:
    """Yield the figures of every part; weights that no part has count for the first record."""
    sizes = {id(weight): weight.numel() for weight in model.parameters() if weight.requires_grad}
    first_part_of: dict[int, str] = {}  # of each weight that a part before this one has
    saved_bytes = 0
    for number, record in enumerate(ledger.records):
        if number == 0:
            weight_ids = _ids_outside_parts(ledger, model)
            if not weight_ids and not any(record.figures.values()):
                continue  # nothing runs before the first part
        else:
            weight_ids = _weight_ids(record.module)
        new_ids, shared_ids = _split_ids(weight_ids, sizes, first_part_of)
        saved_bytes += record.figures["saved"]
        name = record.name
        if shared_ids and not new_ids:  # several parts of this name have these weights
            name += f"-{number}"
        shares = ""
        if shared_ids:
            shares = first_part_of[shared_ids[0]]
        yield _layer_work(
            record,
            name,
            saved_bytes,
            num_params=sum(map(sizes.__getitem__, new_ids)),
            shared_params=sum(map(sizes.__getitem__, shared_ids)),
            shares=shares,
        )
        first_part_of |= dict.fromkeys(new_ids, record.name)


def _split_ids(
    weight_ids: Iterable[int], sizes: Mapping[int, int], first_part_of: Mapping[int, str]
) -> tuple[list[int], list[int]]:
    """Return the trained weights of a part that no part before it has, and the others."""
    new_ids = []
    shared_ids = []
    for key in weight_ids:
        if key in first_part_of:
            shared_ids.append(key)
        elif key in sizes:
            new_ids.append(key)
    return new_ids, shared_ids


def _ids_outside_parts(ledger: Ledger, model: nn.Module) -> list[int]:
    """Return the ids of the model's weights that no part has."""
    ids_in_parts: set[int] = set()
    for record in ledger.records:
        ids_in_parts.update(_weight_ids(record.module))
    return [key for key in _weight_ids(model) if key not in ids_in_parts]


def _layer_work(
    record: Record,
    name: str,
    saved_bytes: int,
    *,
    num_params: int,
    shared_params: int,
    shares: str,
) -> LayerWork:
    """Return the figures of a part; `saved_bytes`: of all parts up to this one."""
    figures = record.figures
    forward_bytes = max(record.peak_bytes["forward"] - saved_bytes, 0)
    return LayerWork(
        name,
        num_params=num_params,
        flops=figures["flops"],
        masked_flops=figures["masked"],
        score_flops=figures["scores"],
        num_operations=figures["operations"],
        frozen_flops=figures["frozen"],
        frozen_score_flops=figures["frozen_scores"],
        moved_bytes=figures["moved"],
        saved_bytes=figures["saved"],
        split_bytes=0,
        peak_bytes=forward_bytes,
        output_bytes=figures["output"],
        input_bytes=figures["input"],
        backward_bytes=max(record.peak_bytes["backward"] - saved_bytes, 0),
        passing_bytes=forward_bytes + figures["saved"],
        product_bytes=figures["products"],
        selective_bytes=forward_bytes + figures["saved"],
        gradient_bytes=max(record.peak_bytes["backward"] - saved_bytes, 0) + figures["saved"],
        widest_bytes=figures["widest"],
        shared_params=shared_params,
        shares=shares,
    )


def _weight_ids(module: nn.Module | None) -> list[int]:
    if module is None:
        return []
    return [id(weight) for weight in module.parameters()]
