"""Linear layers in fp8, emulated, against fp8's own definition in plain PyTorch; which layers they
are; and what compiled graphs, recomputation and ZeRO stage 3 make of them.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.config.load import config_from_values
from framework.config.precision import FP8
from framework.config.training import Compile, Training
from framework.errors import ConfigError
from framework.models import fp8
from framework.models.compilation import CompiledModules
from framework.models.fp8 import compute_in_fp8
from framework.models.prepare_model import prepare_model
from framework.plan.work import named_work
from framework.recipes.language_models.gpt import GPT
from tests.jobs.live_bytes import Saved
from tests.models import small_models
from tests.models.fp8_definition import define
from tests.models.operator_calls import Calls
from tests.models.small_models import IDS, bert
from tests.plan.test_work import MICRO, built, config_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None, reason="torchao comes with the fp8 extra"
    ),
]

EMULATED = FP8(emulate=True)
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False},
}


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return small_models.gpt(**{"num_layers": 2, "dropout": 0.0} | changes).bfloat16()


def of_transformers(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def outcome(model: nn.Module, ids: Tensor = IDS) -> dict[str, Tensor]:
    """Outputs and gradients of one pass; how many rows there are is no multiple of 16."""
    model.zero_grad()
    outputs = model(ids)
    outputs.float().square().mean().backward()
    found = {"outputs": outputs.detach()}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            found[name] = weight.grad.clone()
    return found


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference of all numbers, as a share of their norm."""
    assert one.keys() == other.keys()
    square = sum(float((one[name] - other[name]).float().square().sum()) for name in one)
    size = sum(float(value.float().square().sum()) for value in other.values())
    return (square / size) ** 0.5


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_blocks_compute_what_fp8_is_defined_as(shape: dict[str, Any], scaling: Any) -> None:
    ids = IDS[:3, :21]
    plain = outcome(gpt(**shape), ids)
    defined = gpt(**shape)
    define((each for each in defined.blocks.modules() if isinstance(each, nn.Linear)), scaling)
    model = gpt(**shape)
    found = compute_in_fp8(model, FP8(scaling=scaling, emulate=True))
    assert len(found.converted) == (14 if "mlp" in shape else 12)
    expected = outcome(defined, ids)
    results = outcome(model, ids)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=0, atol=0)
    assert distance(plain, expected) > 0.005


def test_layers_of_other_sizes_the_head_and_embeddings_stay() -> None:
    model = gpt(hidden_size=24, num_heads=2)
    with pytest.raises(ConfigError, match="24 inputs and 24 outputs are no multiples of 16"):
        compute_in_fp8(model, EMULATED)
    model = gpt(mlp_size=72, tie_embeddings=False)
    found = compute_in_fp8(model, EMULATED)
    assert all(name.startswith("blocks.") for name in found.converted)
    assert list(found.left_out) == [
        f"blocks.{number}.mlp.{layer}" for number in (0, 1) for layer in ("up", "down")
    ]
    assert str(found) == (
        "8 linear layers compute in fp8, and 4 of the blocks stay in bf16, as blocks.0.mlp.up: "
        "32 inputs and 72 outputs are no multiples of 16"
    )
    with pytest.raises(ConfigError, match="Linear has no linear layers in blocks that repeat"):
        compute_in_fp8(nn.Linear(16, 16), EMULATED)


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_models_by_import_path(name: str) -> None:
    model = of_transformers(name)
    names = list(model.state_dict())
    found = compute_in_fp8(model, EMULATED)
    per_block = 7 if name == "Llama" else 4
    assert len(found.converted) == 2 * per_block
    assert not [each for each in found.converted if "gate." in each or "router" in each]
    assert list(model.state_dict()) == names
    assert model.state_dict()["lm_head.weight"].dtype == torch.float32


def test_a_copied_model_computes_the_same() -> None:
    model = gpt()
    compute_in_fp8(model, EMULATED)
    assert distance(outcome(copy.deepcopy(model)), outcome(model)) == 0


