"""A pipeline must train like plain PyTorch in one process: fp32 steps, each loss within 1e-5, the
metrics exactly.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from framework.recipes.text.prepare import prepare
from tests.engine.pipe_oracle import plain_run
from tests.launched import fewer, hold_parts, rarely, read_metrics, series, train_cases
from tests.train.monitors.sinks import check_all_sinks_agree, histograms_of, sinks

pytestmark = pytest.mark.slow

# Drift is held by one run of each model and sum. What the last step made of the weights is held
# by the evaluation after it.
NUM_STEPS, FEW_STEPS = fewer(5, of=20), fewer(2, of=20)
TOLERANCE = 1e-5

LENET = {"model": {"kind": "lenet"}, "data": {"kind": "digits"}}
# Not Adam: convolutions before a batch norm have gradients near zero in some directions, whose
# rounding Adam blows up.
RESNET = {
    "model": {"kind": "small_resnet18"},
    "optimizer": {"kind": "sgd", "lr": 1e-4, "momentum": 0.0},
    "data": {
        "kind": "synthetic_images",
        "image_size": 16,
        "channels": 1,
        "num_classes": 10,
        "num_samples": 64,
        "num_eval_samples": 20,
    },
}
_SMALL = {"hidden_size": 32, "num_layers": 3, "num_heads": 2, "max_positions": 32}
GPT = {
    "model": {"kind": "gpt", "dropout": 0.0, **_SMALL},
    "data": {"kind": "text", "sequence_length": 32},
    "task": {"kind": "causal_lm"},
}
LLAMA = {
    **GPT,
    "model": {
        **GPT["model"],
        "positions": "rotary",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "num_kv_heads": 1,
        "tie_embeddings": False,
    },
}
BERT = {
    "model": {"kind": "bert", "dropout": 0.0, "vocab_size": 261, **_SMALL},
    "data": {"kind": "text_pairs", "sequence_length": 32},
    "task": {"kind": "masked_lm"},
}
FP16 = {"dtype": "fp16", "initial_scale_power": 8}  # at which no step is skipped
DECAY = {"kind": "adamw", "weight_decay": 0.5, "weight_decay_on": "matrices"}
# Of DeepSpeed's LayerSpecs.
SPECS = {**GPT, "model": {"target": "tests.jobs.pipe_parts:specs"}}
MODELS: dict[str, dict[str, Any]] = {
    "specs": SPECS,
    "lenet": LENET,
    "resnet": RESNET,
    "gpt": GPT,
    "llama": LLAMA,
    "bert": BERT,
}


@dataclass(frozen=True)
class Case:
    """One pipelined run: `global_size` samples per step in micro-batches of 4, the sections that
    differ from its model's.
    """

    name: str
    model: str
    pipe: int = 2
    parallel: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    clip: float = 1.0
    training: dict[str, Any] = field(default_factory=dict)
    steps: int = FEW_STEPS


WATCHED = "gpt-zero1"
TWO_RANKS = [
    # The first, as W&B's own process writes on after the run, and ends with the job.
    Case(WATCHED, "gpt", sections={"zero": {"stage": 1}}, clip=0.05, steps=NUM_STEPS),
    Case("lenet-type", "lenet", parallel={"partition": "type:linear|conv"}),
    Case("lenet-measured", "lenet", parallel={"partition": "measured"}),
    Case("lenet-stages", "lenet", parallel={"stages": [0] * 3 + [1] * 9}),
    Case("lenet-clipped", "lenet", clip=0.05),
    Case("lenet-zero1", "lenet", sections={"zero": {"stage": 1}}, steps=NUM_STEPS),
    Case("lenet-zero1-clipped", "lenet", sections={"zero": {"stage": 1}}, clip=0.05),
    Case(
        "lenet-offload",
        "lenet",
        sections={
            "zero": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
        },
    ),
    Case("resnet", "resnet"),
    Case("gpt", "gpt", steps=NUM_STEPS),
    Case("gpt-recompute", "gpt", training={"recompute_every": 2, "recompute": "selective"}),
    Case("gpt-decay-zero1", "gpt", sections={"optimizer": DECAY, "zero": {"stage": 1}}),
    Case(
        "gpt-layers",
        "gpt",
        sections={"optimizer": {"kind": "adamw", "lr": 5e-3, "layer_decay": 0.5}},
    ),
    Case("gpt-frozen", "gpt", training={"freeze": ["blocks\\.[01]\\..*", "positions.*"]}),
    Case("gpt-autocast", "gpt", sections={"precision": {"dtype": "autocast"}}, tolerance=0.02),
    Case(
        "gpt-bf16",
        "gpt",
        sections={"precision": {"dtype": "bf16"}, "zero": {"stage": 1}},
        tolerance=0.02,
        steps=NUM_STEPS,
    ),
    Case("gpt-fp16-z0", "gpt", sections={"precision": FP16}, tolerance=5e-3),
    Case(
        "gpt-fp16",
        "gpt",
        sections={"precision": {"dtype": "fp16"}, "zero": {"stage": 1}},
        tolerance=0.02,
    ),
    Case("gpt-adafactor", "gpt", sections={"optimizer": {"kind": "adafactor"}}),
    # It computes in bf16, where a last bit of a gradient may move a number by 2**-8 of it.
    Case("gpt-muon", "gpt", sections={"optimizer": {"kind": "muon", "lr": 0.005}}, tolerance=2e-3),
    # Its first stage has no matrix that Muon steps.
    Case(
        "gpt-muon-zero1",
        "gpt",
        parallel={"stages": [0] * 2 + [1] * 5},
        sections={"optimizer": {"kind": "muon", "lr": 0.005}, "zero": {"stage": 1}},
        tolerance=2e-3,
    ),
    Case("llama", "llama", training={"mlp_tile": 24}),
    Case("specs", "specs", sections={"zero": {"stage": 1}}, clip=0.05),
    Case("specs-recompute", "specs", training={"recompute_every": 2}),
    Case("specs-whole", "specs", pipe=1, sections={"zero": {"stage": 2}}),
    Case("bert", "bert", steps=NUM_STEPS),
    Case("bert-zero1", "bert", parallel={"partition": "uniform"}, sections={"zero": {"stage": 1}}),
]
# DeepSpeed's own step would wait for ever.
REFUSED = Case(
    "gpt-muon-host",
    "gpt",
    parallel={"stages": [0] * 2 + [1] * 5},
    sections={
        "optimizer": {"kind": "muon", "lr": 0.005},
        "zero": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    },
)
# With --exhaustive: what differs from others in one thing that a third one holds.
RARE_TWO = [
    Case("lenet-parameters", "lenet"),
    Case("lenet-uniform", "lenet", parallel={"partition": "uniform"}),
    Case("resnet-recompute", "resnet", training={"recompute_every": 1}),
    Case("gpt-decay", "gpt", sections={"optimizer": DECAY}),
    Case("gpt-uniform", "gpt", parallel={"partition": "uniform"}),
    Case("gpt-clipped", "gpt", clip=0.05),
]
FOUR_RANKS = [
    Case("resnet-2x2", "resnet"),
    Case("resnet-synchronised", "resnet", training={"sync_batch_norm": True}),
    Case("gpt-2x2", "gpt", sections={"zero": {"stage": 1}}, clip=0.05, steps=NUM_STEPS),
    Case("gpt-4", "gpt", pipe=4, parallel={"partition": "uniform"}),
    Case("specs-4", "specs", pipe=4, parallel={"partition": "uniform"}),
]
RARE_FOUR = [
    Case("bert-4", "bert", pipe=4),
    Case("lenet-2x2", "lenet", clip=0.05),
    Case("lenet-4", "lenet", pipe=4),
    Case("bert-2x2", "bert"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token folder of a few real modules, small enough to measure in one batch."""
    folder = tmp_path_factory.mktemp("text")
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    documents = [source[start : start + 800] for start in range(0, 16_000, 800)]
    for number, document in enumerate(documents):
        (folder / f"{number:02}.txt").write_text(document, encoding="utf-8")
    prepare([str(path) for path in sorted(folder.glob("*.txt"))], str(folder / "tokens"))
    return folder / "tokens"


