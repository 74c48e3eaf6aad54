"""A tensor group must train like plain PyTorch in one process: fp32 losses and gradient norms
within 1e-5.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.commands.export import export
from framework.config.load import config_from_values
from framework.recipes.text.prepare import prepare
from framework.setup.user_code import call_factory
from tests.engine.pipe_oracle import plain_run
from tests.engine.test_experts import second_copies
from tests.jobs.tensor_parts import WITHOUT_PLAN
from tests.launched import fewer, rarely, read_metrics, series, train_cases
from tests.train.monitors.sinks import histograms_of, samples_of

pytestmark = pytest.mark.slow

# Drift is held by one run of each kind of group and precision. What the last step made of the
# weights is held by the evaluation after it.
NUM_STEPS, FEW_STEPS = fewer(5, of=20), fewer(2, of=20)
TOLERANCE = 1e-5
CLIP = 0.3

_SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "max_positions": 32, "dropout": 0.0}
GPT = {
    "model": {"kind": "gpt", **_SMALL},
    "data": {"kind": "text", "sequence_length": 32},
    "task": {"kind": "causal_lm"},
}
_LLAMA = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "num_kv_heads": 2,
    "tie_embeddings": False,
}
LLAMA = {**GPT, "model": {**GPT["model"], **_LLAMA}}
BERT = {
    "model": {"kind": "bert", "vocab_size": 261, **_SMALL},
    "data": {"kind": "text_pairs", "sequence_length": 32},
    "task": {"kind": "masked_lm"},
}
THEIRS = {**GPT, "model": {"target": "tests.jobs.tensor_parts:llama"}}
DIGITS = {"data": {"kind": "digits", "image_size": 28}, "task": {"kind": "classification"}}
VIT = {**DIGITS, "model": {"target": "tests.jobs.tensor_parts:vit"}}
FUSED = {**DIGITS, "model": {"target": "tests.jobs.tensor_parts:FusedVision"}}
TORCH_VIT = {**DIGITS, "model": {"target": "tests.jobs.tensor_parts:torch_vit"}}
OF_IMAGES = ("vit", "deit", "clip")


def without_plan(family: str) -> dict[str, Any]:
    """Sections of a model of transformers that brings no plan."""
    model = {"target": "tests.jobs.tensor_parts:without_plan", "args": {"family": family}}
    sections = DIGITS if family in OF_IMAGES else GPT
    return {**sections, "model": model}


MODELS: dict[str, dict[str, Any]] = {
    **{family: without_plan(family) for family in WITHOUT_PLAN},
    "gpt": GPT,
    "llama": LLAMA,
    "our-bert": BERT,
    "theirs": THEIRS,
    "tied": {**GPT, "model": {"target": "tests.jobs.tensor_parts:llama", "args": {"tie": True}}},
    "planned-vit": VIT,
    "fused": FUSED,
    "torch-vit": TORCH_VIT,
    "gemma": {**GPT, "model": {"target": "tests.jobs.tensor_parts:gemma"}},
    "unnamed": FUSED,
    "bent": {**DIGITS, "model": {"target": "tests.jobs.tensor_parts:Bent"}},
    "bent-summed": {**DIGITS, "model": {"target": "tests.jobs.tensor_parts:Bent"}},
    "convolved": {
        **DIGITS,
        "model": {"target": "tests.jobs.tensor_parts:Convolved"},
        "training": {"sync_batch_norm": True, "channels_last": True},
    },
}
_VIT_LAYER = "model.vit.layers.*"
PLANS: dict[str, dict[str, Any]] = {
    "planned-vit": {
        f"{_VIT_LAYER}.attention": "shared_input",
        f"{_VIT_LAYER}.attention.q_proj": "column",
        f"{_VIT_LAYER}.attention.k_proj": "column",
        f"{_VIT_LAYER}.attention.v_proj": "column",
        f"{_VIT_LAYER}.attention.o_proj": "row",
        f"{_VIT_LAYER}.mlp.fc1": "column",
        f"{_VIT_LAYER}.mlp.fc2": "row",
        "model.classifier": "column_gathered",
    },
    "fused": {
        "blocks.*.attn": {"divide": ["num_heads"]},
        "blocks.*.attn.qkv": {"split": "column", "sections": 3},
        "blocks.*.attn.q_norm": "summed",
        "blocks.*.attn.proj": "row",
        "blocks.*.mlp.1": "column",
        "blocks.*.mlp.3": "row",
        "head": "column_gathered",
    },
    "bent": {"up": "column", "down": "row"},
    "convolved": {"up": "column", "down": "row"},
    "bent-summed": {"up": "column", "bend": "summed", "down": "row"},
    "torch-vit": {"1.encoder.layers.*.mlp.0": "column", "1.encoder.layers.*.mlp.3": "row"},
}
PLANS["unnamed"] = {name: entry for name, entry in PLANS["fused"].items() if entry != "summed"}


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "sgd", "lr": 0.1, "momentum": 0.9},
    "adamw": {"kind": "adamw", "lr": 1e-3},
    "muon": {"kind": "muon"},
    "adafactor": {"kind": "adafactor", "lr": 0.03},
    "lamb": {"kind": "lamb", "lr": 0.02, "weight_decay": 0.1},
}


@dataclass(frozen=True)
class Case:
    """A run of 16 samples per step, accumulated twice, and the sections that differ from its
    model's.
    """

    model: str
    stage: int
    kind: str = "sgd"
    tolerance: float = TOLERANCE
    dtype: str = "fp32"
    steps: int = FEW_STEPS
    together: int = 1  # ranks whose micro-batches a synchronised norm sees as one
    copies: int = 1  # ranks that share second copies of all weights (hpZ)

    @property
    def name(self) -> str:
        end = f"-hpz{self.copies}" if self.copies > 1 else ""
        return f"{self.model}-z{self.stage}-{self.kind}-{self.dtype}{end}"


TWO_RANKS = [
    Case("gpt", 0),
    Case("gpt", 3, "adamw", steps=NUM_STEPS),
    Case("our-bert", 3),
    Case("llama", 1),
    Case("theirs", 0, steps=NUM_STEPS),
    Case("tied", 2),
    Case("planned-vit", 0),
    Case("fused", 3),
    Case("torch-vit", 2),
    Case("gemma", 3),
    Case("bent-summed", 2),
    Case("gpt2", 0),
    Case("gpt2", 3, "adamw", steps=NUM_STEPS),
    Case("opt", 1),
    Case("bert", 3),
    Case("roberta", 0, "adamw"),
    Case("electra", 2),
    Case("distilbert", 1),
    Case("vit", 3),
    # bf16 has 8 bits of mantissa, which the norm of small gradients shows most.
    Case("gpt", 1, tolerance=0.05, dtype="bf16", steps=NUM_STEPS),
    Case("gpt", 0, tolerance=0.02, dtype="autocast"),
    Case("gpt", 0, tolerance=0.05, dtype="bf16", steps=NUM_STEPS),
    Case("tied", 0, "adamw", tolerance=5e-3, dtype="fp16", steps=NUM_STEPS),
    Case("llama", 0, "muon", tolerance=0.05, dtype="bf16"),
    Case("llama", 0, "adafactor", tolerance=0.05, dtype="bf16"),
    Case("llama", 0, "lamb", tolerance=5e-3, dtype="fp16"),
    Case("gpt", 2, tolerance=5e-3, dtype="fp16", steps=NUM_STEPS),
    # Muon computes in bf16, where a last bit of a gradient may move a number by 2**-8 of it.
    Case("gpt", 0, "muon", tolerance=1e-3),
    Case("llama", 3, "muon", tolerance=1e-3),
    Case("llama", 0, "adafactor", steps=NUM_STEPS),
    Case("fused", 2, "adafactor"),
    Case("convolved", 0, "adafactor"),
    Case("fused", 0, "lamb", steps=NUM_STEPS),
    Case("llama", 3, "lamb"),
]
FOUR_RANKS = [
    Case("llama", 1, steps=NUM_STEPS),
    Case("gpt", 3),
    Case("gpt", 1, "adafactor", steps=NUM_STEPS),
    Case("llama", 2, "lamb"),
    Case("convolved", 3, together=2),
    Case("gpt2", 1),
    Case("gpt2", 2, "adamw", steps=NUM_STEPS),
    Case("opt", 3, "adamw"),
    Case("bert", 1),
    Case("vit", 0),
    Case("llama", 3, "adamw", copies=2),
]
# Of these plans a weight between column and row layers is missing.
PARTIAL = [
    *(Case("unnamed", stage) for stage in (0, 3)),
    Case("bent", 2, dtype="bf16"),
]
RARE_PARTIAL = [*(Case("unnamed", stage) for stage in (1, 2)), Case("bent", 0)]
# With --exhaustive: other stages of a model, on which the others above hold what is the same for
# all.
RARE_TWO = [
    Case("gpt", 3),
    *(Case("gpt2", stage, steps=NUM_STEPS) for stage in (1, 2, 3)),
    *(
        Case(family, stage, kind, steps=NUM_STEPS)
        for family in ("opt", "bert", "roberta", "vit")
        for stage, kind in ((0, "sgd"), (1, "adamw"), (2, "sgd"), (3, "adamw"))
    ),
    *(Case(family, 2) for family in ("xlm-roberta", "camembert", "deit", "clip")),
    Case("gpt2", 1, "muon", tolerance=1e-3),
    Case("gpt2", 1, tolerance=0.05, dtype="bf16"),
    Case("gemma", 0),
    Case("gpt", 1),
    Case("gpt", 2),
    Case("our-bert", 0),
    Case("gpt", 3, tolerance=0.05, dtype="bf16"),
    Case("fused", 1, "muon", tolerance=1e-3),
    Case("our-bert", 3, "adafactor"),
]
RARE_FOUR = [
    Case("gpt", 2, "muon", tolerance=1e-3),
    *(Case("gpt", stage) for stage in (0, 1, 2)),
    *(Case("gpt2", stage, steps=NUM_STEPS) for stage in (0, 3)),
    Case("gpt2", 3, "adamw"),
    Case("theirs", 3),
    *(Case("llama", 3, kind) for kind in ("sgd", "adamw")),
    Case("our-bert", 0),
    Case("our-bert", 2),
    Case("planned-vit", 2),
    Case("fused", 1),
    Case("llama", 3, "adafactor"),
]
# Runs of a tensor group that are held against the same run without one.
_HOST = {"device": "cpu", "pin_memory": False}
_WATCHED = {"tensorboard": {"histograms_every_steps": FEW_STEPS, "samples": 2}}
PAIRS: dict[str, tuple[int, dict[str, Any]]] = {
    "init-z3": (
        3,
        {
            "checkpoint": {"init_weights": "weights.pt", "at_end": False},
            "monitors": _WATCHED,
        },
    ),
    "average-of-recomputed": (
        1,
        {
            "training": {"ema": {"decay": 0.9}, "recompute_every": 1},
            "evaluation": {"weights": "ema"},
            "monitors": _WATCHED,
        },
    ),
    "tiles": (3, {"training": {"loss_tile": 5}, "monitors": _WATCHED}),
    "offload": (2, {"zero": {"stage": 2, "offload_optimizer": _HOST}}),
}
# Runs with dropout that are resumed: model, ZeRO stage and precision.
HALVES = {
    "gpt": ("gpt", 3, "fp32"),
    "gpt2": ("gpt2", 2, "fp32"),
    "gpt-bf16": ("gpt", 0, "bf16"),
}
DROPOUTS: dict[str, dict[str, Any]] = {
    "gpt": {"dropout": 0.2},
    "gpt2": {"args": {"family": "gpt2", "dropout": 0.2}},
}
# Runs of four steps of GPT-2: size of their tensor group, ZeRO stage, and from which run's middle
# they go on.
MOVES: dict[str, tuple[int, int, str]] = {
    "undivided": (1, 1, ""),
    "divided": (2, 2, ""),
    "into-a-group": (2, 3, "undivided"),
    "out-of-a-group": (1, 0, "divided"),
}
NUM_MOVED = 4


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token folder of a real module."""
    folder = tmp_path_factory.mktemp("text")
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    for start in range(0, 8_000, 400):
        (folder / f"{start:05}.txt").write_text(source[start : start + 400], encoding="utf-8")
    prepare([str(path) for path in sorted(folder.glob("*.txt"))], str(folder / "tokens"))
    return folder / "tokens"


