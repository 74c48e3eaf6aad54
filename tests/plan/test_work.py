"""Work of models in closed form, against what autograd saves and torch counts of the models
themselves.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.models.layers import LayeredModel
from framework.models.prepare_model import prepare_model
from framework.plan.cluster import Cluster
from framework.plan.plan import describe_packed_rows, make_plan
from framework.plan.plan_text import rows
from framework.plan.work import ModelWork, model_work, named_work, work_of
from framework.setup.components import gather_parts
from framework.setup.user_code import Objects
from framework.tasks.causal_lm import CausalLM
from tests.jobs.live_bytes import Saved
from tests.plan.saved_bytes import saved_bytes

TEXT = {"data": {"kind": "text", "sequence_length": 32}, "task": {"kind": "causal_lm"}}
PAIRS = {"data": {"kind": "text_pairs", "sequence_length": 32}, "task": {"kind": "masked_lm"}}
SMALL = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "max_positions": 32}
# rows that are all taken, if evenly: of no others are operations
EXPERTS = {"num_experts": 4, "capacity_factor": 1.0}
LLAMA = {"size": "llama-2-7b", "mlp_size": 160, "num_kv_heads": 2, "vocab_size": 261}


def images(model: dict[str, Any], size: int, channels: int = 1) -> dict[str, Any]:
    data = {"kind": "synthetic_images", "image_size": size, "channels": channels, "num_classes": 10}
    return {"model": {"num_classes": 10, "in_channels": channels, **model}, "data": data}


MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": {"kind": "gpt", **SMALL, "dropout": 0.0}, **TEXT},
    "gpt-dropout": {"model": {"kind": "gpt", **SMALL, "dropout": 0.1}, **TEXT},
    "llama": {"model": {"kind": "gpt", **SMALL, **LLAMA}, **TEXT},
    "gpt-rotary": {
        "model": {"kind": "gpt", **SMALL, "positions": "rotary", "dropout": 0.1},
        **TEXT,
    },
    "switch": {"model": {"kind": "gpt", **SMALL, "moe": EXPERTS}, **TEXT},
    "mixtral": {
        "model": {"kind": "gpt", **SMALL, **LLAMA, "moe": {**EXPERTS, "top_k": 2, "every": 1}},
        **TEXT,
    },
    "bert": {"model": {"kind": "bert", **SMALL, "dropout": 0.0}, **PAIRS},
    "bert-dropout": {"model": {"kind": "bert", **SMALL, "dropout": 0.1}, **PAIRS},
    "lenet": images({"kind": "lenet"}, 28),
    "mlp": images({"kind": "mlp", "dropout": 0.2, "image_size": 16}, 16),
    "small_resnet18": images({"kind": "small_resnet18"}, 20),
    "resnet18": images({"kind": "resnet18"}, 48, channels=3),
    "resnet50": images({"kind": "resnet50"}, 33),
}
MICRO = 3


def config_of(name: str, dtype: str, **training: Any) -> RunConfig:
    values = MODELS[name] | {
        "precision": {"dtype": dtype},
        "training": {"max_steps": 1, "loss_tile": 0, **training},
    }
    return config_from_values(values | {"batch": {"micro_size": MICRO}})


def built(config: RunConfig) -> tuple[torch.nn.Module, Any, Any, Any]:
    """Model, task, inputs and targets of one micro-batch, in the run's arithmetic."""
    parts = gather_parts(config, Objects())
    model = prepare_model(parts.build_model(), config.training)
    samples = [parts.splits.train[number] for number in range(MICRO)]
    inputs, targets = parts.task.split(torch.utils.data.default_collate(samples))
    if config.precision.dtype == "bf16":
        model = model.bfloat16()
        inputs = (
            inputs.bfloat16()
            if isinstance(inputs, torch.Tensor) and inputs.is_floating_point()
            else inputs
        )
    return model, parts.task, inputs, targets


def arithmetic_of(config: RunConfig) -> Any:
    return (
        torch.autocast("cpu", torch.bfloat16)
        if config.precision.dtype == "autocast"
        else nullcontext()
    )


def counted(config: RunConfig) -> int:
    """Bytes that autograd saves of the model and its loss."""
    model, task, inputs, targets = built(config)
    saved = Saved(model)
    with saved.hooks, arithmetic_of(config):
        task.loss(task.forward(model, inputs), targets)
    return saved.total


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [*product(MODELS, ("fp32", "bf16", "autocast"))])
def test_saved_bytes_are_what_autograd_saves(name: str, dtype: str) -> None:
    config = config_of(name, dtype)
    work = named_work(config, MICRO, device="cpu")
    assert work is not None
    assert saved_bytes(work) == pytest.approx(counted(config), rel=0.05)


PACKED = {"data": {"kind": "conversations", "packing": True, "sequence_length": 32}}


