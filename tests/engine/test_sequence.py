"""Ranks that share sequences must train like plain PyTorch in one process: fp32 steps, losses,
gradient norms and metrics; and go on where they were, on as many ranks or on fewer.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.recipes.text.prepare import prepare
from tests.engine.pipe_oracle import plain_run
from tests.engine.test_resume import bits
from tests.launched import fewer, rarely, read_metrics, series, train_cases

pytestmark = pytest.mark.slow

# Drift is held by one run of each way to share, to hold its state and to round; of stage 3, whose
# steps are several times as dear, by one. What the last step made of the weights is held by the
# evaluation after it.
NUM_STEPS, FEW_STEPS = fewer(5, of=20), fewer(2, of=20)
LONG_RUNS = (
    "gpt-z0",
    "gqa-z2",
    "gqa-z3",
    "gpt-adamw",
    "gpt-ema",
    "bert-tiled-z2",
    "bf16",
    "fp16",
    "gqa-2x2",
)
LONG_RUNS += ("gpt-split-z2", "gpt-muon")
STOP, RESUMED = 2, 4
CLIP = 0.5
_SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "max_positions": 32, "dropout": 0.0}
TEXT = {"data": {"kind": "text", "sequence_length": 32}, "task": {"kind": "causal_lm"}}
RAGGED = TEXT | {"task": {"target": "tests.jobs.sequence_parts:RaggedLM"}}
PADDED = TEXT | {"task": {"target": "tests.jobs.sequence_parts:PaddedLM"}}
# Three heads of keys for twelve of queries: two ranks get more of them than there are.
_LLAMA = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "num_heads": 12,
    "num_kv_heads": 3,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": TEXT | {"model": {"kind": "gpt", **_SMALL}},
    "gqa": TEXT
    | {"model": {"kind": "gpt", **_SMALL, **_LLAMA, "hidden_size": 48, "tie_embeddings": False}},
    # As many heads of keys as ranks of a tensor group: those that share sequences get the same ones.
    "grouped": TEXT
    | {"model": {"kind": "gpt", **_SMALL, **_LLAMA, "num_heads": 4, "num_kv_heads": 2}},
    # Fewer heads than four ranks.
    "few": TEXT | {"model": {"kind": "gpt", **_SMALL, "num_heads": 2}},
    "one": TEXT | {"model": {"kind": "gpt", **_SMALL, "num_heads": 1}},
    "few-bert": {
        "model": {"kind": "bert", "vocab_size": 261, **_SMALL, "num_heads": 1},
        "data": {"kind": "text_pairs", "sequence_length": 32},
        "task": {"kind": "masked_lm"},
    },
    "few-llama": RAGGED
    | {
        "model": {
            "target": "tests.jobs.sequence_parts:tiny_llama",
            "args": {"num_attention_heads": 2, "num_key_value_heads": 1},
        }
    },
    "bert": {
        "model": {"kind": "bert", "vocab_size": 261, **_SMALL},
        "data": {"kind": "text_pairs", "sequence_length": 32},
        "task": {"kind": "masked_lm"},
    },
    "llama": RAGGED | {"model": {"target": "tests.jobs.sequence_parts:tiny_llama"}},
    "staged-llama": TEXT
    | {
        "model": {"target": "tests.jobs.sequence_parts:tiny_llama"},
        "task": {"target": "tests.jobs.sequence_parts:StagedRaggedLM"},
    },
    "staged-window": TEXT | {"model": {"target": "tests.jobs.sequence_parts:window_llama"}},
    "window": RAGGED | {"model": {"target": "tests.jobs.sequence_parts:window_llama"}},
    "gpt2": RAGGED
    | {
        "model": {"target": "tests.jobs.tensor_parts:without_plan", "args": {"family": "gpt2"}},
    },
    # They number positions by themselves.
    "roberta": PADDED | {"model": {"target": "tests.jobs.sequence_parts:tiny_roberta"}},
    "opt": PADDED
    | {
        "model": {"target": "tests.jobs.sequence_parts:tiny_opt"},
        "task": {"target": "tests.jobs.sequence_parts:PaddedLM", "args": {"is_left": True}},
    },
}
MIXING = {"target": "tests.jobs.sequence_parts:mixing_bert", "args": {"kind": "MobileBert"}}
GPT_BY_PATH = {"model": {"target": "tests.jobs.sequence_parts:tiny_gpt"}}
SGD = {"kind": "sgd", "lr": 0.05, "momentum": 0.9}
ADAMW = {"kind": "adamw", "lr": 1e-3}
# Name -> model, ZeRO stage, optimizer.
Cases = dict[str, tuple[str, int, dict[str, Any]]]
TWO_RANKS: Cases = {
    **{
        f"{model}-z{stage}": (model, stage, SGD)
        for model, stage in (("gpt", 0), ("gqa", 2), ("gqa", 3), ("bert", 2))
    },
    "gpt-adamw": ("gpt", 0, ADAMW),
    "gpt-muon": ("gpt", 0, {"kind": "muon"}),
    "gpt-muon-z3": ("gpt", 3, {"kind": "muon"}),
    "gpt-adafactor": ("gpt", 0, {"kind": "adafactor"}),
    "gpt-lamb": ("gpt", 3, {"kind": "lamb"}),
    "gpt-ema": ("gpt", 1, SGD),
    "window": ("window", 2, SGD),
    "roberta-z0": ("roberta", 0, SGD),
    "opt-z2": ("opt", 2, SGD),
    **{
        f"{model}-tiled-z{stage}": (model, stage, SGD)
        for model, stage in (("gpt", 3), ("bert", 2), ("llama", 3))
    },
}
# With --exhaustive: the other stages of these models.
RARE: Cases = {
    **{
        name: (model, stage, SGD)
        for model in ("gpt", "gqa", "bert", "llama")
        for stage in range(4)
        if (name := f"{model}-z{stage}") not in TWO_RANKS
    },
    "gqa-adamw": ("gqa", 3, ADAMW),
    "llama-adamw": ("llama", 2, ADAMW),
    "bert-adamw": ("bert", 1, ADAMW),
    "roberta-z3": ("roberta", 3, SGD),
    "gpt-tiled-z0": ("gpt", 0, SGD),
    "gqa-tiled-z3": ("gqa", 3, SGD),
    "gqa-tiled-z1": ("gqa", 1, SGD),
    "bert-tiled-z3": ("bert", 3, SGD),
}
FOUR_RANKS: Cases = {f"{model}-2x2": (model, stage, SGD) for stage, model in ((3, "gqa"),)}
# Two ranks of a tensor group by two that share sequences.
DIVIDED: Cases = {
    **{
        f"{model}-split-z{stage}": (model, stage, SGD) for model, stage in (("bert", 1), ("gpt", 2))
    },
    "gpt-split-tiled": ("gpt", 3, ADAMW),
    "grouped-split-z1": ("grouped", 1, SGD),
    "few-split-z0": ("few", 0, SGD),
    "gpt2-split-z2": ("gpt2", 2, SGD),
}
# Four ranks share sequences, and are more than heads: a ring of two teams, or of four ranks.
RING: Cases = {
    "few-ring-z2": ("few", 2, SGD),
    "few-bert-ring-z1": ("few-bert", 1, SGD),
    "few-llama-ring-z3": ("few-llama", 3, SGD),
}
# Two stages of a pipeline by two that share sequences, one of them around a ring.
PIPED: Cases = {
    "gpt-piped-z0": ("gpt", 0, SGD),
    "bert-piped-z1": ("bert", 1, ADAMW),
    "one-piped-z1": ("one", 1, SGD),
    "llama-piped-z1": ("staged-llama", 1, ADAMW),
    "window-piped-z0": ("staged-window", 0, SGD),
}
# With --exhaustive: four processes are dear, and of each of these another one above holds the model
# and the stage.
RARE_FOUR: Cases = {
    f"{model}-2x2": (model, stage, SGD) for stage, model in ((0, "gpt"), (1, "llama"), (2, "bert"))
}
RARE_RING: Cases = {"few-ring-adamw": ("few", 0, ADAMW)}
RARE_DIVIDED: Cases = {
    f"{model}-split-z{stage}": (model, stage, SGD)
    for model, stage in (("gpt", 0), ("bert", 3), ("opt", 3), ("roberta", 1))
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token folder of pieces of a module, many of them shorter than a sequence: what BERT reads is
    padded.
    """
    folder = tmp_path_factory.mktemp("text")
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    start = 0
    for number in range(120):
        length = 12 + 7 * number % 71
        (folder / f"{number:03}.txt").write_text(source[start : start + length], encoding="utf-8")
        start += length
    prepare([str(path) for path in sorted(folder.glob("*.txt"))], str(folder / "tokens"))
    return folder / "tokens"


