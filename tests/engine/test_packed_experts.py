"""Mixtures of transformers whose experts are divided over ranks train like plain PyTorch in one
process, where each expert is computed after the other: fp32 losses within 1e-5, gradient norms
within 1e-4.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.state.reader import MergedWeights
from framework.config.optimizer import Muon
from framework.errors import ConfigError
from framework.setup.resumed_start import refuse_moments_of_adamw
from tests.engine import test_lora
from tests.engine.oracle import Average, MuonWithAdam
from tests.gpu.oracles import lamb
from tests.jobs.parts import prompts_of_step, tiny_mixture
from tests.launched import fewer, rarely, read_metrics, series, train_cases

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

NUM_STEPS, FEW_STEPS, GLOBAL_SIZE = fewer(5, of=20), fewer(3, of=20), 8
STOP, END = 2, 4  # of runs that are resumed
SGD = {"kind": "sgd", "lr": 0.3, "momentum": 0.9}
ADAMW = {"kind": "adamw", "lr": 3e-3, "weight_decay": 0.1}
ADAFACTOR = {"kind": "adafactor", "lr": 0.03}
MUON = {"kind": "muon", "lr": 0.01}
# It computes in bf16: by step 19 that exceeds what a wrong step would show.
MUON_STEPS = min(FEW_STEPS, 7)
LAMB = {"kind": "lamb", "lr": 0.01}
MAX_NORM = 0.5
LORA = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["gate"]}
DIVIDED = {"tensor": 2, "expert": 1}
ROUTER_LOSS = 0.05  # `tests.jobs.parts.WithRouterLoss`


@dataclass(frozen=True)
class Case:
    kind: str
    stage: int
    optimizer: dict[str, Any]
    steps: int = 1
    ranks: int = 2
    implementation: str = "grouped_mm"
    average: bool = False
    num_steps: int = FEW_STEPS
    parallel: dict[str, int] = field(default_factory=dict)
    has_adapters: bool = False

    @property
    def name(self) -> str:
        parts = (f"r{self.ranks}-z{self.stage}", self.kind, self.optimizer["kind"])
        ways = (self.implementation, str(self.steps), "ema" if self.average else "weights")
        further = (f"{name}{size}" for name, size in self.parallel.items())
        return "-".join((*parts, *ways, *further, *(["lora"] if self.has_adapters else [])))

    @property
    def replicas(self) -> int:
        """Ranks that see other samples."""
        return self.ranks // prod(size for name, size in self.parallel.items() if name != "expert")

    @property
    def max_norm(self) -> float:
        """Most steps are clipped to it; adapters have small gradients."""
        return 0.01 if self.has_adapters else MAX_NORM

    @property
    def has_router_loss(self) -> bool:
        is_staged = self.parallel.get("pipe", 1) > 1
        return self.kind in ("mixtral", "qwen2_moe") and not is_staged

    def config(self, folder: Path, **sections: Any) -> dict[str, Any]:
        args: dict[str, Any] = {"kind": self.kind, "implementation": self.implementation}
        args["returns_routers"] = self.has_router_loss
        task: dict[str, Any] = {"kind": "causal_lm"}
        if self.has_router_loss:
            task = {"target": "tests.jobs.parts:WithRouterLoss"}
        training: dict[str, Any] = {
            "max_steps": self.num_steps,
            "log_every": 1,
            "clip_grad_norm": self.max_norm,
        }
        if self.average:
            training["ema"] = {"decay": 0.8}
        if self.has_adapters:
            training["lora"] = {"r": 4, "lora_alpha": 8, **LORA}
        return {
            "run": {"name": self.name, "output_dir": str(folder)},
            "model": {"target": "tests.jobs.parts:tiny_mixture", "args": args},
            "task": task,
            "data": {"target": "tests.jobs.parts:masked_prompts"},
            "batch": {"global_size": GLOBAL_SIZE, "accumulation_steps": self.steps},
            "zero": {"stage": self.stage},
            "parallel": {"expert": 2, **self.parallel},
            "optimizer": self.optimizer,
            "training": training,
            "checkpoint": {"at_end": self.average},
            "evaluation": {"at_end": False},
            "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
            **sections,
        }


TWO = [
    Case("mixtral", 1, SGD, steps=2, num_steps=NUM_STEPS),
    Case("qwen2_moe", 2, ADAMW, steps=2, average=True, num_steps=NUM_STEPS),
    Case("deepseek_v3", 3, SGD, steps=2),
    Case("gpt_oss", 1, ADAMW),
    Case("olmoe", 2, SGD, implementation="eager"),
    Case("mixtral", 1, SGD, steps=2, num_steps=NUM_STEPS, parallel={"sequence": 2}),
    Case("qwen3_moe", 3, ADAMW, parallel={"sequence": 2}),
    Case("mixtral", 1, SGD | {"lr": 3.0}, has_adapters=True, average=True),
    Case("qwen3_moe", 3, ADAMW, steps=2, has_adapters=True),
    # Whole experts on each rank of a tensor group.
    Case("mixtral", 0, SGD, steps=2, num_steps=NUM_STEPS, parallel=DIVIDED),
    Case("gpt_oss", 2, ADAMW, parallel=DIVIDED, average=True),
    Case("qwen3_moe", 3, ADAMW, parallel=DIVIDED),
    Case("qwen3_moe", 1, SGD, steps=2, parallel=DIVIDED, has_adapters=True),
    Case("mixtral", 2, ADAFACTOR, num_steps=NUM_STEPS),
    Case("qwen3_moe", 0, ADAFACTOR, steps=2, parallel=DIVIDED),
    # Each expert's matrix is made orthogonal by itself.
    Case("mixtral", 3, MUON, steps=2, num_steps=MUON_STEPS),
    Case("qwen3_moe", 2, MUON, num_steps=MUON_STEPS, parallel=DIVIDED),
    # Each expert has norms of its own.
    Case("mixtral", 2, LAMB, num_steps=NUM_STEPS),
    Case("gpt_oss", 0, LAMB, steps=2, parallel=DIVIDED),
]
# With --exhaustive: other models at other stages.
RARE = [
    Case("qwen3_moe", 1, ADAMW),
    Case("deepseek_v3", 2, ADAMW, parallel={"sequence": 2}),
    Case("deepseek_v3", 1, SGD, steps=2, parallel=DIVIDED),
    Case("olmoe", 1, ADAMW, implementation="eager", parallel=DIVIDED),
    Case("qwen2_moe", 0, ADAMW, parallel=DIVIDED),
    Case("mixtral", 3, SGD | {"lr": 3.0}, parallel=DIVIDED, has_adapters=True),
]
FOUR = [
    Case("mixtral", 2, ADAMW, ranks=4),
    Case("qwen2_moe", 3, ADAMW, ranks=4),
    Case("qwen2_moe", 2, ADAMW, ranks=4, parallel={"sequence": 2, "expert": 4}),
    Case("qwen3_moe", 1, SGD, steps=2, ranks=4, num_steps=NUM_STEPS, parallel={"pipe": 2}),
    Case("qwen3_moe", 1, SGD, steps=2, ranks=4, parallel={"pipe": 2}, has_adapters=True),
    Case("qwen3_moe", 3, ADAFACTOR, ranks=4, parallel={"tensor": 2}),
    Case("gpt_oss", 3, MUON, ranks=4, num_steps=MUON_STEPS),
    Case("qwen3_moe", 3, LAMB, ranks=4, parallel={"tensor": 2}),
    Case("qwen3_moe", 1, ADAMW, steps=2, ranks=4, parallel={"pipe": 2, **DIVIDED}),
]
RARE_FOUR = [
    Case("qwen2_moe", 1, SGD, ranks=4),
    Case("mixtral", 1, ADAMW, steps=2, ranks=4, parallel={"pipe": 2}),
    Case("qwen3_moe", 3, SGD, ranks=4, parallel={"tensor": 2}),
    Case("mixtral", 2, ADAMW, ranks=4, parallel={"tensor": 2}),
    Case("qwen2_moe", 1, SGD, steps=2, ranks=4, parallel={"tensor": 2}),
    Case("qwen2_moe", 1, ADAMW, ranks=4, parallel={"tensor": 2, "sequence": 2}),
    Case("mixtral", 3, ADAMW, ranks=4, parallel={"tensor": 2}, has_adapters=True),
]
RARE_EIGHT = [
    Case("qwen3_moe", 1, ADAMW, steps=2, ranks=8, parallel={"tensor": 2, "pipe": 2}),
    Case("qwen3_moe", 1, SGD, steps=2, ranks=8, parallel={"pipe": 2, "sequence": 2, **DIVIDED}),
]


def micro_batches(case: Case, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return those of all ranks."""
    samples = prompts_of_step(step, global_size=GLOBAL_SIZE)
    size = GLOBAL_SIZE // case.replicas // case.steps
    batches = []
    for start in range(0, GLOBAL_SIZE, size):
        ids, targets = zip(*samples[start : start + size], strict=True)
        batches.append((torch.stack(ids), torch.stack(targets)))
    return batches


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def _packed(model: nn.Module) -> list[nn.Parameter]:
    """List the weights of several experts."""
    return [weight for name, weight in model.named_parameters() if ".experts." in name]