@pytest.mark.parametrize("name", ["gpt", "gpt-dropout", "llama"])
@pytest.mark.parametrize("texts", [1, 4])
def test_packed_rows_save_and_compute_what_their_texts_do(name: str, texts: int) -> None:
    config = config_from_values({**MODELS[name], **PACKED, "training": {"max_steps": 1}})
    work = named_work(config, MICRO, device="cpu", texts_per_row=texts)
    assert work is not None
    model = built(config_of(name, "fp32"))[0]
    task = CausalLM()
    places = torch.arange(32 // texts).repeat(MICRO, texts)
    inputs = {"input_ids": torch.randint(0, 261, (MICRO, 32)), "position_ids": places}
    saved = Saved(model)
    with saved.hooks, FlopCounterMode(display=False) as counter:
        task.loss(task.forward(model, inputs), inputs["input_ids"])
    assert saved_bytes(work) == pytest.approx(saved.total, rel=0.02)
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_a_plan_counts_the_texts_of_packed_rows() -> None:
    config = config_from_values({**MODELS["gpt"], **PACKED, "training": {"max_steps": 1}})
    plan = make_plan(config, Cluster(1, 1, "cpu"))
    read = replace(plan, texts_per_row=4.0)
    assert rows(plan)["rows"] == "packed, planned as 1 text each, the most work and memory"
    assert describe_packed_rows(read) == "packed, planned as 4.0 texts of equal length each"
    work, less = work_of(plan), work_of(read)
    assert work is not None
    assert less is not None
    attention = 3 * 4 * plan.layout.micro_size * 32 * 32 * 64  # of all layers
    assert work.flops - less.flops == attention * 3 // 4


FROZEN = (
    ["embed.*"],
    [r"blocks\.0\..*", "positions.*", "embed.*"],
    [".*norm.*"],
    [".*up.*", r"blocks\.[12]\..*"],
)


@pytest.mark.parametrize(("patterns", "dtype"), [*product(FROZEN, ("fp32", "autocast"))])
def test_frozen_layers_save_what_autograd_saves(patterns: list[str], dtype: str) -> None:
    config = config_of("gpt-dropout", dtype, freeze=patterns)
    work = named_work(config, MICRO, device="cpu")
    assert work is not None
    assert saved_bytes(work) == pytest.approx(counted(config), rel=0.01)


def counted_with_recompute(config: RunConfig) -> int:
    """Inputs of groups and what the loss saves, of the forward pass; and of each group what it
    saves when it runs by itself: the most that is there at once in the backward pass.
    """
    every = config.training.recompute_every
    model, task, value, targets = built(config)
    assert isinstance(model, LayeredModel)
    inputs, most = 0, 0
    for start in range(0, len(model.recipes), every):
        inputs += sum(each.nbytes for each in leaves(value)) if start else 0
        saved = Saved(model)
        with saved.hooks, arithmetic_of(config):
            made = model._run(value, start, start + every)
        own = saved.without(leaves(value)) if start else saved.total
        value = tuple(map(again, made)) if isinstance(made, tuple) else again(made)
        most = max(most, inputs + own)
    saved = Saved(model)
    with saved.hooks, arithmetic_of(config):
        task.loss(value, targets)
    return max(most, inputs + own + saved.total)


def leaves(value: Any) -> list[torch.Tensor]:
    return [*value] if isinstance(value, tuple) else [value]


def again(value: torch.Tensor) -> torch.Tensor:
    """The same tensor, as another group made it; an operation may change it in place."""
    return value.detach().requires_grad_(value.is_floating_point()).clone()


@pytest.mark.slow
@pytest.mark.parametrize(("every", "dtype"), [*product((1, 2, 3, 20), ("fp32", "bf16"))])
@pytest.mark.parametrize(
    "name", ["gpt-dropout", "llama", "bert", "lenet", "small_resnet18", "resnet50"]
)
def test_recomputation_keeps_inputs_of_groups_and_one_group(
    name: str, every: int, dtype: str
) -> None:
    config = config_of(name, dtype, recompute_every=every)
    work = named_work(config, MICRO, device="cpu")
    assert work is not None
    assert saved_bytes(work, every) == pytest.approx(counted_with_recompute(config), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_flops_are_what_torch_counts(name: str) -> None:
    config = config_of(name, "fp32")
    model, task, inputs, targets = built(config)
    with FlopCounterMode(display=False) as counter:
        task.loss(task.forward(model, inputs), targets)
    work = named_work(config, MICRO, device="cpu")
    assert work is not None
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_a_block_keeps_what_the_literature_states() -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198), table 2: s b h (34 + 5 a s / h) bytes, of which
    fused attention keeps none of the last, and s b h (10 + 24 / t) with tensor parallelism of t.
    """
    model = config_from_values(
        {"model": {"kind": "gpt", "size": "gpt2-xl"}, "task": {"kind": "causal_lm"}}
    ).model
    work = model_work(model, micro_size=4, sequence_length=1024)
    assert work is not None
    (block,) = (part for part in work.parts if part.count > 1)
    unit = 4 * 1024 * 1600
    assert block.count == 48
    assert block.saved_bytes / unit == pytest.approx(34, rel=0.01)
    assert block.split_bytes / unit == pytest.approx(24, rel=0.01)
    assert block.flops == 24 * unit * 1600 + 4 * unit * 1024
    # above the diagonal, which fused attention leaves out
    assert block.masked_flops == 2 * unit * 1023
    unfused = model_work(
        model.model_copy(update={"dropout": 0.1}), micro_size=4, sequence_length=1024, device="cpu"
    )
    assert unfused is not None
    assert sum(part.masked_flops for part in unfused.parts) == 0


def test_operations_of_experts_are_those_of_tokens_and_their_memory_that_of_rows() -> None:
    """Of 8 experts a token takes 2: operations of two perceptrons, and time of all rows."""

    def work(moe: dict[str, Any] | None) -> ModelWork:
        values = {"kind": "gpt", "size": "llama-2-7b", "num_layers": 2} | (
            {"moe": moe} if moe else {}
        )
        made = named_work(config_from_values({"model": values, **TEXT}), 4)
        assert made is not None
        return made

    dense, moe = work(None), {"num_experts": 8, "top_k": 2, "every": 1}
    perceptron = 3 * 4096 * 11008
    for factor, num_rows in ((1.0, 2), (2.0, 4), (None, 8)):
        mixed = work({**moe, "capacity_factor": factor})
        assert mixed.num_params - dense.num_params == 2 * (7 * perceptron + 8 * 4096)
        router = 2 * 8 * 4096
        assert mixed.flops - dense.flops == 2 * 128 * 2 * (perceptron + router // 2)
        computed = mixed.flops - sum(part.masked_flops * part.count for part in mixed.parts)
        masked = sum(part.masked_flops * part.count for part in dense.parts)
        assert computed - (dense.flops - masked) == 2 * 128 * 2 * (
            (num_rows - 1) * perceptron + router // 2
        )


@pytest.mark.parametrize(
    ("device", "is_tied", "tokens", "micro_size", "is_filled"),
    [
        ("cuda", True, 261, 8, True),
        ("cuda", True, 320, 8, False),
        ("cuda", False, 261, 8, False),
        ("cpu", True, 261, 8, False),
        ("cuda", True, 261, 7, False),  # of 224 positions
    ],
)
def test_logits_with_filled_rows_keep_a_copy_of_the_weight(
    device: Any, is_tied: bool, tokens: int, micro_size: int, is_filled: bool
) -> None:
    model = {"kind": "gpt", **SMALL, "vocab_size": tokens, "tie_embeddings": is_tied}
    values: dict[str, Any] = {"model": model, **TEXT, "training": {"loss_tile": 0}}
    config = config_from_values(values | {"precision": {"dtype": "bf16"}})
    work = named_work(config, micro_size, device=device)
    assert work is not None
    head = next(layer for layer in work.layers if layer.name == "head")
    kept = 2 * micro_size * 32 * SMALL["hidden_size"]  # its input
    copy = 2 * 320 * SMALL["hidden_size"]
    assert head.saved_bytes == kept + is_filled * copy
    assert head.moved_bytes == is_filled * 2 * copy


_LORA = {"target_modules": ["query", "value", "down"], "r": 4}


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("gpt", {}),
        ("gpt", {"lora": _LORA}),
        ("llama", {"lora": _LORA | {"modules_to_save": ["mlp_norm"]}}),
        ("llama", {"lora": {"target_modules": "all-linear", "r": 4}}),
        ("gpt", {"freeze": ["embed.*", "positions.*", r"blocks\.[01]\..*"]}),
        ("mixtral", {"lora": {"target_modules": ["query", "value"], "r": 4}}),
    ],
)
def test_frozen_weights_have_no_gradients_to_compute(name: str, training: dict[str, Any]) -> None:
    """Operations of both passes, as torch counts them."""
    config = config_of(name, "fp32", **training)
    model, task, inputs, targets = built(config)
    if config.training.lora is not None:
        pytest.importorskip("peft", reason="peft comes with the lora extra")
        from framework.models.adapters import add_adapters

        model = add_adapters(model, config.training.lora, seed=0)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = task.loss(task.forward(model, inputs), targets)
        first = loss[0] if isinstance(loss, tuple) else loss
        first.total.backward()
    work = named_work(config, MICRO, device="cpu")
    assert work is not None
    assert work.trained_flops == pytest.approx(counter.get_total_flops(), rel=0.02)
    if config.training.lora is not None:
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        assert sorted(work.weights.values()) == sorted(tuple(weight.shape) for weight in trained)
    if training:
        assert work.trained_flops < 2.8 * work.flops
