"""Draw run configs at random, and look whether what `check` lets through trains the described
model: python -m tests.campaign.combinations_drawn --draws 100

A draw is a meaning (model, data, optimizer, schedule, what is frozen or adapted) and a layout
(ranks, ZeRO stage, precision, buckets, recomputation). Where `check` finds an error, its messages
are counted, to be read. Otherwise the run must train: losses, gradient norms, rates and
evaluations must be those of the same meaning in fp32 on one rank without ZeRO, and a run from its
checkpoint must go on, to the bit in the same layout and within the bound in another one. Other
ends are written with their config to ``found.jsonl``, and their runs are left in the folder.

Not drawn: what needs a compiler (torch.compile, kernels on the host) or CUDA.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from framework.commands.check_result import CheckContext, check_file
from framework.plan.cluster import Cluster
from tests.dotted_keys import nested
from tests.jobs.parts import PROMPTED_GPT
from tests.launched import read_metrics
from tests.warm_ranks import WarmRanks

# A config as dotted keys and their values.
Keys = dict[str, Any]

SAVED_STEP: Final = 3
JOB_SECONDS: Final = 300.0
LAYOUTS_OF_A_MEANING: Final = 3
ALWAYS: Final[Keys] = {
    "batch.global_size": 8,
    "training.max_steps": 2 * SAVED_STEP,
    "training.log_every": 1,
    "training.clip_grad_norm": 0.3,
    "checkpoint.every_steps": SAVED_STEP,
    "evaluation.max_samples": 7,
    "monitors": {"tensorboard": False, "progress": "off", "report": False},
}
COMPARED: Final = re.compile(r"train/(loss|grad_norm|lr)|eval/.*loss")

_PROMPTS: Final = {"target": "tests.jobs.parts:masked_prompts_and_seven_more"}
_RAGGED: Final = {"target": "tests.jobs.parts:ragged_prompts"}
_TEXT: Final = {"kind": "text", "sequence_length": 16}
_LM: Final = {"kind": "causal_lm"}
_GPT: Final = PROMPTED_GPT | {"num_heads": 4}
_LIKE_LLAMA: Final = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "num_kv_heads": 2,
    "tie_embeddings": False,
}
# Without a capacity every token reaches its experts, however they are spread.
_MOE: Final = {"num_experts": 4, "top_k": 2, "capacity_factor": None, "eval_capacity_factor": None}
_BERT: Final = {"kind": "bert", "size": "tiny", "vocab_size": 261, "dropout": 0.0}


class Family(NamedTuple):
    """A model with its data, and the names that its weights have.

    Attributes:
        adapted: modules that adapters may be put on.
        frozen: pattern of weights that may be frozen.
        ways: keys of `parallel` that its ranks may share it by.
    """

    keys: Keys
    adapted: list[str]
    frozen: str
    ways: tuple[str, ...]


_OURS: Final = (["query", "value"], r"blocks\.0\..*", ("pipe", "tensor", "sequence"))
_THEIRS: Final = (["q_proj", "v_proj"], r".*layers\.0\..*", ("tensor", "sequence"))
_MIXED: Final = (*_OURS[:2], ("pipe", "tensor", "sequence", "expert"))
FAMILIES: Final = (
    Family({"model": _GPT, "data": _PROMPTS, "task": _LM}, *_OURS),
    Family({"model": _GPT | _LIKE_LLAMA, "data": _RAGGED, "task": _LM}, *_OURS),
    Family(
        {"model": _GPT | {"moe": _MOE | {"balance_loss": 0.0}}, "data": _PROMPTS, "task": _LM},
        *_MIXED,
    ),
    Family(
        {"model": {"target": "tests.jobs.tensor_parts:llama"}, "data": _TEXT, "task": _LM}, *_THEIRS
    ),
    Family(
        {
            "model": _BERT,
            "data": {"kind": "text_pairs", "sequence_length": 32},
            "task": {"kind": "masked_lm"},
        },
        *_OURS,
    ),
    Family(
        {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "task": {"kind": "classification"}},
        ["fc1"],
        ".*bias",
        ("pipe",),
    ),
)

# Name -> what is drawn of: keys that decide which numbers a run computes.
MEANINGS: Final[Mapping[str, Sequence[Keys]]] = {
    "schedule": [
        {"scheduler": {"kind": "cosine", "warmup_steps": 2}},
        {"scheduler": {"kind": "wsd", "decay_steps": 3}},
        {"scheduler": {"kind": "warmup_decay", "warmup_steps": 2}},
        {"scheduler": {"kind": "one_cycle", "min_lr": 1e-4, "max_lr": 5e-3, "first_steps": 3}},
        {"scheduler": {"target": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 2}}},
    ],
    "average": [
        {"training.ema": {"decay": 0.5}, "evaluation.weights": "ema", "evaluation.every_steps": 2},
        {"training.ema": {"decay": 0.9, "every_steps": 2, "start_step": 1}},
    ],
    "adapters": [
        {"training.lora.r": 4},
        {"training.lora.r": 4, "training.lora.use_dora": True},
        {"training.lora.r": 4, "training.lora.quantization": "int8"},
    ],
    "frozen": [{"training.freeze": {}}, {"training.freeze": {"until_step": 3}}],
    "evaluation": [
        {"evaluation.every_steps": 2, "evaluation.batch_size": 4},
        {"evaluation.at_start": True, "evaluation.max_samples": 3},
    ],
    "plateau": [
        {
            "callbacks": [{"kind": "reduce_on_plateau", "patience": 1, "min_change": 10.0}],
            "evaluation.every_steps": 1,
        }
    ],
    "bad steps": [{"training.bad_steps": "skip"}, {"training.bad_steps": "roll_back"}],
    "size": [{"batch.global_size": 4}, {"batch.global_size": 16}],
    "clipping": [{"training.clip_grad_norm": 0.0}],
}
# Optimizer -> the largest relative difference of a loss that rounding may make in six steps.
OPTIMIZERS: Final[Sequence[tuple[Keys, float]]] = (
    ({"kind": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, 1e-5),
    ({"kind": "adamw", "lr": 3e-3}, 1e-4),
    ({"kind": "adamw", "lr": 3e-3, "layer_decay": 0.5, "weight_decay_on": "matrices"}, 1e-4),
    ({"kind": "adagrad", "lr": 0.01, "weight_decay_on": "matrices", "weight_decay": 0.1}, 1e-4),
    ({"kind": "schedule_free", "lr": 3e-3}, 1e-4),
    ({"target": "torch.optim:NAdam", "args": {"lr": 1e-3}}, 1e-4),
    ({"kind": "lion", "lr": 1e-3}, 2e-3),
    ({"kind": "muon", "lr": 0.01}, 2e-3),
    ({"kind": "adamw_8bit", "lr": 3e-3}, 2e-2),
)
OF_HALF_PRECISION: Final = 4e-2
# Name -> what is drawn of: keys that decide how and where the same numbers are computed.
LAYOUTS: Final[Mapping[str, Sequence[Keys]]] = {
    "micro-batches": [{"batch.micro_size": 1}, {"batch.accumulation_steps": 2}],
    "buckets": [
        {"zero.reduce_bucket_size": 1, "zero.allgather_bucket_size": 2},
        {"zero.reduce_bucket_size": 3000, "zero.allgather_bucket_size": 500},
    ],
    "messages": [
        {"zero.overlap_comm": True},
        {"zero.contiguous_gradients": False},
        {"zero.reduce_scatter": False},
        {"zero.round_robin_gradients": True},
        {"zero.coalesce": True},
    ],
    "spread": [
        {"zero.stage3_param_persistence_threshold": 0, "zero.stage3_prefetch_bucket_size": 0},
        {"zero.stage3_param_persistence_threshold": 0, "zero.sub_group_size": 1000},
    ],
    "recomputation": [{"training.recompute_every": 1}, {"training.recompute": "selective"}],
    "memory": [
        {"training.offload_activations": True},
        {"training.loss_tile": 16},
        {"training.mlp_tile": 3},
    ],
    "saves": [
        {"checkpoint.mode": "async"},
        {"checkpoint.keep_last": 1, "checkpoint.keep_every": 3},
    ],
    "data": [{"data.num_workers": 1}],
    "watching": [
        {"profile": {"steps": "2-3", "modules": True}},
        {"training.detect_anomaly": True},
        {"monitors.tensorboard": {"histograms_every_steps": 2}},
    ],
    "precision": [
        {"precision": {"dtype": "bf16"}},
        {"precision": {"dtype": "bf16", "states": "bf16"}},
        {"precision": {"dtype": "autocast"}},
    ],
}


class Meaning(NamedTuple):
    """What a run computes."""

    family: Family
    keys: Keys
    bound: float


class Layout(NamedTuple):
    """How and where it computes it."""

    num_ranks: int
    keys: Keys


def draw_meaning(draw: random.Random) -> Meaning:
    """Draw what a run computes: a family, an optimizer and up to three further keys."""
    family = draw.choice(FAMILIES)
    optimizer, bound = draw.choice(OPTIMIZERS)
    keys = ALWAYS | family.keys | {"optimizer": optimizer}
    for name in draw.sample(sorted(MEANINGS), draw.choice([0, 1, 2, 3])):
        keys |= draw.choice(MEANINGS[name])
    if "training.lora.r" in keys:
        keys["training.lora.target_modules"] = family.adapted
    if "training.freeze" in keys:
        steps = keys["training.freeze"]
        keys["training.freeze"] = [family.frozen]
        if steps:
            keys["training.freeze"] = [{"match": family.frozen, **steps}]
    return Meaning(family, keys, bound)


def draw_layout(draw: random.Random, family: Family) -> Layout:
    """Draw how a run computes: ranks, ways to share the model, a stage and up to three keys."""
    num_ranks = draw.choice([1, 2, 2, 2, 4])
    keys: Keys = {"zero.stage": draw.choice([0, 1, 2, 3])}
    if num_ranks > 1 and draw.random() < 0.6:
        count = min(num_ranks // 2, len(family.ways))
        for way in draw.sample(family.ways, count):
            keys[f"parallel.{way}"] = 2
    for name in draw.sample(sorted(LAYOUTS), draw.choice([1, 2, 3])):
        keys |= draw.choice(LAYOUTS[name])
    return Layout(num_ranks, keys)


def as_sections(keys: Keys) -> dict[str, Any]:
    """Return dotted keys as the sections of a run config."""
    return json.loads(json.dumps(nested(keys)))  # no section is shared with another draw


def compared(run: Path, *, after: int = 0) -> dict[str, float]:
    """Return the metrics that the meaning decides, of the steps after one."""
    found = {}
    for row in read_metrics(run):
        if row["step"] > after:
            found |= {
                f"{name} of step {row['step']}": value
                for name, value in row.items()
                if COMPARED.fullmatch(name)
            }
    return found


def differences(
    expected: Mapping[str, float], found: Mapping[str, float], bound: float
) -> list[str]:
    """List metrics that are missing or too far from the expected ones; norms may be ten times as
    far as losses.
    """
    lines = []
    for name, value in expected.items():
        other = found.get(name)
        if other is None:
            lines.append(f"{name} is missing")
            continue
        allowed = bound * abs(value) + 1e-7
        if "grad_norm" in name:
            allowed *= 10
        if not abs(other - value) <= allowed:
            lines.append(f"{name}: {other:.7g}, and not {value:.7g}")
    return lines


class Campaign:
    """Draws, their runs and what became of them."""

    def __init__(self, warm: WarmRanks, folder: Path) -> None:
        self._warm = warm
        self._folder = folder
        self._expected: dict[str, dict[str, float]] = {}
        self._number = 0
        self.ends: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def hold(self, meaning: Meaning, layout: Layout, second: Layout | None) -> None:
        """Train a draw, and go on from its checkpoint in the second layout, or in the same."""
        self._number += 1
        folder = self._folder / str(self._number)
        end, details = self._end_of(folder, meaning, layout, second)
        self.ends[end] += 1
        if end in ("equal", "refused"):
            shutil.rmtree(folder)
            return
        layouts = [layout, second]
        row = {"draw": self._number, "end": end, "details": details, "layouts": layouts}
        row["keys"] = meaning.keys
        with (self._folder / "found.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"draw {self._number}: {end}: {details[-1]}", file=sys.stderr, flush=True)

    def _end_of(
        self, folder: Path, meaning: Meaning, layout: Layout, second: Layout | None
    ) -> tuple[str, list[str]]:
        file = self._checked(folder / "first", meaning, layout)
        if file is None:
            return "refused", []
        expected = self._expected_of(meaning)
        if not expected:
            return "refused", []  # or fails, in fp32 on one rank: nothing to compare with
        output = self._train(file, layout.num_ranks)
        if output:
            return "failed", output
        run = folder / "first/run"
        wrong = differences(expected, compared(run), self._bound(meaning, layout))
        if wrong:
            return "other numbers", wrong
        resume = f"checkpoint.resume={run}/checkpoints/global_step{SAVED_STEP}"
        other_file = None
        if second is not None:
            other_file = self._checked(folder / "second", meaning, second)
        if second is None or other_file is None:
            output = self._train(file, layout.num_ranks, resume, "run.name=again")
            if output:
                return "not resumed", output
            whole = compared(run, after=SAVED_STEP)
            wrong = differences(whole, compared(folder / "first/again"), 0.0)
            return ("resumed with other numbers", wrong) if wrong else ("equal", [])
        output = self._train(other_file, second.num_ranks, resume)
        if output and "[resume-" in output[-1]:
            self.refusals[_without_file(output[-1])] += 1
            return "equal", []
        if output:
            return "not moved", output
        rest = {name: value for name, value in expected.items() if _step(name) > SAVED_STEP}
        bound = max(self._bound(meaning, layout), self._bound(meaning, second))
        wrong = differences(rest, compared(folder / "second/run"), bound)
        return ("moved with other numbers", wrong) if wrong else ("equal", [])

    def _checked(self, folder: Path, meaning: Meaning, layout: Layout) -> Path | None:
        """Write the config of a draw; None, with its messages counted, where `check` refuses it."""
        folder.mkdir(parents=True)
        keys = meaning.keys | layout.keys | {"run.name": "run", "run.output_dir": str(folder)}
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(as_sections(keys)), encoding="utf-8")
        cluster = Cluster(devices_per_host=layout.num_ranks, device="cpu")
        problems = check_file(str(file), [], CheckContext(cluster=cluster)).problems
        errors = [problem for problem in problems if problem.severity == "error"]
        self.refusals.update(_without_file(str(problem)) for problem in errors)
        return None if errors else file

    def _expected_of(self, meaning: Meaning) -> dict[str, float]:
        """Return the metrics of a meaning in fp32 on one rank; none where it does not train so."""
        key = json.dumps(meaning.keys, sort_keys=True)
        if key not in self._expected:
            self._expected[key] = {}
            layout = Layout(1, {})
            file = self._checked(self._folder / f"meaning-{len(self._expected)}", meaning, layout)
            if file is not None and not self._train(file, 1):
                self._expected[key] = compared(file.parent / "run")
        return self._expected[key]

    def _train(self, file: Path, num_ranks: int, *settings: str) -> list[str]:
        """Run a config; returns the end of its output if it fails."""
        said = file.parent / "said"
        job = self._warm.start(
            ["--config", str(file), *settings], num_ranks=num_ranks, folder=said, cwd=file.parent
        )
        try:
            codes = job.wait(JOB_SECONDS)
        except TimeoutError:
            return [*job.stated().splitlines()[-20:], f"no end after {JOB_SECONDS:.0f} s"]
        if any(codes):
            return job.stated(0).splitlines()[-20:]
        return []

    @staticmethod
    def _bound(meaning: Meaning, layout: Layout) -> float:
        if "precision" in layout.keys:
            return OF_HALF_PRECISION
        return meaning.bound


def _step(name: str) -> int:
    return int(name.rpartition(" ")[2])


def _without_file(message: str) -> str:
    """Return a message without its file, so that equal ones are counted together."""
    return re.sub(r"^\S+/run\.yaml:\d+: ", "", message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold draws until there are enough, and print what became of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for the runs; left out: a new one")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="combinations-"))
    draw = random.Random(options.seed)
    with WarmRanks() as warm:
        campaign = Campaign(warm, folder)
        while campaign.ends.total() < options.draws:
            meaning = draw_meaning(draw)
            for _ in range(LAYOUTS_OF_A_MEANING):
                second = None
                if draw.random() < 0.5:
                    second = draw_layout(draw, meaning.family)
                campaign.hold(meaning, draw_layout(draw, meaning.family), second)
    for message, count in campaign.refusals.most_common():
        print(f"{count:4} {message}")
    print(json.dumps(campaign.ends), f"seed {options.seed}, runs in {folder}")
    return int(any(end not in ("equal", "refused") for end in campaign.ends))


if __name__ == "__main__":
    sys.exit(main())
