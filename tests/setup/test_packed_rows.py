"""The trial of packed rows on a model of transformers before the first step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from framework.config.precision import FP32
from framework.config.training import Parallel
from framework.models import packed_transformers
from framework.models.packed_transformers import attend_in_packed_rows, attends_in_packed_rows
from framework.setup import packed_rows
from framework.setup.packed_rows import keep_texts_apart
from tests.models.test_packed_transformers import model_of


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bool, list[str]]]:
    """Try a model; return whether it attends within texts, and the warnings."""

    def call(*others: str) -> tuple[bool, list[str]]:
        """`others`: what another rank finds at each trial; left out: nothing."""
        left = list(others)
        warnings: list[str] = []
        model = model_of("llama").eval()
        attend_in_packed_rows(model)
        engine: Any = SimpleNamespace(
            module=model,
            modes=SimpleNamespace(evaluating=nullcontext),
            outputs=lambda inputs: model(**inputs),
        )
        plan: Any = SimpleNamespace(config=SimpleNamespace(precision=FP32(), parallel=Parallel()))
        monkeypatch.setattr(packed_rows, "gather", lambda own: [own, left.pop(0) if left else ""])
        monkeypatch.setattr(packed_rows, "warn", lambda text, **_: warnings.append(text))
        keep_texts_apart(engine, SimpleNamespace(), plan)  # type: ignore[arg-type]
        return attends_in_packed_rows(model), warnings

    return call


def test_right_attention_within_texts_stays(attempt: Any) -> None:
    assert attempt() == (True, [])


def test_ranks_keep_masks_together(attempt: Any) -> None:
    """One that found a difference alone would take a step of another attention."""
    attends, warnings = attempt("another rank's kernel differs")
    assert not attends
    assert len(warnings) == 1
    assert "another rank's kernel differs" in warnings[0]


def test_attention_that_gives_no_number_is_taken_back(
    attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(query: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.full_like(query, torch.nan)

    monkeypatch.setattr(packed_transformers, "attend_within_texts", broken)
    attends, warnings = attempt()
    assert not attends
    assert "something else than the model does on a text alone" in warnings[0]
