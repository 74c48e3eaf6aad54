"""Adapters in models of others: merged, they compute what they did beside the weights, under the
plain names.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from framework.config.load import config_from_values
from framework.config.training import LoRA
from framework.engine.adapter_weights import quantize_adapted
from framework.errors import ConfigError
from framework.models.adapters import add_adapters, merge_adapters, put_trained
from framework.plan.cluster import Cluster
from framework.plan.memory import estimate
from framework.plan.plan import make_plan
from framework.plan.work import weights_alone
from framework.setup.user_code import call_factory

pytestmark = pytest.mark.slow  # peft imports transformers
pytest.importorskip("peft", reason="peft comes with the lora extra")


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)
    )


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
def test_merged_models_compute_the_same_under_plain_names(
    build: Any, targets: list[str], inputs: torch.Tensor
) -> None:
    model = build().eval()
    names = {*model.state_dict()}
    model = add_adapters(model, LoRA(target_modules=targets), seed=0).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    before, after = (
        getattr(made, "logits", made) for made in (model(inputs), merge_adapters(model)(inputs))
    )
    assert {*model.state_dict()} == names
    assert float((before - after).abs().max()) < 5e-6


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ({"kind": "gpt", "size": "tiny"}, "all-linear"),
        ({"kind": "gpt", "size": "tiny", "tie_embeddings": False}, ["embed", "head"]),
        ({"kind": "bert", "size": "tiny"}, ["query", "types"]),
        ({"kind": "resnet50"}, ["conv2", "fc"]),
    ],
)
def test_the_plan_counts_what_is_trained_and_what_is_not(
    model: dict[str, Any], targets: Any, dora: bool
) -> None:
    saved = ["norm"] if model["kind"] != "resnet50" else []
    config = config_from_values(
        {
            "model": model,
            "training": {
                "lora": {"target_modules": targets, "modules_to_save": saved, "use_dora": dora}
            },
        }
    )
    lora = config.training.lora
    assert lora is not None
    built = add_adapters(call_factory(config.model.factory(), key="model"), lora, seed=0)
    work = weights_alone(config.model, (), lora)
    assert work is not None
    for shapes, is_trained in ((work.weights, True), (work.frozen, False)):
        sizes = [one.numel() for one in built.parameters() if one.requires_grad is is_trained]
        assert (len(shapes), sum(map(prod, shapes.values()))) == (len(sizes), sum(sizes))


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_the_plan_counts_the_bytes_of_weights_in_few_bits(form: Any) -> None:
    config = config_from_values(
        {
            "model": {"kind": "gpt", "size": "tiny"},
            "task": {"kind": "causal_lm"},
            "data": {"kind": "text", "sequence_length": 32},
            "training": {
                "max_steps": 1,
                "lora": {"target_modules": "all-linear", "quantization": form},
            },
        }
    )
    lora = config.training.lora
    assert lora is not None
    built = add_adapters(call_factory(config.model.factory(), key="model"), lora, seed=0)
    quantize_adapted(built, form, dtype=torch.float32)
    counted = sum(one.numel() * one.element_size() for one in built.parameters())
    memory = estimate(make_plan(config, Cluster(device="cpu")))
    planned = memory.moments["between"]["weights"]
    assert planned == pytest.approx(counted, rel=0.001)


class TiedHead(nn.Module):
    """An embedding whose weight is the head's too, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = (
            nn.Embedding(8, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 8, bias=False),
        )
        self.head.weight = self.embed.weight


def spread_convolution() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 2, 3))
    model[0].weight.data = model[0].weight.data.flatten()  # as ZeRO stage 3 leaves it
    return model


@pytest.mark.parametrize(
    ("make", "targets", "kind"),
    [
        (TiedHead, "all-linear", r"the weight of head is used in another place .*\[lora-tied\]"),
        (TiedHead, ["embed"], r"\[lora-tied\]"),
        (
            spread_convolution,
            ["0"],
            r"4 dimensions, .* set zero.stage: 2 for convolutions \[lora-not-adaptable\]",
        ),
    ],
)
def test_what_would_be_merged_into_two_places_is_refused(
    make: Any, targets: Any, kind: str
) -> None:
    with pytest.raises(ConfigError, match=kind):
        add_adapters(make(), LoRA(target_modules=targets), seed=0)


def test_a_tied_weight_that_is_trained_whole_comes_back_under_either_name() -> None:
    model = add_adapters(
        TiedHead(), LoRA(target_modules=["middle"], modules_to_save=["head"]), seed=0
    )
    trained = {
        name: torch.ones_like(one) for name, one in model.named_parameters() if one.requires_grad
    }
    assert "embed.weight" in trained
    put_trained(model, trained)
    assert torch.equal(model.get_parameter("head.weight"), torch.ones(8, 4))
    with pytest.raises(ValueError, match="it lacks embed"):
        put_trained(model, {name: one for name, one in trained.items() if name != "embed.weight"})
