"""Linear layers of stage 3 are torch's to the bit, keep no copy of a weight, and are gone
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor, nn
from torch.nn import functional

from framework.engine.workarounds.left_by_stage_3 import leaving_nothing


@pytest.fixture
def stage_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # which asks for the rank
    monkeypatch.setattr(partition_parameters, "print_rank_0", lambda *_, **__: None)
    with leaving_nothing(3):
        partition_parameters.InsertPostInitMethodToModuleSubClasses()._enable_mem_efficient_linear()
        assert functional.linear is zero3_linear_wrap
        yield


def test_another_run_that_is_open_keeps_its_layers(stage_3: None) -> None:
    with suppress(ZeroDivisionError), leaving_nothing(3):
        raise ZeroDivisionError
    assert functional.linear is zero3_linear_wrap, "another run of stage 3 is open"
    with leaving_nothing(2):
        assert functional.linear is zero3_linear_wrap


def test_a_function_of_the_users_own_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    own = partial(functional.linear)
    monkeypatch.setattr(functional, "linear", own)
    with suppress(ZeroDivisionError), leaving_nothing(3):
        functional.linear = zero3_linear_wrap
        raise ZeroDivisionError
    assert functional.linear is own


@pytest.mark.parametrize("shape", [(64,), (32, 64), (2, 32, 64)])
def test_it_is_torchs_to_the_bit_with_all_gradients(shape: tuple[int, ...], stage_3: None) -> None:
    layer, rows = layer_and_rows(shape)
    output = layer(rows)
    output.sin().sum().backward()
    found = [output.detach(), *(tensor.grad for tensor in (rows, *layer.parameters()))]
    layer, rows = layer_and_rows(shape)
    expected = torch._C._nn.linear(rows, layer.weight, layer.bias)
    expected.sin().sum().backward()
    assert torch.equal(found[0], expected)
    torch.testing.assert_close(found[1:], [tensor.grad for tensor in (rows, *layer.parameters())])


def test_autocast_keeps_no_copy_of_a_weight(stage_3: None) -> None:
    layer, rows = nn.Linear(64, 64), torch.randn(2, 64)
    copies: list[torch.dtype] = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and args[0].shape == layer.weight.shape:
                copies.append(made.dtype)
            return made

    with torch.autocast("cpu", torch.bfloat16), Watched():
        layer(rows), layer(rows)
    assert copies == [torch.bfloat16] * 2, "one that is kept is made once"


def layer_and_rows(shape: tuple[int, ...]) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(64, 48, dtype=torch.bfloat16), torch.randn(
        shape, dtype=torch.bfloat16, requires_grad=True
    )
