"""The moving average of the weights is the formula's, at every ZeRO stage, in a pipeline and in
bf16, to the end and resumed.

Held against a loop of plain PyTorch in fp32, and against the formula in fp64 over the weights of
every step's checkpoint.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.checkpoint.manifest import SavedCheckpoint, list_checkpoints
from framework.engine.weights import checkpoint_weights
from framework.recipes.image_models.small_nets import LeNet
from framework.recipes.image_sets.digits import build
from tests.engine.oracle import digit_batches
from tests.engine.test_resume import bits
from tests.launched import series, train_cases

pytestmark = pytest.mark.slow

TOTAL, STOP = 5, 3
GLOBAL_SIZE = 32
# begins after step 1, changes after steps 3 and 5
EMA = {"decay": 0.8, "every_steps": 2, "start_step": 1}
TOLERANCE = 1e-5
BF16 = {"precision": {"dtype": "bf16"}}

IN_BF16 = {"precision": {"dtype": "bf16", "states": "bf16"}}


def config(
    name: str, folder: Path, *, ema: dict[str, Any] | None = EMA, **sections: Any
) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "batch": {"global_size": GLOBAL_SIZE},
        "training": {"max_steps": TOTAL, "log_every": 1, "ema": ema},
        "evaluation": {"every_steps": 3, "weights": "ema" if ema else "trained"},
        "checkpoint": {"every_steps": 1, "keep_last": 99},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        **sections,
    }


PLAIN: dict[str, dict[str, Any]] = {
    **{f"fp32-z{stage}": {"zero": {"stage": stage}} for stage in (0, 1, 2, 3)},
    **{f"bf16-z{stage}": {"zero": {"stage": stage}} | BF16 for stage in (0, 1, 3)},
    **{f"bf16-states-z{stage}": {"zero": {"stage": stage}} | IN_BF16 for stage in (2, 3)},
    "groups-z3": {
        "zero": {"stage": 3, "sub_group_size": 3000},
        "optimizer": {"kind": "adamw", "weight_decay_on": "matrices"},
    },
    "offload-z2": {
        "zero": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    },
    "sgd": {
        "optimizer": {"kind": "sgd"},
        "batch": {"global_size": GLOBAL_SIZE, "accumulation_steps": 2},
    },
}
PIPED = {
    "pipe-z1": {"parallel": {"pipe": 2}, "zero": {"stage": 1}},
    "pipe-bf16-z1": {"parallel": {"pipe": 2}, "zero": {"stage": 1}} | BF16,
}
CASES = PLAIN | PIPED
# The run that is moved -> where to: another number of ranks, ZeRO stage or pipeline. The last one
# is a job of two ranks.
MOVED = {
    "fp32-z0": {"zero": {"stage": 3}},
    "bf16-z1": {"zero": {"stage": 3}} | BF16,
    "bf16-states-z3": {"zero": {"stage": 1}} | IN_BF16,
    "groups-z3": {"zero": {"stage": 0}, "optimizer": CASES["groups-z3"]["optimizer"]},
    "pipe-z1": {"zero": {"stage": 2}},
    "fp32-z2": {"parallel": {"pipe": 2}},
}
RESUMED = ["fp32-z0", "fp32-z3", "bf16-z1", "bf16-states-z2", "bf16-states-z3", "pipe-bf16-z1"]


def from_stop(folder: Path, name: str) -> dict[str, Any]:
    """Go on from a checkpoint in the middle of a finished run."""
    return {
        "every_steps": 1,
        "keep_last": 99,
        "resume": str(folder / name / "checkpoints" / f"global_step{STOP}"),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ema")
    for cases in (PLAIN, PIPED):
        whole = [config(name, folder, **sections) for name, sections in cases.items()]
        again = [
            config(f"{name}-resumed", folder, **cases[name], checkpoint=from_stop(folder, name))
            for name in RESUMED
            if name in cases
        ]
        extra = []
        if cases is PLAIN:
            whole.append(config("without", folder, ema=None, zero={"stage": 3}))
            bare = {"ema": None, "checkpoint": from_stop(folder, "fp32-z2")}
            extra = [
                config("dropped", folder, zero={"stage": 2}, **bare),
                config("dropped-moved", folder, zero={"stage": 1}, **bare),
                config("begun", folder, zero={"stage": 3}, checkpoint=from_stop(folder, "without")),
            ]
        else:
            extra = [
                config(
                    "fp32-z2-moved",
                    folder,
                    **MOVED["fp32-z2"],
                    checkpoint=from_stop(folder, "fp32-z2"),
                )
            ]
        train_cases([*whole, *again, *extra], num_ranks=2, folder=folder)
    alone = [
        config(f"{name}-moved", folder, **sections, checkpoint=from_stop(folder, name))
        for name, sections in MOVED.items()
        if "parallel" not in sections
    ]
    train_cases(alone, num_ranks=1, folder=folder)
    return folder


def checkpoints(run: Path) -> dict[int, SavedCheckpoint]:
    return {checkpoint.step: checkpoint for checkpoint in list_checkpoints(run / "checkpoints")}


def weights(checkpoint: SavedCheckpoint, *, average: bool = False) -> dict[str, torch.Tensor]:
    return {
        name: tensor.double()
        for name, tensor in checkpoint_weights(checkpoint, average=average).items()
    }


def plain_averages() -> dict[int, dict[str, torch.Tensor]]:
    """What anyone would write: a second model, and the formula."""
    torch.manual_seed(0)
    model = LeNet(num_classes=10, in_channels=1, image_size=28)
    optimizer = torch.optim.AdamW(model.parameters())
    average, found = copy.deepcopy(model), {}
    for step, (images, labels) in enumerate(
        digit_batches(global_size=GLOBAL_SIZE, num_steps=TOTAL), start=1
    ):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            if step <= EMA["start_step"]:
                mean.data = weight.data.clone()
            elif step in (3, 5):
                mean.data = EMA["decay"] * mean.data + (1 - EMA["decay"]) * weight.data
        found[step] = copy.deepcopy(average.state_dict())
    return found


@pytest.mark.parametrize(
    "name", [name for name in CASES if "fp32" in name or name in ("pipe-z1", "offload-z2")]
)
def test_it_is_what_plain_pytorch_finds(runs: Path, name: str) -> None:
    expected = plain_averages()
    saved = checkpoints(runs / name)
    assert sorted(saved) == list(range(1, TOTAL + 1))
    for step, checkpoint in saved.items():
        found = weights(checkpoint, average=True)
        assert found.keys() == expected[step].keys()
        for key, tensor in expected[step].items():
            assert torch.allclose(found[key], tensor.double(), rtol=0, atol=TOLERANCE), (step, key)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_formula_over_the_weights_of_every_step(runs: Path, name: str) -> None:
    saved = checkpoints(runs / name)
    expected = weights(saved[1])
    moved = 0.0
    for step, checkpoint in saved.items():
        if step in (3, 5):
            now = weights(checkpoint)
            expected = {
                key: EMA["decay"] * mean + (1 - EMA["decay"]) * now[key]
                for key, mean in expected.items()
            }
            moved = max(
                moved, *(float((now[key] - mean).abs().max()) for key, mean in expected.items())
            )
        for key, found in weights(checkpoint, average=True).items():
            assert torch.allclose(found, expected[key], rtol=1e-6, atol=1e-7), (step, key)
    assert moved > 1e-4


@pytest.mark.parametrize(
    "name", [name for name in CASES if "fp32" in name or name.startswith("pipe-z")]
)
def test_evaluation_measures_the_average(runs: Path, name: str) -> None:
    images, labels = (
        torch.stack([torch.as_tensor(sample[part]) for sample in build(28).evaluation])
        for part in (0, 1)
    )
    model = LeNet(num_classes=10, in_channels=1, image_size=28).eval()
    measured = series(runs / name, "eval/loss")
    assert sorted(measured) == [3, TOTAL]
    for step, loss in measured.items():
        losses = {}
        for average in (True, False):
            model.load_state_dict(weights(checkpoints(runs / name)[step], average=average))
            with torch.no_grad():
                losses[average] = nn.functional.cross_entropy(model(images), labels).item()
        assert loss == pytest.approx(losses[True], abs=TOLERANCE)
        assert abs(losses[True] - losses[False]) > 10 * TOLERANCE


def test_training_knows_nothing_of_it(runs: Path) -> None:
    """Neither the average nor measuring it changes a bit of what is trained."""
    for name in ("train/loss", "train/grad_norm"):
        assert series(runs / "fp32-z3", name) == series(runs / "without", name)
    left, right = (weights(checkpoints(runs / name)[TOTAL]) for name in ("fp32-z3", "without"))
    assert all(torch.equal(tensor, right[key]) for key, tensor in left.items())


def test_after_an_evaluation_a_model_in_bf16_has_its_own_weights_again(runs: Path) -> None:
    """Saved at once after it; the unbroken run's losses tell the same of fp32."""
    checkpoint = checkpoints(runs / "bf16-z1")[3]
    held = torch.load(checkpoint.path / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    for key, tensor in weights(checkpoint).items():
        assert torch.equal(held[key], tensor.bfloat16()), key
        assert not torch.equal(held[key], weights(checkpoint, average=True)[key].bfloat16()), key


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_same_bits(runs: Path, name: str) -> None:
    left, right = bits(runs / name, TOTAL), bits(runs / f"{name}-resumed", TOTAL)
    assert any(path.endswith("/weight_ema") for path in left)
    assert left.keys() == right.keys()
    assert [path for path, tensor in left.items() if not torch.equal(tensor, right[path])] == []
    for metric in ("train/loss", "eval/loss"):
        whole = {step: value for step, value in series(runs / name, metric).items() if step > STOP}
        assert series(runs / f"{name}-resumed", metric) == whole


@pytest.mark.parametrize("name", MOVED)
def test_it_moves_to_another_layout_with_the_weights(runs: Path, name: str) -> None:
    whole, moved = checkpoints(runs / name), checkpoints(runs / f"{name}-moved")
    assert sorted(moved) == list(range(STOP + 1, TOTAL + 1))
    before = weights(whole[STOP], average=True)
    # of a step that leaves it as it is
    for key, mean in weights(moved[STOP + 1], average=True).items():
        assert torch.equal(mean, before[key]), key
    tolerance = 1e-2 if "bf16" in name else TOLERANCE
    end = weights(whole[TOTAL], average=True)
    for key, mean in weights(moved[TOTAL], average=True).items():
        assert torch.allclose(mean, end[key], rtol=0, atol=tolerance), key
    assert any(not torch.equal(mean, before[key]) for key, mean in end.items())


@pytest.mark.parametrize("name", ["dropped", "dropped-moved"])
def test_a_run_that_keeps_none_drops_it(runs: Path, name: str) -> None:
    assert not any(path.endswith("/weight_ema") for path in bits(runs / name, TOTAL))
    last = {
        step: loss for step, loss in series(runs / "fp32-z2", "train/loss").items() if step > STOP
    }
    assert series(runs / name, "train/loss") == pytest.approx(last, abs=TOLERANCE)


def test_a_run_that_begins_one_begins_with_the_weights_it_resumed_from(runs: Path) -> None:
    before = weights(checkpoints(runs / "without")[STOP])
    saved = checkpoints(runs / "begun")
    for key, mean in weights(saved[STOP + 1], average=True).items():
        assert torch.equal(mean, before[key])  # step 4 is none of its steps
    now = weights(saved[5])
    for key, mean in weights(saved[5], average=True).items():
        assert torch.allclose(mean, 0.8 * before[key] + 0.2 * now[key], rtol=1e-6, atol=1e-7)