def plain_steps(case: Case) -> tuple[list[dict[str, float]], Average]:
    """Return what every step reports, and the moving average of the weights."""
    torch.manual_seed(0)
    model = tiny_mixture(case.kind, "eager")
    if case.has_adapters:
        model, _ = test_lora.adapted(replace(case, implementation="eager").config(Path()))
    options = {name: value for name, value in case.optimizer.items() if name != "kind"}
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
        "muon": lambda _, lr: MuonWithAdam.for_layers(model, lr=lr, adam_lr=3e-4),
        "lamb": partial(lamb, packed=_packed(model)),
    }
    optimizer = kinds[case.optimizer["kind"]](_trained(model), **options)
    average = Average(model, 0.8)
    found = []
    for step in range(case.num_steps):
        optimizer.zero_grad()
        batches = micro_batches(case, step)
        nats = torch.zeros(())
        balances = []
        for ids, targets in batches:
            outputs = model(ids)
            nats = nats + cross_entropy(
                outputs.logits.flatten(0, 1), targets.flatten(), reduction="sum"
            )
            if case.has_router_loss:
                balances.append(outputs.aux_loss)
        loss = nats / sum(int((targets != -100).sum()) for _, targets in batches)
        row = {}
        if balances:
            mean = torch.stack(balances).mean()
            loss = loss + ROUTER_LOSS * mean
            row = {"train/balance_loss": mean.item() / 2, "train/dropped_tokens": 0.0}
        loss.backward()
        norm = nn.utils.clip_grad_norm_(_trained(model), case.max_norm)
        optimizer.step()
        average.step()
        found.append(row | {"train/loss": loss.item(), "train/grad_norm": norm.item()})
    return found, average


