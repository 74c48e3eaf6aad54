"""What CPU tests cannot see: bits that differ between runs, TF32, copies from the device, options
that meet kernels.

`pytest tests/gpu` proves all of it on one GPU in a few minutes; `docs/gpu-status.md` says what has
been measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint.manifest import list_checkpoints
from framework.config.load import config_from_values
from framework.engine.plain_engine import arithmetic_of
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from tests.launched import read_metrics, series, train_cases_on_gpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device on this machine: its arithmetic not run",
    ),
]

STEPS, STOP = 24, 12
GPT = {
    "model": {
        "kind": "gpt",
        "vocab_size": 50,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "max_positions": 16,
    },
    "data": {"target": "tests.jobs.parts:masked_prompts"},
    "task": {"kind": "causal_lm"},
    "precision": {"dtype": "bf16"},
}
CONVOLUTIONS = {"model": {"kind": "lenet"}, "data": {"kind": "digits"}}
SAME_BITS = {"gpt": (GPT, 1), "convolutions": (CONVOLUTIONS, 0), "gpt-stage3": (GPT, 3)}
LEARNING: dict[str, dict[str, Any]] = {
    "async": {"checkpoint": {"mode": "async", "every_steps": 50}},
    "recompute": {"training": {"recompute_every": 1}},
    "channels-last": {"training": {"channels_last": True}, "model": {"kind": "small_resnet18"}},
    "offload": {"zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "pinned-workers": {
        "data": {"kind": "digits", "num_workers": 2},
        "evaluation": {"every_epochs": 1},
    },
    "compiled": {"training": {"compile": {}}, "precision": {"dtype": "bf16"}},
    "cuda-graphs": {
        "training": {"compile": {"mode": "reduce-overhead"}},
        "precision": {"dtype": "bf16"},
    },
    "poisoned": {
        "data": {
            "target": "tests.jobs.bad_parts:poisoned_digits",
            "args": {"indices": [5, 700], "factor": "nan"},
        },
        "batch": {"global_size": 120},
        "optimizer": {"kind": "adamw", "implementation": "fused"},
        "training": {"bad_steps": {"policy": "skip", "spike_sigmas": 0}},
    },
    "long-sums": {
        "precision": {"dtype": "bf16"},
        "zero": {"stage": 1},
        "batch": {"accumulation_steps": 15},
    },
}


def config(
    name: str, folder: Path, sections: dict[str, Any], *, stage: int = 0, **training: Any
) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "zero": {"stage": stage},
        "monitors": {"progress": "off"},
        **sections,
        "batch": {
            "global_size": 120 if "data" not in sections else 16,
            **sections.get("batch", {}),
        },
        "training": {"log_every": 1, **sections.get("training", {}), **training},
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu-risks")
    configs = []
    for name, (sections, stage) in SAME_BITS.items():
        for run, steps in (
            ("whole", STEPS),
            ("again", STEPS),
            ("resumed", STOP),
            ("resumed", STEPS),
        ):
            values = config(
                f"{name}-{run}", folder, sections, stage=stage, deterministic=True, max_steps=steps
            )
            resume = "auto" if (run, steps) == ("resumed", STEPS) else "never"
            configs.append({**values, "checkpoint": {"at_end": True, "resume": resume}})
    for name, sections in LEARNING.items():
        configs.append(config(name, folder, sections, max_epochs=6, log_every=11))
    train_cases_on_gpu(configs, folder=folder)
    assert not list(folder.glob("*.error")), [
        path.read_text(encoding="utf-8") for path in folder.glob("*.error")
    ]
    return folder


@pytest.mark.parametrize("name", SAME_BITS)
@pytest.mark.parametrize("other", ["again", "resumed"])
def test_deterministic_runs_are_equal_to_the_bit(runs: Path, name: str, other: str) -> None:
    whole, found = (series(runs / f"{name}-{run}", "train/loss") for run in ("whole", other))
    assert list(whole) == list(range(1, STEPS + 1))
    assert found == whole
    last = [
        list_checkpoints(runs / f"{name}-{run}" / "checkpoints")[-1] for run in ("whole", other)
    ]
    assert [checkpoint.step for checkpoint in last] == [STEPS, STEPS]


@pytest.mark.parametrize("name", LEARNING)
def test_options_that_meet_kernels_learn(runs: Path, name: str) -> None:
    assert read_metrics(runs / name)[-1]["eval/accuracy"] > 0.7


@pytest.mark.parametrize(
    ("matmul", "least", "most"), [("highest", 0.0, 1e-5), ("high", 1e-5, 1e-2)]
)
def test_a_convolution_in_fp32_is_one(matmul: str, least: float, most: float) -> None:
    """TF32 keeps 10 bits: its error is a hundred times larger, where the device has it (Ampere and
    newer).
    """
    if matmul == "high" and torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("this device has no TF32")
    plan = make_plan(
        config_from_values({"precision": {"dtype": "fp32", "matmul": matmul}}),
        Cluster(devices_per_host=1),
    )
    torch.manual_seed(0)
    images, kernel = torch.randn(8, 64, 32, 32), torch.randn(64, 64, 3, 3)
    exact = torch.nn.functional.conv2d(images.double(), kernel.double())
    with arithmetic_of(plan):
        found = torch.nn.functional.conv2d(images.cuda(), kernel.cuda()).cpu().double()
    error = float((found - exact).norm() / exact.norm())
    assert least <= error < most


def test_a_full_device_is_explained_and_the_way_out_that_is_named_is_one(tmp_path: Path) -> None:
    """GPT-2 holds a third of a GiB for each sequence between forward and backward, and 2 GiB
    whatever the batch.
    """
    sequences = int(1.4 * torch.cuda.get_device_properties(0).total_memory / (0.33 * 2**30))
    sections: dict[str, Any] = {
        "model": {"kind": "gpt", "size": "gpt2"},
        "data": {"kind": "text", "sequence_length": 1024},
        "task": {"kind": "causal_lm"},
        "precision": {"dtype": "bf16"},
        "batch": {"global_size": sequences, "micro_size": sequences},
        "evaluation": {"at_end": False},
        "checkpoint": {"at_end": False},
    }
    configs = [
        config("full", tmp_path, sections, stage=1, max_steps=2),
        config("recomputed", tmp_path, sections, stage=1, max_steps=2, recompute_every=1),
    ]
    train_cases_on_gpu(configs, folder=tmp_path)
    stated = (tmp_path / "full.error").read_text(encoding="utf-8")
    assert stated.endswith("[out-of-memory]")
    assert "the device has no memory left (" in stated
    assert "in the forward pass; by estimate" in stated
    assert "training.recompute_every" in stated
    assert not (tmp_path / "recomputed.error").exists(), (
        "the memory of the step before is free again, and this fits"
    )
    assert list(series(tmp_path / "recomputed", "train/loss")) == [1, 2]
