"""`partition: measured` times layers as they are, also those that write over their input."""

from __future__ import annotations

from typing import ClassVar, Literal

import pytest
import torch
from torch import nn

from framework.config.precision import FP32, Autocast
from framework.engine.layer_times import time_layers
from framework.errors import ConfigError
from framework.models.layer_lists import as_layers

pytestmark = pytest.mark.slow  # imports DeepSpeed


def test_a_layer_may_work_in_place() -> None:
    # A stem like torchvision's, and the in-place layer first: nothing but the batch stands before
    # it.
    inputs = torch.randn(4, 3, 8, 8)
    before = inputs.clone()
    model = nn.Sequential(
        nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten()
    )
    seconds = time_layers(as_layers(model), inputs, seed=0, precision=FP32())
    assert len(seconds) == 4
    assert all(second > 0 for second in seconds)
    assert torch.equal(inputs, before)


class SaysItsType(nn.Linear):
    seen: ClassVar[set[torch.dtype]] = set()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output = super().forward(value)
        self.seen.add(output.dtype)
        return output


@pytest.mark.parametrize(("named", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_is_timed_in_the_type_of_the_run(
    named: Literal["bf16", "fp16"], dtype: torch.dtype
) -> None:
    SaysItsType.seen.clear()
    time_layers(
        as_layers([SaysItsType(2, 2)]),
        torch.randn(3, 2),
        seed=0,
        precision=Autocast(compute_dtype=named),
    )
    assert SaysItsType.seen == {dtype}


def test_a_layer_that_fails_on_the_device_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 2))
    words = (
        r'model = "1": the layer fails when it is timed on cpu: RuntimeError: .*\[layer-failed\]'
    )
    with pytest.raises(ConfigError, match=words):
        time_layers(as_layers(model), torch.randn(3, 2), seed=0, precision=FP32())
