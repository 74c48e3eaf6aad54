"""What a config asks of a model, done to models of every sort."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.config.base import Target
from framework.config.optimizer import AdamW, Group
from framework.config.training import Compile, Training
from framework.errors import ConfigError
from framework.models.adapt import (
    channels_last,
    compile_model,
    freeze,
    parameter_groups,
    prepare_model,
    with_recompute,
)
from framework.models.bert import BERT
from framework.models.gpt import GPT
from framework.models.layers import Layer, LayeredModel
from framework.models.resnet import SmallResNet18, resnet18
from framework.models.sync_batch_norm import SyncBatchNorm

MATRICES = AdamW(weight_decay=0.1, weight_decay_on="matrices")


def gpt() -> nn.Module:
    return GPT.of(
        vocab_size=11,
        max_positions=64,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        mlp_size=64,
        dropout=0.1,
    )


def bert() -> nn.Module:
    return BERT.of(
        vocab_size=11, max_positions=64, hidden_size=32, num_layers=4, num_heads=4, mlp_size=64
    )


def with_dropout() -> nn.Module:
    parts = [
        part
        for _ in range(4)
        for part in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3))
    ]
    return nn.Sequential(*parts, nn.Linear(32, 1))


IDS = torch.randint(0, 11, (4, 64), generator=torch.Generator().manual_seed(0))
MODELS: dict[str, Any] = {
    "gpt": (gpt, (IDS,)),
    "bert": (bert, (IDS, torch.zeros_like(IDS), torch.ones_like(IDS))),
    "sequential": (
        with_dropout,
        (torch.randn(64, 32, generator=torch.Generator().manual_seed(0)),),
    ),
    "small_resnet18": (
        SmallResNet18,
        (torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0)),),
    ),
    "resnet18": (
        partial(resnet18, 5),
        (torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)),),
    ),
}


def one_step(
    model: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Gradients, buffers, and bytes that autograd keeps between forward and backward, weights not
    counted.
    """
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum(output.square().mean() for output in outputs)
    num_kept_bytes = sum(kept.values())
    loss.backward()
    return (
        {name: p.grad for name, p in model.named_parameters()},
        dict(model.named_buffers()),
        num_kept_bytes,
    )


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_gradients_are_the_same_to_the_bit_and_less_is_kept(name: str) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    plain = build()
    other = build()
    other.load_state_dict(plain.state_dict())
    recomputed = prepare_model(other, Training(recompute_every=3))
    assert list(recomputed.state_dict()) == list(plain.state_dict())
    gradients, buffers, kept_bytes = one_step(plain, inputs)
    again, buffers_again, kept_again_bytes = one_step(recomputed, inputs)
    assert gradients.keys() == again.keys()
    assert all(torch.equal(gradients[key], again[key]) for key in gradients)
    assert buffers.keys() == buffers_again.keys()
    assert all(torch.equal(buffers[key], buffers_again[key]) for key in buffers), (
        "batch norms counted the batch twice"
    )
    assert kept_again_bytes < 0.6 * kept_bytes


def test_a_layered_model_is_recomputed_as_it_is_and_zero_keeps_everything() -> None:
    model = LayeredModel([Layer("a", partial(nn.Linear, 2, 2)), Layer("b", nn.ReLU)])
    assert prepare_model(model, Training(recompute_every=2)) is model
    assert model.recompute_every == 2
    sequence = nn.Sequential(nn.Linear(2, 2))
    assert prepare_model(sequence, Training()) is sequence


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value) + value


class Residual(nn.Sequential):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) + value


class InAttribute(nn.Module):
    """A module named layers, which is common, is no method that tells them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])


@pytest.mark.parametrize(
    "model",
    [Whole(), Residual(nn.Linear(2, 2), nn.ReLU()), InAttribute()],
    ids=lambda model: type(model).__name__,
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_way_out(model: nn.Module) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare_model(model, Training(recompute_every=2))
    (problem,) = caught.value.problems
    assert (problem.kind, problem.key, problem.value) == (
        "recompute-needs-layers",
        "training.recompute_every",
        2,
    )
    assert type(model).__name__ in problem.reason
    assert "layers()" in problem.fix


class Recomputing(Whole):
    """One with a switch of its own, under the name that transformers' models gave it."""

    is_on = False
    refusal = ""

    def gradient_checkpointing_enable(self) -> None:
        if self.refusal:
            raise ValueError(self.refusal)
        self.is_on = True


def test_a_model_with_recomputation_of_its_own_turns_it_on() -> None:
    model, inside = Recomputing(), nn.ModuleDict({"body": Recomputing(), "head": nn.Linear(2, 2)})
    assert prepare_model(model, Training(recompute_every=1)) is model
    assert model.is_on
    assert prepare_model(inside, Training(recompute_every=1)) is inside
    assert inside["body"].is_on
    untouched = Recomputing()
    prepare_model(untouched, Training())
    assert not untouched.is_on
    with pytest.raises(
        ConfigError, match=r"is of each layer; set training.recompute_every: 1, or 0"
    ):
        prepare_model(untouched, Training(recompute_every=2))
    refusing = Recomputing()
    refusing.refusal = "Recomputing does not support gradient checkpointing."
    with pytest.raises(
        ConfigError, match=r"cannot be turned on: ValueError: Recomputing does not support"
    ):
        prepare_model(refusing, Training(recompute_every=1))


