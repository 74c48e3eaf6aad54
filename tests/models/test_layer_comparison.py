"""What a module gives as its layers is held against its forward(), on copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from framework.errors import ConfigError
from framework.models import survey as told_layers
from framework.models.survey import refuse_untrue_layers


class Scales(nn.Module):
    """Writes into what it is given."""

    def forward(self, value: Tensor) -> Tensor:
        return value.sub_(0.5).div_(0.5)


class Remembers(nn.Module):
    """Keeps things beside its weights, as caches and memories do."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        self.kept = torch.ones(6) if self.kept is None else self.kept + 1
        return value * self.kept


class Noisy(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value + float(np.random.default_rng().random())


class Told(nn.Module):
    """A module with layers(), whose forward() does `between` after the first and gives its result
    to `last`.
    """

    def __init__(self, first: nn.Module, *, between: Any = None, last: Any = None) -> None:
        super().__init__()
        self.first, self.linear, self.between, self.last = first, nn.Linear(6, 2), between, last

    def layers(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), ("linear", self.linear)]

    def forward(self, value: Tensor) -> Any:
        value = self.first(value)
        value = self.linear(self.between(value) if self.between else value)
        return self.last(value) if self.last else value


FORMS = [
    None,
    lambda value: (value, None),
    lambda value: {"logits": value},
    lambda value: (value[:1], None),
]


@pytest.mark.parametrize("first", [Scales, Remembers, Noisy])
@pytest.mark.parametrize("last", FORMS)
def test_what_can_be_the_same_model_is_taken_and_left_as_it_was(
    first: type[nn.Module], last: Any
) -> None:
    model, inputs = Told(first(), last=last), torch.randn(4, 6)
    before = inputs.clone()
    refuse_untrue_layers(model, inputs, seed=0)
    refuse_untrue_layers(model, (inputs,), seed=0)
    assert torch.equal(inputs, before)
    assert not isinstance(model.first, Remembers) or (model.first.kept, model.first.calls) == (
        None,
        0,
    )
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    "last", [None, lambda value: {"logits": value}, lambda value: (value, None)]
)
@pytest.mark.parametrize("first", [nn.Identity, Scales])
def test_another_model_is_refused(first: type[nn.Module], last: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"numbers that differ by .*\[layers-differ-from-forward\]"
    ):
        refuse_untrue_layers(
            Told(first(), between=torch.relu, last=last), torch.randn(4, 6), seed=0
        )
    with pytest.raises(ConfigError, match="shapes"):
        refuse_untrue_layers(Told(first(), last=lambda value: value[:1]), torch.randn(4, 6), seed=0)


def test_a_very_large_model_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Told(nn.Identity(), between=torch.relu)
    monkeypatch.setattr(told_layers, "_MOST_WEIGHTS", 13)
    refuse_untrue_layers(model, torch.randn(4, 6), seed=0)
    monkeypatch.setattr(told_layers, "_MOST_WEIGHTS", 14)
    with pytest.raises(ConfigError):
        refuse_untrue_layers(model, torch.randn(4, 6), seed=0)


def test_many_tokens_of_a_large_model_are_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Told(nn.Embedding(5, 6), between=torch.relu)
    tokens = torch.arange(10).remainder(5).reshape(2, 5)
    with pytest.raises(ConfigError):
        refuse_untrue_layers(model, tokens, seed=0)
    monkeypatch.setattr(told_layers, "_MOST_PRODUCTS", 400)
    refuse_untrue_layers(model, tokens, seed=0)
