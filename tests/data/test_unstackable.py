"""Samples that torch cannot stack: which differ and in what, or what they hold, instead of torch's
text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from framework.data.batches import collate
from framework.errors import ConfigError


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("samples", "stated", "kind"),
    [
        (
            [(zeros(3), 0), (zeros(3), 1), (zeros(5), 1)],
            "sample[0] is a tensor of shape (3,) in sample 0 of the batch and a tensor of shape (5,) in sample 2",
            "samples-differ",
        ),
        (
            [(np.zeros(3), 0), (np.zeros(4), 0)],
            "an array of shape (3,) in sample 0",
            "samples-differ",
        ),
        (
            [((zeros(2), zeros(3)), 0), ((zeros(2), zeros(4)), 0)],
            "sample[0][1] is a tensor of shape (3,)",
            "samples-differ",
        ),
        (
            [{"x": zeros(3)}, {"y": zeros(3)}],
            "a dict with the keys x in sample 0",
            "samples-differ",
        ),
        (
            [(zeros(3), 0), (zeros(3), None)],
            "[1] is a number in sample 0 of the batch and None in sample 1",
            "samples-differ",
        ),
        ([(zeros(3), None), (zeros(3), None)], "sample[1] is None", "sample-type"),
        ([(object(), 0)], "sample[0] is of type object", "sample-type"),
        ([(np.array([{}]), 0)], "an array of objects of shape (1,)", "sample-type"),
    ],
)
def test_the_difference_is_named(samples: list[Any], stated: str, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        collate(samples)
    assert stated in str(caught.value)
    assert str(caught.value).endswith(f"[{kind}]")
    assert str(caught.value).count("\n") == 0


def test_what_can_be_stacked_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(samples: Any) -> Any:
        raise RuntimeError("unable to write to file </torch_1>: No space left on device")

    monkeypatch.setattr("framework.data.batches.default_collate", full)
    with pytest.raises(RuntimeError, match="No space left"):
        collate([(zeros(3), 0), (zeros(3), 1)])
