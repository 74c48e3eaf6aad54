"""GPT and BERT in half precision on a CUDA device, and cut in two over two of them, where NCCL
sends between the stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launched import read_metrics, train_cases_on_gpu

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        NUM_DEVICES < 1,
        reason="no CUDA device on this machine: GPT and BERT in half precision not run",
    ),
]

MODELS: Mapping[str, dict[str, Any]] = {
    "gpt": {
        "model": {"kind": "gpt"},
        "data": {"kind": "text", "sequence_length": 128},
        "task": {"kind": "causal_lm"},
    },
    "bert": {
        "model": {"kind": "bert", "vocab_size": 261},
        "data": {"kind": "text_pairs", "sequence_length": 128},
        "task": {"kind": "masked_lm"},
    },
}
ALONE = {
    f"{model}-{dtype}-z{stage}": {
        **MODELS[model],
        "precision": {"dtype": dtype},
        "zero": {"stage": stage},
    }
    for model in MODELS
    for dtype in ("fp16", "bf16")
    for stage in (1, 3)
}
CUT = {
    f"{model}-{dtype}-cut": {
        **MODELS[model],
        "precision": {"dtype": dtype},
        "zero": {"stage": 1},
        "parallel": {"pipe": 2},
    }
    for model in MODELS
    for dtype in ("fp16", "bf16")
}


def train(cases: Mapping[str, dict[str, Any]], folder: Path, *, num_ranks: int) -> Path:
    configs = [
        {
            "run": {"name": name, "output_dir": str(folder)},
            "batch": {"global_size": 32, "micro_size": 8},
            "optimizer": {"kind": "adamw", "lr": 1e-3},
            "training": {"max_steps": 150, "log_every": 10},
            "evaluation": {"max_samples": 256, "batch_size": 32},
            "checkpoint": {"at_end": False},
            "monitors": {"tensorboard": False, "csv": False, "progress": "off"},
            **sections,
        }
        for name, sections in cases.items()
    ]
    train_cases_on_gpu(configs, num_ranks=num_ranks, folder=folder)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(ALONE, tmp_path_factory.mktemp("alone"), num_ranks=1)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if NUM_DEVICES < 2:
        pytest.skip("one CUDA device on this machine: a pipeline over NCCL not run")
    return train(CUT, tmp_path_factory.mktemp("cut"), num_ranks=2)


def learns(folder: Path, name: str) -> None:
    """A model of no knowledge has log(261) = 5.56 nats per byte; that of the frequencies of bytes
    about 3.4.
    """
    last = read_metrics(folder / name)[-1]
    assert last["eval/loss" if name.startswith("gpt") else "eval/mlm_loss"] < 4.5


@pytest.mark.parametrize("name", ALONE)
def test_it_learns_in_half_precision(alone: Path, name: str) -> None:
    learns(alone, name)


@pytest.mark.parametrize("name", CUT)
def test_it_learns_cut_in_two(cut: Path, name: str) -> None:
    learns(cut, name)
