"""Mixtures of experts train like plain PyTorch in one process: fp32 losses, gradient norms and what
the mixtures report within 1e-5, dropped tokens included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.state.reader import MergedWeights
from framework.config.load import config_from_values
from framework.models.added_losses import Routing, add_losses, collected_routings
from framework.models.experts import MixtureOfExperts
from framework.setup.user_code import call_factory
from tests.engine.oracle import Average, MuonWithAdam
from tests.gpu.oracles import lamb, lion
from tests.jobs.parts import PROMPTED_GPT, prompts_of_step, tiny_mixtral
from tests.launched import fewer, rarely, read_metrics, series, train_cases
from tests.train.monitors.sinks import histograms_of

pytestmark = pytest.mark.slow

# Drift is held by one run of each kind and way to spread experts.
NUM_STEPS, FEW_STEPS, GLOBAL_SIZE = fewer(7, of=20), fewer(3, of=20), 8
# Of runs in which rounding grows: half precision, Muon (bf16), and adapters, where a last bit is
# multiplied by the other factor. By step 20 it exceeds what a wrong step would show. A weight of 8
# bits that falls into the next code does so by step 7.
MOST_WITH_ROUNDING, MOST_WITH_CODES = 7, 3
STOP, END = 2, 4  # of runs that are resumed
# Weights of its losses that show: in half of the cases tokens are dropped.
TOP1 = {
    "num_experts": 4,
    "capacity_factor": 1.0,
    "min_capacity": 1,
    "every": 1,
    "balance_loss": 0.1,
}
TOP2 = {"num_experts": 4, "top_k": 2, "balance_loss": 0.05, "z_loss": 0.01, "capacity_factor": None}
# Of transformers, by import path, with the losses of its routers.
MIXTRAL = {"num_experts": 4, "top_k": 2}
OWN = {
    "model": {"target": "tests.jobs.parts:tiny_mixtral"},
    "task": {"target": "tests.jobs.parts:WithRouterLoss"},
}
SGD = {"kind": "sgd", "lr": 0.3, "momentum": 0.9}
ADAMW = {"kind": "adamw", "lr": 3e-3, "weight_decay": 0.1}
# Adapters of attention; beside them experts are frozen, or trained whole.
ADAPTED = {"target_modules": ["query", "value", "output"], "r": 4, "lora_alpha": 64}
ADAPTED_AND_WHOLE = ADAPTED | {"modules_to_save": ["norm", "router", "experts"]}
ADAPTED_MIXTRAL = ADAPTED | {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["gate"]}
HAS_PEFT = find_spec("peft") is not None  # it comes with the lora extra
ALL_EXPERTS = (r".*experts\..*",)
# All experts, then some weights of each and others.
BY_STEPS = (
    {"match": [r".*experts\.\d\.down\..*"], "until_step": 1},
    {"match": [r".*experts\.\d\.up\..*", "norm.*"], "from_step": 3},
)


IN_8_BITS = {"zero_quantized_weights": True, "stage3_allgather_sequential": True}


def second_copies(size: int, **more: Any) -> dict[str, Any]:
    """Sections of a run that spreads every weight, with second copies over `size` ranks (hpZ), and
    more keys of DeepSpeed's.
    """
    return {
        "zero": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "deepspeed": {"zero_optimization": {"zero_hpz_partition_size": size, **more}},
    }


@dataclass(frozen=True)
class Case:
    stage: int
    moe: dict[str, Any]
    optimizer: dict[str, Any]
    steps: int = 1
    ranks: int = 2
    recompute: int = 0
    expert: int = 1
    average: bool = False
    num_steps: int = FEW_STEPS
    sequence: int = 1
    tensor: int = 1
    pipe: int = 1
    lora: dict[str, Any] | None = None
    freeze: tuple[Any, ...] = ()
    copies: int = 1  # ranks that share second copies of all weights (hpZ)
    quantized: bool = False  # weights are gathered in 8 bits, each by itself

    def __post_init__(self) -> None:
        most = self.num_steps
        if self.quantized:
            most = MOST_WITH_CODES
        elif self.lora is not None or self.optimizer["kind"] == "muon":
            most = MOST_WITH_ROUNDING
        object.__setattr__(self, "num_steps", min(self.num_steps, most))

    @property
    def name(self) -> str:
        top = self.moe.get("top_k", 1)
        place = f"r{self.ranks}-e{self.expert}-z{self.stage}"
        for name in ("sequence", "tensor", "pipe"):
            size = getattr(self, name)
            place += f"-{name[0]}{size}" if size > 1 else ""
        place += f"-hpz{self.copies}" if self.copies > 1 else ""
        place += "-int8" * self.quantized
        place += "-mixtral" if self.moe is MIXTRAL else ""
        end = "-lora" if self.lora else ""
        end += "-frozen" if self.freeze else ""
        end += "-by-steps" if self.freeze == BY_STEPS else ""
        return f"{place}-top{top}-{self.optimizer['kind']}-{self.steps}-{self.recompute}{'-ema' * self.average}{end}"

    @property
    def model(self) -> dict[str, Any]:
        heads = {"num_heads": 4} if self.tensor * self.sequence > 2 else {}
        return {**PROMPTED_GPT, **heads, "moe": self.moe}

    def config(self, folder: Path, **sections: Any) -> dict[str, Any]:
        return {
            "run": {"name": self.name, "output_dir": str(folder)},
            **(
                {"model": self.model, "task": {"kind": "causal_lm"}}
                if self.moe is not MIXTRAL
                else OWN
            ),
            "data": {"target": "tests.jobs.parts:masked_prompts"},
            "batch": {"global_size": GLOBAL_SIZE, "accumulation_steps": self.steps},
            "zero": {"stage": self.stage},
            **(second_copies(self.copies) if self.copies > 1 else {}),
            **(second_copies(1, **IN_8_BITS) if self.quantized else {}),
            "parallel": {
                "expert": self.expert,
                "sequence": self.sequence,
                "tensor": self.tensor,
                "pipe": self.pipe,
            },
            "optimizer": self.optimizer,
            "training": {
                "max_steps": self.num_steps,
                "log_every": 1,
                "clip_grad_norm": 0.5,
                "recompute_every": self.recompute,
                **({"ema": {"decay": 0.8}} if self.average else {}),
                **({"lora": self.lora} if self.lora else {}),
                "freeze": list(self.freeze),
            },
            "checkpoint": {"at_end": self.average},
            "evaluation": {"at_end": False},
            "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
            **sections,
        }


TWO = [
    Case(0, MIXTRAL, SGD, steps=2, num_steps=NUM_STEPS),
    Case(3, MIXTRAL, ADAMW),
    Case(0, TOP1, SGD, steps=2, num_steps=NUM_STEPS),
    Case(3, TOP1, SGD, steps=2),
    *(Case(stage, TOP2, ADAMW) for stage in (1, 2)),
    Case(3, TOP2, SGD, steps=2, recompute=1),
    Case(1, TOP1, SGD, steps=2, expert=2, num_steps=NUM_STEPS),
    Case(2, TOP2, ADAMW, recompute=1, expert=2),
    Case(0, TOP2, {"kind": "muon", "lr": 0.002}),
    Case(2, TOP2, {"kind": "muon", "lr": 0.002}, expert=2),
    Case(0, TOP2, {"kind": "adafactor"}),
    Case(3, TOP2, {"kind": "adafactor"}, expert=2),
    Case(0, MIXTRAL, {"kind": "lamb"}),
    Case(3, TOP2, {"kind": "lamb"}),
    Case(2, TOP2, {"kind": "lamb"}, expert=2),
    Case(3, TOP2, {"kind": "muon", "lr": 0.002}, expert=2),
    Case(1, TOP1, SGD, steps=2, expert=2, freeze=ALL_EXPERTS),
    Case(3, TOP2, ADAMW, expert=2, freeze=ALL_EXPERTS),
    Case(1, TOP2, ADAMW, expert=2, freeze=BY_STEPS, num_steps=NUM_STEPS),
    Case(3, TOP1, SGD, steps=2, expert=2, freeze=BY_STEPS, num_steps=NUM_STEPS),
    Case(3, TOP2, SGD, average=True),
    Case(2, TOP2, SGD, average=True, expert=2, num_steps=NUM_STEPS),
    Case(0, TOP2, SGD, steps=2, sequence=2, num_steps=NUM_STEPS),
    Case(3, TOP1, ADAMW, recompute=1, sequence=2),
    Case(2, TOP1, SGD, steps=2, sequence=2, expert=2),
    Case(3, TOP1, SGD, steps=2, expert=2, num_steps=NUM_STEPS),
    Case(3, TOP2, ADAMW, recompute=1, expert=2),
    Case(0, TOP1, SGD, steps=2, tensor=2, num_steps=NUM_STEPS),
    Case(3, TOP2, ADAMW, recompute=1, tensor=2),
    Case(0, TOP1, SGD, steps=4, pipe=2, num_steps=NUM_STEPS),
    Case(1, TOP2, ADAMW, steps=2, recompute=1, pipe=2),
]
if HAS_PEFT:
    TWO += [
        Case(0, TOP1, SGD, steps=2, lora=ADAPTED),
        Case(3, TOP2, ADAMW, average=True, lora=ADAPTED_AND_WHOLE),
        Case(1, TOP2, ADAMW, lora=ADAPTED),
        Case(2, TOP1, SGD, steps=2, lora=ADAPTED),
        Case(3, MIXTRAL, SGD, lora=ADAPTED_MIXTRAL),
        Case(1, TOP1, SGD, steps=2, expert=2, average=True, lora=ADAPTED),
        Case(3, TOP1, SGD, steps=2, expert=2, lora=ADAPTED),
        Case(1, TOP1, SGD, steps=4, pipe=2, lora=ADAPTED),
        Case(2, TOP2, ADAMW, recompute=1, expert=2, lora=ADAPTED_AND_WHOLE),
        Case(3, TOP1, SGD, steps=2, expert=2, lora=ADAPTED, copies=2),
    ]
# The first of two ranks has the experts 0 and 1.
UNLIKE = [
    Case(2, TOP2, SGD, expert=2, freeze=(r".*experts\.[01]\..*",)),
    Case(3, TOP2, SGD, expert=2, freeze=(r".*experts\.0\.up\..*",)),
]
TWO += [
    Case(2, TOP1, SGD, expert=2, freeze=(r".*experts\.1\..*",)),
    Case(3, TOP1, SGD, expert=2, freeze=(r".*experts\.[02]\..*",)),
]
# With --exhaustive: the other stages.
RARE = [
    *(Case(stage, TOP1, SGD, steps=2) for stage in (1, 2)),
    *(Case(stage, TOP2, ADAMW) for stage in (0, 3)),
    Case(0, TOP2, SGD, steps=2, recompute=1),
    Case(2, TOP1, SGD, steps=2, expert=2),
    Case(1, TOP2, ADAMW, recompute=1, expert=2),
    *(Case(stage, TOP1, SGD, steps=2, sequence=2) for stage in (1, 2)),
    *(Case(stage, TOP2, SGD, steps=2, tensor=2) for stage in (1, 2)),
    *(Case(stage, TOP2, ADAMW, sequence=2, expert=2) for stage in (1, 3)),
]
# What changes how a step is computed -> of which run, and by how much it may change losses.
_HOST = {"device": "cpu", "pin_memory": False}
_TOGETHER, _APART = Case(2, TOP2, ADAMW), Case(2, TOP2, ADAMW, recompute=1, expert=2)
_SHORT = min(FEW_STEPS, MOST_WITH_ROUNDING)
_HALF: dict[str, tuple[dict[str, Any], float]] = {
    "autocast": ({"dtype": "autocast"}, 0.02),
    "bf16": ({"dtype": "bf16"}, 0.05),
    "fp16": ({"dtype": "fp16", "initial_scale_power": 8}, 0.02),  # at which no step is skipped
}
VARIANTS: dict[str, tuple[Case, dict[str, Any], float]] = {
    **{
        f"together-{name}": (replace(_TOGETHER, num_steps=_SHORT), {"precision": own}, within)
        for name, (own, within) in _HALF.items()
    },
    **{
        f"apart-{name}": (replace(_APART, num_steps=_SHORT), {"precision": own}, within)
        for name, (own, within) in _HALF.items()
    },
    **{
        name: (case, {"zero": {"stage": case.stage, "offload_optimizer": _HOST, **weights}}, 1e-5)
        for name, case, weights in (
            ("offload", _TOGETHER, {}),
            ("apart-offload", Case(2, TOP1, SGD, steps=2, expert=2), {}),
            ("apart-offload-z3", Case(3, TOP2, ADAMW, expert=2), {"offload_param": _HOST}),
        )
    },
}

# With --exhaustive: each way to spread experts is tried in one kind of half precision at least.
RARE_VARIANTS = ("together-bf16", "apart-autocast", "apart-fp16")


def varied(name: str, folder: Path) -> dict[str, Any]:
    """The run of a variant."""
    case, sections, _ = VARIANTS[name]
    return case.config(folder, **{"run": {"name": name, "output_dir": str(folder)}, **sections})


BOARD = {
    "tensorboard": {"histograms_every_steps": FEW_STEPS},
    "csv": False,
    "progress": "off",
    "report": False,
}


def ragged(name: str, folder: Path, expert: int) -> dict[str, Any]:
    """A run whose ranks read batches of unlike length."""
    data = {"target": "tests.jobs.parts:ragged_prompts"}
    run = {"name": name, "output_dir": str(folder)}
    return Case(1, TOP1, SGD, steps=2, expert=expert).config(
        folder, run=run, data=data, monitors=BOARD
    )


def micro_batches(case: Case) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of each step, those of all ranks."""
    for step in range(case.num_steps):
        samples = prompts_of_step(step, global_size=GLOBAL_SIZE)
        together = case.sequence * case.tensor * case.pipe
        size = GLOBAL_SIZE * together // case.ranks // case.steps
        groups = [samples[start : start + size] for start in range(0, GLOBAL_SIZE, size)]
        yield [
            (torch.stack([x for x, _ in group]), torch.stack([y for _, y in group]))
            for group in groups
        ]