# Nothing of its loss depends on how a batch is divided. Layout up to the middle -> after it.
MOVED = Case("deepseek_v3", 1, ADAMW)
Layouts = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def layout(stage: int, **parallel: int) -> dict[str, Any]:
    return {"parallel": {"expert": 1, **parallel}, "zero": {"stage": stage}}


APART = layout(1, expert=2)
SHARED = layout(1, expert=2, sequence=2)
SPREAD = layout(3, expert=2)
CUT = layout(1, tensor=2)
MOVES: Layouts = {
    "same": (APART, APART),
    "together": (APART, layout(3)),
    "apart": (layout(0), layout(2, expert=2)),
    "spread": (SPREAD, SPREAD),
    "cut": (CUT, CUT),
    "out-of-groups": (CUT, SPREAD),
    "into-groups": (APART, layout(3, tensor=2)),
}
# With --exhaustive: experts and shared sequences each go on by themselves elsewhere.
RARE_MOVES: Layouts = {"shared": (SHARED, SHARED)}
# Adapters beside frozen experts: their fingerprint is the same, however they are divided.
ADAPTED = Case("qwen3_moe", 1, ADAMW, has_adapters=True)
ADAPTED_MOVES: Layouts = {
    "adapted": (APART, APART),
    "adapted-together": (APART, layout(3)),
    "adapted-cut": (APART, CUT),
}
# On four ranks, of a model in which every layer has experts.
MOVED_STAGES = Case("qwen3_moe", 1, ADAMW, steps=2, ranks=4)
STAGED = layout(1, expert=2, pipe=2)
BOTH = layout(3, expert=2, tensor=2)
STAGE_MOVES: Layouts = {
    "staged": (STAGED, STAGED),
    "out-of-stages": (STAGED, layout(2)),
    "both": (BOTH, BOTH),
    "both-into-stages": (BOTH, layout(1, pipe=2, tensor=2)),
}
# With --exhaustive: a run of the four goes into stages as well.
RARE_STAGE_MOVES: Layouts = {"into-stages": (APART, STAGED)}
ADAPTED_STAGES = Case("qwen3_moe", 1, ADAMW, steps=2, ranks=4, has_adapters=True)
ADAPTED_STAGE_MOVES: Layouts = {
    "adapted-staged": (STAGED, STAGED),
    "adapted-into-groups": (STAGED, layout(2, expert=2, tensor=2)),
}
TO_THE_BIT = ("same", "spread", "shared", "cut", "staged", "both", "adapted", "adapted-staged")


