"""A checkpoint goes to any other number of ranks, ZeRO stage and number of pipeline stages, and the
run goes on as if unbroken.

The state that an engine holds is read by DeepSpeed's own functions, before the save and after the
move, and must be equal to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_pipeline import GPT, text
from tests.launched import ROOT, rarely, run_ranks, series, train_cases

__all__ = ["text"]  # a fixture
pytestmark = pytest.mark.slow

NUM_STEPS = 3


@dataclass(frozen=True)
class Layout:
    """Where the work is done."""

    ranks: int
    stage: int
    pipe: int = 1
    tensor: int = 1
    dtype: str = "fp32"
    more: str = ""
    sequence: int = 1

    @property
    def name(self) -> str:
        stated = [
            f"r{self.ranks}",
            f"z{self.stage}",
            f"p{self.pipe}" if self.pipe > 1 else "",
            f"t{self.tensor}" if self.tensor > 1 else "",
            f"s{self.sequence}" if self.sequence > 1 else "",
            self.dtype if self.dtype != "fp32" else "",
            self.more,
        ]
        return "-".join(filter(None, stated))


PLAIN = [Layout(ranks, stage) for ranks in (1, 2, 4) for stage in (0, 1, 2, 3)]
PIPED = [Layout(2, 0, 2), Layout(2, 1, 2), Layout(4, 1, 2), Layout(4, 0, 2)]
DIVIDED = [Layout(2, 0, tensor=2), Layout(2, 3, tensor=2), Layout(4, 2, tensor=4)]
DIVIDED_STAGES = [Layout(4, 1, 2, tensor=2)]
# Two ways more at once, and three of them on eight ranks.
TOGETHER = [
    Layout(4, 1, 2, sequence=2),
    Layout(4, 2, tensor=2, sequence=2),
    Layout(8, 1, 2, tensor=2),
]
# Half precision, and optimizer state in host memory.
HALF = [
    Layout(2, 0, dtype="bf16"),
    Layout(2, 0, dtype="fp16"),
    Layout(2, 2, dtype="fp16"),
    Layout(1, 3, dtype="fp16"),
    Layout(2, 3, dtype="bf16"),
    Layout(1, 0, dtype="bf16", more="fused"),
    Layout(2, 0, 2, dtype="fp16"),
    Layout(2, 2, more="offload"),
    Layout(2, 3, dtype="bf16", more="offload"),
    Layout(2, 2, tensor=2, dtype="bf16"),
    Layout(4, 3, tensor=2, dtype="bf16"),
    Layout(2, 0, tensor=2, dtype="bf16"),
]
MEETS_HALF = [Layout(1, 2), Layout(2, 0), Layout(2, 3), Layout(2, 1, 2), *HALF]
# Moved into one another: other weights have other state.
MUON = [
    Layout(2, 2, more="muon"),
    Layout(2, 3, more="muon"),
    Layout(2, 0, tensor=2, more="muon"),
    Layout(1, 0, more="muon"),
]
LAYOUTS = [*PLAIN, *PIPED, *DIVIDED, *DIVIDED_STAGES, *TOGETHER, *HALF, *MUON]
# With --exhaustive: four processes are dear, and each of these divides its state as another one
# does.
RARE_LAYOUTS = [Layout(4, 0), Layout(4, 1), Layout(4, 2), Layout(4, 0, 2), *TOGETHER]
MORE = {
    "": {},
    "fused": {"optimizer": {"kind": "adamw", "implementation": "deepspeed"}},
    "offload": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "muon": {"optimizer": {"kind": "muon"}},
}
LOSS_SCALE = {"initial_scale_power": 10, "loss_scale_window": 2}  # doubled once in three steps
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def layouts(*, exhaustive: bool) -> list[Layout]:
    return [layout for layout in LAYOUTS if exhaustive or layout not in RARE_LAYOUTS]


def meet(source: Layout, target: Layout, *, exhaustive: bool) -> bool:
    """Return whether a checkpoint of the one is moved into the other: into two layouts, so that
    plain runs, pipelines and tensor groups go into each other, and of half precision into one; with
    ``--exhaustive`` of a plain one into all, else three.
    """
    if source in MUON or target in MUON:
        if source == target or not {source, target} <= {*MUON}:
            return False
        return exhaustive or (MUON.index(target) - MUON.index(source)) % len(MUON) == 1
    if {source, target}.isdisjoint(HALF):
        others = [*HALF, *MUON]
        whole = [layout for layout in layouts(exhaustive=exhaustive) if layout not in others]
        if source == target or not {source, target} <= {*whole}:
            return False
        return exhaustive or (whole.index(target) - whole.index(source)) % len(whole) in (3, 14)
    if source not in MEETS_HALF or target not in MEETS_HALF:
        return False
    distance = MEETS_HALF.index(target) - MEETS_HALF.index(source)
    return distance % len(MEETS_HALF) in ((1, 5, 9) if exhaustive else (5,))


def config(layout: Layout, folder: Path, text: Path, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": layout.name, "output_dir": str(folder)},
        **GPT,
        "model": {
            **GPT["model"],
            "num_layers": 2,
            "num_heads": 4,
        },  # few weights: reading each of them back is a collective
        "data": {**GPT["data"], "path": str(text)},
        "precision": {"dtype": layout.dtype} | (LOSS_SCALE if layout.dtype == "fp16" else {}),
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "weight_decay_on": "matrices"}
        | MORE[layout.more].get("optimizer", {"kind": "adamw"}),
        "scheduler": {"kind": "warmup", "warmup_steps": 4, "curve": "linear"},
        "batch": {"global_size": 8, "micro_size": 2},
        "zero": {"stage": layout.stage} | MORE[layout.more].get("zero", {}),
        "parallel": {
            "pipe": layout.pipe,
            "tensor": layout.tensor,
            "sequence": layout.sequence,
        },
        "training": {"max_steps": NUM_STEPS, "log_every": 1},
        "evaluation": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        **sections,
    }


def run_jobs(
    cases: dict[Layout, dict[str, Any]], run: Callable[[list[dict[str, Any]], int], None]
) -> None:
    """One job for each number of ranks."""
    for ranks in (1, 2, 4, 8):
        jobs = [case for layout, case in cases.items() if layout.ranks == ranks]
        if jobs:
            run(jobs, ranks)


def test_contributing_states_how_many_moves_there_are() -> None:
    every, some = (
        sum(meet(source, target, exhaustive=exhaustive) for source in LAYOUTS for target in LAYOUTS)
        for exhaustive in (True, False)
    )
    assert f"every move between layouts: {every} instead of {some}\n" in (
        ROOT / "CONTRIBUTING.md"
    ).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def trained(text: Path, exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in every layout."""
    folder = tmp_path_factory.mktemp("trained")
    configs = {layout: config(layout, folder, text) for layout in layouts(exhaustive=exhaustive)}

    def train(cases: list[dict[str, Any]], num_ranks: int) -> None:
        train_cases(cases, num_ranks=num_ranks, folder=folder, allow_fp16=True)

    run_jobs(configs, train)
    return folder