def steps_of(name: str) -> int:
    return NUM_STEPS if name in LONG_RUNS else FEW_STEPS


def values(
    name: str, case: tuple[str, int, dict[str, Any]], folder: Path, text: Path, **sections: Any
) -> Any:
    model, stage, optimizer = case
    if name == "gpt-ema":
        sections = {
            "training": {"ema": {"decay": 0.8}},
            "evaluation": {"weights": "ema"},
        } | sections
    if "split" in name:
        sections = {"parallel": {"tensor": 2}} | sections
    if "piped" in name:
        sections = {"parallel": {"sequence": 2, "pipe": 2}} | sections
    if "ring" in name:
        sections = {"parallel": {"sequence": 4}} | sections
    if "tiled" in name:  # seven positions of sixteen: the last tile of a sequence is shorter
        sections = {"training": {"loss_tile": 7}} | sections
    base = {
        "run": {"name": name, "output_dir": str(folder)},
        "batch": {"micro_size": 4, "accumulation_steps": 2},
        "parallel": {"sequence": 2},
        "zero": {"stage": stage},
        "optimizer": optimizer,
        "training": {"max_steps": steps_of(name), "log_every": 1, "clip_grad_norm": CLIP},
        "evaluation": {"at_end": True, "batch_size": 5},
        "checkpoint": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        **MODELS[model],
    }
    base["data"] = {**base["data"], "path": str(text)}
    return base | {name: base.get(name, {}) | section for name, section in sections.items()}


