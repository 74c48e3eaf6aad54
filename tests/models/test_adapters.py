"""Adapters in models of others: merged, they compute what they did beside the weights, under the plain names."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from framework.config.load import config_from_values
from framework.config.training import LoRA
from framework.models.adapters import add_adapters, merge_adapters
from framework.plan.work import weights_alone
from framework.setup.objects import call_factory

pytestmark = pytest.mark.slow  # peft imports transformers
pytest.importorskip("peft", reason="peft comes with the lora extra")


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))


def resnet() -> nn.Module:
    return pytest.importorskip("torchvision").models.resnet18()


@pytest.mark.parametrize(
    ("build", "targets", "inputs"),
    [
        (attention, ["self_attn", "linear1"], torch.randn(2, 4, 16)),
        (gpt2, ["c_attn"], torch.arange(8)[None]),
        (resnet, ["conv1", "fc"], torch.randn(1, 3, 32, 32)),
    ],
)
def test_merged_models_compute_the_same_under_plain_names(build: Any, targets: list[str], inputs: torch.Tensor) -> None:
    model = build().eval()
    names = {*model.state_dict()}
    model = add_adapters(model, LoRA(target_modules=targets), seed=0).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    before, after = (getattr(made, "logits", made) for made in (model(inputs), merge_adapters(model)(inputs)))
    assert {*model.state_dict()} == names
    assert float((before - after).abs().max()) < 5e-6


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ({"kind": "gpt", "size": "tiny"}, "all-linear"),
        ({"kind": "gpt", "size": "tiny", "tie_embeddings": False}, ["embed", "head"]),
        ({"kind": "bert", "size": "tiny"}, ["query", "types"]),
        ({"kind": "resnet50"}, ["conv2", "fc"]),
    ],
)
def test_the_plan_counts_what_is_trained_and_what_is_not(model: dict[str, Any], targets: Any) -> None:
    saved = ["norm"] if model["kind"] != "resnet50" else []
    config = config_from_values(
        {"model": model, "training": {"lora": {"target_modules": targets, "modules_to_save": saved}}}
    )
    lora = config.training.lora
    assert lora is not None
    built = add_adapters(call_factory(config.model.factory(), key="model"), lora, seed=0)
    work = weights_alone(config.model, (), lora)
    assert work is not None
    for shapes, is_trained in ((work.weights, True), (work.frozen, False)):
        sizes = [one.numel() for one in built.parameters() if one.requires_grad is is_trained]
        assert (len(shapes), sum(map(prod, shapes.values()))) == (len(sizes), sum(sizes))
