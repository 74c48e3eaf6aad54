"""ZenFlow trains as its definition in plain PyTorch does, in one process: fp32 losses, gradient
norms and weights within 1e-5. A resumed run is the unbroken one to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.state.reader import MergedWeights
from framework.config.load import config_from_values
from framework.setup.user_code import call_factory
from tests.engine.test_resume import bits
from tests.jobs.parts import PROMPTED_GPT, prompts_of_step
from tests.launched import fewer, read_metrics, series, train_cases

pytestmark = pytest.mark.slow

NUM_STEPS, GLOBAL_SIZE, RANKS = fewer(8, of=20), 16, 2
CLIP, LR, DECAY, BETAS, EPS = 0.5, 3e-3, 0.1, (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class Case:
    """A run with ZenFlow; `decays_all`: also vectors, so that there is one group."""

    name: str
    stage: int
    micro_batches: int
    select_every: int
    warm_up: int = 0
    ratio: float = 0.25
    decays_all: bool = True
    zenflow: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)

    def config(self, folder: Path, **training: Any) -> dict[str, Any]:
        zenflow = {
            "topk_ratio": self.ratio,
            "select_every": self.select_every,
            "full_warm_up_steps": self.warm_up,
            **self.zenflow,
        }
        return {
            "run": {"name": self.name, "output_dir": str(folder)},
            "model": PROMPTED_GPT,
            "task": {"kind": "causal_lm"},
            "data": {"target": "tests.jobs.parts:masked_prompts"},
            "batch": {"global_size": GLOBAL_SIZE, "accumulation_steps": self.micro_batches},
            "zero": {
                "stage": self.stage,
                "offload_optimizer": {"device": "cpu", "pin_memory": False, "zenflow": zenflow},
            },
            "optimizer": {
                "kind": "adamw",
                "implementation": "deepspeed",
                "lr": LR,
                "weight_decay": DECAY,
                "weight_decay_on": "all" if self.decays_all else "matrices",
                "betas": list(BETAS),
            },
            "scheduler": {"kind": "cosine", "warmup_steps": 4, "total_steps": 30},
            "training": {
                "max_steps": NUM_STEPS,
                "log_every": 1,
                "clip_grad_norm": CLIP,
                **training,
            },
            "checkpoint": {"at_end": True},
            "evaluation": {"at_end": False},
            "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
            **self.sections,
        }


HELD = [
    Case("stage-2", 2, 2, select_every=3),
    Case("stage-1", 1, 4, select_every=2, warm_up=2, decays_all=False),
    Case("moments-on-host", 2, 2, select_every=2, zenflow={"offload": True}),
]
BF16 = Case("bf16", 2, 2, select_every=3, sections={"precision": {"dtype": "bf16"}})
BROKEN = Case("broken", 2, 2, select_every=3)
STOP = 4  # in the middle of a choice of columns


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zenflow")
    cases = [case.config(folder) for case in (*HELD, BF16)]
    resumed = BROKEN.config(folder)
    resumed["checkpoint"] = {"at_end": True, "resume": "auto"}
    cases += [BROKEN.config(folder, max_steps=STOP), resumed]
    train_cases(cases, num_ranks=RANKS, folder=folder)
    return folder


def micro_batches(case: Case) -> Iterator[list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Of each step its micro-batches, each with the batches of all ranks."""
    for step in range(NUM_STEPS):
        samples = prompts_of_step(step, global_size=GLOBAL_SIZE)
        size = GLOBAL_SIZE // RANKS // case.micro_batches
        batches = []
        for start in range(0, GLOBAL_SIZE, size):
            group = samples[start : start + size]
            ids = torch.stack([ids for ids, _ in group])
            batches.append((ids, torch.stack([labels for _, labels in group])))
        yield [batches[number :: case.micro_batches] for number in range(case.micro_batches)]


