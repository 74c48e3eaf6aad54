"""What an optimizer at stage 0 steps is told by shapes and order, or not told at all: with torch's
own optimizers.
"""

from __future__ import annotations

from typing import Any

import torch

from framework.checkpoint.state.stage0_names import names_by_shape


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 4)
    )


def content(module: torch.nn.Module, optimizer: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "module": module.state_dict(),
        "buffer_names": [name for name, _ in module.named_buffers()],
        "optimizer": optimizer,
    }


def stepped(module: torch.nn.Module, groups: list[list[torch.nn.Parameter]]) -> dict[str, Any]:
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return content(module, optimizer.state_dict())


def test_one_group_is_the_module_in_its_order() -> None:
    module = model()
    assert names_by_shape(stepped(module, [list(module.parameters())])) == [
        [name for name, _ in module.named_parameters()]
    ]


def test_matrices_and_vectors_are_two_groups() -> None:
    module = model()
    groups = [
        [p for p in module.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False)
    ]
    expected = [
        [n for n, p in module.named_parameters() if (p.ndim > 1) == wanted]
        for wanted in (True, False)
    ]
    assert names_by_shape(stepped(module, groups)) == expected


def test_groups_with_weights_of_one_shape_cannot_be_distinguished() -> None:
    module = model()
    parameters = list(module.parameters())
    assert names_by_shape(stepped(module, [parameters[:3], parameters[3:]])) == []


def test_another_order_is_not_taken_for_the_modules() -> None:
    module = model()
    assert names_by_shape(stepped(module, [list(reversed(list(module.parameters())))])) == []


def test_weights_that_are_not_stepped_leave_no_doubt_or_nothing_is_reported() -> None:
    module = model()
    assert names_by_shape(stepped(module, [list(module[2].parameters())])) == [
        ["2.weight", "2.bias"]
    ]
    # there are more vectors of four
    assert names_by_shape(stepped(module, [list(module[0].parameters())])) == []


def test_a_tied_weight_is_stepped_once() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    )
    module[1].weight = module[0].weight
    assert names_by_shape(stepped(module, [list(module.parameters())])) == [["0.weight"]]


def test_copies_in_half_precision() -> None:
    module = model()
    copies = [parameter.detach().clone() for parameter in module.parameters()]
    names = [[name for name, _ in module.named_parameters()]]
    assert (
        names_by_shape(content(module, {"fp32_groups": [copies], "optimizer_state_dict": {}}))
        == names
    )
    flat = torch.cat([copy.flatten() for copy in copies])
    assert (
        names_by_shape(content(module, {"fp32_groups_flat": [flat], "optimizer_state_dict": {}}))
        == names
    )
    assert (
        names_by_shape(
            content(module, {"fp32_groups_flat": [flat.flip(0)], "optimizer_state_dict": {}})
        )
        == []
    )
    swapped = [copies[0], copies[3], copies[2], copies[1], *copies[4:]]  # two vectors of four
    assert (
        names_by_shape(content(module, {"fp32_groups": [swapped], "optimizer_state_dict": {}}))
        == []
    )
    assert (
        names_by_shape(
            content(module, {"fp32_groups_flat": [flat[1:]], "optimizer_state_dict": {}})
        )
        == []
    )
    assert (
        names_by_shape(
            content(module, {"fp32_groups_flat": [flat, flat], "optimizer_state_dict": {}})
        )
        == []
    )


def test_no_state_gives_nothing() -> None:
    module = model()
    assert names_by_shape(content(module, None)) == []
    assert (
        names_by_shape(content(module, torch.optim.SGD(module.parameters(), lr=0.1).state_dict()))
        == []
    )