def in_parts(mixture: MixtureOfExperts, number: int) -> None:
    """Let every expert have room for its tokens of each part of the positions by itself, as on
    ranks that share sequences; the losses are those of whole sequences.
    """
    of_part, shape = mixture.forward, mixture.shape

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        with collected_routings() as parts:
            outputs = [of_part(part) for part in hidden.chunk(number, dim=1)]
        logits = mixture.router(hidden.flatten(0, -2))
        first = nn.functional.one_hot(logits.argmax(-1), shape.num_experts).float().mean(0)
        balance = shape.num_experts * (first * logits.softmax(-1).mean(0)).sum()
        loss = shape.balance_loss * balance + shape.z_loss * logits.logsumexp(-1).square().mean()
        dropped = torch.stack([part.dropped for part in parts]).mean()
        add_losses(Routing(loss, balance.detach(), dropped))
        return torch.cat(outputs, dim=1)

    mixture.forward = forward  # type: ignore[method-assign]


# Layers that a tensor group divides by rows; others that it divides are divided by columns.
BY_ROWS, BY_COLUMNS = ("query", "key", "value", "up", "embed"), ("output", "down")


def in_8_bits(model: nn.Module, case: Case) -> dict[nn.Parameter, torch.Tensor]:
    """Give a model the numbers that ranks gather: of every rank's share the nearest of 256, the
    largest number of the share being the 128th. Return its own numbers.
    """
    kept = {}
    ranks = case.ranks // case.tensor
    for name, weight in model.named_parameters():
        kept[weight] = weight.data
        layer = name.split(".")[-2]
        holders = ranks // case.expert if ".experts." in name else ranks
        if holders == 1:  # nothing is gathered
            continue
        parts = [weight.data]
        dim = 0
        if layer in BY_ROWS:
            parts = list(weight.data.chunk(case.tensor, dim))
        elif layer in BY_COLUMNS and weight.ndim > 1:
            dim = 1
            parts = list(weight.data.chunk(case.tensor, dim))
        rounded = []
        for part in parts:
            shares = part.reshape(holders, -1).half().float()
            step = shares.abs().amax(1, keepdim=True) / 128
            step[step == 0] = 1.0
            codes = (shares / step).round().clamp(-128, 127)
            rounded.append((codes * step).half().float().view(part.shape))
        weight.data = torch.cat(rounded, dim)
    return kept


