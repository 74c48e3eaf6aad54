"""Linear layers of stage 3 and after it: torch's, to the bit and for every gradient, compiled as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor, nn

from framework.engine.workarounds.left_by_stage_3 import restore_linear_layers


@pytest.fixture(autouse=True)
def torchs_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(partition_parameters, "print_rank_0", lambda *_, **__: None)  # which asks for the rank
    yield
    restore_linear_layers(0)


def replace_as_stage_3_does() -> None:
    partition_parameters.InsertPostInitMethodToModuleSubClasses()._enable_mem_efficient_linear()
    assert torch.nn.functional.linear is zero3_linear_wrap, "DeepSpeed leaves it as it is: the workaround can go"


def test_a_run_without_stage_3_has_torchs_own_after_one_with_it() -> None:
    before = torch.nn.functional.linear
    replace_as_stage_3_does()
    restore_linear_layers(3)
    assert torch.nn.functional.linear is zero3_linear_wrap
    restore_linear_layers(2)
    assert torch.nn.functional.linear is before


@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 7, 5)])
def test_it_is_torchs_to_the_bit_with_all_gradients(shape: tuple[int, ...]) -> None:
    expected = outputs_and_gradients(shape)
    replace_as_stage_3_does()
    restore_linear_layers(3)
    found = outputs_and_gradients(shape)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1:], expected[1:])


@pytest.mark.slow
def test_compiled_it_has_its_gradients() -> None:
    expected = outputs_and_gradients((2, 7, 5))
    replace_as_stage_3_does()
    restore_linear_layers(3)
    torch.testing.assert_close(outputs_and_gradients((2, 7, 5), backend="aot_eager"), expected)


def outputs_and_gradients(shape: tuple[int, ...], *, backend: str = "") -> list[Tensor]:
    torch.manual_seed(0)
    layer, rows = nn.Linear(5, 3), torch.randn(shape, requires_grad=True)
    output = (torch.compile(layer, backend=backend) if backend else layer)(rows)
    output.sin().sum().backward()
    gradients = [tensor.grad for tensor in (rows, *layer.parameters())]
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]