class ZenFlow:
    """The definition: Adam of all weights at the end of a step, on the host, and AdamW of vectors
    and chosen columns at every micro-batch.
    """

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.case = case
        self.weights = list(model.parameters())
        matrices = [weight for weight in self.weights if weight.ndim > 1]
        vectors = [weight for weight in self.weights if weight.ndim == 1]
        self.groups = [self.weights] if case.decays_all else [matrices, vectors]
        self.count = 0  # of micro-batches
        self.sums = [torch.zeros_like(weight) for weight in self.weights]
        self.host = [(torch.zeros_like(w), torch.zeros_like(w)) for w in self.weights]
        self.chosen: list[torch.Tensor] = [torch.ones(0)] * len(self.weights)  # masks
        self.moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in self.weights]
        self.steps = 0  # since columns were chosen for the first time

    def decay_of(self, weight: nn.Parameter) -> float:
        return DECAY if self.case.decays_all or weight.ndim > 1 else 0.0

    def choose(self, gradients: list[torch.Tensor]) -> None:
        """Choose the columns with the largest gradients, of each weight within each rank's share.

        A share is a part of all weights of a group in a row, column by column.
        """
        for group in self.groups:
            share = ceil(sum(weight.numel() for weight in group) / (2 * RANKS)) * 2
            begin = 0
            for weight in group:
                number = next(n for n, other in enumerate(self.weights) if other is weight)
                mask = torch.zeros_like(weight)
                if weight.ndim == 1:
                    mask += 1
                else:
                    rows = weight.shape[0]
                    sums = gradients[number].abs().sum(0)
                    cuts = [begin, begin + weight.numel()]
                    cuts[1:1] = [
                        rank * share
                        for rank in range(1, RANKS)
                        if begin < rank * share < begin + weight.numel()
                    ]
                    for start, end in pairwise(cuts):
                        first, last = ceil((start - begin) / rows), (end - begin) // rows
                        if last > first:
                            most = max(1, int((last - first) * self.case.ratio))
                            mask[:, first + torch.topk(sums[first:last], most).indices] = 1
                self.chosen[number] = mask
                self.moments[number] = (torch.zeros_like(weight), torch.zeros_like(weight))
                begin += weight.numel()

    @torch.no_grad()
    def micro_batch(self, lr: float, *, is_last: bool) -> float:
        """Take a micro-batch's gradients; return the norm of the sums at the last one."""
        gradients = [weight.grad.clone() for weight in self.weights if weight.grad is not None]
        size = self.case.micro_batches
        warm_up = self.case.warm_up * size
        chooses = self.count == warm_up or (
            self.count > warm_up and self.count % (self.case.select_every * size) == 0
        )
        if chooses:
            self.choose(gradients)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total += gradient
        has_chosen = self.count >= warm_up
        self.count += 1
        if has_chosen:
            self.steps += 1
        before = [weight.clone() for weight in self.weights]
        norm = 0.0
        if is_last:
            norm = float(torch.stack([total.norm() for total in self.sums]).norm())
            scale = max((norm + 1e-6) / CLIP, 1.0)
            for weight, total, moments in zip(self.weights, self.sums, self.host, strict=True):
                adam(weight, total / scale, moments, self.count, lr, self.decay_of(weight))
                total.zero_()
        if has_chosen:
            rows = zip(self.weights, before, gradients, self.moments, self.chosen, strict=True)
            for weight, old, gradient, moments, mask in rows:
                adam(old, gradient, moments, self.steps, lr, self.decay_of(weight))
                weight.copy_(torch.where(mask > 0, old, weight))
        return norm


def adam(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    step: int,
    lr: float,
    decay: float,
) -> None:
    """Step in place: Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
    first, second = moments
    first.lerp_(gradient, 1 - BETAS[0])
    second.lerp_(gradient * gradient, 1 - BETAS[1])
    mean = first / (1 - BETAS[0] ** step)
    root = (second / (1 - BETAS[1] ** step)).sqrt() + EPS
    weight.mul_(1 - lr * decay).sub_(lr * mean / root)


def plain_steps(case: Case, rates: list[float]) -> tuple[list[dict[str, float]], nn.Module]:
    """Return loss and norm of every step, and the trained model."""
    torch.manual_seed(0)
    factory = config_from_values({"model": PROMPTED_GPT}).model.factory()
    model: nn.Module = call_factory(factory, key="model")
    optimizer = ZenFlow(model, case)
    found = []
    for batches, lr in zip(micro_batches(case), rates, strict=True):
        counted = sum(int((labels != -100).sum()) for batch in batches for _, labels in batch)
        total = 0.0
        norm = 0.0
        for number, batch in enumerate(batches, 1):
            model.zero_grad()
            for ids, labels in batch:
                logits = model(ids).flatten(0, 1)
                loss = cross_entropy(logits, labels.flatten(), reduction="sum") / counted
                loss.backward()
                total += loss.item()
            norm = optimizer.micro_batch(lr, is_last=number == case.micro_batches)
        found.append({"train/loss": total, "train/grad_norm": norm})
    return found, model


@pytest.mark.parametrize("case", HELD, ids=lambda case: case.name)
def test_trains_as_its_definition(case: Case, folder: Path) -> None:
    rows = read_metrics(folder / case.name)
    rates = [row["train/lr"] for row in rows]
    expected, model = plain_steps(case, rates)
    for name in expected[0]:
        found = [row[name] for row in rows]
        assert found == pytest.approx([step[name] for step in expected], abs=1e-5), name
    assert len(set(rates[:4])) == 4, "the schedule moves on with every step"
    norms = [step["train/grad_norm"] for step in expected]
    assert sum(norm > CLIP for norm in norms) > NUM_STEPS // 2
    saved = MergedWeights(list_checkpoints(folder / case.name / "checkpoints")[-1])
    names = dict(model.named_parameters())
    assert set(saved) == set(names)
    for name, weight in names.items():
        # a bias of keys has no gradient but rounding, which Adam steps by
        torch.testing.assert_close(saved[name], weight.detach(), atol=1e-4, rtol=0.0)


def test_bf16_stays_close_to_fp32(folder: Path) -> None:
    found = series(folder / BF16.name, "train/loss")
    expected = series(folder / HELD[0].name, "train/loss")
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=0.05)


def test_a_resumed_run_is_the_unbroken_one(folder: Path) -> None:
    whole, broken = (
        {
            int(row["step"]): [row[name] for name in ("train/loss", "train/grad_norm", "train/lr")]
            for row in read_metrics(folder / name)
        }
        for name in (HELD[0].name, BROKEN.name)
    )
    assert whole == broken
    left, right = (bits(folder / name, NUM_STEPS) for name in (HELD[0].name, BROKEN.name))
    assert left.keys() == right.keys()
    assert [path for path, tensor in left.items() if not torch.equal(tensor, right[path])] == []
    assert any("zenflow" in path for path in left)
