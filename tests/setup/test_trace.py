"""Work of models that are not ours, on fake tensors, against what autograd saves of real ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils.flop_counter import FlopCounterMode

from framework.config.load import config_from_values
from framework.plan.devices import Machine
from framework.plan.fitted_rates import RATES
from framework.plan.layers import RankShare
from framework.plan.parallelism import Parallelism
from framework.plan.rank_work import WorkOfRank
from framework.plan.time import step_time
from framework.plan.work import LayerWork, model_work
from framework.recipes.language_models.gpt import GPT
from framework.setup.components import Parts
from framework.setup.trace import NotTracedError, trace_work
from framework.tasks.causal_lm import CausalLM
from framework.tasks.classification import Classification
from framework.tasks.task import Task
from tests.jobs.live_bytes import Saved
from tests.launched import ROOT
from tests.plan.saved_bytes import saved_bytes

MICRO = 2


class OfLogits(Task):
    """Mean over the logits of a transformers model."""

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(input_ids=inputs)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        made = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
        return made.float().square().mean()


def of_torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(pytest.importorskip("torchvision.models"), name)(
        num_classes=10, **options
    )


def of_transformers(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        made = getattr(transformers, name)
        return made(made.config_class(vocab_size=500, **options))

    return build


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A model with a rate of dropped paths, which grows from layer to layer: numbers in its
    constructor.
    """
    values = {"num_classes": 10, "drop_path_rate": 0.1, **options}
    return lambda: pytest.importorskip("timm").create_model(name, **values)


IMAGES, TOKENS = torch.zeros(MICRO, 3, 64, 64), torch.zeros(MICRO, 32, dtype=torch.int64)
LABELS = torch.zeros(MICRO, dtype=torch.int64)
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 160,
}
VIT = {
    "image_size": 64,
    "patch_size": 16,
    "num_layers": 3,
    "num_heads": 4,
    "hidden_dim": 64,
    "mlp_dim": 128,
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Task]] = {
    "vit": (of_torchvision("VisionTransformer", **VIT), IMAGES, Classification()),
    "convnext": (of_torchvision("convnext_tiny"), IMAGES, Classification()),
    "efficientnet": (of_torchvision("efficientnet_b0"), IMAGES, Classification()),
    "timm-vit": (
        of_timm("vit_tiny_patch16_224", img_size=64, depth=3),
        IMAGES,
        Classification(),
    ),
    "timm-deit": (
        of_timm("deit_tiny_distilled_patch16_224", img_size=64, depth=3),
        IMAGES,
        Classification(),
    ),
    "timm-swin": (
        of_timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(2, 2)),
        IMAGES,
        Classification(),
    ),
    "timm-convnext": (of_timm("test_convnext"), IMAGES, Classification()),
    "gpt2": (
        of_transformers("GPT2LMHeadModel", n_embd=64, n_layer=3, n_head=4),
        TOKENS,
        OfLogits(),
    ),
    "bert": (of_transformers("BertModel", **SHAPE), TOKENS, OfLogits()),
    "llama": (
        of_transformers("LlamaForCausalLM", **SHAPE, num_key_value_heads=2),
        TOKENS,
        OfLogits(),
    ),
}


def config_of(dtype: str = "fp32", freeze: tuple[str, ...] = ()) -> Any:
    values = {
        "data": {"kind": "digits"},
        "batch": {"micro_size": MICRO},
        "precision": {"dtype": dtype},
        "training": {"freeze": list(freeze)},
    }
    return config_from_values(values)


def traced(
    build: Callable[[], nn.Module],
    inputs: Any,
    task: Task,
    dtype: str = "fp32",
    freeze: tuple[str, ...] = (),
    targets: Any = LABELS,
    **options: Any,
) -> Any:
    parts: Any = Parts(build, splits=None, task=task)  # type: ignore[arg-type]
    return trace_work(config_of(dtype, freeze), parts, (inputs, targets), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "fp32") for name in MODELS), ("vit", "bf16"), ("llama", "bf16")]
)
def test_what_is_saved_is_what_autograd_saves(name: str, dtype: str) -> None:
    build, inputs, task = MODELS[name]
    work = traced(build, inputs, task, dtype, device="cpu")
    model = build()
    assert dict(work.weights) == {
        weight: tuple(own.shape) for weight, own in model.named_parameters()
    }
    assert sum(part.num_params for part in work.parts) == sum(
        weight.numel() for weight in model.parameters()
    )
    if dtype == "bf16":
        model = model.bfloat16()
        inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
    saved = Saved(model)
    with saved.hooks, FlopCounterMode(display=False) as counter:
        task.loss(task.forward(model, inputs), LABELS)
    assert saved_bytes(work) == pytest.approx(saved.total, rel=0.1)
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=0.02)


