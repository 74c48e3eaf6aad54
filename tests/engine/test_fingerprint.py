"""The fingerprint of frozen weights under adapters."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from framework.engine.fingerprint import fingerprint
from framework.engine.weights import describe_base, is_base


def model(*, tied: bool) -> nn.Module:
    torch.manual_seed(0)
    whole = nn.Module()
    whole.embedding = nn.Embedding(7, 4)
    whole.block = nn.Linear(4, 4)
    if tied:
        whole.head = nn.Linear(4, 7, bias=False)
        whole.head.weight = whole.embedding.weight
    return whole.requires_grad_(False)


def gathered(weights: list[nn.Parameter]) -> Any:
    return nullcontext()


def test_a_tied_weight_counts_once_as_in_stages_that_have_it_under_one_name() -> None:
    plain, by_name = fingerprint(model(tied=True), gathered)
    stage, stage_by_name = fingerprint(model(tied=False), gathered)
    assert plain == stage == stage_by_name
    assert by_name != plain


def test_a_base_that_an_earlier_release_noted_by_all_names_is_known() -> None:
    base = describe_base(model(tied=True), None)
    assert is_base(base["sha256"], base)
    assert is_base(base["sha256_by_name"], base)
    assert not is_base("0" * 64, base)
    assert "sha256_by_name" not in describe_base(model(tied=False), None)


def test_another_number_or_name_is_another_base() -> None:
    first, _ = fingerprint(model(tied=False), gathered)
    other = model(tied=False)
    with torch.no_grad():
        next(iter(other.parameters()))[0, 0] += 1e-3
    assert fingerprint(other, gathered)[0] != first
    renamed = fingerprint(model(tied=False), gathered, plain_name=lambda name: f"x.{name}")
    assert renamed[0] != first
