"""Mixtures of transformers whose experts are divided over ranks train like plain PyTorch in one
process, where each expert is computed after the other: fp32 losses within 1e-5, gradient norms
within 1e-4.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.state.reader import MergedWeights
from tests.engine import test_lora
from tests.engine.oracle import Average
from tests.jobs.parts import prompts_of_step, tiny_mixture
from tests.launched import fewer, read_metrics, series, train_cases

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

NUM_STEPS, FEW_STEPS, GLOBAL_SIZE = fewer(7, of=20), fewer(3, of=20), 8
STOP, END = 3, 6  # of runs that are resumed
SGD = {"kind": "sgd", "lr": 0.3, "momentum": 0.9}
ADAMW = {"kind": "adamw", "lr": 3e-3, "weight_decay": 0.1}
MAX_NORM = 0.5
LORA = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["gate"]}
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
    Case("qwen3_moe", 1, ADAMW),
    Case("mixtral", 1, SGD, steps=2, num_steps=NUM_STEPS, parallel={"sequence": 2}),
    Case("qwen3_moe", 3, ADAMW, parallel={"sequence": 2}),
    Case("deepseek_v3", 2, ADAMW, parallel={"sequence": 2}),
    Case("mixtral", 1, SGD | {"lr": 3.0}, has_adapters=True, average=True),
    Case("qwen3_moe", 3, ADAMW, steps=2, has_adapters=True),
]
FOUR = [
    Case("qwen2_moe", 1, SGD, ranks=4),
    Case("mixtral", 2, ADAMW, ranks=4),
    Case("qwen2_moe", 3, ADAMW, ranks=4),
    Case("qwen2_moe", 2, ADAMW, ranks=4, parallel={"sequence": 2, "expert": 4}),
    Case("qwen3_moe", 1, SGD, steps=2, ranks=4, num_steps=NUM_STEPS, parallel={"pipe": 2}),
    Case("mixtral", 1, ADAMW, steps=2, ranks=4, parallel={"pipe": 2}),
    Case("qwen3_moe", 1, SGD, steps=2, ranks=4, parallel={"pipe": 2}, has_adapters=True),
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


def plain_steps(case: Case) -> tuple[list[dict[str, float]], Average]:
    """Return what every step reports, and the moving average of the weights."""
    torch.manual_seed(0)
    model = tiny_mixture(case.kind, "eager")
    if case.has_adapters:
        model, _ = test_lora.adapted(replace(case, implementation="eager").config(Path()))
    options = {name: value for name, value in case.optimizer.items() if name != "kind"}
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
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


# Nothing of its loss depends on how a batch is divided. Layout before the stop -> after it.
MOVED = Case("deepseek_v3", 1, ADAMW)
APART: dict[str, Any] = {"parallel": {"expert": 2}, "zero": {"stage": 1}}
SHARED: dict[str, Any] = {"parallel": {"expert": 2, "sequence": 2}, "zero": {"stage": 1}}
SPREAD: dict[str, Any] = {"parallel": {"expert": 2}, "zero": {"stage": 3}}
MOVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "same": (APART, APART),
    "together": (APART, {"parallel": {"expert": 1}, "zero": {"stage": 3}}),
    "apart": (
        {"parallel": {"expert": 1}, "zero": {"stage": 0}},
        {"parallel": {"expert": 2}, "zero": {"stage": 2}},
    ),
    "spread": (SPREAD, SPREAD),
    "shared": (SHARED, SHARED),
}
# Adapters beside frozen experts: their fingerprint is the same, however they are divided.
ADAPTED = Case("qwen3_moe", 1, ADAMW, has_adapters=True)
ADAPTED_MOVES = {
    "adapted": (APART, APART),
    "adapted-together": (APART, {"parallel": {"expert": 1}, "zero": {"stage": 3}}),
}
# On four ranks, of a model in which every layer has experts.
MOVED_STAGES = Case("qwen3_moe", 1, ADAMW, steps=2, ranks=4)
STAGED: dict[str, Any] = {"parallel": {"expert": 2, "pipe": 2}, "zero": {"stage": 1}}
WHOLE: dict[str, Any] = {"parallel": {"expert": 1}, "zero": {"stage": 2}}
STAGE_MOVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "staged": (STAGED, STAGED),
    "out-of-stages": (STAGED, WHOLE),
    "into-stages": (APART, STAGED),
}
TO_THE_BIT = ("same", "spread", "shared", "staged", "adapted")


def saved(
    name: str, folder: Path, layout: dict[str, Any], *, max_steps: int, case: Case = MOVED
) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder)},
        "training": {
            "max_steps": max_steps,
            "log_every": 1,
            "clip_grad_norm": MAX_NORM,
            "ema": {"decay": 0.8},
        },
        "evaluation": {"every_steps": 3, "batch_size": 2, "weights": "ema"},
        "data": {"target": "tests.jobs.parts:masked_prompts_and_seven_more"},
        "scheduler": {"kind": "cosine", "warmup_steps": 2, "total_steps": END},
        "checkpoint": {"at_end": True, "resume": "auto"},
    }
    if case.has_adapters:
        sections["training"]["lora"] = LORA
    return case.config(folder, **(sections | layout))


def pairs_of(
    moves: dict[str, tuple[dict[str, Any], dict[str, Any]]], folder: Path, case: Case
) -> list[dict[str, Any]]:
    """Runs in a piece, and in two with another layout after the stop."""
    cases = []
    for name, (before, after) in moves.items():
        cases.append(saved(f"{name}-whole", folder, before, max_steps=END, case=case))
        cases.append(saved(name, folder, before, max_steps=STOP, case=case))
        cases.append(saved(name, folder, after, max_steps=END, case=case))
    return cases


def moved_cases(folder: Path) -> list[dict[str, Any]]:
    cases = [*pairs_of(MOVES, folder, MOVED), *pairs_of(ADAPTED_MOVES, folder, ADAPTED)]
    begun = {"at_end": False, "init_weights": str(folder / "same-whole")}
    for name, size in (("begun-together", 1), ("begun-apart", 2)):
        layout = {"parallel": {"expert": size}, "zero": {"stage": 1}, "checkpoint": begun}
        cases.append(saved(name, folder, layout, max_steps=2))
    return cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed-experts")
    in_half = TWO[1].config(folder, precision={"dtype": "bf16"})
    in_half["run"]["name"] = "bf16"
    cases = [*(case.config(folder) for case in TWO), in_half, *moved_cases(folder)]
    train_cases(cases, num_ranks=2, folder=folder)
    return folder


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed-experts-4")
    cases = [case.config(folder) for case in FOUR]
    cases += pairs_of(STAGE_MOVES, folder, MOVED_STAGES)
    train_cases(cases, num_ranks=4, folder=folder)
    return folder


def hold(case: Case, folder: Path) -> None:
    """Compare a run with plain PyTorch; most of its steps are clipped."""
    rows = read_metrics(folder / case.name)
    expected, average = plain_steps(case)
    for name in expected[0]:
        within = {"rel": 1e-4} if name == "train/grad_norm" else {"abs": 1e-5}
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


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_trains_as_plain_pytorch(case: Case, folder: Path) -> None:
    hold(case, folder)


@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.name)
def test_groups_of_experts_train_as_plain_pytorch(case: Case, on_four: Path) -> None:
    hold(case, on_four)


def test_half_precision_stays_close(folder: Path) -> None:
    expected, _ = plain_steps(TWO[1])
    losses = [step["train/loss"] for step in expected]
    assert [*series(folder / "bf16", "train/loss").values()] == pytest.approx(losses, abs=0.05)


def hold_moved(name: str, folder: Path) -> None:
    """Compare a run in two pieces with the one in a piece: in the same layout to the bit,
    evaluations of the average included; in others as their arithmetic has it.
    """
    for kind in ("train/loss", "train/grad_norm", "eval/loss"):
        whole = series(folder / f"{name}-whole", kind)
        broken = series(folder / name, kind)
        if name in TO_THE_BIT:
            assert broken == whole, kind
        else:
            assert broken == pytest.approx(whole, abs=2e-5), kind


@pytest.mark.parametrize("name", [*MOVES, *ADAPTED_MOVES])
def test_saved_experts_go_on_where_they_were(name: str, folder: Path) -> None:
    hold_moved(name, folder)


@pytest.mark.parametrize("name", STAGE_MOVES)
def test_saved_experts_of_stages_go_on_where_they_were(name: str, on_four: Path) -> None:
    hold_moved(name, on_four)
    weights = MergedWeights(list_checkpoints(on_four / name / "checkpoints")[-1])
    expected = MergedWeights(list_checkpoints(on_four / f"{name}-whole" / "checkpoints")[-1])
    state = tiny_mixture(MOVED_STAGES.kind).state_dict()
    assert set(weights) | set(weights.ties) == set(state)
    for weight_name, weight in weights.items():
        assert weight.shape == state[weight_name].shape, weight_name
        torch.testing.assert_close(weight, expected[weight_name], atol=1e-4, rtol=0.0)


def test_weights_of_a_checkpoint_are_those_of_transformers(folder: Path) -> None:
    ends = {}
    for run in ("together-whole", "spread-whole", "together"):
        ends[run] = MergedWeights(list_checkpoints(folder / run / "checkpoints")[-1])
    together = ends.pop("together")
    state = tiny_mixture(MOVED.kind).state_dict()
    for apart in ends.values():
        assert set(apart) | set(apart.ties) == set(state)
        for name, weight in apart.items():
            assert weight.shape == state[name].shape, name
            torch.testing.assert_close(weight, together[name], atol=1e-4, rtol=0.0)


def test_weights_of_a_checkpoint_begin_another_run(folder: Path) -> None:
    together, apart = (
        series(folder / f"begun-{name}", "train/loss") for name in ("together", "apart")
    )
    assert apart == pytest.approx(together, abs=1e-5)
    assert apart[1] < series(folder / "same-whole", "train/loss")[1]
