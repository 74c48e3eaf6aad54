"""Layers that are recomputed in the backward pass, of models of every sort."""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from framework.config.training import Training
from framework.errors import ConfigError
from framework.models.kept_products import _operations
from framework.models.layers import Layer, LayeredModel
from framework.models.prepare_model import prepare_model
from framework.models.recomputation import can_recompute
from framework.models.tiled_loss import output_head, wanting_loss
from framework.recipes.image_models.resnet import SmallResNet18, resnet18
from tests.models import small_models
from tests.models.small_models import IDS, gpt

MODELS: dict[str, Any] = {
    **small_models.MODELS,
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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputed_gradients_are_the_same_to_the_bit_and_less_is_kept(name: str, how: str) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    plain = build()
    other = build()
    other.load_state_dict(plain.state_dict())
    recomputed = prepare_model(other, Training(recompute_every=3, recompute=how))
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
    assert not can_recompute(model)


class Recomputing(Whole):
    """One with a switch of its own, under the name that transformers' models gave it."""

    is_on = False
    refusal = ""
    supports_gradient_checkpointing = True

    def gradient_checkpointing_enable(self) -> None:
        if self.refusal:
            raise ValueError(self.refusal)
        self.is_on = True


def test_a_model_with_recomputation_of_its_own_turns_it_on() -> None:
    model, inside = Recomputing(), nn.ModuleDict({"body": Recomputing(), "head": nn.Linear(2, 2)})
    assert can_recompute(model)
    assert can_recompute(inside)
    assert not model.is_on
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
    refusing.supports_gradient_checkpointing = False
    assert not can_recompute(refusing)
    with pytest.raises(
        ConfigError, match=r"cannot be turned on: ValueError: Recomputing does not support"
    ):
        prepare_model(refusing, Training(recompute_every=1))


class Products(TorchDispatchMode):
    """Counts the operations whose outputs selective recomputation keeps, and all others."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counter = self.kept if func in _operations() else self.others
        counter[func.name()] += 1
        return func(*args, **(kwargs or {}))


def operations_of_a_step(how: str | None) -> Products:
    """Operations below autograd of a small GPT's forward and backward pass."""
    torch.manual_seed(0)
    model = gpt(dropout=0.0)
    with Products() as counted:
        training = Training() if how is None else Training(recompute=how)
        prepare_model(model, training)(IDS).square().mean().backward()
    return counted


def test_selective_recomputation_runs_no_product_again_and_everything_else() -> None:
    plain, selective, full = (operations_of_a_step(how) for how in (None, "selective", "full"))
    assert plain.kept.total() > 10
    assert selective.kept == plain.kept
    assert full.kept.total() > plain.kept.total()
    norms = "aten::native_layer_norm"
    assert selective.others[norms] == full.others[norms] > plain.others[norms]


def test_recompute_alone_means_groups_of_one_layer_and_old_files_mean_what_they_did() -> None:
    assert Training(recompute="selective").recompute_every == 1
    assert Training(recompute="selective").keeps_products
    assert Training(recompute="full", recompute_every=3).recompute_every == 3
    old = Training(recompute_every=2)
    assert (old.recompute, old.keeps_products) == (None, False)
    assert Training().recompute_every == 0


def test_a_loss_in_tiles_keeps_none_of_its_logits() -> None:
    """Logits of all tiles would be more than the whole logits that tiles are there to avoid."""
    torch.manual_seed(0)
    model = prepare_model(gpt(dropout=0.0), Training(recompute="selective"))
    vocabulary = model.shape.vocab_size
    assert output_head(model) is not None
    kept: list[Tensor] = []
    targets = IDS.flatten()
    with wanting_loss(targets, 2, None):
        loss = model(IDS)
        frames = [object_ for object_ in gc.get_objects() if type(object_) is Tensor]
        kept = [tensor for tensor in frames if tensor.shape[-1:] == (vocabulary,)]
        loss.nats.backward()
    assert not kept


def test_a_product_that_is_written_over_runs_again() -> None:
    """In place on the output of a product: what is kept is no longer what it was."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh())

    value = torch.randn(4, 8)
    gradients, _, _ = one_step(build(), (value,))
    again, _, _ = one_step(
        prepare_model(build(), Training(recompute_every=2, recompute="selective")), (value,)
    )
    assert all(torch.equal(gradients[key], again[key]) for key in gradients)