def with_adapters(model: nn.Module, lora: dict[str, Any]) -> None:
    """Put adapters into a model by peft's own function, as a run draws them."""
    import peft

    options = dict(lora)
    endings = tuple(options.pop("modules_to_save", ()))
    saved = [module for name, module in model.named_modules() if name.endswith(endings or ("?",))]
    torch.manual_seed(1)
    peft.inject_adapter_in_model(peft.LoraConfig(**options), model)
    for module in saved:
        module.requires_grad_(True)


def _packed(model: nn.Module) -> list[nn.Parameter]:
    """List the weights of several experts."""
    return [
        weight
        for name, weight in model.named_parameters()
        if ".experts." in name and weight.ndim == 3
    ]


def _frozen(case: Case, model: nn.Module, *, step: int | None) -> list[nn.Parameter]:
    """List the weights that are frozen in a step, in the whole run for None."""
    patterns = []
    for entry in case.freeze:
        if isinstance(entry, str):
            if step is None:
                patterns.append(entry)
        elif step is not None and _is_frozen(entry, step):
            patterns += entry["match"]
    return [
        weight
        for name, weight in model.named_parameters()
        if any(re.fullmatch(pattern, name) for pattern in patterns)
    ]


def _is_frozen(entry: dict[str, Any], step: int) -> bool:
    if "until_step" in entry:
        return bool(step <= entry["until_step"])
    return bool(step >= entry["from_step"])


