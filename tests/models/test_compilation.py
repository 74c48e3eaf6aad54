"""What `training.compile` compiles of a model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from framework.config.training import Compile
from framework.errors import ConfigError
from framework.models.compilation import CompiledModules
from framework.models.recomputation import with_recompute
from framework.recipes.image_models.resnet import SmallResNet18
from tests.models.small_models import gpt, with_dropout


def names_of_compiled(model: nn.Module) -> list[str]:
    return [
        name for name, module in model.named_modules() if module._compiled_call_impl is not None
    ]


def test_what_is_compiled() -> None:
    def compiled(model: nn.Module, **asked: Any) -> list[str]:
        CompiledModules(model, Compile(backend="eager", **asked)).start()
        return names_of_compiled(model)

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


def test_nothing_is_compiled_before_the_start_and_after_the_end() -> None:
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    model = gpt()
    before = inductor.fallback_random, inductor.deterministic, dynamo.suppress_errors
    compiled = CompiledModules(model, Compile(per="block"), deterministic=True)
    assert names_of_compiled(model) == []
    compiled.start()
    compiled.go_on_without()
    assert len(names_of_compiled(model)) == 4
    assert (inductor.fallback_random, inductor.deterministic, dynamo.suppress_errors) == (True,) * 3
    compiled.stop()
    assert names_of_compiled(model) == []
    assert (inductor.fallback_random, inductor.deterministic, dynamo.suppress_errors) == before