# What changes how a step is computed -> of which run, and by how much it may change losses.
VARIANTS: dict[str, tuple[str, dict[str, Any], float]] = {
    "recompute": ("gqa-z3", {"training": {"recompute_every": 1}}, 1e-5),
    "autocast": ("gqa-z2", {"precision": {"dtype": "autocast"}}, 0.02),
    "bf16": ("gqa-z2", {"precision": {"dtype": "bf16"}}, 0.05),
    # The first step, the loss scale in the norm: what DeepSpeed has otherwise there, more than
    # rounding shows.
    "fp16-z0": ("gpt-adamw", {"precision": {"dtype": "fp16", "initial_scale_power": 8}}, 5e-4),
    "fp16-muon": ("gpt-muon", {"precision": {"dtype": "fp16", "initial_scale_power": 8}}, 5e-4),
    "tiled-recompute": ("gqa-z2", {"training": {"loss_tile": 7, "recompute_every": 1}}, 1e-5),
    "tiled-fp16": ("gqa-z2", {"precision": {"dtype": "fp16"}}, 0.02),
    "offload": (
        "gqa-z2",
        {"zero": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}},
        1e-5,
    ),
}
# With --exhaustive: of the four, the two others are above.
RARE_VARIANTS: dict[str, tuple[str, dict[str, Any], float]] = {
    "fp16": ("gqa-z2", {"precision": {"dtype": "fp16"}}, 0.02),
    "tiled-autocast": ("gqa-z2", {"precision": {"dtype": "autocast"}}, 0.02),
}
DROPPED = {
    "model": _SMALL | {"dropout": 0.2},
    "checkpoint": {"at_end": True},
    "training": {"max_steps": RESUMED},
}
MOVED = ("to-one", "to-data")
# On four ranks, resumed to the bit: a run, and the model's sections for dropout.
WAYS: dict[str, tuple[tuple[str, int, dict[str, Any]], dict[str, Any]]] = {
    "split": (DIVIDED["gpt-split-z2"], {"dropout": 0.2}),
    "piped": (PIPED["gpt-piped-z0"], {"dropout": 0.2}),
    "ring": (RING["few-ring-z2"], {"dropout": 0.2}),
    "llama-piped": (PIPED["llama-piped-z1"], {"args": {"attention_dropout": 0.2}}),
}
# Into stages of transformers' layers that share sequences, and out of them: sizes, ZeRO stage, and
# the run and the step from which a run goes on.
STAGED_MOVES: dict[str, tuple[dict[str, int], int, str, int]] = {
    "llama-divided": ({"sequence": 2, "tensor": 2}, 3, "", 0),
    "llama-into-stages": ({"sequence": 2, "pipe": 2}, 1, "llama-divided", STOP),
    "llama-out-of-stages": ({"sequence": 4}, 2, "llama-into-stages", 2 * STOP),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, text: Path, exhaustive: bool) -> Path:
    folder = tmp_path_factory.mktemp("sequence-2")
    cases = [
        values(name, case, folder, text)
        for name, case in (TWO_RANKS | (RARE if exhaustive else {})).items()
    ]
    cases += [
        values(name, TWO_RANKS[of], folder, text, **sections)
        for name, (of, sections, _) in (VARIANTS | (RARE_VARIANTS if exhaustive else {})).items()
    ]
    shorter = {"training": {"max_steps": STOP}}
    cases += [
        values(f"{name}-whole", TWO_RANKS[name], folder, text, **DROPPED)
        for name in ("gpt-z0", "bert-z2")
    ]
    for sections in (shorter, {"checkpoint": {"at_end": True, "resume": "auto"}}):
        cases += [
            values(f"{name}-broken", TWO_RANKS[name], folder, text, **DROPPED | sections)
            for name in ("gpt-z0", "bert-z2")
        ]
    cases.append(
        values("begun", TWO_RANKS["gqa-z2"], folder, text, **shorter, checkpoint={"at_end": True})
    )
    cases.append(moved("to-data", folder, text, parallel={"sequence": 1}, batch={"micro_size": 2}))
    unknown = TEXT | {"model": {"target": "tests.jobs.sequence_parts:NoKnownAttention"}}
    cases.append(values("unknown", TWO_RANKS["gpt-z0"], folder, text) | {"model": unknown["model"]})
    task = {"target": "torch.nn.functional:cross_entropy"}
    cases.append(values("no-positions", TWO_RANKS["gpt-z0"], folder, text) | {"task": task})
    pooled = {"target": "tests.jobs.sequence_parts:Pooled"}
    cases.append(values("mobile", TWO_RANKS["roberta-z0"], folder, text) | {"model": MIXING})
    cases.append(values("pooled", TWO_RANKS["llama-tiled-z3"], folder, text) | {"model": pooled})
    dropping = {"target": "tests.jobs.sequence_parts:Dropping"}
    cases.append(
        values("dropping", TWO_RANKS["roberta-z0"], folder, text) | GPT_BY_PATH | {"task": dropping}
    )
    own_loss = {"target": "tests.jobs.sequence_parts:OwnLoss"}
    cases.append(values("tiled-own-loss", TWO_RANKS["gpt-z0"], folder, text) | {"task": own_loss})
    train_cases(cases, num_ranks=2, folder=folder, allow_fp16=True)
    train_cases(
        [moved("to-one", folder, text, parallel={"sequence": 1})], num_ranks=1, folder=folder
    )
    return folder


