"""Twin-Flow (`zero.offload_optimizer.ratio`): a part of the weights is stepped on the device, with
the schedule, the clipping, the average and the state of the part on the host.

Steps of 2 ranks on real text with accumulation, held against plain PyTorch, by themselves and in
groups; resumed to the bit, and moved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.state.reader import MergedWeights
from tests.engine.pipe_oracle import plain_run
from tests.engine.test_own_optimizers import DIVIDED, MIXED, config
from tests.engine.test_pipeline import text
from tests.engine.test_resume import bits
from tests.launched import ROOT, fewer, furthest, run_ranks, series

__all__ = ["text"]  # a fixture
pytestmark = pytest.mark.slow

NUM_STEPS: Final = fewer(10, of=20)
STOP: Final = fewer(5, of=12)
TOLERANCE: Final = 2e-4
SECTIONS: Final[dict[str, Any]] = {
    "optimizer": {
        "kind": "adamw",
        "lr": 5e-3,
        "weight_decay": 0.5,
        "weight_decay_on": "matrices",
        "implementation": "deepspeed",
    },
    "scheduler": {"kind": "cosine", "warmup_steps": 10},
    "training": {
        "max_steps": NUM_STEPS,
        "log_every": 1,
        "clip_grad_norm": 0.5,
        "ema": {"decay": 0.9},
    },
}

LORA: Final = {"r": 4, "target_modules": ["query", "value"]}
# Layouts in which each of the two ranks has parts of both. Adapters are held against a run without
# offload, as `test_lora.py` holds those.
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "tensor": {**DIVIDED, "parallel": {"tensor": 2}},
    "sequence": {**DIVIDED, "parallel": {"sequence": 2}},
    "moe": {"model": MIXED},
    "expert": {"model": MIXED, "parallel": {"expert": 2}},
    "lora": {
        "optimizer": {**SECTIONS["optimizer"], "lr": 0.05},
        "training": {**SECTIONS["training"], "lora": LORA},
    },
}

ADAPTERS_ON_DEVICE: Final = {
    **SECTIONS,
    **LAYOUTS["lora"],
    "optimizer": {**LAYOUTS["lora"]["optimizer"], "implementation": "auto"},
    "zero": {"stage": 3},
}


def zero(ratio: float, *, most: int = 4000) -> dict[str, Any]:
    """`most`: elements of a sub-group."""
    place = {"device": "cpu", "pin_memory": False, "ratio": ratio}
    return {"stage": 3, "sub_group_size": most, "offload_optimizer": place}


def weights_of(run: Path) -> MergedWeights:
    return MergedWeights(list_checkpoints(run / "checkpoints")[-1])


def in_layout(layout: str, folder: Path, text: Path) -> dict[str, Any]:
    most = 100 if layout == "lora" else 4000
    sections = {**SECTIONS, **LAYOUTS[layout], "zero": zero(0.4, most=most)}
    return config(layout, folder, text, **sections)


def held_cases(folder: Path, text: Path) -> list[dict[str, Any]]:
    """Those that are held against plain PyTorch, adapters against a run as others hold."""
    parts = config("parts", folder, text, **SECTIONS, zero=zero(0.4))
    return [parts, *(in_layout(name, folder, text) for name in LAYOUTS)]


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    saved = {"every_steps": STOP, "keep_last": 9}
    resumed = {"resume": str(folder / "parts" / "checkpoints" / f"global_step{STOP}")}
    cases = [
        config("whole", folder, text, **SECTIONS, zero=zero(1.0), checkpoint={"at_end": False}),
        config("parts", folder, text, **SECTIONS, zero=zero(0.4), checkpoint=saved),
        config("parts-on", folder, text, **SECTIONS, zero=zero(0.4), checkpoint=resumed),
        config("moved", folder, text, **SECTIONS, zero=zero(1.0), checkpoint=resumed),
        *(in_layout(name, folder, text) for name in LAYOUTS),
        config("lora-on-device", folder, text, **ADAPTERS_ON_DEVICE),
    ]
    file = folder / "cases.json"
    file.write_text(json.dumps([{"config": case} for case in cases]), encoding="utf-8")
    run_ranks(ROOT / "tests/jobs/two_parts.py", str(file), num_ranks=2, cwd=folder)
    return folder


def test_losses_are_those_of_plain_pytorch(runs: Path, text: Path, tmp_path: Path) -> None:
    values = config("plain", tmp_path, text, **SECTIONS)
    # the rates of the schedule, which the oracle has none of
    rates = list(series(runs / "parts", "train/lr").values())
    assert rates[0] < rates[9] / 5
    losses, metrics, _ = plain_run(values, micro_size=2, num_steps=NUM_STEPS, rates=rates)
    assert losses[-1] < losses[0] - 0.3, "the oracle itself must learn"
    for name in ("whole", "parts"):
        assert furthest(runs / name, losses) < TOLERANCE
        measured = series(runs / name, "eval/loss")[NUM_STEPS]
        assert measured == pytest.approx(metrics["loss"], abs=TOLERANCE)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "lora"])
def test_losses_in_groups_are_those_of_plain_pytorch(
    layout: str, runs: Path, text: Path, tmp_path: Path
) -> None:
    model = LAYOUTS[layout].get("model")
    sections = SECTIONS if model is None else {**SECTIONS, "model": model}
    values = config("plain", tmp_path, text, **sections)
    rates = list(series(runs / "parts", "train/lr").values())
    losses, _, _ = plain_run(values, micro_size=2, num_steps=NUM_STEPS, rates=rates)
    assert losses[-1] < losses[0] - 0.3, "the oracle itself must learn"
    assert furthest(runs / layout, losses) < TOLERANCE


def test_adapters_are_those_of_a_run_on_the_device(runs: Path) -> None:
    expected = weights_of(runs / "lora-on-device")
    changed = [name for name in expected if "lora_B" in name]
    assert changed
    for name in changed:  # zeros at the start
        assert expected[name].abs().max() > 0.05, f"{name} must learn"
    weights = weights_of(runs / "lora")
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("name", ["parts", *LAYOUTS])
def test_both_parts_were_stepped(name: str, runs: Path) -> None:
    """The host counts steps as whole numbers, torch as tensors; both have moments and averages."""
    checkpoint = runs / name / "checkpoints" / f"global_step{NUM_STEPS}"
    (file, *_) = sorted(checkpoint.glob("*_optim_states.pt"))
    saved = torch.load(file, weights_only=False, map_location="cpu")["optimizer_state_dict"]
    states = list(saved["optimizer_state_dict"]["state"].values())
    kinds = [type(state["step"]) for state in states]
    assert {torch.Tensor, int} == set(kinds)
    assert kinds[: kinds.count(torch.Tensor)] == [torch.Tensor] * kinds.count(torch.Tensor)
    for state in states:
        assert int(state["step"]) == NUM_STEPS
        assert {"exp_avg", "exp_avg_sq", "weight_ema"} <= state.keys()


def test_a_resumed_run_is_the_unbroken_one_to_the_bit(runs: Path) -> None:
    unbroken = bits(runs / "parts", NUM_STEPS)
    resumed = bits(runs / "parts-on", NUM_STEPS)
    assert unbroken.keys() == resumed.keys()
    assert [path for path in unbroken if not torch.equal(unbroken[path], resumed[path])] == []


def test_a_run_goes_on_with_all_on_the_host(runs: Path) -> None:
    expected = series(runs / "parts", "train/loss")
    moved = series(runs / "moved", "train/loss")
    assert set(moved) == set(range(STOP + 1, NUM_STEPS + 1))
    assert max(abs(loss - expected[step]) for step, loss in moved.items()) < TOLERANCE