def values(
    case: Case, folder: Path, text: Path, *, micro_size: int, **more: dict[str, Any]
) -> dict[str, Any]:
    sections = MODELS[case.model]
    if sections["data"]["kind"].startswith("text"):
        sections = {**sections, "data": {**sections["data"], "path": str(text)}}
    plan = {"tensor_plan": PLANS[case.model]} if case.model in PLANS else {}
    limits = {"max_steps": case.steps, "log_every": 1, "clip_grad_norm": CLIP}
    made: dict[str, Any] = {
        "run": {"name": case.name, "output_dir": str(folder)},
        "batch": {"global_size": 16, "micro_size": micro_size},
        "parallel": {"tensor": 2, **plan},
        "precision": {"dtype": case.dtype},
        "zero": {"stage": case.stage},
        "optimizer": OPTIMIZERS[case.kind],
        "training": {},
        "evaluation": {"at_end": True, "batch_size": 180},
        "checkpoint": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        **sections,
    }
    made["training"] = made["training"] | limits
    if case.copies > 1:
        made |= second_copies(case.copies)
    return made | {name: {**made.get(name, {}), **section} for name, section in more.items()}


def pairs(folder: Path, text: Path) -> list[dict[str, Any]]:
    """Each with a tensor group of two, and with two data-parallel ranks."""
    torch.manual_seed(7)
    model = call_factory(
        config_from_values(values(Case("gpt", 0), folder, text, micro_size=8)).model.factory(),
        key="model",
    )
    torch.save(model.state_dict(), folder / "weights.pt")
    found = []
    for name, (stage, sections) in PAIRS.items():
        if "init_weights" in (checkpoint := sections.get("checkpoint", {})):
            begun = {**checkpoint, "init_weights": str(folder / "weights.pt")}
            sections = {**sections, "checkpoint": begun}
        for size in (2, 1):
            own = {"run": {"name": f"{name}-{size}"}, "parallel": {"tensor": size}}
            found.append(
                values(Case("gpt", stage), folder, text, micro_size=4 * size, **sections, **own)
            )
    return found


