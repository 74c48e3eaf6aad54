"""Batches that are mappings, with the loss of the model or of a named task, train as plain PyTorch
trains them: the sum over all micro-batches and ranks by the count of all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import framework
from framework.data.order import epoch_order
from tests.jobs.dict_rows import Rows, model
from tests.launched import fewer, series, train_cases

pytestmark = pytest.mark.slow

STEPS, SIZE = fewer(4, of=8), 8
# Name -> family, classes instead of tokens, task, ZeRO stage.
CASES: dict[str, tuple[str, bool, dict[str, Any], int]] = {
    "own-next": ("qwen3", False, {"kind": "model_loss", "mean_over": "next_labels"}, 2),
    "own-next-z3": ("gpt-neox", False, {"kind": "model_loss", "mean_over": "next_labels"}, 3),
    "recomputed": ("qwen3", False, {"kind": "causal_lm"}, 0),
    "recomputed-z3": ("qwen3", False, {"kind": "model_loss", "mean_over": "next_labels"}, 3),
    "recomputed-selective": ("qwen3", False, {"kind": "causal_lm"}, 0),
    "recomputed-selective-z3": ("gpt-neox", False, {"kind": "causal_lm"}, 3),
    "named-next": ("qwen3", False, {"kind": "causal_lm"}, 1),
    "own-classes": ("roberta", True, {"kind": "model_loss"}, 0),
    "named-classes": ("roberta", True, {"kind": "classification"}, 1),
    # In two stages; Gemma's embedding is its output layer, and it scales and caps.
    "piped-own-next": ("qwen3", False, {"kind": "model_loss", "mean_over": "next_labels"}, 1),
    "piped-tied": ("gemma2", False, {"kind": "causal_lm"}, 0),
    "piped-recomputed": ("gemma2", False, {"kind": "model_loss", "mean_over": "next_labels"}, 1),
    "piped-experts": ("mixtral", False, {"kind": "causal_lm"}, 1),
}


def recomputed(name: str) -> dict[str, Any]:
    """Keys of `training` of the case."""
    if "selective" in name:
        return {"recompute": "selective"}
    return {"recompute_every": int("recomputed" in name)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="transformers comes with the dev extra")
    folder = tmp_path_factory.mktemp("model-loss")
    cases = [
        {
            "run": {"name": name, "output_dir": str(folder)},
            "model": {"target": "tests.jobs.dict_rows:model", "args": {"family": family}},
            "data": {"target": "tests.jobs.dict_rows:Rows", "args": {"has_classes": classes}},
            "task": task,
            "batch": {"global_size": SIZE, "accumulation_steps": 2},
            "zero": {"stage": stage},
            "parallel": {"pipe": 2 if name.startswith("piped") else 1},
            "optimizer": {"kind": "sgd", "lr": 0.1},
            "training": {
                "max_steps": STEPS,
                "log_every": 1,
                "clip_grad_norm": 0,
                **recomputed(name),
            },
            "checkpoint": {"at_end": name == "piped-tied"},
            "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        }
        for name, (family, classes, task, stage) in CASES.items()
    ]
    train_cases(cases, num_ranks=2, folder=folder)
    return folder


def trained(family: str, *, has_classes: bool) -> tuple[nn.Module, dict[int, float]]:
    """A model that plain PyTorch has trained, and the losses by step."""
    net, rows = model(family).train(), Rows(has_classes)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    expected = {}
    for step in range(STEPS):
        order = epoch_order(len(rows), seed=0, epoch=0, shuffle=True)[
            step * SIZE : (step + 1) * SIZE
        ]
        batch = torch.utils.data.default_collate([rows[index] for index in order.tolist()])
        loss = net(**batch).loss  # transformers' own, over the whole batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected[step + 1] = loss.item()
    return net, expected


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_plain_pytorch(runs: Path, name: str) -> None:
    family, has_classes, _, _ = CASES[name]
    expected = trained(family, has_classes=has_classes)[1]
    assert series(runs / name, "train/loss") == pytest.approx(expected, abs=1e-5)


def test_a_tied_model_that_stages_trained_is_loaded_whole(runs: Path) -> None:
    net = trained(CASES["piped-tied"][0], has_classes=False)[0].eval()
    loaded = framework.load(runs / "piped-tied", trust=True)
    tokens = torch.arange(3, 15).view(2, 6)
    with torch.no_grad():
        assert torch.allclose(net(tokens).logits, loaded(tokens).logits, atol=1e-4)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