@pytest.fixture(scope="module")
def moved(
    trained: Path, text: Path, exhaustive: bool, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The state of every checkpoint: as DeepSpeed loads it where it was written, and moved into
    other layouts, with ``--exhaustive`` into all.
    """
    folder = tmp_path_factory.mktemp("moved")
    cases = {
        target: {
            "config": config(target, folder, text),
            "own": (str(trained / target.name), str(folder / f"{target.name}.pt")),
            "loads": [
                (str(trained / source.name), str(folder / f"{source.name}-{target.name}.pt"))
                for source in LAYOUTS
                if meet(source, target, exhaustive=exhaustive)
            ],
        }
        for target in layouts(exhaustive=exhaustive)
    }

    def load(jobs: list[dict[str, Any]], num_ranks: int) -> None:
        file = folder / f"cases-{num_ranks}-{len(list(folder.iterdir()))}.json"
        file.write_text(json.dumps(jobs), encoding="utf-8")
        run_ranks(ROOT / "tests/jobs/move_cases.py", str(file), num_ranks=num_ranks, cwd=folder)

    run_jobs(cases, load)
    return folder


@pytest.mark.parametrize(
    "source", [*layouts(exhaustive=False), *rarely(RARE_LAYOUTS)], ids=lambda layout: layout.name
)
def test_weights_and_moments_are_equal_after_every_move(
    source: Layout, moved: Path, exhaustive: bool
) -> None:
    truth = torch.load(moved / f"{source.name}.pt", weights_only=True)
    assert truth["step"] == NUM_STEPS
    targets = [target for target in LAYOUTS if meet(source, target, exhaustive=exhaustive)]
    assert targets
    for target in targets:
        found = torch.load(moved / f"{source.name}-{target.name}.pt", weights_only=True)
        assert found["step"] == NUM_STEPS
        states = [name for name in truth["state"] if not name.endswith(" model")]
        assert sorted(states) == sorted(
            name for name in found["state"] if not name.endswith(" model")
        )
        assert len(states) > 50
        for name in states:
            assert torch.equal(found["state"][name], truth["state"][name]), f"{target.name}: {name}"
        for name, value in found["state"].items():
            if name.endswith(" model"):
                whole = truth["state"].get(name.replace(" model", " fp32"))
                assert whole is None or torch.equal(value, whole.to(KINDS[target.dtype])), (
                    f"{target.name}: {name}"
                )
        if source.dtype == target.dtype == "fp16":
            assert found["loss_scale"] == truth["loss_scale"] != 2.0**10, target.name


GOES_ON = [
    (Layout(2, 2), Layout(1, 3)),
    (Layout(2, 1, 2), Layout(2, 3)),
    (Layout(1, 3), Layout(2, 1, 2)),
    (Layout(4, 3), Layout(2, 0)),
    (Layout(4, 1, 2), Layout(1, 1)),
    (Layout(2, 3, tensor=2), Layout(1, 0)),
    (Layout(2, 0, 2), Layout(2, 3, tensor=2)),
    (Layout(4, 1, 2, tensor=2), Layout(2, 0, 2)),
]
# With --exhaustive: both ends of each are met above, with others.
RARE = [
    (Layout(1, 0), Layout(2, 2)),
    (Layout(2, 3), Layout(2, 1)),
    (Layout(2, 0), Layout(2, 0, 2)),
    (Layout(2, 2), Layout(2, 0, tensor=2)),
]


@pytest.fixture(scope="module")
def gone_on(
    trained: Path, text: Path, exhaustive: bool, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("gone-on")
    longer = {"training": {"max_steps": 6, "log_every": 1}, "checkpoint": {"at_end": False}}
    runs: dict[int, list[dict[str, Any]]] = {1: [config(Layout(1, 0), folder, text, **longer)]}
    for source, target in (*GOES_ON, *(RARE if exhaustive else ())):
        resumed = {"checkpoint": {"at_end": False, "resume": str(trained / source.name)}}
        case = config(target, folder, text, **longer | resumed)
        case["run"]["name"] = f"{source.name}-{target.name}"
        runs.setdefault(target.ranks, []).append(case)
    for ranks, cases in runs.items():
        train_cases(cases, num_ranks=ranks, folder=folder)
    return folder


@pytest.mark.parametrize(
    ("source", "target"),
    [*GOES_ON, *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in RARE)],
    ids=lambda layout: layout.name,
)
def test_the_run_goes_on_with_the_next_samples_as_if_unbroken(
    source: Layout, target: Layout, gone_on: Path
) -> None:
    unbroken = series(gone_on / "r1-z0", "train/loss")
    found = series(gone_on / f"{source.name}-{target.name}", "train/loss")
    assert sorted(found) == [4, 5, 6]
    for step, loss in found.items():
        assert loss == pytest.approx(unbroken[step], abs=1e-5), step
    rates, expected = (
        series(gone_on / name, "train/lr") for name in (f"{source.name}-{target.name}", "r1-z0")
    )
    assert all(rates[step] == pytest.approx(expected[step]) for step in rates)
