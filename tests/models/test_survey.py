from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.errors import ConfigError
from framework.models.layer_lists import as_layers
from framework.models.layers import Layer
from framework.models.survey import Surveyed, survey

IMAGES = torch.randn(4, 3, 8, 8)


def run(*modules: nn.Module, inputs: Any = IMAGES) -> list[Surveyed]:
    return survey(as_layers(list(modules)), inputs, seed=0)


def test_layers_are_weighed_without_being_touched() -> None:
    norm = nn.BatchNorm2d(5)
    found = run(nn.Conv2d(3, 5, 3), norm, nn.Flatten(), nn.Linear(180, 2))
    assert [layer.kind for layer in found] == ["Conv2d", "BatchNorm2d", "Flatten", "Linear"]
    assert [sum(shape.numel() for shape in layer.params.values()) for layer in found] == [
        140,
        10,
        0,
        362,
    ]
    # weight, bias, running mean and variance, an int64 count
    assert found[1].param_bytes == 4 * 10 + 4 * 10 + 8
    assert [layer.output_bytes for layer in found] == [4 * 4 * 180] * 3 + [4 * 4 * 2]
    assert {layer.cannot_send for layer in found} == {""}
    assert [layer.flops for layer in found] == [2 * 4 * 5 * 36 * 27, 0, 0, 2 * 4 * 180 * 2]
    assert norm.num_batches_tracked == 0


def test_half_precision_halves_what_is_sent() -> None:
    (found,) = survey(as_layers([nn.Conv2d(3, 5, 3)]), IMAGES, seed=0, float_bytes=2)
    assert (found.param_bytes, found.output_bytes) == (2 * 140, 2 * 4 * 180)


class Reads(nn.Module):
    """Branches on a number, which the meta device does not have."""

    def forward(self, value: Tensor) -> Tensor:
        return value * 2 if float(value.sum()) > 0 else value


def test_code_that_needs_numbers_is_run_for_real() -> None:
    norm = nn.BatchNorm2d(3)
    before = torch.get_rng_state()
    found = run(norm, Reads())
    assert [layer.output_bytes for layer in found] == [4 * IMAGES.numel()] * 2
    assert [layer.flops for layer in found] == [None, None]
    assert norm.num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_recipes_are_built_and_ties_are_one_module() -> None:
    build, both = partial(nn.Linear, 8, 8), ("weight", "bias")
    layers = [
        Layer("a", build, tied="t", tied_weights=both),
        Layer("b", build, tied="t", tied_weights=both),
    ]
    assert [
        sum(shape.numel() for shape in layer.params.values())
        for layer in survey(layers, IMAGES, seed=0)
    ] == [
        72,
        72,
    ]


class Returns(nn.Module):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.weight, self.result = nn.Parameter(torch.ones(1)), result

    def forward(self, value: Tensor) -> Any:
        return self.result(value * self.weight)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda value: {"x": value}, "a dict"),
        (lambda value: [value], "a list"),
        (lambda value: (value, None), "a tuple with a NoneType"),
        (lambda value: (value, value > 0), "torch.bool"),
        (lambda value: (value, torch.ones_like(value)), "no gradient flows"),
        (lambda value: value.detach().long(), "no floating tensor"),
        (lambda value: (value,) * 50, "too many"),
        (lambda value: (value, value.long()), ""),
    ],
)
def test_what_cannot_be_sent_is_named(result: Any, words: str) -> None:
    (found,) = run(Returns(result))
    assert words in found.cannot_send
    assert bool(words) == bool(found.cannot_send)


def test_a_layer_that_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        run(nn.Conv2d(3, 5, 3), nn.Linear(180, 2))
    (problem,) = caught.value.problems
    assert problem.kind == "layer-failed"
    assert "1 (Linear)" in str(problem)
    assert "(4, 5, 6, 6)" in problem.reason