def moved(name: str, folder: Path, text: Path, **sections: Any) -> Any:
    resume = {"resume": str(folder / "begun" / "checkpoints" / f"global_step{STOP}")}
    training = {"max_steps": RESUMED}
    return values(
        name, TWO_RANKS["gqa-z2"], folder, text, checkpoint=resume, training=training, **sections
    )


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory, text: Path, exhaustive: bool) -> Path:
    folder = tmp_path_factory.mktemp("sequence-2x2")
    listed = FOUR_RANKS | DIVIDED | PIPED | RING
    if exhaustive:
        listed |= RARE_FOUR | RARE_DIVIDED | RARE_RING
    cases = [values(name, case, folder, text) for name, case in listed.items()]
    for way, (case, dropped) in WAYS.items():
        sections = DROPPED | {"model": dropped}
        sections["checkpoint"] = {"every_steps": STOP, "at_end": True}
        cases.append(values(f"{way}-whole", case, folder, text, **sections))
        middle = folder / f"{way}-whole" / "checkpoints" / f"global_step{STOP}"
        sections["checkpoint"] = {"resume": str(middle)}
        cases.append(values(f"{way}-broken", case, folder, text, **sections))
    cases += [staged_move(name, folder, text) for name in STAGED_MOVES]
    train_cases(cases, num_ranks=4, folder=folder)
    return folder