def whole_name(before: dict[str, Any], case: Case) -> str:
    """Return the name of the run in a piece from which runs of other layouts go on."""
    sizes = [f"{way}{size}" for way, size in before["parallel"].items()]
    return "-".join(("whole", case.name, f"z{before['zero']['stage']}", *sizes))


def saved(
    name: str, folder: Path, layout: dict[str, Any], *, case: Case = MOVED, **checkpoint: Any
) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder)},
        "training": {
            "max_steps": END,
            "log_every": 1,
            "clip_grad_norm": MAX_NORM,
            "ema": {"decay": 0.8},
        },
        "evaluation": {"every_steps": STOP, "batch_size": 2, "weights": "ema"},
        "data": {"target": "tests.jobs.parts:masked_prompts_and_seven_more"},
        "scheduler": {"kind": "cosine", "warmup_steps": 2, "total_steps": END},
        "checkpoint": {"at_end": True, **checkpoint},
    }
    if case.has_adapters:
        sections["training"]["lora"] = LORA
    return case.config(folder, **(sections | layout))


def moves_of(moves: Layouts, folder: Path, case: Case) -> list[dict[str, Any]]:
    """Runs in a piece, and from the middle of one of them in another layout."""
    wholes: dict[str, dict[str, Any]] = {}
    further = []
    for name, (before, after) in moves.items():
        whole = whole_name(before, case)
        wholes[whole] = saved(whole, folder, before, case=case, every_steps=STOP)
        middle = folder / whole / "checkpoints" / f"global_step{STOP}"
        further.append(saved(name, folder, after, case=case, resume=str(middle)))
    return [*wholes.values(), *further]


def moved_cases(moves: Layouts, folder: Path) -> list[dict[str, Any]]:
    cases = [*moves_of(moves, folder, MOVED), *moves_of(ADAPTED_MOVES, folder, ADAPTED)]
    begun = {"at_end": False, "init_weights": str(folder / whole_name(APART, MOVED))}
    for name, size in (("begun-together", 1), ("begun-apart", 2)):
        case = saved(name, folder, layout(1, expert=size), **begun)
        case["training"]["max_steps"] = 2
        cases.append(case)
    return cases