def values(case: Case, folder: Path, text: Path, *, global_size: int) -> dict[str, Any]:
    sections = {**MODELS[case.model], **case.sections}
    if sections["data"]["kind"].startswith("text"):
        sections["data"] = {**sections["data"], "path": str(text)}
    return {
        "run": {"name": case.name, "output_dir": str(folder)},
        "batch": {"global_size": global_size, "micro_size": 4},
        "parallel": {"pipe": case.pipe, **case.parallel},
        "training": {
            "max_steps": case.steps,
            "log_every": 1,
            "clip_grad_norm": case.clip,
            **case.training,
        },
        "evaluation": {"at_end": True, "batch_size": 48},
        "checkpoint": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        **sections,
    }


def train(cases: list[Case], text: Path, folder: Path, *, num_ranks: int) -> Path:
    configs = [values(case, folder, text, global_size=16) for case in cases]
    for config in configs:
        if config["run"]["name"] == WATCHED:
            config["monitors"] = sinks(tensorboard={"histograms_every_steps": NUM_STEPS})
    train_cases(configs, num_ranks=num_ranks, folder=folder, allow_fp16=True)
    return folder


@pytest.fixture(scope="module")
def two_ranks(text: Path, exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = [*TWO_RANKS, REFUSED, *(RARE_TWO if exhaustive else ())]
    return train(cases, text, tmp_path_factory.mktemp("two-ranks"), num_ranks=2)


@pytest.fixture(scope="module")
def four_ranks(text: Path, exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = [*FOUR_RANKS, *(RARE_FOUR if exhaustive else ())]
    return train(cases, text, tmp_path_factory.mktemp("four-ranks"), num_ranks=4)


def hold(case: Case, run_folder: Path, text: Path) -> None:
    # Synchronised norms of two data-parallel ranks see two micro-batches of 4 together.
    together = 2 if case.training.get("sync_batch_norm") else 1
    config = values(case, run_folder, text, global_size=16)
    if case.model == "specs":
        config["model"] = {"target": "tests.jobs.pipe_parts:SpecsByHand"}
    # Other norms see the micro-batches of their own rank, and the first rank's running statistics
    # are measured and saved.
    ranks = 2 if case.name == "resnet-2x2" else 1
    losses, metrics, _ = plain_run(
        config, micro_size=4, num_steps=case.steps, together=together, ranks=ranks
    )
    found = series(run_folder, "train/loss")
    assert sorted(found) == list(range(1, case.steps + 1))
    worst = max(abs(found[step] - loss) for step, loss in enumerate(losses, start=1))
    assert worst < case.tolerance, f"{case.name}: losses differ by up to {worst}"
    measured = {
        name.removeprefix("eval/"): value
        for name, value in read_metrics(run_folder)[-1].items()
        if "eval/" in name
    }
    assert set(measured) == set(metrics)
    for name, value in metrics.items():
        within = case.tolerance * (value if name == "perplexity" else 1.0)
        assert measured[name] == pytest.approx(value, abs=within), name
        # a share of counted samples: exactly so
        if name.endswith("accuracy") and case.tolerance == TOLERANCE:
            assert measured[name] == pytest.approx(value, abs=1e-9), name


def test_stages_with_other_groups_are_refused_where_each_group_has_a_norm(two_ranks: Path) -> None:
    error = (two_ranks / f"{REFUSED.name}.error").read_text(encoding="utf-8")
    assert "the stages have from 1 to 2 groups" in error
    assert "[stage-with-one-group]" in error


@pytest.mark.parametrize("case", [*TWO_RANKS, *rarely(RARE_TWO)], ids=lambda case: case.name)
def test_two_stages_train_like_plain_pytorch(case: Case, two_ranks: Path, text: Path) -> None:
    hold(case, two_ranks / case.name, text)


@pytest.mark.parametrize("case", [*FOUR_RANKS, *rarely(RARE_FOUR)], ids=lambda case: case.name)
def test_four_ranks_train_like_plain_pytorch(case: Case, four_ranks: Path, text: Path) -> None:
    hold(case, four_ranks / case.name, text)


def test_the_run_folder_states_where_the_model_was_cut(two_ranks: Path) -> None:
    plan = json.loads((two_ranks / "lenet-stages" / "plan.json").read_text())
    assert plan["pipeline"]["bounds"] == [0, 3, 12]
    assert plan["pipeline"]["layers"][:2] == ["conv1", "relu1"]
    assert plan["layout"]["pipe_size"] == 2
    measured = json.loads((two_ranks / "lenet-measured" / "plan.json").read_text())["pipeline"][
        "stages"
    ]
    assert all(stage["seconds"] > 0 for stage in measured)


@pytest.mark.parametrize("name", ["lenet-zero1", "gpt", "bert"])
def test_the_parts_of_a_step_add_up(two_ranks: Path, name: str) -> None:
    names = {"data", "copy", "forward", "backward", "communication", "bubble", "optimizer"}
    hold_parts(two_ranks / name, names)


def test_a_clipped_run_logs_the_norm_of_all_stages(two_ranks: Path) -> None:
    clipped = series(two_ranks / "lenet-clipped", "train/grad_norm")
    zero = series(two_ranks / "lenet-zero1-clipped", "train/grad_norm")
    assert clipped[1] > 0.05
    assert clipped[1] == pytest.approx(zero[1], rel=1e-4)
    plain, fp16 = (series(two_ranks / name, "train/grad_norm") for name in ("gpt", "gpt-fp16-z0"))
    assert len(fp16) == FEW_STEPS
    assert fp16 == pytest.approx({step: plain[step] for step in fp16}, rel=0.02), (
        "the tied embedding counts once, and the loss scale not at all"
    )


def test_every_sink_has_the_numbers_of_a_pipeline(two_ranks: Path) -> None:
    check_all_sinks_agree(two_ranks / WATCHED)
    layers = {tag.split("/")[1].split(".")[0] for tag in histograms_of(two_ranks / WATCHED)}
    assert len(layers) >= 4, "of the layers of both stages"