def halves(folder: Path, text: Path) -> list[dict[str, Any]]:
    """A run with dropout in a piece, and one in two."""
    return [
        values(
            Case(model, stage, dtype=dtype),
            folder,
            text,
            micro_size=8,
            run={"name": f"{name}-{half}"},
            model=DROPOUTS[model],
            training={"max_steps": steps},
            checkpoint={"every_steps": 2, "resume": "auto"},
        )
        for half, (model, stage, dtype) in HALVES.items()
        for name, steps in (("whole", 4), ("halves", 2), ("halves", 4))
    ]


def moves(folder: Path, text: Path) -> list[dict[str, Any]]:
    """Runs that go on in another layout, after those from which they do."""
    runs = []
    for name, (size, stage, source) in MOVES.items():
        checkpoint: dict[str, Any] = {"every_steps": 2}
        if source:
            checkpoint["resume"] = str(folder / source / "checkpoints/global_step2")
        case = Case("gpt2", stage, steps=NUM_MOVED)
        sections = {
            "run": {"name": name},
            "parallel": {"tensor": size},
            "checkpoint": checkpoint,
        }
        runs.append(values(case, folder, text, micro_size=4 * size, **sections))
    return runs


@pytest.fixture(scope="module")
def two_ranks(text: Path, exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    listed = (*TWO_RANKS, *PARTIAL, *(RARE_TWO + RARE_PARTIAL if exhaustive else ()))
    cases = [values(case, folder, text, micro_size=8) for case in listed]
    train_cases(
        [*cases, *pairs(folder, text), *halves(folder, text), *moves(folder, text)],
        num_ranks=2,
        folder=folder,
        allow_fp16=True,
    )
    return folder


@pytest.fixture(scope="module")
def four_ranks(text: Path, exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four-ranks")
    cases = [*FOUR_RANKS, *(RARE_FOUR if exhaustive else ())]
    train_cases(
        [values(case, folder, text, micro_size=4) for case in cases], num_ranks=4, folder=folder
    )
    return folder


_plain: dict[str, Any] = {}


def plain(
    case: Case, text: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], list[float], dict[str, float]]:
    """Losses, gradient norms and metrics of one process; the stage makes no difference there."""
    key = f"{case.model}-{case.kind}-{case.steps}-{case.together}"
    if key not in _plain:
        norms: list[float] = []
        clip = nn.utils.clip_grad_norm_
        with monkeypatch.context() as patched:
            patched.setattr(
                nn.utils, "clip_grad_norm_", lambda *args: norms.append(float(clip(*args)))
            )
            config = values(replace(case, dtype="fp32"), Path(), text, micro_size=8)
            losses, metrics, _ = plain_run(
                config,
                micro_size=8 // case.together,
                num_steps=case.steps,
                together=case.together,
            )
        if case.steps == NUM_STEPS:
            assert min(losses) < losses[0] - 0.05, (
                "the oracle itself must learn, or equality says nothing"
            )
        _plain[key] = losses, norms, metrics
    losses, norms, metrics = _plain[key]
    return losses, norms, metrics


def hold(case: Case, run_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, norms, metrics = plain(case, text, monkeypatch)
    assert min(norms) > CLIP, "clipping must be at work, or it is not compared"
    for name, expected in (("train/loss", losses), ("train/grad_norm", norms)):
        found = series(run_folder, name)
        assert sorted(found) == list(range(1, case.steps + 1))
        worst = max(
            abs(found[step] - value) / value for step, value in enumerate(expected, start=1)
        )
        assert worst < case.tolerance, f"{name} differs by up to {worst:.1e} of it"
    measured = read_metrics(run_folder)[-1]
    for name, value in metrics.items():
        assert measured[f"eval/{name}"] == pytest.approx(value, rel=10 * case.tolerance), name


@pytest.mark.parametrize("case", [*TWO_RANKS, *rarely(RARE_TWO)], ids=lambda case: case.name)
def test_a_group_of_two_trains_like_plain_pytorch(
    case: Case, two_ranks: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(case, two_ranks / case.name, text, monkeypatch)


@pytest.mark.parametrize("case", [*FOUR_RANKS, *rarely(RARE_FOUR)], ids=lambda case: case.name)
def test_two_groups_of_two_train_like_plain_pytorch(
    case: Case, four_ranks: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(case, four_ranks / case.name, text, monkeypatch)


@pytest.mark.parametrize("name", PAIRS)
def test_a_tensor_group_does_not_change_a_run(name: str, two_ranks: Path) -> None:
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        found, expected = (series(two_ranks / f"{name}-{size}", metric) for size in (2, 1))
        assert found == pytest.approx(expected, rel=TOLERANCE), metric
    if name.startswith("init"):
        losses = [
            series(two_ranks / run, "train/loss")[1] for run in (f"{name}-2", Case("gpt", 0).name)
        ]
        assert abs(losses[0] - losses[1]) > 5e-4, "other weights, another loss"
    logs = [
        (two_ranks / f"{name}-{size}/logs/rank0.log").read_text(encoding="utf-8") for size in (2, 1)
    ]
    assert all("gpt, 22,144 parameters" in log for log in logs), "a part is counted as the whole"


@pytest.mark.parametrize("name", ["init-z3", "average-of-recomputed"])
def test_histograms_of_a_tensor_group_are_those_of_whole_weights(
    name: str, two_ranks: Path
) -> None:
    cut, whole = (histograms_of(two_ranks / f"{name}-{size}") for size in (2, 1))
    assert cut.keys() == whole.keys()
    for tag, expected in whole.items():
        assert cut[tag].num == expected.num, tag
        assert cut[tag].sum_squares == pytest.approx(expected.sum_squares, rel=1e-4), tag


@pytest.mark.parametrize("name", ["init-z3", "average-of-recomputed", "tiles"])
def test_samples_of_a_tensor_group_are_those_of_whole_logits(name: str, two_ranks: Path) -> None:
    cut, whole = (samples_of(two_ranks / f"{name}-{size}") for size in (2, 1))
    assert cut == whole
    assert cut.count("\n") == 3, "a head, a rule and two samples"


@pytest.mark.parametrize("half", HALVES)
def test_a_resumed_tensor_group_is_the_unbroken_one(half: str, two_ranks: Path) -> None:
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        whole, halved = (series(two_ranks / f"{run}-{half}", name) for run in ("whole", "halves"))
        assert {step: halved[step] for step in whole} == whole


@pytest.mark.parametrize("name", MOVES)
def test_gpt2_moves_between_layouts_and_leaves_as_it_came(
    name: str, two_ranks: Path, text: Path, tmp_path: Path
) -> None:
    case = Case("gpt2", 0, steps=NUM_MOVED)
    losses, _, plain_model = plain_run(
        values(case, Path(), text, micro_size=8), micro_size=8, num_steps=NUM_MOVED
    )
    run = two_ranks / name
    first = 3 if MOVES[name][2] else 1
    expected_losses = {step: losses[step - 1] for step in range(first, NUM_MOVED + 1)}
    assert series(run, "train/loss") == pytest.approx(expected_losses, rel=TOLERANCE)
    export(str(run), tmp_path, trust=str(run))
    plain_model.config.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    exported = type(plain_model).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    for weight, expected in zip(exported.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("case", [*PARTIAL, *rarely(RARE_PARTIAL)], ids=lambda case: case.name)
def test_a_weight_of_which_each_rank_has_a_part_of_the_gradient_ends_the_first_step(
    case: Case, two_ranks: Path
) -> None:
    error = (two_ranks / f"{case.name}.error").read_text(encoding="utf-8")
    name, module = (
        ("bend.weight", "bend")
        if case.model == "bent"
        else ("blocks.0.attn.q_norm.weight", "blocks.0.attn.q_norm")
    )
    assert f"other gradients of {name}" in error
    assert f'write "{module}": summed into the plan' in error
    assert error.endswith("[tensor-plan]")
    metrics = two_ranks / case.name / "metrics.jsonl"
    assert not metrics.exists() or "train/loss" not in metrics.read_text(encoding="utf-8")