def test_batch_norms_keep_their_weights_and_names() -> None:
    model = SmallResNet18()
    before, objects = list(model.state_dict()), list(model.parameters())
    prepared = prepare_model(model.eval(), Training(sync_batch_norm=True))
    assert list(prepared.state_dict()) == before
    assert all(a is b for a, b in zip(prepared.parameters(), objects, strict=True))
    norms = [
        module
        for module in prepared.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    assert len(norms) == 20
    assert all(isinstance(norm, SyncBatchNorm) and not norm.training for norm in norms)


@pytest.mark.parametrize("channels", [1, 3])
def test_convolutions_follow_the_order_of_their_images(channels: int) -> None:
    torch.manual_seed(0)
    model, images = SmallResNet18(in_channels=channels), torch.randn(2, channels, 16, 16)
    expected = model(images)
    orders: list[bool] = []
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.register_forward_hook(
                lambda _, __, output: orders.append(
                    output.is_contiguous(memory_format=torch.channels_last)
                )
            )
    model(images)
    assert not any(orders[:5])
    orders.clear()
    reordered = channels_last(images)
    assert torch.equal(reordered, images)
    torch.testing.assert_close(model(reordered), expected)
    assert orders == [True] * 20


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_what_matches_as_a_whole_is_frozen() -> None:
    model = prepare_model(gpt(), Training(freeze=[r"embed\..*", r"blocks\.[01]\..*", "norm.bias"]))
    frozen = {name for name, _ in model.named_parameters()} - trained(model)
    assert {
        "embed.weight",
        "blocks.0.mlp.up.weight",
        "blocks.1.attention.key.bias",
        "norm.bias",
    } <= frozen
    assert all(
        name.startswith(("embed.", "blocks.0.", "blocks.1.")) or name == "norm.bias"
        for name in frozen
    )


def test_a_frozen_weight_gets_no_gradient_and_the_others_theirs() -> None:
    model = prepare_model(gpt(), Training(freeze=["positions.*"], recompute_every=2))
    model(IDS).sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == {
        "positions.weight"
    }


@pytest.mark.parametrize(
    ("patterns", "kinds", "words"),
    [
        (
            ["norm"],
            ["freeze-matches-nothing"],
            "it must match the whole name, as in blocks.0.attention_norm.weight; write norm.*",
        ),
        (["embed.wieght"], ["freeze-matches-nothing"], "did you mean embed.weight?"),
        (["zzz", "norm.bias", "qqq"], ["freeze-matches-nothing"] * 2, "training.freeze.2 = qqq"),
        ([".*"], ["freeze-matches-all"], "nothing would be left to train"),
        ([".*weight", ".*bias"], ["freeze-matches-all"], "training.freeze = [.*weight, .*bias]"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(
    patterns: list[str], kinds: list[str], words: str
) -> None:
    model = gpt()
    before = trained(model)
    with pytest.raises(ConfigError) as caught:
        prepare_model(model, Training(freeze=patterns))
    assert [problem.kind for problem in caught.value.problems] == kinds
    assert words in str(caught.value)
    assert trained(model) == before


def test_what_the_user_froze_counts() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    with pytest.raises(ConfigError, match="freeze-matches-all"):
        freeze(model, ["0.*"])


def test_decay_on_matrices_leaves_biases_and_norms_alone() -> None:
    model = SmallResNet18()
    model.conv.weight.requires_grad_(False)
    groups: Any = parameter_groups(dict(model.named_parameters()), MATRICES)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = ([names[id(parameter)] for parameter in group["params"]] for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(
        "norm" not in name and name.endswith("weight") and ".shortcut.1." not in name
        for name in decayed
    )
    assert all("norm" in name or name.endswith("bias") or ".shortcut.1." in name for name in others)
    assert {*decayed, *others, "conv.weight"} == set(names.values())


def test_an_optimizer_decays_what_it_should() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    groups = parameter_groups(
        dict(model.named_parameters()), AdamW(weight_decay=0.5, weight_decay_on="matrices")
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model[0].weight, before["0.weight"] * (1 - 0.1 * 0.5))
    assert all(
        torch.equal(value, before[name])
        for name, value in model.state_dict().items()
        if name != "0.weight"
    )


def test_partitioned_weights_have_the_dimensions_they_had() -> None:
    """ZeRO-3 leaves flat, empty tensors and their shapes as `ds_shape`."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    groups: Any = parameter_groups(dict(model.named_parameters()), MATRICES)
    assert [
        group["params"][0] is parameter
        for group, parameter in zip(groups, model.parameters(), strict=True)
    ] == [True] * 2


def test_where_all_are_treated_alike_there_are_no_groups() -> None:
    model = nn.Linear(3, 2)
    named = dict(model.named_parameters())
    for wanted in (
        AdamW(),
        AdamW(weight_decay=0.0, weight_decay_on="matrices"),
        Target(target="torch.optim:SGD"),
    ):
        assert parameter_groups(named, wanted) == list(model.parameters())
    assert len(parameter_groups({"weight": model.weight}, MATRICES)) == 1


def test_weights_of_a_group_have_its_rate_and_its_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    own = [Group(match="1.*", lr=0.02, weight_decay=0.0)]
    groups: Any = parameter_groups(
        dict(model.named_parameters()), AdamW(lr=0.1, weight_decay=0.5, groups=own)
    )
    assert [len(group["params"]) for group in groups] == [2, 2]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.1, 0.5),
        (pytest.approx(0.02), 0.0),
    ]


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