def plain_steps(case: Case) -> tuple[list[dict[str, float]], Average]:
    """What every step reports: the dozen lines that anyone would write; and the moving average."""
    torch.manual_seed(0)
    factory = config_from_values({"model": case.model}).model.factory()
    model: nn.Module = (
        call_factory(factory, key="model") if case.moe is not MIXTRAL else tiny_mixtral()
    )
    for module in model.modules():
        if isinstance(module, MixtureOfExperts) and case.sequence > 1:
            in_parts(module, case.sequence)
    if case.lora is not None:
        with_adapters(model, case.lora)
    for weight in _frozen(case, model, step=None):
        weight.requires_grad_(False)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
        "adagrad": torch.optim.Adagrad,
        "lion": lion,
        "lamb": partial(lamb, lr=1e-3, packed=_packed(model)),
        "muon": lambda _, lr: MuonWithAdam.for_blocks(model, lr=lr, adam_lr=3e-4),
    }
    options = {name: value for name, value in case.optimizer.items() if name != "kind"}
    optimizer = kinds[case.optimizer["kind"]](trained, **options)
    found, average = [], Average(model, 0.8)
    for step, batches in enumerate(micro_batches(case), start=1):
        optimizer.zero_grad()
        kept = in_8_bits(model, case) if case.quantized else {}
        nats, routings = torch.zeros(()), []
        for ids, targets in batches:
            with collected_routings() as reported:
                outputs = model(ids)
            logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
            nats = nats + cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            routings += reported
            if case.moe is MIXTRAL:
                routings.append(Routing(0.05 * outputs.aux_loss, torch.zeros(()), torch.zeros(())))
        loss = nats / sum(int((targets != -100).sum()) for _, targets in batches)
        added = sum((one.loss for one in routings), torch.zeros(())) / len(batches)
        (loss + added).backward()
        for weight, numbers in kept.items():
            weight.data = numbers
        for weight in _frozen(case, model, step=step):
            weight.grad = None
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        average.step()
        found.append({"train/loss": loss.item(), "train/grad_norm": norm.item()})
        if case.moe is MIXTRAL:  # whose task adds them
            found[-1]["train/loss"] += added.item()
        if case.moe is MIXTRAL or not routings:
            continue
        for name in ("balance", "dropped"):
            mean = torch.stack([getattr(one, name) for one in routings]).mean().item()
            found[-1]["train/balance_loss" if name == "balance" else "train/dropped_tokens"] = mean
    return found, average