@pytest.fixture(scope="module")
def folder(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed-experts")
    in_half = TWO[1].config(folder, precision={"dtype": "bf16"})
    in_half["run"]["name"] = "bf16"
    held = [*TWO, *(RARE if exhaustive else ())]
    moves = MOVES | (RARE_MOVES if exhaustive else {})
    cases = [*(case.config(folder) for case in held), in_half, *moved_cases(moves, folder)]
    train_cases(cases, num_ranks=2, folder=folder)
    return folder


@pytest.fixture(scope="module")
def on_four(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed-experts-4")
    held = [*FOUR, *(RARE_FOUR if exhaustive else ())]
    cases = [case.config(folder) for case in held]
    moves = STAGE_MOVES | (RARE_STAGE_MOVES if exhaustive else {})
    cases += moves_of(moves, folder, MOVED_STAGES)
    cases += moves_of(ADAPTED_STAGE_MOVES, folder, ADAPTED_STAGES)
    train_cases(cases, num_ranks=4, folder=folder)
    return folder


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed-experts-8")
    train_cases([case.config(folder) for case in RARE_EIGHT], num_ranks=8, folder=folder)
    return folder


def hold(case: Case, folder: Path) -> None:
    """Compare a run with plain PyTorch; most of its steps are clipped. Muon computes in bf16."""
    rows = read_metrics(folder / case.name)
    expected, average = plain_steps(case)
    wider = 100 if case.optimizer == MUON else 1
    for name in expected[0]:
        within = {"abs": 1e-5 * wider}
        if name == "train/grad_norm":
            within = {"rel": 1e-4 * wider}
        found = [row[name] for row in rows]
        assert found == pytest.approx([step[name] for step in expected], **within), name
    assert sum(step["train/grad_norm"] > case.max_norm for step in expected) > case.num_steps // 2
    if case.average:
        checkpoint = list_checkpoints(folder / case.name / "checkpoints")[-1]
        weights = MergedWeights(checkpoint, average=True)
        assert set(weights) == set(average.weights)
        for name, weight in average.weights.items():
            torch.testing.assert_close(
                weights[name], weight, atol=1e-5, rtol=0.0, check_dtype=False
            )


@pytest.mark.parametrize("case", [*TWO, *rarely(RARE)], ids=lambda case: case.name)
def test_trains_as_plain_pytorch(case: Case, folder: Path) -> None:
    hold(case, folder)


@pytest.mark.parametrize("case", [*FOUR, *rarely(RARE_FOUR)], ids=lambda case: case.name)
def test_groups_of_experts_train_as_plain_pytorch(case: Case, on_four: Path) -> None:
    hold(case, on_four)


@pytest.mark.parametrize("case", rarely(RARE_EIGHT), ids=lambda case: case.name)
def test_experts_in_divided_stages_train_as_plain_pytorch(case: Case, on_eight: Path) -> None:
    hold(case, on_eight)


def test_half_precision_stays_close(folder: Path) -> None:
    expected, _ = plain_steps(TWO[1])
    losses = [step["train/loss"] for step in expected]
    assert [*series(folder / "bf16", "train/loss").values()] == pytest.approx(losses, abs=0.05)


def test_muon_does_not_go_on_from_experts_with_moments_of_adamw(folder: Path) -> None:
    checkpoint = list_checkpoints(folder / TWO[1].name / "checkpoints")[-1]
    with pytest.raises(ConfigError, match=r"it holds AdamW's moments of \S+\.experts\.\w+, and"):
        refuse_moments_of_adamw(checkpoint, Muon())


def hold_moved(name: str, before: dict[str, Any], folder: Path, case: Case) -> None:
    """Compare a run that goes on from the middle of another with that other: in the same layout to
    the bit, evaluations of the average included; in others as their arithmetic has it.
    """
    for kind in ("train/loss", "train/grad_norm", "eval/loss"):
        whole = series(folder / whole_name(before, case), kind)
        second_half = {step: value for step, value in whole.items() if step > STOP}
        broken = series(folder / name, kind)
        if name in TO_THE_BIT:
            assert broken == second_half, kind
        else:
            assert broken == pytest.approx(second_half, abs=2e-5), kind


@pytest.mark.parametrize("name", [*MOVES, *rarely(RARE_MOVES)])
def test_saved_experts_go_on_where_they_were(name: str, folder: Path) -> None:
    hold_moved(name, (MOVES | RARE_MOVES)[name][0], folder, MOVED)


@pytest.mark.parametrize("name", ADAPTED_MOVES)
def test_saved_adapters_beside_experts_go_on_where_they_were(name: str, folder: Path) -> None:
    hold_moved(name, ADAPTED_MOVES[name][0], folder, ADAPTED)


@pytest.mark.parametrize("name", ADAPTED_STAGE_MOVES)
def test_saved_adapters_in_stages_go_on_where_they_were(name: str, on_four: Path) -> None:
    hold_moved(name, ADAPTED_STAGE_MOVES[name][0], on_four, ADAPTED_STAGES)


@pytest.mark.parametrize("name", [*STAGE_MOVES, *rarely(RARE_STAGE_MOVES)])
def test_saved_experts_of_stages_go_on_where_they_were(name: str, on_four: Path) -> None:
    before, _ = (STAGE_MOVES | RARE_STAGE_MOVES)[name]
    hold_moved(name, before, on_four, MOVED_STAGES)
    hold_weights([whole_name(before, MOVED_STAGES), name], on_four, MOVED_STAGES)


def hold_weights(runs: list[str], folder: Path, case: Case) -> None:
    """Compare names and shapes of the last weights of runs with those of transformers, and the
    weights with those of the first run.
    """
    state = tiny_mixture(case.kind).state_dict()
    ends = [MergedWeights(list_checkpoints(folder / run / "checkpoints")[-1]) for run in runs]
    for end in ends:
        assert set(end) | set(end.ties) == set(state)
        for name, weight in end.items():
            assert weight.shape == state[name].shape, name
            torch.testing.assert_close(weight, ends[0][name], atol=1e-4, rtol=0.0)


def test_weights_of_a_checkpoint_are_those_of_transformers(folder: Path) -> None:
    wholes = [whole_name(before, MOVED) for before in (APART, SPREAD, CUT)]
    hold_weights([*wholes, "together", "into-groups"], folder, MOVED)


def test_weights_of_a_checkpoint_begin_another_run(folder: Path) -> None:
    together, apart = (
        series(folder / f"begun-{name}", "train/loss") for name in ("together", "apart")
    )
    assert apart == pytest.approx(together, abs=1e-5)
    assert apart[1] < series(folder / whole_name(APART, MOVED), "train/loss")[1]