def staged_move(name: str, folder: Path, text: Path) -> Any:
    """Return a run of `STAGED_MOVES`."""
    parallel, stage, source, step = STAGED_MOVES[name]
    checkpoint: dict[str, Any] = {"every_steps": STOP}
    if source:
        checkpoint["resume"] = str(folder / source / "checkpoints" / f"global_step{step}")
    sections = {
        "parallel": parallel,
        "zero": {"stage": stage},
        "training": {"max_steps": RESUMED + 1},
        "checkpoint": checkpoint,
    }
    return values(name, ("staged-llama", 1, ADAMW), folder, text, **sections)


_plain: dict[str, tuple[list[float], list[float], dict[str, float]]] = {}


def hold(
    folder: Path, name: str, case: tuple[str, int, dict[str, Any]], text: Path, *, global_size: int
) -> None:
    num_steps = steps_of(name)
    key = f"{case[0]}-{case[2]['kind']}-{global_size}-{'ema' in name}-{num_steps}"
    # Muon computes in bf16, where a last bit of a gradient may move a number by 2**-8 of it.
    finer = 100 if case[2]["kind"] == "muon" else 1
    if key not in _plain:
        config, norms = values(name, case, folder, text), list[float]()
        config["batch"] = {"global_size": global_size}
        losses, metrics, _ = plain_run(config, micro_size=4, num_steps=num_steps, norms=norms)
        _plain[key] = losses, norms, metrics
    losses, norms, metrics = _plain[key]
    learnt = 0.05 if num_steps == NUM_STEPS else 0.0
    if case[2]["kind"] == "lamb":  # whose steps are short: 0.04 in the 20 of --exhaustive
        learnt = min(learnt, 0.03)
    assert losses[-1] < losses[0] - learnt, "the oracle itself must learn, or equality says nothing"
    assert sum(norm > CLIP for norm in norms) > num_steps / 2, "most steps are clipped"
    found = series(folder / name, "train/loss")
    assert found == {
        step: pytest.approx(loss, abs=finer * 1e-5) for step, loss in enumerate(losses, start=1)
    }
    found = series(folder / name, "train/grad_norm")
    assert found == {
        step: pytest.approx(norm, rel=finer * 1e-4) for step, norm in enumerate(norms, start=1)
    }
    last = read_metrics(folder / name)[-1]
    for metric, value in metrics.items():
        assert last[f"eval/{metric}"] == pytest.approx(value, rel=finer * 1e-5), metric


@pytest.mark.parametrize("name", [*TWO_RANKS, *rarely(RARE)])
def test_two_ranks_equal_plain_pytorch(two_ranks: Path, text: Path, name: str) -> None:
    hold(two_ranks, name, (TWO_RANKS | RARE)[name], text, global_size=8)


@pytest.mark.parametrize("name", [*FOUR_RANKS, *rarely(RARE_FOUR)])
def test_four_ranks_equal_plain_pytorch(four_ranks: Path, text: Path, name: str) -> None:
    hold(four_ranks, name, (FOUR_RANKS | RARE_FOUR)[name], text, global_size=16)


@pytest.mark.parametrize("name", [*DIVIDED, *rarely(RARE_DIVIDED)])
def test_tensor_groups_that_share_sequences_equal_plain_pytorch(
    four_ranks: Path, text: Path, name: str
) -> None:
    hold(four_ranks, name, (DIVIDED | RARE_DIVIDED)[name], text, global_size=8)


@pytest.mark.parametrize("name", PIPED)
def test_stages_that_share_sequences_equal_plain_pytorch(
    four_ranks: Path, text: Path, name: str
) -> None:
    hold(four_ranks, name, PIPED[name], text, global_size=8)


@pytest.mark.parametrize("name", [*RING, *rarely(RARE_RING)])
def test_rings_equal_plain_pytorch(four_ranks: Path, text: Path, name: str) -> None:
    hold(four_ranks, name, (RING | RARE_RING)[name], text, global_size=8)


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_of_both_is_the_unbroken_one(four_ranks: Path, way: str) -> None:
    whole, broken = (
        series(four_ranks / f"{way}-{end}", "train/loss") for end in ("whole", "broken")
    )
    assert broken == {step: whole[step] for step in range(STOP + 1, RESUMED + 1)}


def test_stages_of_transformers_layers_go_on_as_other_layouts(four_ranks: Path) -> None:
    whole = series(four_ranks / "llama-divided", "train/loss")
    assert len(whole) == RESUMED + 1
    for name, (*_, step) in STAGED_MOVES.items():
        later = {number: loss for number, loss in whole.items() if number > step}
        assert series(four_ranks / name, "train/loss") == pytest.approx(later, abs=1e-5), name