@pytest.fixture(scope="module")
def folder(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    held = [*TWO, *(RARE if exhaustive else ())]
    cases = [case.config(folder) for case in held]
    for name in VARIANTS:
        if exhaustive or name not in RARE_VARIANTS:
            cases.append(varied(name, folder))
    cases += [case.config(folder) for case in UNLIKE]
    cases += [
        ragged(name, folder, expert)
        for name, expert in (("ragged-together", 1), ("ragged-apart", 2))
    ]
    train_cases(cases, num_ranks=2, folder=folder, allow_fp16=True)
    return folder


def hold(case: Case, folder: Path) -> None:
    """Compare a run with plain PyTorch; most of its steps are clipped."""
    rows, (expected, average) = read_metrics(folder / case.name), plain_steps(case)
    # Muon computes in bf16, where a last bit of a gradient may move a number by 2**-8 of it.
    within = 2e-3 if case.optimizer["kind"] == "muon" else 1e-5
    if case.quantized:
        within = 1e-4  # a number between two codes may go to the other one
        unrounded, _ = plain_steps(replace(case, quantized=False))
        rounding = abs(unrounded[0]["train/grad_norm"] - expected[0]["train/grad_norm"])
        assert rounding > 50 * within, "8 bits must show"
    for name in expected[0]:
        assert [row[name] for row in rows] == pytest.approx(
            [step[name] for step in expected], abs=within
        ), name
    if case.average:
        found = MergedWeights(
            list_checkpoints(folder / case.name / "checkpoints")[-1], average=True
        )
        assert set(found) == set(average.weights)
        for name, weight in average.weights.items():
            torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=0.0, check_dtype=False)
    drops = [step.get("train/dropped_tokens", 0.0) for step in expected]
    assert max(drops) > 0.05 if case.moe is TOP1 else max(drops) == 0
    assert sum(step["train/grad_norm"] > 0.5 for step in expected) > case.num_steps // 2


@pytest.mark.parametrize("case", [*TWO, *rarely(RARE)], ids=lambda case: case.name)
def test_trains_as_plain_pytorch(case: Case, folder: Path) -> None:
    hold(case, folder)


@pytest.mark.parametrize(
    "name", [*(name for name in VARIANTS if name not in RARE_VARIANTS), *rarely(RARE_VARIANTS)]
)
def test_other_arithmetic_stays_close(name: str, folder: Path) -> None:
    case, _, within = VARIANTS[name]
    found, (expected, _) = series(folder / name, "train/loss"), plain_steps(case)
    assert [*found.values()] == pytest.approx([step["train/loss"] for step in expected], abs=within)


