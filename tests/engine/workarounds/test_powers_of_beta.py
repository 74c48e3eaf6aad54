"""DeepSpeed's Adam for the host steps to the same bits wherever a run was stopped."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch

from framework.engine.workarounds.powers_of_beta import take_powers_of_count
from framework.system.cache_folders import extensions_folder, path_of_compilers

pytestmark = pytest.mark.slow  # compiles DeepSpeed's kernel at its first use

NUM_STEPS = 12


@pytest.fixture(autouse=True)
def _takes_the_compiled_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for the kernel where runs keep it."""
    monkeypatch.setenv("PATH", path_of_compilers(os.environ))
    folder = extensions_folder(os.environ, torch_version=torch.__version__)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))


def made(weight: torch.Tensor, *, is_changed: bool) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adam = DeepSpeedCPUAdam([torch.nn.Parameter(weight)], lr=1e-2)
    if is_changed:
        take_powers_of_count(adam)
    return adam


def stepped(adam: Any, steps: range) -> torch.Tensor:
    (weight,) = adam.param_groups[0]["params"]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        weight.grad = torch.randn(weight.shape, generator=generator)
        adam.step()
    return weight.detach().clone()


def differences(*, is_changed: bool) -> list[int]:
    """Return the steps after which a resumed optimizer ends with other bits."""
    first = torch.randn(1000, generator=torch.Generator().manual_seed(99))
    whole = stepped(made(first.clone(), is_changed=is_changed), range(NUM_STEPS))
    found = []
    for stop in range(1, NUM_STEPS):
        before = made(first.clone(), is_changed=is_changed)
        weight = stepped(before, range(stop))
        after = made(weight, is_changed=is_changed)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        if not torch.equal(stepped(after, range(stop, NUM_STEPS)), whole):
            found.append(stop)
    return found


def test_a_resumed_optimizer_is_the_unbroken_one_to_the_bit() -> None:
    assert differences(is_changed=True) == []


def test_without_the_change_it_is_not() -> None:
    """Otherwise DeepSpeed has mended it, and the change can go."""
    assert differences(is_changed=False)


def test_the_change_leaves_adam_what_it_is() -> None:
    first = torch.randn(1000, generator=torch.Generator().manual_seed(99))
    found = stepped(made(first.clone(), is_changed=True), range(NUM_STEPS))
    plain = torch.optim.AdamW([torch.nn.Parameter(first.clone())], lr=1e-2, weight_decay=0)
    torch.testing.assert_close(found, stepped(plain, range(NUM_STEPS)), rtol=1e-5, atol=1e-6)
