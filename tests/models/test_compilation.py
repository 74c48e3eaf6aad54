"""The parts of a model that are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from framework.config.training import Compile
from framework.errors import ConfigError
from framework.models.compilation import compile_model
from framework.models.recomputation import with_recompute
from framework.recipes.image_models.resnet import SmallResNet18
from tests.models.small_models import gpt, with_dropout


def test_what_is_compiled() -> None:
    def compiled(model: nn.Module, **asked: Any) -> list[str]:
        compile_model(model, Compile(backend="eager", **asked))
        return [
            name for name, module in model.named_modules() if module._compiled_call_impl is not None
        ]

    model, names = with_dropout(), list(with_dropout().state_dict())
    assert compiled(model) == [""]
    assert list(model.state_dict()) == names
    assert compiled(gpt(), per="block") == [f"blocks.{number}" for number in range(4)]
    resnet = SmallResNet18()
    is_block = [
        name for name, module in resnet.named_modules() if type(module).__name__ == "BasicBlock"
    ]
    assert compiled(resnet, per="block") == is_block
    recomputed = with_recompute(with_dropout(), every=3)
    assert compiled(recomputed) == [name for name, _ in recomputed.named_children()]
    with pytest.raises(ConfigError, match="no-blocks"):
        compiled(with_dropout(), per="block")


def test_a_model_whose_first_pass_is_looked_at_is_compiled_after_it() -> None:
    model = gpt()
    compile_model(model, Compile(backend="eager"), after_first_pass=True)
    assert model._compiled_call_impl is None
    for _ in range(2):
        model(torch.zeros(1, 4, dtype=torch.long))
        assert model._compiled_call_impl is not None
    assert not model._forward_hooks