@pytest.mark.parametrize("case", UNLIKE, ids=lambda case: f"z{case.stage}")
def test_experts_that_are_frozen_on_one_rank_alone_are_refused(case: Case, folder: Path) -> None:
    message = (folder / f"{case.name}.error").read_text(encoding="utf-8")
    assert message.startswith("training.freeze: it names other weights of one rank's experts")
    assert message.endswith("[expert-with-other]")


def test_ranks_of_unlike_many_tokens_agree_on_room_and_show_all_experts(folder: Path) -> None:
    for name in ("train/loss", "train/grad_norm", "train/dropped_tokens"):
        together, apart = (series(folder / f"ragged-{run}", name) for run in ("together", "apart"))
        assert apart == pytest.approx(together, abs=1e-5), name
    together, apart = (
        set(histograms_of(folder / f"ragged-{run}")) for run in ("together", "apart")
    )
    assert apart == together


FOUR = [
    Case(stage, moe, optimizer, ranks=4, expert=2)
    for stage, moe, optimizer in ((1, TOP1, SGD), (2, TOP2, ADAMW))
]
FOUR.append(Case(1, TOP2, SGD, ranks=4, expert=4))
FOUR.append(Case(3, TOP1, SGD, steps=2, ranks=4, expert=2))
FOUR.append(Case(2, TOP1, SGD, steps=2, ranks=4, expert=2, tensor=2))
FOUR.append(Case(3, TOP2, ADAMW, ranks=4, expert=2, tensor=2))
FOUR.append(Case(2, TOP2, {"kind": "lamb"}, ranks=4, expert=2, tensor=2))
FOUR.append(Case(1, TOP2, SGD, ranks=4, tensor=2, sequence=2, num_steps=NUM_STEPS))
FOUR.append(Case(1, TOP2, SGD, steps=2, ranks=4, tensor=2, pipe=2))
FOUR.append(Case(1, TOP1, SGD, steps=2, ranks=4, expert=2, pipe=2))
WATCHED = Case(2, TOP1, ADAMW, ranks=4, expert=2, tensor=2, sequence=2)
FOUR.append(Case(1, TOP1, ADAMW, steps=4, ranks=4, expert=2, pipe=2, sequence=2))
FOUR.append(WATCHED)
FOUR.append(Case(3, TOP1, SGD, steps=2, ranks=4, expert=2, copies=2))
FOUR.append(Case(3, TOP2, ADAMW, recompute=1, ranks=4, expert=2, copies=4))
FOUR.append(Case(3, TOP2, SGD, steps=2, ranks=4, expert=2, tensor=2, copies=2))
FOUR.append(Case(3, TOP2, SGD, steps=2, ranks=4, expert=2, quantized=True))
FOUR.append(Case(3, TOP2, ADAMW, ranks=4, expert=2, tensor=2, quantized=True))
RARE_FOUR = [
    Case(1, TOP2, SGD, ranks=4, expert=2, tensor=2),
    Case(1, {**TOP2, "every": 1}, ADAMW, ranks=4, expert=2, pipe=2),
]


