"""Compiled runs are runs without, to rounding: fp32 steps at every ZeRO stage; their checkpoints
are anybody's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import framework
from framework.commands.export import export
from tests.engine.saved_runs import TIED, write_tokens
from tests.engine.test_pipeline import GPT as THREE_BLOCKS
from tests.engine.test_pipeline import LENET
from tests.launched import fewer, rarely, series, train_cases

pytestmark = pytest.mark.slow

NUM_STEPS, HALF_WAY, TOLERANCE = fewer(4, of=20), fewer(2, of=10), 1e-5
LONG_STEPS, LONG_RUNS = fewer(8, of=20), ("gpt", "gpt-z2")  # which show a drift
EAGER: dict[str, Any] = {"backend": "aot_eager"}
BLOCKS = EAGER | {"per": "block"}
GPT = THREE_BLOCKS | {"model": THREE_BLOCKS["model"] | {"num_layers": 2}}
RAGGED = GPT | {
    "model": GPT["model"] | {"vocab_size": 50},
    "data": {"target": "tests.jobs.parts:ragged_prompts"},
}
OUTSIDE = TIED | {"model": {"target": "tests.jobs.tied_net:OutsideNet"}}
# Of the own ones every graph is compiled for seconds; the other has no such data.
NOT_EVALUATED = ("own", "outside", "ragged")
MODELS = {"gpt": GPT, "lenet": LENET, "own": TIED, "outside": OUTSIDE, "ragged": RAGGED}
# Biases and norms stay on all ranks; each matrix has to be gathered where it is read.
SPREAD: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 100}
# Name -> model, what is compiled, other sections, graphs of rank 0 (0: as many as hooks of stage 3
# or layers make).
Cases = dict[str, tuple[str, Any, dict[str, Any], int]]
CASES: Cases = {
    "gpt-z0": ("gpt", EAGER | {"fullgraph": True}, {"zero": {"stage": 0}}, 2),
    "gpt-z2": ("gpt", BLOCKS, {"zero": {"stage": 2}, "batch": {"accumulation_steps": 2}}, 2),
    "gpt-z2-recomputed": (
        "gpt",
        EAGER,
        {"zero": {"stage": 2}, "training": {"recompute_every": 2}},
        0,
    ),
    # Batches of 16 positions, then of any number from 3 to 16: one graph for them all.
    "ragged-z1": ("ragged", {"backend": "eager"}, {"zero": {"stage": 1}}, 2),
    "own-z2-inductor": ("own", True, {"zero": {"stage": 2}}, 1),
    "outside-z3": ("outside", {"backend": "eager"}, {"zero": SPREAD}, 0),
}
RARE: Cases = {
    # All of its weights stay on all ranks, as some of "outside-z3".
    "own-z3": ("own", {"backend": "eager"}, {"zero": {"stage": 3}}, 0),
    "gpt-z1-accumulated": (
        "gpt",
        BLOCKS,
        {"zero": {"stage": 1}, "batch": {"accumulation_steps": 2}},
        2,
    ),
    "lenet-z1": ("lenet", EAGER, {"zero": {"stage": 1}}, 2),
    "gpt-z1": ("gpt", EAGER, {"zero": {"stage": 1}}, 2),
    "gpt-z1-inductor": ("gpt", True, {"zero": {"stage": 1}}, 2),
    "gpt-z2-inductor": ("gpt", {"per": "block"}, {"zero": {"stage": 2}}, 2),
    "gpt-z3": ("gpt", EAGER, {"zero": {"stage": 3}}, 0),
    "gpt-z3-blocks": ("gpt", BLOCKS, {"zero": {"stage": 3}}, 0),
    "gpt-sequence": ("gpt", BLOCKS, {"parallel": {"sequence": 2}}, 3),
    "gpt-tensor": ("gpt", EAGER, {"parallel": {"tensor": 2}}, 3),
    "gpt-tiled": ("gpt", EAGER, {"zero": {"stage": 1}, "training": {"loss_tile": 5}}, 3),
    "lenet-inductor": ("lenet", True, {"zero": {"stage": 1}}, 2),
    "lenet-recomputed": (
        "lenet",
        True,
        {"zero": {"stage": 0}, "training": {"recompute_every": 3}},
        0,
    ),
}


def steps_of(name: str) -> int:
    return LONG_STEPS if name in LONG_RUNS else NUM_STEPS


def config(
    folder: Path, name: str, model: str, asked: Any, sections: dict[str, Any]
) -> dict[str, Any]:
    data = MODELS[model]["data"] | ({"path": str(folder / "tokens")} if model == "gpt" else {})
    count = {
        "target": "tests.jobs.parts:CountsGraphs",
        "args": {"path": str(folder / f"{name}.json")},
    }
    count["args"]["cache"] = str(folder / "cache")  # type: ignore[index]  # both ranks begin with an empty one
    made: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder)},
        **MODELS[model],
        "data": data,
        "batch": {"global_size": 8 if model in ("gpt", "ragged") else 64},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
        "training": {
            "max_steps": steps_of(name),
            "log_every": 1,
            "compile": asked,
            "ema": {"decay": 0.9},
        },
        # Batches of another size than in training.
        "evaluation": {
            "every_steps": HALF_WAY,
            "batch_size": 3,
            "max_samples": 16,
            "weights": "ema",
        },
        "checkpoint": {"every_steps": HALF_WAY, "keep_last": LONG_STEPS // HALF_WAY},
        "callbacks": [count],
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
    }
    if model in NOT_EVALUATED:
        made["evaluation"] = {"at_end": False, "weights": "ema"}
    return made | {key: {**made.get(key, {}), **section} for key, section in sections.items()}


def resumed(folder: Path, source: str, asked: Any, name: str) -> dict[str, Any]:
    start = folder / source / "checkpoints" / f"global_step{HALF_WAY}"
    return config(
        folder, name, "gpt", asked, {"zero": {"stage": 2}, "checkpoint": {"resume": str(start)}}
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    write_tokens(folder)
    cases = CASES | (RARE if pytestconfig.getoption("--exhaustive") else {})
    models = {case[0] for case in cases.values()}
    made = [
        config(folder, model, model, False, {"zero": {"stage": 2}})
        for model in MODELS
        if model in models
    ]
    made += [config(folder, name, *case[:3]) for name, case in cases.items()]
    made += [
        resumed(folder, "gpt", BLOCKS, "to-compiled"),
        resumed(folder, "gpt-z2", False, "to-plain"),
    ]
    train_cases(made, num_ranks=2, folder=folder)
    return folder


def hold(folder: Path, name: str, model: str, *, first: int = 1) -> None:
    last = steps_of(name)
    for metric, steps in (
        ("train/loss", range(first, last + 1)),
        ("eval/loss", range(HALF_WAY, last + 1, HALF_WAY)),
    ):
        if metric == "eval/loss" and model in NOT_EVALUATED:
            continue
        found, expected = series(folder / name, metric), series(folder / model, metric)
        assert sorted(found) == [step for step in steps if step >= first], metric
        assert max(abs(found[step] - expected[step]) for step in found) < TOLERANCE, metric


@pytest.mark.parametrize("name", [*CASES, *rarely(RARE)])
def test_losses_are_those_of_a_run_without(trained: Path, name: str) -> None:
    model, _, _, graphs = (CASES | RARE)[name]
    hold(trained, name, model)
    found = json.loads((trained / f"{name}.json").read_text(encoding="utf-8"))
    assert found["graphs"] == graphs if graphs else found["graphs"] > 3
    assert not (graphs and found["breaks"])
    assert json.loads((trained / f"{model}.json").read_text(encoding="utf-8"))["graphs"] == 0


@pytest.mark.parametrize("name", ["to-compiled", "to-plain"])
def test_a_run_goes_on_with_or_without(trained: Path, name: str) -> None:
    hold(trained, name, "gpt", first=HALF_WAY + 1)


def test_weights_have_the_models_own_names(trained: Path, tmp_path: Path) -> None:
    for name, model in (("gpt-z2", "gpt"), ("own-z2-inductor", "own"), ("outside-z3", "outside")):
        found, expected = (
            framework.load(trained / each, trust=True).state_dict() for each in (name, model)
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        assert list(found) == list(expected)
        exported = []
        for run in (name, model):
            export(str(trained / run), out := tmp_path / f"{name}-{run}", file_format="pt")
            exported.append(torch.load(next(out.glob("*.pt"))))
        torch.testing.assert_close(*exported, atol=1e-5, rtol=1e-4)


def test_the_start_states_that_the_model_is_compiled(trained: Path) -> None:
    log, plain = (trained / name / "logs" / "rank0.log" for name in ("own-z2-inductor", "own"))
    assert "compiled     per model by inductor" in log.read_text(encoding="utf-8")
    assert "compiled  " not in plain.read_text(encoding="utf-8")
