"""State on NVMe and weights away from the device, alone and beside every other way to train: runs
are those of plain PyTorch, go on to the bit, move into other layouts and out of the files.

--exhaustive: the first use of DeepSpeed's async_io op compiles it for four minutes, and needs
libaio.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint.manifest import list_checkpoints
from framework.checkpoint.names import SWAPPED
from framework.checkpoint.state.reader import MergedWeights
from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.memory import estimate
from framework.plan.plan import make_plan
from tests.engine import test_experts
from tests.engine import test_own_optimizers as own_optimizers
from tests.engine.pipe_oracle import plain_run
from tests.engine.test_experts import ADAMW, HAS_PEFT, SGD, TOP1, TOP2, plain_steps
from tests.engine.test_pipeline import text
from tests.engine.test_resume import METRICS, bits
from tests.jobs.parts import PROMPTED_GPT
from tests.launched import furthest, read_metrics, series, train_cases

__all__ = ["text"]  # a fixture
# DeepSpeed's op for the drive compiles for minutes.
JOB_SECONDS = 1800
pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(2 * JOB_SECONDS + 120),
]

NUM_STEPS, STOP, END = 20, 3, 6
# DeepSpeed leaves tensors below 1 MiB off the drive: a rank's shares are larger.
WIDE = PROMPTED_GPT | {"num_heads": 4}
ADAPTED = {"target_modules": ["query", "value", "up", "down"], "r": 128, "lora_alpha": 512}
STATE, WEIGHTS, BOTH = (
    ("offload_optimizer",),
    ("offload_param",),
    ("offload_optimizer", "offload_param"),
)
SLOW, CALM = SGD | {"lr": 0.05}, ADAMW | {"lr": 5e-4}
OTHERS = (("muon", 0.002), ("adafactor", 0.01), ("lamb", 0.01))


@dataclass(frozen=True)
class Case(test_experts.Case):
    """A run at ZeRO stage 3.

    Attributes:
        device: where the state, the weights or both are.
        away: the sections that say so.
    """

    device: str = "nvme"
    away: tuple[str, ...] = STATE
    num_steps: int = NUM_STEPS
    hidden_size: int = 256

    @property
    def name(self) -> str:
        own = "moe" if self.moe else "plain"
        return f"{self.device}-{'-'.join(self.away)}-{own}-{super().name}"

    @property
    def model(self) -> dict[str, Any]:
        wide = WIDE | {"hidden_size": self.hidden_size}
        if self.device == "cpu":
            wide = PROMPTED_GPT
        return wide | ({"moe": self.moe} if self.moe else {})

    def config(self, folder: Path, **sections: Any) -> dict[str, Any]:
        zero = zero_of(folder / "drive" / self.name, self.device, self.away)
        return super().config(folder, **{"zero": zero, **sections})


def zero_of(drive: Path, device: str, away: tuple[str, ...]) -> dict[str, Any]:
    """A section `zero`; with every weight that is large enough on the drive."""
    options: dict[str, Any] = {"device": device, "pin_memory": False}
    if device == "nvme":
        options["nvme_path"] = str(drive)
    zero: dict[str, Any] = {"stage": 3, **{section: dict(options) for section in away}}
    if device == "nvme" and "offload_param" in away:
        zero["offload_param"] |= {"max_in_cpu": 0, "buffer_size": 2_500_000}
    return zero


TWO = [
    Case(3, {}, ADAMW, steps=2),
    Case(3, {}, SLOW, steps=2, tensor=2),
    Case(3, {}, ADAMW, tensor=2),
    Case(3, {}, ADAMW, steps=2, sequence=2),
    Case(3, {}, {"kind": "adagrad", "lr": 0.004}),
    # Later a gradient near zero has another sign.
    Case(3, {}, {"kind": "lion", "lr": 1e-4}, num_steps=10),
    Case(3, TOP2, SLOW),
    Case(3, TOP1, SLOW, steps=2, expert=2),
    Case(3, TOP2, ADAMW, expert=2),
    Case(3, TOP2, ADAMW, expert=2, sequence=2),
    *(Case(3, {}, {"kind": kind, "lr": lr}, tensor=2) for kind, lr in OTHERS),
    *(Case(3, TOP2, {"kind": kind, "lr": lr}, expert=2) for kind, lr in OTHERS),
    Case(3, {}, SLOW, steps=2, away=WEIGHTS, hidden_size=512),
    Case(3, {}, SLOW, tensor=2, away=WEIGHTS, hidden_size=512),
    Case(3, {}, CALM, tensor=2, away=BOTH, hidden_size=512),
    Case(3, TOP1, SLOW, steps=2, expert=2, away=WEIGHTS, hidden_size=512),
    Case(3, TOP2, CALM, expert=2, away=BOTH, hidden_size=512),
    Case(3, {}, SGD, tensor=2, away=WEIGHTS, device="cpu"),
    Case(3, {}, ADAMW, sequence=2, away=WEIGHTS, device="cpu"),
    Case(3, TOP2, ADAMW, away=WEIGHTS, device="cpu"),
    Case(3, TOP1, SGD, steps=2, expert=2, away=WEIGHTS, device="cpu"),
    Case(3, TOP2, ADAMW, expert=2, away=WEIGHTS, device="cpu"),
]
if HAS_PEFT:
    TWO += [
        Case(3, {}, SLOW, lora=ADAPTED),
        Case(3, {}, SLOW, lora=ADAPTED, away=WEIGHTS, hidden_size=512),
        Case(3, {}, ADAMW, lora=test_experts.ADAPTED, away=WEIGHTS, device="cpu"),
    ]
FOUR = [
    Case(3, {}, ADAMW, steps=2, ranks=4, tensor=2),
    Case(3, TOP1, SLOW, steps=2, ranks=4, expert=2),
    Case(3, TOP2, CALM, ranks=4, expert=2, tensor=2, away=BOTH, hidden_size=512),
]


# Optimizers of our own, on text.
KINDS = ("schedule_free", "adamw_8bit")


def own(kind: str, folder: Path, text: Path, *, resumes: bool = False) -> dict[str, Any]:
    """A run that saves at `own_optimizers.STOP`, or the one that goes on from there on another
    drive.
    """
    name = f"{kind}-on" if resumes else kind
    checkpoint: dict[str, Any] = {"every_steps": own_optimizers.STOP, "keep_last": 9}
    if resumes:
        saved_at = folder / kind / "checkpoints" / f"global_step{own_optimizers.STOP}"
        checkpoint = {"resume": str(saved_at)}
    drive = folder / "drive" / name
    drive.mkdir(parents=True, exist_ok=True)
    sections = own_optimizers.OPTIMIZERS[kind] | {
        "model": own_optimizers.SMALL | {"hidden_size": 256, "num_heads": 4},
        "zero": zero_of(drive, "nvme", STATE),
        "checkpoint": checkpoint,
    }
    return own_optimizers.config(name, folder, text, **sections)


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvme")
    further = [own(kind, folder, text) for kind in KINDS]
    further += [own(kind, folder, text, resumes=True) for kind in KINDS]
    for ranks, cases in ((2, TWO), (4, FOUR)):
        for case in cases:
            (folder / "drive" / case.name).mkdir(parents=True)
        configs = [case.config(folder) for case in cases]
        if ranks == 2:
            configs += further
        train_cases(configs, num_ranks=ranks, folder=folder, timeout=JOB_SECONDS)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_our_own_step_state_on_the_drive(kind: str, folder: Path, text: Path) -> None:
    """Evaluations are of the averaged weights, if there are any."""
    values = own(kind, folder, text)
    if kind == "adamw_8bit":
        values["optimizer"] = {**values["optimizer"], "kind": "adamw"}
    steps = own_optimizers.NUM_STEPS
    losses, metrics, _ = plain_run(values, micro_size=2, num_steps=steps)
    assert losses[-1] < losses[0] - 0.1, "the oracle itself must learn"
    within = own_optimizers.TOLERANCE[kind]
    assert furthest(folder / kind, losses) < within
    assert series(folder / kind, "eval/loss")[steps] == pytest.approx(metrics["loss"], abs=within)
    whole, resumed = (bits(folder / name, steps) for name in (kind, f"{kind}-on"))
    assert whole.keys() == resumed.keys()
    assert [path for path, tensor in whole.items() if not torch.equal(tensor, resumed[path])] == []
    saved_files = [
        swapped_files(folder / name / "checkpoints" / f"global_step{steps}")
        for name in (kind, f"{kind}-on")
    ]
    assert saved_files[0]
    assert saved_files[0] == saved_files[1]


@pytest.mark.parametrize("case", [*TWO, *FOUR], ids=lambda case: case.name)
def test_trains_as_plain_pytorch(case: Case, folder: Path) -> None:
    rows, (expected, _) = read_metrics(folder / case.name), plain_steps(case)
    # Muon computes in bf16, where a last bit of a gradient may move a number by 2**-8 of it.
    within = 5e-3 if case.optimizer["kind"] == "muon" else 1e-5
    for name in expected[0]:
        options = {"abs": within} if name == "train/loss" else {"rel": 10 * within, "abs": within}
        found = [row[name] for row in rows]
        assert found == pytest.approx([step[name] for step in expected], **options), name
    drops = [step.get("train/dropped_tokens", 0.0) for step in expected]
    assert (max(drops) > 0.05) == (case.moe is TOP1)
    assert sum(step["train/grad_norm"] > 0.5 for step in expected) > case.num_steps // 2


@pytest.mark.parametrize(
    "case", [case for case in (*TWO, *FOUR) if case.device == "nvme"], ids=lambda case: case.name
)
def test_plan_counts_what_is_on_the_drive(case: Case, folder: Path) -> None:
    cluster = Cluster(devices_per_host=case.ranks, device="cpu")
    memory = estimate(make_plan(config_from_values(case.config(folder)), cluster))
    files = (folder / "drive" / case.name).glob("zero_stage_3/*/rank0/*.swp")
    num_bytes = sum(file.stat().st_size for file in files)
    assert num_bytes > 2**20, "something must be on the drive, or nothing is compared"
    assert sum(memory.drive.values()) == pytest.approx(num_bytes, rel=0.01)


# Layouts of runs that are stopped; what moves depends on nothing by which a batch is divided.
EXPERTS = TOP2 | {"balance_loss": 0.0}
LAYOUTS: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (Case(3, EXPERTS, CALM), {"zero": {"stage": 1}}),
    "alone": (Case(3, EXPERTS, CALM, away=BOTH), {}),
    "tensor": (Case(3, EXPERTS, CALM, tensor=2), {}),
    "expert": (Case(3, EXPERTS, CALM, expert=2), {}),
    "weights": (Case(3, EXPERTS, CALM, expert=2, away=WEIGHTS), {}),
    "host": (Case(3, EXPERTS, CALM, expert=2, away=BOTH, device="cpu"), {}),
}
SAME = [name for name in LAYOUTS if name != "plain"]
MOVES = [
    ("expert", "plain"),
    ("tensor", "expert"),
    ("plain", "tensor"),
    ("expert", "alone"),
    ("alone", "weights"),
    ("weights", "expert"),
    ("expert", "host"),
    ("host", "tensor"),
]


def saved(name: str, layout: str, folder: Path, *, max_steps: int) -> dict[str, Any]:
    """A run that saves at its end, and goes on where one of its name has ended."""
    case, sections = LAYOUTS[layout]
    drive = folder / "drive" / f"{name}-{layout}"
    drive.mkdir(parents=True, exist_ok=True)
    made = case.config(
        folder,
        **{
            "run": {"name": name, "output_dir": str(folder)},
            "zero": zero_of(drive, case.device, case.away),
            "model": WIDE | {"hidden_size": 512, "moe": EXPERTS},
            "optimizer": CALM | {"weight_decay_on": "matrices"},
            "scheduler": {"kind": "cosine", "warmup_steps": 2, "total_steps": END},
            "training": {"max_steps": max_steps, "log_every": 1, "clip_grad_norm": 0.5},
            "checkpoint": {"at_end": True, "resume": "auto"},
            **sections,
        },
    )
    if name.startswith("same"):
        made["model"] = made["model"] | {"dropout": 0.1}
    return made


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvme-resumed")
    first, second = [], []
    for name in SAME:
        first.append(saved(f"same-{name}-whole", name, folder, max_steps=END))
        first.append(saved(f"same-{name}", name, folder, max_steps=STOP))
        second.append(saved(f"same-{name}", name, folder, max_steps=END))
    first.append(saved("whole", "plain", folder, max_steps=END))
    for before, after in MOVES:
        first.append(saved(f"{before}-{after}", before, folder, max_steps=STOP))
        second.append(saved(f"{before}-{after}", after, folder, max_steps=END))
    for cases in (first, second):
        train_cases(cases, num_ranks=2, folder=folder)
    return folder


@pytest.mark.parametrize("name", SAME)
def test_a_resumed_run_is_the_unbroken_one(name: str, resumed: Path) -> None:
    whole, broken = resumed / f"same-{name}-whole", resumed / f"same-{name}"
    for metric in METRICS[:3]:
        assert series(whole, metric) == series(broken, metric), metric
    left, right = bits(whole, END), bits(broken, END)
    assert left.keys() == right.keys()
    assert [path for path, tensor in left.items() if not torch.equal(tensor, right[path])] == []
    swapped = [swapped_files(run / "checkpoints" / f"global_step{END}") for run in (whole, broken)]
    assert swapped[0] == swapped[1]
    assert bool(swapped[0]) == (LAYOUTS[name][0].device == "nvme" and name != "weights")


def swapped_files(checkpoint: Path) -> list[bytes]:
    """Contents of the swapper's files, in any order: their names have numbers of the process."""
    return sorted(file.read_bytes() for file in (checkpoint / SWAPPED).rglob("*.swp"))


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_run_goes_on_in_another_layout(before: str, after: str, resumed: Path) -> None:
    for metric in ("train/loss", "train/grad_norm"):
        whole, broken = (series(resumed / run, metric) for run in ("whole", f"{before}-{after}"))
        assert broken == pytest.approx(whole, abs=2e-5, rel=2e-6), metric


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_its_weights_are_read_out_of_the_files(before: str, after: str, resumed: Path) -> None:
    of_run = resumed / f"{before}-{after}" / "checkpoints"
    whole = MergedWeights(list_checkpoints(resumed / "whole" / "checkpoints")[-1])
    weights = MergedWeights(list_checkpoints(of_run)[-1])
    assert set(weights) == set(whole)
    for name, expected in whole.items():
        torch.testing.assert_close(weights[name], expected, atol=1e-4, rtol=0.0)