SMALL = {"vocab_size": 97, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "max_positions": 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [{"size": "tiny", "dropout": 0.1}, {"size": "llama-2-7b", "mlp_size": 160}]
)
@pytest.mark.parametrize(
    ("dtype", "arithmetic"), [("fp32", "fp32"), ("bf16", "half"), ("autocast", "autocast")]
)
def test_on_gpus_it_is_the_closed_form(size: dict[str, Any], dtype: str, arithmetic: Any) -> None:
    """Fused operations of GPUs are stood for by what they save; each block is a part."""
    model = config_from_values(
        {"model": {"kind": "gpt", **SMALL, **size}, "task": {"kind": "causal_lm"}}
    ).model
    closed = model_work(model, micro_size=MICRO, arithmetic=arithmetic, device="cuda")
    assert closed is not None
    values = {
        name: value for name, value in model.model_dump().items() if name not in ("kind", "size")
    }
    work = traced(lambda: GPT.of(**values), TOKENS, _NextToken(), dtype, device="cuda")
    assert work.flops == closed.flops
    assert saved_bytes(work) == pytest.approx(saved_bytes(closed), rel=0.01)
    moved = [sum(part.moved_bytes for part in each.layers) for each in (work, closed)]
    assert moved[0] == pytest.approx(moved[1], rel=0.1)
    # the closed form has rotations and casts as fewer operations than torch starts
    started = [sum(part.num_operations for part in each.layers[:-1]) for each in (work, closed)]
    assert started[1] <= started[0] <= 2.1 * started[1]
    for name in ("peak_bytes", "backward_bytes"):
        most = [max(getattr(part, name) for part in each.parts) for each in (work, closed)]
        assert most[0] == pytest.approx(most[1], rel=0.1, abs=2**15), name
    found = {part.name: part for part in work.parts}
    for part in closed.layers:
        other = found.get(
            part.name, next((each for each in work.parts if each.shares and part.shares), part)
        )
        assert figures(other) == pytest.approx(figures(part), rel=0.02, abs=4096)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"sequence": 2}], ids=["tensor", "sequence"])