@pytest.fixture(scope="module")
def on_four(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts-4")
    layout = {**UNBALANCED, "parallel": {"expert": 4}, "zero": {"stage": 2}}
    held = [*FOUR, *(RARE_FOUR if exhaustive else ())]
    saves = [
        saved("fewer", folder, layout, max_steps=STOP),
        saved("same-whole", folder, STAGED),
        gone_on("same", folder, STAGED),
        saved("once-same", folder, {**COPIED, "deepspeed": {}}),
        saved("copied-same-whole", folder, COPIED),
        gone_on("copied-same", folder, COPIED),
        saved("in-8-bits", folder, {**SPREAD, **second_copies(4, zero_quantized_weights=True)}),
    ]
    configs = [*(case.config(folder) for case in held), *saves]
    configs[held.index(WATCHED)]["monitors"] = BOARD
    train_cases(configs, num_ranks=4, folder=folder)
    return folder


EIGHT = [Case(1, TOP1, SGD, steps=2, ranks=8, expert=2, tensor=2, pipe=2)]


@pytest.fixture(scope="module")
def on_eight(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts-8")
    cases = [case.config(folder) for case in EIGHT]
    if exhaustive:
        layout = STAGED | {"parallel": {"expert": 2, "tensor": 2, "pipe": 2}}
        cases += [saved("same-whole", folder, layout), gone_on("same", folder, layout)]
    train_cases(cases, num_ranks=8, folder=folder)
    return folder


@pytest.mark.parametrize("case", EIGHT, ids=lambda case: case.name)
def test_experts_in_divided_stages_train_as_plain_pytorch(case: Case, on_eight: Path) -> None:
    hold(case, on_eight)


@pytest.mark.parametrize("case", [*FOUR, *rarely(RARE_FOUR)], ids=lambda case: case.name)
def test_groups_of_experts_train_as_plain_pytorch(case: Case, on_four: Path) -> None:
    hold(case, on_four)


def test_histograms_count_each_weight_of_divided_experts_once(on_four: Path) -> None:
    model = call_factory(config_from_values({"model": WATCHED.model}).model.factory(), key="model")
    counted = sum(histogram.num for histogram in histograms_of(on_four / WATCHED.name).values())
    assert counted == sum(weight.numel() for weight in model.parameters())


# Nothing of its loss depends on how a batch is divided.
UNBALANCED = {"model": {**PROMPTED_GPT, "moe": {**TOP2, "balance_loss": 0.0}}}
STAGED: dict[str, Any] = {
    "model": {**PROMPTED_GPT, "moe": {**TOP2, "balance_loss": 0.0, "every": 1}},
    "parallel": {"expert": 2, "pipe": 2, "sequence": 2},
    "zero": {"stage": 1},
}
# Layout before the stop -> after it.
EXPERTS_2, EXPERTS_1 = {"parallel": {"expert": 2}, "zero": {"stage": 1}}, {"zero": {"stage": 1}}
SPREAD = {**EXPERTS_2, "zero": {"stage": 3}}


COPIED = {**SPREAD, **second_copies(4)}


def one_by_one(zero: int, **parallel: int) -> dict[str, Any]:
    """A layout of one data-parallel rank, with the micro-batches that two have beside each other."""
    batch = {"global_size": GLOBAL_SIZE, "accumulation_steps": 2}
    return {"parallel": parallel, "zero": {"stage": zero}, "batch": batch}


_FROZEN: dict[str, Any] = EXPERTS_2 | {"training": {"freeze": list(ALL_EXPERTS)}}
_BY_STEPS: dict[str, Any] = SPREAD | {
    "training": {"freeze": [{"match": r".*experts\..*", "until_step": STOP + 1}]}
}
MOVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "same-spread": (SPREAD, SPREAD),
    "same-stages": (one_by_one(1, pipe=2), one_by_one(1, pipe=2)),
    "divided": (SPREAD, one_by_one(1, tensor=2)),
    "spread": (one_by_one(2, tensor=2), SPREAD),
    "stages": (EXPERTS_2, one_by_one(1, pipe=2)),
    "unstaged": (one_by_one(0, pipe=2), EXPERTS_2),
    "same": (EXPERTS_2, EXPERTS_2),
    "together": (EXPERTS_2, {"zero": {"stage": 3}}),
    "apart": ({"zero": {"stage": 0}}, {**EXPERTS_2, "zero": {"stage": 2}}),
    "bf16": (
        {**EXPERTS_2, "precision": {"dtype": "bf16"}},
        {**EXPERTS_2, "precision": {"dtype": "bf16"}},
    ),
    "same-frozen": (_FROZEN, _FROZEN),
    "frozen": (_FROZEN, {**_FROZEN, **SPREAD}),
    "same-by-steps": (_BY_STEPS, _BY_STEPS),
}


def saved(
    name: str, folder: Path, layout: dict[str, Any], *, max_steps: int = END
) -> dict[str, Any]:
    """Return a run that saves at `STOP`."""
    training = {
        "max_steps": max_steps,
        "log_every": 1,
        "clip_grad_norm": 0.5,
        "ema": {"decay": 0.8},
    }
    sections = {
        "run": {"name": name, "output_dir": str(folder)},
        "model": {
            **PROMPTED_GPT,
            "dropout": 0.1 if "same" in name or "bf16" in name else 0.0,
            "moe": TOP2,
        },
        "data": {"target": "tests.jobs.parts:masked_prompts_and_seven_more"},
        "training": training,
        "evaluation": {"every_steps": STOP, "batch_size": 2, "weights": "ema"},
        "optimizer": ADAMW | {"weight_decay_on": "matrices"},
        "scheduler": {"kind": "cosine", "warmup_steps": 2, "total_steps": END},
        "checkpoint": {"every_steps": STOP, "resume": "auto"},
    }
    merged = {**training, **layout.get("training", {})}
    return Case(1, TOP2, ADAMW).config(folder, **{**sections, **layout, "training": merged})


def gone_on(
    name: str, folder: Path, layout: dict[str, Any], *, whole: str | None = None
) -> dict[str, Any]:
    """Return a run that goes on where the unbroken one saved at `STOP`."""
    start = folder / (whole or f"{name}-whole") / "checkpoints" / f"global_step{STOP}"
    values = saved(name, folder, layout)
    values["checkpoint"] = {"at_end": True, "resume": str(start)}
    return values


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moved-experts")
    cases = []
    for name, (before, after) in MOVES.items():
        cases.append(saved(f"{name}-whole", folder, before))
        cases.append(gone_on(name, folder, after))
    begun = {"at_end": False, "init_weights": str(folder / "same-whole")}
    for name, layout in (("begun-together", EXPERTS_1), ("begun-apart", EXPERTS_2)):
        cases.append(saved(name, folder, {**layout, "checkpoint": begun}, max_steps=2))
    train_cases(cases, num_ranks=2, folder=folder)
    return folder


def test_weights_of_a_checkpoint_begin_another_run(moved: Path) -> None:
    together, apart = (
        series(moved / f"begun-{name}", "train/loss") for name in ("together", "apart")
    )
    assert apart == pytest.approx(together, abs=1e-5)
    assert apart[1] < series(moved / "same-whole", "train/loss")[1]


def after_stop(run: Path, name: str) -> dict[int, float]:
    """Return the steps of a metric after `STOP`."""
    found = {step: value for step, value in series(run, name).items() if step > STOP}
    assert max(found) == END
    return found


@pytest.mark.parametrize("name", MOVES)
def test_saved_experts_go_on_where_they_were(name: str, moved: Path) -> None:
    """In the same layout to the bit, evaluations of the average included; in others as their
    arithmetic has it.
    """
    for kind in ("train/loss", "train/grad_norm", "eval/loss"):
        expected: Any = after_stop(moved / f"{name}-whole", kind)
        if "same" not in name and name != "bf16":
            expected = pytest.approx(expected, abs=2e-5)
        assert series(moved / name, kind) == expected, kind


def test_weights_of_a_checkpoint_are_those_of_all_experts(moved: Path) -> None:
    ends = [
        list_checkpoints(moved / run / "checkpoints")[-1] for run in ("together-whole", "together")
    ]
    one, other = (MergedWeights(end) for end in ends)
    assert set(one) == set(other)
    for name, weights in one.items():
        torch.testing.assert_close(weights, other[name], atol=1e-4, rtol=0.0)
    model: nn.Module = call_factory(
        config_from_values({"model": {**PROMPTED_GPT, "moe": TOP2}}).model.factory(), key="model"
    )
    assert set(one) | set(one.ties) == set(model.state_dict())


def test_experts_of_four_ranks_go_on_on_two(on_four: Path) -> None:
    cases = [
        saved("fewer", on_four, UNBALANCED | EXPERTS_2),
        saved("whole", on_four, UNBALANCED | EXPERTS_1),
        gone_on("moved", on_four, {**STAGED, **EXPERTS_2}, whole="same-whole"),
    ]
    train_cases(cases, num_ranks=2, folder=on_four)
    whole = series(on_four / "whole", "train/loss")
    assert series(on_four / "fewer", "train/loss") == pytest.approx(whole, abs=2e-5)
    whole = after_stop(on_four / "same-whole", "train/loss")
    assert series(on_four / "moved", "train/loss") == pytest.approx(whole, abs=2e-5)


def hold_resumed(folder: Path) -> None:
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert series(folder / "same", name) == after_stop(folder / "same-whole", name)


def test_experts_in_stages_go_on_to_the_bit(on_four: Path) -> None:
    hold_resumed(on_four)


def test_second_copies_change_no_bit_and_a_run_goes_on_with_them(on_four: Path) -> None:
    """Neither where the average was measured between two steps."""
    whole = on_four / "copied-same-whole"
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert series(whole, name) == series(on_four / "once-same", name), name
        assert series(on_four / "copied-same", name) == after_stop(whole, name), name


def test_quantized_weights_from_second_copies_stay_close(on_four: Path) -> None:
    """Several weights in one message, some of experts, forward from shares and backward from second
    copies.
    """
    for name, within in (("train/loss", 0.01), ("train/grad_norm", 0.2)):
        expected = pytest.approx(series(on_four / "once-same", name), rel=within)
        found = series(on_four / "in-8-bits", name)
        assert found == expected, name
        assert found != series(on_four / "once-same", name)


@pytest.mark.exhaustive
def test_experts_in_divided_stages_go_on_to_the_bit_and_on_two_ranks(on_eight: Path) -> None:
    hold_resumed(on_eight)
    moved = gone_on("moved", on_eight, {**STAGED, **EXPERTS_2}, whole="same-whole")
    train_cases([moved], num_ranks=2, folder=on_eight)
    whole = after_stop(on_eight / "same-whole", "train/loss")
    assert series(on_eight / "moved", "train/loss") == pytest.approx(whole, abs=2e-5)