@pytest.mark.parametrize("name", [*VARIANTS, *rarely(RARE_VARIANTS)])
def test_other_arithmetic_stays_close(two_ranks: Path, name: str) -> None:
    of, _, within = (VARIANTS | RARE_VARIANTS)[name]
    plain, found = (series(two_ranks / run, "train/loss") for run in (of, name))
    steps = range(1, steps_of(name) + 1)
    assert found == {step: pytest.approx(plain[step], abs=within) for step in steps}
    if within < 1e-3:
        plain, found = (series(two_ranks / run, "train/grad_norm") for run in (of, name))
        assert found == {step: pytest.approx(plain[step], rel=5e-3) for step in steps}


@pytest.mark.parametrize("name", ["gpt-z0", "bert-z2"])
def test_a_resumed_run_is_the_unbroken_one(two_ranks: Path, name: str) -> None:
    """With dropout, whose masks differ between the ranks that share a sequence."""
    whole, broken = two_ranks / f"{name}-whole", two_ranks / f"{name}-broken"
    assert series(whole, "train/loss") == series(broken, "train/loss")
    left, right = bits(whole, RESUMED), bits(broken, RESUMED)
    assert left.keys() == right.keys()
    assert not [path for path, tensor in left.items() if not torch.equal(tensor, right[path])]


@pytest.mark.parametrize("name", MOVED)
def test_a_move_to_whole_sequences_goes_on(two_ranks: Path, name: str) -> None:
    whole, found = (
        series(two_ranks / "gqa-z2", "train/loss"),
        series(two_ranks / name, "train/loss"),
    )
    assert found == {
        step: pytest.approx(whole[step], abs=1e-5) for step in range(STOP + 1, RESUMED + 1)
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("unknown", "sequence-needs-attention"),
        ("no-positions", "task-has-no-positions"),
        ("mobile", "sequence-needs-attention"),
        ("pooled", "sequence-needs-attention"),
        ("dropping", "sequence-needs-attention"),
        ("tiled-own-loss", "loss-not-tiled"),
    ],
)
def test_what_cannot_be_shared_is_refused(two_ranks: Path, name: str, kind: str) -> None:
    assert f"[{kind}]" in (two_ranks / f"{name}.error").read_text(encoding="utf-8")


LONG, SHORT = 8_192, 64
PEAK = "memory/host_peak_bytes"


def long_case(length: int, size: int, folder: Path) -> dict[str, Any]:
    """A perceptron much wider than attention, so that memory is what it keeps for each position."""
    shape = {
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "mlp_size": 2048,
        "vocab_size": 64,
        "dropout": 0.0,
    }
    return {
        "run": {"name": f"{length}-over-{size}", "output_dir": str(folder)},
        "model": {
            "kind": "gpt",
            **shape,
            "num_kv_heads": 2,
            "positions": "rotary",
            "max_positions": LONG,
        },
        "data": {"target": "tests.jobs.sequence_parts:long_text", "args": {"length": length}},
        "task": {"kind": "causal_lm"},
        "batch": {"global_size": 1},
        "parallel": {"sequence": size},
        "optimizer": SGD,
        "training": {"max_steps": 1, "log_every": 1},
        "checkpoint": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
    }


@pytest.fixture(scope="module")
def long_sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    for size in (1, 2):  # the short one first: what a process has taken at most never falls
        train_cases(
            [long_case(length, size, folder) for length in (SHORT, LONG)],
            num_ranks=size,
            folder=folder,
        )
    return folder


def test_two_ranks_keep_half_of_a_long_sequence_each(long_sequences: Path) -> None:
    for name in ("train/loss", "train/grad_norm"):
        one, two = (series(long_sequences / f"{LONG}-over-{size}", name) for size in (1, 2))
        assert two == {1: pytest.approx(one[1], rel=1e-5)}
    taken = [
        max(series(long_sequences / f"{LONG}-over-{size}", PEAK).values())
        - max(series(long_sequences / f"{SHORT}-over-{size}", PEAK).values())
        for size in (1, 2)
    ]
    print("bytes for one sequence:", taken)
    assert taken[0] > 1.2e8
    assert 0.4 < taken[1] / taken[0] < 0.6