# Beside the blocks, the layers of BERT's head and its dropouts are compiled.
@pytest.mark.parametrize(
    ("make", "graphs"), [(gpt, 1), (lambda: bert().bfloat16(), 3)], ids=["gpt", "bert"]
)
def test_a_compiled_block_is_one_graph_and_the_same_to_the_bit(
    make: Any, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    model = make()
    inputs = (IDS,) if isinstance(model, GPT) else (IDS, 0 * IDS, 0 * IDS + 1)
    compute_in_fp8(model, EMULATED)

    def run() -> Tensor:
        model.zero_grad()
        outputs = model(*inputs)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        first.float().square().mean().backward()
        return torch.cat(
            [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
        )

    model.eval()
    eager = run()
    compiled = CompiledModules(model, Compile(backend="aot_eager", per="block"))
    compiled.start()
    counters.clear()
    try:
        assert torch.equal(run(), eager)
        assert not counters["graph_break"]
        assert counters["stats"]["unique_graphs"] == graphs
    finally:
        compiled.stop()


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_layers_are_the_same_to_the_bit(recompute: Any) -> None:
    model = gpt()
    compute_in_fp8(model, EMULATED)
    expected = outcome(model)
    again = prepare_model(model, Training(recompute=recompute))
    with Calls() as calls:
        results = outcome(again)
    assert distance(results, expected) == 0
    # 12 layers and the head have three products each; run again where nothing is kept, but for the
    # head, which ends the pass.
    assert calls.of["mm"] == 12 * 3 + 3 + (12 if recompute == "full" else 0)


def test_perceptrons_in_tiles_scale_each_tile() -> None:
    model = prepare_model(gpt(), Training(mlp_tile=48))
    found = compute_in_fp8(model, EMULATED)
    assert len(found.converted) == 12
    whole = gpt()
    compute_in_fp8(whole, EMULATED)
    assert 0 < distance(outcome(model), outcome(whole)) < 0.1


def test_the_backward_pass_keeps_the_weight_itself_and_no_view_of_it() -> None:
    """At ZeRO stage 3 a view would keep gathered weights of all layers in memory."""
    model = gpt()
    compute_in_fp8(model, EMULATED)
    weights = {
        layer.weight.untyped_storage().data_ptr(): layer.weight
        for layer in model.blocks.modules()
        if isinstance(layer, nn.Linear)
    }
    views = []

    def note(tensor: Tensor) -> Tensor:
        weight = weights.get(tensor.untyped_storage().data_ptr())
        if weight is not None and tensor is not weight:
            views.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(IDS)
    assert views == []


@pytest.mark.parametrize("name", ["gpt-dropout", "llama"])
def test_the_planner_knows_what_autograd_saves(name: str) -> None:
    plain = config_of(name, "bf16")
    values = plain.to_dict() | {"precision": {"dtype": "bf16", "fp8": {"emulate": True}}}
    config = config_from_values(values)
    model, task, inputs, targets = built(config)
    compute_in_fp8(model, EMULATED)
    saved = Saved(model)
    with saved.hooks:
        task.loss(task.forward(model, inputs), targets)
    work = named_work(config, MICRO, device="cpu")
    assert work is not None
    planned = sum(part.saved_bytes * part.count for part in work.parts)
    assert planned == pytest.approx(saved.total, rel=0.02)


def test_frozen_layers_have_no_product_for_their_weight() -> None:
    model = gpt()
    compute_in_fp8(model, EMULATED)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith("blocks.1.mlp"))
    with Calls() as calls:
        outcome(model)
    assert calls.of["mm"] == 12 * 3 - 2 + 3


def test_a_missing_package_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    fp8.Products.like.cache_clear()
    with pytest.raises(ConfigError, match=r"launch.sh setup fp8, or pip install -e '.\[fp8\]'"):
        compute_in_fp8(gpt(), EMULATED)
