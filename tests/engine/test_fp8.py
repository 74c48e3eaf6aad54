"""Steps in fp8, emulated, of two ranks at every ZeRO stage against plain PyTorch with layers by
fp8's own definition; resumed to the bit, and checkpoints with and without fp8 that are one.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.state.reader import MergedWeights
from framework.config.load import config_from_values
from framework.data.order import Share, epoch_order
from framework.recipes.text.prepare import prepare
from framework.setup.user_code import call_factory
from tests.engine.saved_runs import write_tokens
from tests.launched import series, train_cases
from tests.models.fp8_definition import define
from tests.places import data_root

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None, reason="torchao comes with the fp8 extra"
    ),
]

NUM_STEPS = 4
HALF_WAY = 2
BATCH = 8
MICRO = 2
CLIP = 0.5
LR = 0.5
FP8 = {"dtype": "bf16", "fp8": {"emulate": True}}
BF16 = {"dtype": "bf16"}
GPT = {
    "kind": "gpt",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "max_positions": 32,
    "dropout": 0.0,
}
SPREAD = {"stage": 3, "stage3_param_persistence_threshold": 0}
# Name -> ZeRO, precision, other sections.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "z0": ({"stage": 0}, FP8, {}),
    "z1": ({"stage": 1}, FP8, {}),
    "z2": ({"stage": 2}, FP8, {"training": {"recompute": "selective"}}),
    "z3": (SPREAD, FP8, {"training": {"recompute": "full"}}),
    "bf16": ({"stage": 1}, BF16, {}),
}
TEXT = {"bf16": BF16, "fp8": FP8}
TEXT_STEPS = 100
PLAYS = data_root() / "tinyshakespeare" / "input.txt"
# Name -> where it begins, and its case.
AGAIN = {
    "z1-again": ("z1", "z1"),
    "z3-again": ("z3", "z3"),
    "bf16-from-fp8": ("z1", "bf16"),
    "fp8-from-bf16": ("bf16", "z2"),
}


def text_config(folder: Path, name: str, precision: dict[str, Any]) -> dict[str, Any]:
    """A run on real text that is long enough to learn something."""
    values = config(folder, name, "z1")
    return values | {
        "model": GPT | {"hidden_size": 64, "max_positions": 64},
        "data": {"kind": "text", "sequence_length": 64, "path": str(folder / "plays")},
        "batch": {"global_size": 16},
        "precision": precision,
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "training": {"max_steps": TEXT_STEPS, "log_every": 1},
        "checkpoint": {"at_end": False},
    }


def config(folder: Path, name: str, case: str, start: str | None = None) -> dict[str, Any]:
    zero, precision, sections = CASES[case]
    checkpoint: dict[str, Any] = {"every_steps": HALF_WAY}
    if start is not None:
        path = folder / start / "checkpoints" / f"global_step{HALF_WAY}"
        checkpoint = {"resume": str(path)}
    training = {"max_steps": NUM_STEPS, "log_every": 1, "clip_grad_norm": CLIP}
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "model": GPT,
        "data": {"kind": "text", "sequence_length": 32, "path": str(folder / "tokens")},
        "task": {"kind": "causal_lm"},
        "batch": {"global_size": BATCH, "micro_size": MICRO},
        "zero": zero,
        "precision": precision,
        "optimizer": {"kind": "sgd", "lr": LR, "momentum": 0.9},
        "training": training | sections.get("training", {}),
        "checkpoint": checkpoint,
        "evaluation": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    write_tokens(folder)
    configs = [config(folder, name, name) for name in CASES]
    configs += [config(folder, name, case, start) for name, (start, case) in AGAIN.items()]
    if PLAYS.is_file():
        prepare([str(PLAYS)], str(folder / "plays"))
        configs += [text_config(folder, f"text-{name}", each) for name, each in TEXT.items()]
    train_cases(configs, num_ranks=2, folder=folder)
    assert [path.read_text(encoding="utf-8") for path in folder.glob("*.error")] == []
    return folder


def plain(values: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train in one process, each micro-batch of both ranks by itself: it has scales of its own.

    Returns:
        The fp32 weights at first and in the end.
    """
    samples = call_factory(config_from_values(values).data.factory(), key="data").train
    torch.manual_seed(0)
    model = call_factory(config_from_values(values).model.factory(), key="model").bfloat16()
    define(each for each in model.blocks.modules() if isinstance(each, nn.Linear))
    weights = dict(model.named_parameters())
    copies = {name: weight.detach().float() for name, weight in weights.items()}
    first = {name: copy.clone() for name, copy in copies.items()}
    optimizer = torch.optim.SGD(list(copies.values()), lr=LR, momentum=0.9)
    order = epoch_order(len(samples), seed=0, epoch=0, shuffle=True)
    num_micro = BATCH // MICRO
    for step in range(NUM_STEPS):
        sums = {name: torch.zeros_like(copy) for name, copy in copies.items()}
        for rank in (0, 1):
            share = Share(BATCH, MICRO, num_micro // 2, rank, 2)
            for places in share.positions(step, 1).tolist():
                batch = [samples[int(order[place])] for place in places]
                tokens = torch.stack([torch.as_tensor(sample[0]) for sample in batch])
                targets = torch.stack([torch.as_tensor(sample[1]) for sample in batch])
                logits = model(tokens).flatten(0, 1).float()
                loss = nn.functional.cross_entropy(logits, targets.flatten()) / num_micro
                model.zero_grad()
                loss.backward()
                for name, weight in weights.items():
                    assert weight.grad is not None
                    sums[name] += weight.grad.float()
        for name, copy in copies.items():
            copy.grad = sums[name]
        assert float(nn.utils.clip_grad_norm_(copies.values(), CLIP)) > CLIP
        optimizer.step()
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(copies[name])
    return first, copies


def weights_of(run: Path, step: int = NUM_STEPS) -> dict[str, torch.Tensor]:
    (found,) = [one for one in list_checkpoints(run / "checkpoints") if one.step == step]
    return {name: tensor.float() for name, tensor in MergedWeights(found).items()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5


@pytest.fixture(scope="module")
def held(runs: Path) -> tuple[dict[str, torch.Tensor], float, float]:
    """What plain PyTorch makes of the weights, how far it moves them, and how far from there they
    are without fp8.
    """
    first, last = plain(config(runs, "plain", "z1"))
    return last, distance(last, first), distance(weights_of(runs / "bf16"), last)


@pytest.mark.parametrize("name", ["z0", "z1", "z2", "z3", "z1-again", "z3-again"])
def test_steps_are_those_of_the_definition(runs: Path, held: Any, name: str) -> None:
    expected, moved, without = held
    found = distance(weights_of(runs / name), expected)
    print(f"{name}: {found / moved:.4f} of the way, {without / moved:.4f} without fp8")
    # The rest is the rounding of sums of gradients in bf16.
    assert found < 0.01 * moved
    assert found < without / 3


@pytest.mark.parametrize("name", ["z1", "z3"])
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(runs: Path, name: str) -> None:
    assert distance(weights_of(runs / name), weights_of(runs / f"{name}-again")) == 0
    losses = series(runs / name, "train/loss")
    again = series(runs / f"{name}-again", "train/loss")
    assert again == {step: losses[step] for step in again}


@pytest.mark.parametrize("name", ["bf16-from-fp8", "fp8-from-bf16"])
def test_checkpoints_are_those_of_bf16(runs: Path, name: str) -> None:
    start, case = AGAIN[name]
    assert series(runs / name, "train/loss").keys() == {3, 4}
    assert weights_of(runs / name).keys() == weights_of(runs / start).keys()
    # Both ways move them alike, and not equally.
    found = weights_of(runs / name)
    before = weights_of(runs / start, HALF_WAY)
    for other in (start, case):
        assert 0 < distance(found, weights_of(runs / other)) < 0.2 * distance(found, before)


@pytest.mark.skipif(not PLAYS.is_file(), reason=f"no {PLAYS}; DSF_TEST_DATA is its folder")
def test_real_text_is_learnt_as_in_bf16(runs: Path) -> None:
    losses = [*series(runs / "text-fp8", "train/loss").values()]
    expected = [*series(runs / "text-bf16", "train/loss").values()]
    last = [sum(each[-20:]) / 20 for each in (losses, expected)]
    print(f"{losses[0]:.3f} -> {last[0]:.4f}, {last[1]:.4f} in bf16")
    assert losses[0] - last[0] > 2
    assert last[0] == pytest.approx(last[1], abs=0.02)


def test_one_line_counts_the_layers(runs: Path) -> None:
    (folder,) = runs.glob("said-*")
    stated = "".join(path.read_text(encoding="utf-8") for path in folder.iterdir())
    in_fp8 = [case for case in (*CASES, *(case for _, case in AGAIN.values())) if case != "bf16"]
    line = "precision.fp8: 12 linear layers compute in fp8\n"
    assert len(re.findall(line, stated)) == len(in_fp8) + PLAYS.is_file()