def test_a_rank_of_a_group_has_the_closed_form_of_its_share(sizes: dict[str, int]) -> None:
    """Its bytes, and the time of a step on a listed GPU: what the collectives send included."""
    shape = {"size": "gpt2", "num_layers": 2, "max_positions": 512, "dropout": 0.0}
    tokens = torch.zeros(MICRO, 512, dtype=torch.int64)
    config = config_from_values({"model": {"kind": "gpt", **shape}, "task": {"kind": "causal_lm"}})
    values = config.model.model_dump()
    for name in ("kind", "size"):
        values.pop(name)
    build = partial(GPT.of, **values)
    whole, work = (
        traced(build, tokens, CausalLM(), targets=tokens, **groups) for groups in ({}, sizes)
    )
    closed, closed_whole = (
        model_work(
            config.model, micro_size=MICRO, arithmetic="fp32", device="cuda", share=RankShare(**way)
        )
        for way in (sizes, {})
    )
    assert closed is not None
    assert closed_whole is not None
    assert dict(work.weights) == dict(closed.weights)
    assert work.flops == closed.flops
    assert saved_bytes(work) == pytest.approx(saved_bytes(closed), rel=0.02)
    for name in ("peak_bytes", "backward_bytes"):
        most = [max(getattr(part, name) for part in each.parts) for each in (work, closed)]
        assert most[0] == pytest.approx(most[1], rel=0.1, abs=2**15), name
    rank = WorkOfRank(sizes.get("tensor", 1), sizes.get("sequence", 1), work)
    machine = Machine.listed("a100-80gb", devices_per_host=8)
    by = Parallelism(micro_size=MICRO, block_sums=(2, 2), dtype="fp32", **sizes)
    times = []
    for each in (replace(whole, of_ranks=(rank,)), closed_whole):
        times.append(step_time(each, by, machine, replace(RATES, launch_seconds=0.0)))
    first, second = times
    assert first.seconds.keys() == second.seconds.keys()
    for name in ("compute", "optimizer"):
        assert first.seconds[name] == pytest.approx(second.seconds[name], rel=1e-3)
    # of 2 blocks of 768: sums of what their row layers make and their column layers read, of the
    # embedding and for the output layer; queries, keys and values go in one exchange
    hidden = tokens.numel() * 768 * 4
    expected = {("sum", False, hidden): 5, ("sum", True, hidden): 5}
    if "sequence" in sizes:
        expected = {}
        for num_bytes, is_backward in product((3 * hidden // 2, hidden // 2), (False, True)):
            expected["exchange", is_backward, num_bytes] = 2
    sent = {}
    for each in work.collectives:
        if each.num_bytes > 2**15:  # no logsumexp
            sent[each.kind, each.is_backward, each.num_bytes] = each.count
    assert sent == expected


class _NextToken(Classification):
    def loss(self, outputs: Tensor, targets: Tensor) -> Any:
        return super().loss(
            outputs.flatten(0, 1), torch.zeros(outputs.shape[:2].numel(), dtype=torch.int64)
        )


def figures(part: LayerWork) -> list[float]:
    return [
        part.num_params,
        part.flops,
        part.masked_flops,
        part.score_flops,
        part.frozen_flops,
        part.frozen_score_flops,
        part.saved_bytes,
        part.output_bytes,
        part.input_bytes,
    ]


class AsksForNumbers(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        made = super().forward(value)
        return made if made.sum() > 0 else -made


def test_a_model_that_asks_for_numbers_has_no_trace() -> None:
    with pytest.raises(DataDependentOutputException):
        traced(lambda: AsksForNumbers(4, 3), torch.zeros(MICRO, 4), Classification())


class Computed(nn.Module):
    """Has numbers of its own in the constructor: a rate for each layer, a mask that it reads, and
    weights that are drawn within bounds; two layers share a weight.
    """

    def __init__(self, depth: int = 3, width: int = 4) -> None:
        super().__init__()
        rates = [float(rate.item()) for rate in torch.linspace(0, 0.2, depth)]
        first = nn.Linear(width, width)
        layers: list[nn.Module] = [first]
        for rate in rates:
            layers += [nn.Linear(width, width), nn.Dropout(rate)]
        self.layers = nn.Sequential(*layers)
        self.register_buffer("scales", torch.linspace(0.5, 1, width))
        self.largest = float(self.get_buffer("scales").max())
        self.scale = nn.Parameter(torch.full((width,), self.largest))
        self.head = nn.Linear(width, width)
        self.head.weight = first.weight
        for weight in self.parameters():
            nn.init.trunc_normal_(weight, std=0.02)

    def forward(self, value: Tensor) -> Any:
        value = value * self.scale * self.get_buffer("scales")
        return self.head(self.layers(value))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_that_computes_numbers_where_it_is_built_has_a_trace(dtype: str) -> None:
    built: list[Computed] = []

    def build() -> nn.Module:
        built.append(Computed())
        return built[0]

    work = traced(build, torch.zeros(MICRO, 4), Classification(), dtype)
    (model,) = built
    assert model.largest == 1
    assert dict(work.weights) == {
        name: tuple(weight.shape) for name, weight in Computed().named_parameters()
    }
    assert work.buffer_bytes == 4 * 4
    assert not work.can_recompute
    tensors = [*model.parameters(), *model.buffers()]
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors)


def test_modules_have_real_weights_after_a_trace() -> None:
    with pytest.raises(DataDependentOutputException):
        traced(lambda: AsksForNumbers(4, 3), torch.zeros(MICRO, 4), Classification())
    assert not isinstance(nn.Linear(2, 2).weight, FakeTensor)


class Perceptron(nn.Sequential):
    """Two layers, and a product of values that no weight takes part in."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Linear(8, 3))

    def forward(self, value: Tensor) -> Tensor:
        made = super().forward(value).unsqueeze(-1)
        return (made @ made.transpose(1, 2) @ made).squeeze(-1)


@pytest.mark.parametrize(
    ("freeze", "backward"),
    [
        # of the first layer no gradient of the inputs, of the second both
        ((), 1 * 32 + 2 * 24),
        (("0[.].*",), 1 * 24),
        (("1[.].*",), 1 * 32 + 1 * 24),
    ],
)
def test_a_frozen_weight_has_no_product_for_its_gradient(
    freeze: tuple[str, ...], backward: int
) -> None:
    work = traced(Perceptron, torch.zeros(MICRO, 4), Classification(), freeze=freeze)
    assert sum(part.weight_flops for part in work.parts) == 2 * MICRO * (32 + 24)
    assert sum(part.score_flops for part in work.parts) == 2 * MICRO * 2 * 9
    assert sum(part.backward_weight_flops for part in work.parts) == 2 * MICRO * backward
    assert sum(part.backward_score_flops for part in work.parts) == 2 * 2 * MICRO * 2 * 9


class Recurrent(nn.LSTM):
    def forward(self, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(value)[0]


def test_recurrent_layers_are_not_estimated() -> None:
    with pytest.raises(NotTracedError, match="the model is a recurrent layer"):
        traced(lambda: Recurrent(4, 3), torch.zeros(MICRO, 5, 4), Classification())


@pytest.mark.slow
def test_seven_billion_weights_are_not_allocated() -> None:
    program = [sys.executable, "-m", "tests.jobs.trace_seven_billion"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    num_params, peak_bytes, seconds = map(float, done.stdout.split())
    # attention, three matrices of the perceptron and two norms of each layer; the norm at the end;
    # embedding and output layer
    of_layer = 4 * 8192**2 + 3 * 8192 * 22_016 + 2 * 8192
    assert num_params == 8 * of_layer + 8192 + 2 * 32_000 * 8192 == 7_000_432_640
    assert peak_bytes < 3 * 2**30
    assert seconds < 40


def test_fused_attention_of_processors_leaves_masked_scores_out_too() -> None:
    model = config_from_values(
        {"model": {"kind": "gpt", **SMALL, "dropout": 0.0}, "task": {"kind": "causal_lm"}}
    ).model
    closed = model_work(model, micro_size=MICRO, arithmetic="fp32", device="cpu")
    values = {
        name: value for name, value in model.model_dump().items() if name not in ("kind", "size")
    }
    work = traced(lambda: GPT.of(**values), TOKENS, _NextToken(), device="cpu")
    assert closed is not None
    found = [sum(part.masked_flops for part in each.layers) for each in (work, closed)]
    assert found[0] == found[1] > 0
