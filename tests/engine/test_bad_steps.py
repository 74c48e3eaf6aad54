"""Steps whose numbers go wrong are left out, or the data before them is, as in a dozen lines of
plain PyTorch; what is computed again tells faults of hardware from those of data.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Container
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from torch import nn

from framework.checkpoint.names import STATE_KEY
from framework.data.order import epoch_order
from framework.recipes.image_models.small_nets import LeNet
from framework.recipes.image_sets.digits import build
from tests.engine.oracle import digit_batches
from tests.engine.test_resume import bits
from tests.launched import read_metrics, series, train_cases

pytestmark = pytest.mark.slow

GLOBAL_SIZE, TOTAL, BAD, SPIKE_TOTAL, SPIKE, WINDOW = 32, 12, 7, 28, 25, 40
PLACE = 20  # in its batch: of two ranks the second one's
GAMMA, TOLERANCE = 0.9, 1e-5
FAULTY = "tests.jobs.bad_parts:FaultyNet"
# to step 4: without the data of 5 to 7
BACK = {"policy": "roll_back", "roll_back_steps": 3, "max_roll_backs": 1}


def poisoned(*steps: int, factor: float | str = "nan") -> dict[str, Any]:
    order = epoch_order(len(build(28).train), seed=0, epoch=0, shuffle=True)
    indices = [int(order[(step - 1) * GLOBAL_SIZE + PLACE]) for step in steps]
    return {
        "target": "tests.jobs.bad_parts:poisoned_digits",
        "args": {"indices": indices, "factor": factor},
    }


def config(name: str, folder: Path, bad_steps: Any, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder)},
        "data": poisoned(BAD),
        "batch": {"global_size": GLOBAL_SIZE},
        "scheduler": {"target": "torch.optim.lr_scheduler:ExponentialLR", "args": {"gamma": GAMMA}},
        "training": {"max_steps": TOTAL, "log_every": 1, "bad_steps": bad_steps},
        "evaluation": {"at_end": False},
        "checkpoint": {"every_steps": 1, "keep_last": 99},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
    }
    training = base["training"] | sections.pop("training", {})
    return base | sections | {"training": training}


SPIKED: dict[str, Any] = {
    "training": {"max_steps": SPIKE_TOTAL},
    "checkpoint": {"every_steps": 24, "keep_last": 99},
}
SKIPPED: dict[str, dict[str, Any]] = {
    **{f"nan-z{stage}": {"zero": {"stage": stage}} for stage in (0, 3)},
    "nan-z2": {
        "zero": {"stage": 2},
        "batch": {"global_size": GLOBAL_SIZE, "accumulation_steps": 2},
    },
    "nan-fused": {"zero": {"stage": 1}, "optimizer": {"kind": "adamw", "implementation": "fused"}},
    "nan-unclipped": {"training": {"clip_grad_norm": 0.0}},
}
UNCHANGED: dict[str, dict[str, Any]] = {
    "bf16-z0": {"precision": {"dtype": "bf16"}},
    "bf16-z2": {"precision": {"dtype": "bf16"}, "zero": {"stage": 2}},
    "momentum": {"optimizer": {"kind": "sgd", "momentum": 0.9}, "zero": {"stage": 3}},
    "average": {
        "optimizer": {"kind": "adamw", "implementation": "fused"},
        "training": {"ema": {"decay": 0.8}, "log_every": 5},
    },
    "offloaded": {
        "zero": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    },
}
BROUGHT_BACK: dict[str, dict[str, Any]] = {
    "back-z0": {},
    "back-z3": {
        "zero": {"stage": 3},
        "checkpoint": {"every_steps": 1, "keep_last": 99, "mode": "async"},
    },
}
# from before and within what is left out, and before a spike
RESUMED = {"back-z0": 4, "back-z3": 6, "spike-z2": 24}
FAULTS = {0: ("", "loss"), 3: ("", "gradient")}


def further(folder: Path) -> list[dict[str, Any]]:
    spike = {"policy": "skip", "window_steps": WINDOW}
    again = {"policy": "stop", "rerun": True, "window_steps": WINDOW}
    return [
        config(
            "spike-z2",
            folder,
            spike,
            **SPIKED,
            data=poisoned(SPIKE, factor=300.0),
            zero={"stage": 2},
        ),
        config("stops", folder, "stop", zero={"stage": 2}, training={"log_every": 9}),
        config("none-left", folder, BACK, data=poisoned(BAD, BAD + 3), training={"log_every": 4}),
        config("nothing-before", folder, BACK, data=poisoned(2), checkpoint={"every_steps": 5}),
        *(
            config(
                f"fault-{stage}-{fault or 'none'}",
                folder,
                again,
                model={"target": FAULTY, "args": {"fault": fault, "step": SPIKE}},
                data={"kind": "digits"},
                zero={"stage": stage},
                training={"max_steps": SPIKE_TOTAL, "log_every": 50},
                checkpoint={"at_end": True},
            )
            for stage, faults in FAULTS.items()
            for fault in faults
        ),
        config("persistent", folder, again, zero={"stage": 3}, training={"log_every": 50}),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    unsaved: dict[str, Any] = {"checkpoint": {"at_end": False}}
    skipped = [
        config(name, folder, "skip", **sections, **unsaved) for name, sections in SKIPPED.items()
    ]
    for name, sections in UNCHANGED.items():
        training = {"max_steps": BAD} | sections.get("training", {})
        skipped.append(config(name, folder, "skip", **sections | {"training": training}))
    back = [config(name, folder, BACK, **sections) for name, sections in BROUGHT_BACK.items()]
    train_cases([*skipped, *back, *further(folder)], num_ranks=2, folder=folder)
    again = []
    for case in [*back, *further(folder)]:
        name = case["run"]["name"]
        if name in RESUMED:
            shutil.copytree(folder / name, folder / f"{name}-again")
            for path in (folder / f"{name}-again/checkpoints").glob("global_step*"):
                if int(path.name.removeprefix("global_step").partition(".")[0]) > RESUMED[name]:
                    shutil.rmtree(path)
            case["run"]["name"] = f"{name}-again"
            case["checkpoint"] = case["checkpoint"] | {"resume": "auto"}
            again.append(case)
    start = {"every_steps": 50, "resume": str(folder / "back-z0/checkpoints/global_step3")}
    two = BACK | {"roll_back_steps": 2}
    elsewhere = config("back-elsewhere", folder, two, checkpoint=start)
    train_cases([*again, elsewhere], num_ranks=2, folder=folder)
    return folder


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad-pipe")
    names = {"skip": "skip", "back": BACK}
    cases = [
        config(name, folder, asked, parallel={"pipe": 2}, zero={"stage": 1})
        for name, asked in names.items()
    ]
    train_cases(cases, num_ranks=2, folder=folder)
    return folder


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] in kinds]


def plain(
    *bad: int,
    factor: float = math.nan,
    num_steps: int = TOTAL,
    clip: float = 1.0,
    left_out: Container[int] = (),
    is_bad: Callable[[float, float], bool] = lambda loss, norm: not math.isfinite(loss + norm),
) -> tuple[dict[int, float], list[int]]:
    """Losses of the steps that were not left out, and the steps whose update was not made."""
    torch.manual_seed(0)
    model = LeNet(num_classes=10, in_channels=1, image_size=28)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
    losses, skipped = {}, []
    for step, (images, labels) in enumerate(
        digit_batches(global_size=GLOBAL_SIZE, num_steps=num_steps), start=1
    ):
        if step not in left_out:
            if step in bad:
                images[PLACE] *= factor
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            losses[step] = loss.item()
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
            if is_bad(loss.item(), norm.item()):
                skipped.append(step)
            else:
                optimizer.step()
        schedule.step()
    return losses, skipped


def is_spike() -> Callable[[float, float], bool]:
    """Six deviations above the mean of up to `WINDOW` good steps, from the 21st on: loss or
    norm.
    """
    good: list[tuple[float, float]] = []

    def found(*pair: float) -> bool:
        columns = list(zip(*good[-WINDOW:], strict=True))
        known = len(good) >= WINDOW // 2
        is_bad = known and any(
            x > fmean(of) + 6 * pstdev(of) for x, of in zip(pair, columns, strict=True)
        )
        if not is_bad:
            good.append(pair)
        return is_bad

    return found


def hold_losses(run: Path, expected: dict[int, float]) -> None:
    losses = series(run, "train/loss")
    assert losses.keys() == expected.keys()
    assert {step: losses[step] for step, loss in expected.items() if math.isfinite(loss)} == {
        step: pytest.approx(loss, abs=TOLERANCE)
        for step, loss in expected.items()
        if math.isfinite(loss)
    }


@pytest.mark.parametrize("case", SKIPPED)
def test_a_step_that_is_not_finite_is_skipped_as_in_plain_pytorch(runs: Path, case: str) -> None:
    clip = SKIPPED[case].get("training", {}).get("clip_grad_norm", 1.0)
    losses, skipped = plain(BAD, clip=clip)
    assert skipped == [BAD]
    hold_losses(runs / case, losses)
    (found,) = events(runs / case, "bad_step")
    assert (found["step"], found["loss"], found["ranks"]) == (BAD, "nan", ["rank 1"])
    counted = series(runs / case, "train/skipped_steps")
    assert (counted[BAD - 1], counted[BAD], counted[TOTAL]) == (0, 1, 1)


@pytest.mark.parametrize("case", UNCHANGED)
def test_a_skipped_step_changes_no_bit_of_weights_and_state(runs: Path, case: str) -> None:
    steps = [
        {
            path: one
            for path, one in bits(runs / case, step).items()
            if one.is_floating_point() or path.endswith("/step")
        }
        for step in (BAD - 2, BAD - 1, BAD)
    ]
    assert len(steps[1]) > 3
    other = [
        [path for path, one in left.items() if not torch.equal(one, steps[1][path])]
        for left in steps
    ]
    assert len(other[0]) > 3  # a step that is taken changes them
    assert other[2] == []


def test_a_spike_is_skipped_where_plain_arithmetic_finds_it(runs: Path) -> None:
    case = "spike-z2"
    losses, skipped = plain(SPIKE, factor=300.0, num_steps=SPIKE_TOTAL, is_bad=is_spike())
    assert skipped == [SPIKE]
    hold_losses(runs / case, losses)
    (found,) = events(runs / case, "bad_step")
    assert found["step"] == SPIKE
    assert found["loss"] == pytest.approx(losses[SPIKE], rel=1e-5)
    assert found["loss"] > found["loss_limit"]


@pytest.mark.parametrize("case", BROUGHT_BACK)
def test_a_run_that_was_rolled_back_is_one_without_that_data(runs: Path, case: str) -> None:
    losses, skipped = plain(left_out={5, 6, 7})
    assert skipped == []
    found = series(runs / case, "train/loss")
    hold_losses(runs / case, losses)
    assert found.keys() == set(range(1, TOTAL + 1)) - {5, 6, 7}
    (event,) = events(runs / case, "roll_back")
    assert {name: event[name] for name in ("step", "to", "first", "last")} == {
        "step": BAD,
        "to": 4,
        "first": 5,
        "last": 7,
    }
    rates = series(runs / case, "train/lr")
    assert rates == {
        step: pytest.approx(1e-3 * GAMMA ** (step - 1)) for step in range(1, TOTAL + 1)
    }


@pytest.mark.parametrize("case", RESUMED)
def test_a_resume_leaves_out_the_same_steps_to_the_bit(runs: Path, case: str) -> None:
    total = SPIKE_TOTAL if case.startswith("spike") else TOTAL
    left, right = bits(runs / case, total), bits(runs / f"{case}-again", total)
    assert left.keys() == right.keys()
    assert [path for path, one in left.items() if not torch.equal(one, right[path])] == []
    assert len(events(runs / f"{case}-again", "roll_back")) == (not case.startswith("spike"))
    losses, again = (series(runs / name, "train/loss") for name in (case, f"{case}-again"))
    assert {step: str(loss) for step, loss in losses.items()} == {
        step: str(loss) for step, loss in again.items()
    }
    files = (
        (runs / name / f"checkpoints/global_step{total}").glob("*model_states.pt")
        for name in (case, f"{case}-again")
    )
    kept = [torch.load(min(found), weights_only=False)[STATE_KEY]["state"] for found in files]
    assert kept[0]["bad_steps"] == kept[1]["bad_steps"]
    assert (
        kept[0].get("left_out")
        == kept[1].get("left_out")
        == (None if case.startswith("spike") else [[5, 7]])
    )


def test_a_run_that_began_elsewhere_goes_back_to_there(runs: Path) -> None:
    losses, _ = plain(left_out={6, 7})
    hold_losses(runs / "back-elsewhere", {step: loss for step, loss in losses.items() if step > 3})
    assert not (runs / "back-z0/checkpoints/global_step4.replaced").exists()


def test_a_run_that_stops_names_the_first_bad_step(runs: Path) -> None:
    error = (runs / "stops.error").read_text(encoding="utf-8")
    assert error.startswith(f"step {BAD}: train/loss = nan and train/grad_norm = inf (rank 1)")
    assert error.endswith("[bad-step]")
    assert [event["step"] for event in events(runs / "stops", "bad_step")] == [BAD]


def test_roll_backs_come_to_an_end(runs: Path) -> None:
    error = (runs / "none-left.error").read_text(encoding="utf-8")
    assert f"step {BAD + 3}: " in error
    assert "training.bad_steps.max_roll_backs = 1, and so often it has gone back" in error
    assert "no sound checkpoint before it" in (runs / "nothing-before.error").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(("stage", "fault"), [(0, "loss"), (3, "gradient")])
def test_a_fault_that_does_not_come_again_is_transient_and_leaves_no_trace(
    runs: Path, stage: int, fault: str
) -> None:
    run, clean = runs / f"fault-{stage}-{fault}", runs / f"fault-{stage}-none"
    (found,) = events(run, "bad_step")
    assert (found["step"], found["verdict"], found["is_taken"]) == (SPIKE, "transient", True)
    ranks = found.get("ranks", [])
    assert [rank.partition(" on ")[0] for rank in ranks] == (["rank 1"] if fault == "loss" else [])
    left, right = bits(clean, SPIKE_TOTAL), bits(run, SPIKE_TOTAL)
    assert len(left) > 10
    assert [path for path, one in left.items() if not torch.equal(one, right[path])] == []
    assert read_metrics(run)[-1]["train/skipped_steps"] == 0
    assert events(clean, "bad_step") == []


def test_what_comes_again_is_of_the_data(runs: Path) -> None:
    error = (runs / "persistent.error").read_text(encoding="utf-8")
    assert error.startswith(f"step {BAD}: ")
    assert "persistent, of the data or the model" in error
    assert read_metrics_until(runs / "persistent") == BAD  # at once


def read_metrics_until(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return int(json.loads(lines[-1])["step"])


def test_pipelines_skip_and_go_back(piped: Path) -> None:
    losses, _ = plain(BAD)
    hold_losses(piped / "skip", losses)
    losses, _ = plain(left_out={5, 6, 7})
    hold_losses(piped / "back", losses)
