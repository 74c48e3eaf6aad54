"""Parts of one's own in a pipeline, held against plain PyTorch: data of varying width, tuples of
types, lists, optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.resume_point import find_checkpoint
from framework.engine.weights import checkpoint_weights
from tests.engine.pipe_oracle import plain_run
from tests.launched import fewer, read_metrics, series, train_cases

pytestmark = pytest.mark.slow

NUM_STEPS = fewer(4, of=8)
TOLERANCE = 1e-5
PARTS = "tests.jobs.pipe_parts"
POINTS = {"target": f"{PARTS}:points"}
EVERY_STEP = {"every_steps": 1}
LOSS = {"target": "torch.nn:CrossEntropyLoss"}


@dataclass(frozen=True)
class Case:
    """Steps of 8 samples in micro-batches of 2."""

    name: str
    model: str
    pipe: int = 2
    sections: dict[str, Any] = field(default_factory=dict)


TWO_RANKS = [
    Case(
        "padded",
        "reader",
        sections={
            "data": {"target": f"{PARTS}:padded_text"},
            "parallel": {"pipe": 2, "stages": [0, 0, 1, 1]},
            "evaluation": {**EVERY_STEP, "batch_size": 3},
        },
    ),
    Case("transposed", "turned"),
    Case("one-sample-to-evaluate", "rows", sections={"data": {**POINTS, "args": {"num_eval": 1}}}),
    Case(
        "wider-evaluation",
        "rows",
        sections={
            "data": {**POINTS, "args": {"num_eval": 50}},
            "evaluation": {**EVERY_STEP, "batch_size": 3},
        },
    ),
    Case("targets-in-lists", "rows", sections={"task": {"target": f"{PARTS}:InLists"}}),
    Case(
        "own-optimizer",
        "rows",
        sections={"optimizer": {"target": "torch.optim:RMSprop", "args": {"lr": 0.01}}},
    ),
    Case(
        "own-optimizer-zero1",
        "rows",
        sections={
            "optimizer": {"target": "torch.optim:RMSprop", "args": {"lr": 0.01}},
            "zero": {"stage": 1},
        },
    ),
    *(
        Case(
            f"recomputed-{every}",
            "counting",
            sections={
                "training": {"max_steps": NUM_STEPS, "log_every": 1, "recompute_every": every},
                "checkpoint": {"at_end": True},
            },
        )
        for every in (0, 1, 2)
    ),
]
THREE_RANKS = [
    Case("integers-before-floats", "in_pairs", pipe=3),
    Case("two-types", "of_two_types", pipe=3),
    Case(
        "fewer-batches-than-stages",
        "rows",
        pipe=3,
        sections={
            "parallel": {"pipe": 3, "partition": "uniform"},
            "model": {"target": f"{PARTS}:in_pairs"},
            "evaluation": {**EVERY_STEP, "batch_size": 5},
        },
    ),
]
FOUR_RANKS = [
    Case("uneven-shares", "rows", sections={"data": {**POINTS, "args": {"num_eval": 5}}}),
    Case("a-share-of-nothing", "rows", sections={"data": {**POINTS, "args": {"num_eval": 1}}}),
    Case(
        "padded-2x2",
        "reader",
        sections={"data": {"target": f"{PARTS}:padded_text"}, "evaluation": {"batch_size": 5}},
    ),
]


def values(case: Case, folder: Path) -> dict[str, Any]:
    return {
        "run": {"name": case.name, "output_dir": str(folder)},
        "model": {"target": f"{PARTS}:{case.model}"},
        "data": POINTS,
        "task": LOSS,
        "batch": {"global_size": 8, "micro_size": 2},
        "parallel": {"pipe": case.pipe},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "training": {"max_steps": NUM_STEPS, "log_every": 1},
        "evaluation": EVERY_STEP,
        "checkpoint": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        **case.sections,
    }


def started(cases: list[Case], folder: Path, *, num_ranks: int) -> Path:
    train_cases([values(case, folder) for case in cases], num_ranks=num_ranks, folder=folder)
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return started(TWO_RANKS, tmp_path_factory.mktemp("two"), num_ranks=2)


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return started(THREE_RANKS, tmp_path_factory.mktemp("three"), num_ranks=3)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return started(FOUR_RANKS, tmp_path_factory.mktemp("four"), num_ranks=4)


def hold(case: Case, folder: Path) -> None:
    losses, metrics, _ = plain_run(values(case, folder), micro_size=2, num_steps=NUM_STEPS)
    found = series(folder / case.name, "train/loss")
    assert sorted(found) == list(range(1, NUM_STEPS + 1))
    assert [found[step] for step in sorted(found)] == pytest.approx(losses, abs=TOLERANCE)
    assert max(losses) - min(losses) > 1e-3, "nothing happens here that could differ"
    assert read_metrics(folder / case.name)[-1]["eval/loss"] == pytest.approx(
        metrics["loss"], abs=TOLERANCE
    )


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.name)
def test_two_stages(case: Case, two_ranks: Path) -> None:
    hold(case, two_ranks)


@pytest.mark.parametrize(("every", "times"), [(0, 1), (1, 2), (2, 2)])
def test_recomputed_layers_run_twice(every: int, times: int, two_ranks: Path) -> None:
    """Equal losses alone would also be those of a recomputation that does nothing."""
    folder = two_ranks / f"recomputed-{every}"
    checkpoint = find_checkpoint(str(folder), run_checkpoints=folder / "checkpoints")
    assert checkpoint is not None
    weights = checkpoint_weights(checkpoint)
    calls = {name: int(weights[name]) for name in weights if name.endswith(".calls")}
    num_micro_batches = NUM_STEPS * 4
    assert calls == {f"{layer}.calls": times * num_micro_batches for layer in (0, 2, 3)}


@pytest.mark.parametrize("case", THREE_RANKS, ids=lambda case: case.name)
def test_three_stages(case: Case, three_ranks: Path) -> None:
    hold(case, three_ranks)


@pytest.mark.parametrize("case", FOUR_RANKS, ids=lambda case: case.name)
def test_two_stages_twice(case: Case, four_ranks: Path) -> None:
    hold(case, four_ranks)
