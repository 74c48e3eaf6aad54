"""Weights of every named model, as its forward pass on a tape has them, against the model
itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.plan.work import weights_alone
from framework.recipes.language_models.kinds import BERT_SIZES, GPT_SIZES

MODELS: list[dict[str, Any]] = [
    {"kind": "lenet"},
    {"kind": "lenet", "num_classes": 7, "in_channels": 3, "image_size": 32},
    {"kind": "mlp"},
    {"kind": "mlp", "hidden_sizes": [], "in_channels": 3},
    {"kind": "mlp", "hidden_sizes": [10, 20, 30], "num_classes": 5},
    {"kind": "small_resnet18"},
    {"kind": "small_resnet18", "in_channels": 3, "num_classes": 100},
    {"kind": "resnet18"},
    {"kind": "resnet18", "in_channels": 1, "num_classes": 10},
    {"kind": "resnet50"},
    *({"kind": "gpt", "size": size} for size in GPT_SIZES),
    {"kind": "gpt", "bias": False},
    {"kind": "gpt", "norm": "rmsnorm", "tie_embeddings": False, "num_kv_heads": 2},
    {"kind": "gpt", "mlp": "swiglu", "positions": "rotary", "hidden_size": 96},
    {"kind": "gpt", "moe": {"num_experts": 3}},
    {"kind": "gpt", "mlp": "swiglu", "bias": False, "moe": {"num_experts": 2, "every": 1}},
    *({"kind": "bert", "size": size} for size in BERT_SIZES),
    {"kind": "bert", "num_types": 3, "mlp_size": 100},
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model.values())))
def test_names_and_shapes_are_those_of_the_model(model: dict[str, Any]) -> None:
    import torch

    from framework.setup.components import gather_parts
    from framework.setup.user_code import Objects

    config = config_from_values(
        {"model": model, "data": {"kind": "digits"}, "training": {"max_steps": 1}}
    )
    parts = gather_parts(config, Objects())
    with torch.device("meta"):
        module = parts.build_model()
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    work = weights_alone(config.model)
    assert work is not None
    assert list(work.weights.items()) == list(shapes.items())
    assert work.buffer_bytes == sum(each.numel() * each.element_size() for each in module.buffers())
