"""The written list: what `check` refuses although DeepSpeed takes it, and what this machine cannot
try with DeepSpeed.

docs/silent-harms.md describes the same for people, and a test holds every harm's effect against
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from deepspeed_lint.facts import Facts
from tests.deepspeed_lint.rules.cases import CASES, GONE, optimizer, scheduler

HAND_READ: Final = (
    "activation_checkpointing",
    "aio",
    "autotuning",
    "checkpoint",
    "data_efficiency",
    "data_types",
    "datastates_ckpt",
    "expert_parallel",
    "flops_profiler",
    "optimizer",
    "pipeline",
    "scheduler",
    "timers",
    "torch_autocast",
)
# Stands for every key outside all sections.
TOP: Final = "(top level)"
_IN_HAND_READ: Final = (*(f"{name}.*" for name in HAND_READ), "tensor_parallel.partition_config*")
_BATCH: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)

Shown = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True)
class Harm:
    """One kind of refusal that DeepSpeed does not share.

    Attributes:
        name: heading in docs/silent-harms.md.
        kind: kind of the problem.
        keys: patterns of the keys; `TOP` for those outside all sections.
        effect: what DeepSpeed does instead, as measured.
        witness: a change of the plain config that shows it.
        shown: whether the engine's report of itself shows it.
    """

    name: str
    kind: str
    keys: tuple[str, ...]
    effect: str
    witness: Mapping[str, Any]
    shown: Shown

    def explains(self, kind: str, key: str) -> bool:
        """Check whether a refusal is of this kind."""
        is_there = (TOP in self.keys and "." not in key) or any(
            fnmatchcase(key, pattern) for pattern in self.keys
        )
        return kind == self.kind and is_there


HARMS: Final[tuple[Harm, ...]] = (
    Harm(
        "Misspelt sections and top-level keys",
        "unknown-key",
        (TOP,),
        "`gradient_cliping: 0.1` is dropped, and the engine clips at 1.0",
        {"gradient_clipping": GONE, "gradient_cliping": 0.1},
        lambda saw: saw["clipping"] == 1.0,
    ),
    Harm(
        "Misspelt or misplaced keys in sections that are read by hand",
        "unknown-key",
        _IN_HAND_READ,
        "`torch_autocast.enalbed: true` is dropped, and autocast stays off",
        {"torch_autocast": {"enalbed": True}},
        lambda saw: saw["autocast"] is False,
    ),
    Harm(
        "Paths where a name belongs",
        "dotted-key",
        ("*",),
        '`"zero_optimization.stage": 3` is dropped, and the stage is 0',
        {"zero_optimization.stage": 3},
        lambda saw: saw["stage"] == 0,
    ),
    Harm(
        "Decimal points in batch sizes",
        "wrong-type",
        _BATCH,
        "`gradient_accumulation_steps: 1.5` is kept: the engine steps in a rhythm that is neither one nor two",
        {"gradient_accumulation_steps": 1.5},
        lambda saw: saw["accumulation"] == 1.5,
    ),
    Harm(
        "Values of another type among the parameters",
        "wrong-type",
        ("optimizer.params.*", "scheduler.params.*"),
        "`lr: true` trains at a rate of 1.0",
        optimizer("AdamW", lr=True, torch_adam=True),
        lambda saw: saw["rates"][-1] == 1.0,
    ),
    Harm(
        "Values of another type in keys that are read by hand",
        "wrong-type",
        (TOP, *_IN_HAND_READ),
        '`prescale_gradients: "false"` is true, as any text is',
        {"prescale_gradients": "false"},
        lambda saw: saw["prescale"] is True,
    ),
    Harm(
        '"auto" in keys that are read by hand',
        "auto-value",
        (TOP, *_IN_HAND_READ),
        '`checkpoint.load_universal: "auto"` is true: the next load looks for a universal checkpoint',
        {"checkpoint": {"load_universal": "auto"}},
        lambda saw: saw["load_universal"] is True,
    ),
    Harm(
        "Momenta outside 0 to 1",
        "wrong-value",
        ("scheduler.params.cycle_min_mom", "scheduler.params.cycle_max_mom"),
        "`cycle_min_mom: 7` is handed to Adam as its first beta",
        scheduler("OneCycle", cycle_min_lr=0.001, cycle_max_lr=0.01, cycle_min_mom=7),
        lambda saw: saw["first_beta"] == 7,
    ),
    Harm(
        "Choices that do not exist",
        "wrong-value",
        _IN_HAND_READ,
        '`warmup_type: "Linear"` warms up along a logarithm',
        scheduler("WarmupLR", warmup_type="Linear"),
        lambda saw: saw["warmup_type"] == "log",
    ),
    Harm(
        "Rates below 0, and ratios above 1",
        "wrong-value",
        tuple(
            f"scheduler.params.{name}"
            for name in ("warmup_m*_lr", "cycle_m*_lr", "lr_range_test_min_lr", "*_min_ratio")
        ),
        "`warmup_min_lr: -0.1` trains uphill, at a rate of -0.1",
        scheduler("WarmupLR", warmup_min_lr=-0.1, warmup_max_lr=0.01),
        lambda saw: saw["rates"][0] == -0.1,
    ),
    Harm(
        "Numbers outside their range",
        "wrong-value",
        (TOP,),
        "`gradient_clipping: -1` is taken, and nothing is clipped",
        {"gradient_clipping": -1},
        lambda saw: saw["clipping"] == -1,
    ),
    Harm(
        "Autocast to int8",
        "autocast-in-int8",
        ("torch_autocast.dtype",),
        '`torch_autocast.dtype: "int8"` switches autocast off, and the model computes in fp32',
        {"torch_autocast": {"enabled": True, "dtype": "int8"}},
        lambda saw: saw["autocast"] and saw["output"] == "torch.float32",
    ),
    Harm(
        "Values that only Python can give",
        "wrong-type",
        ("tensor_parallel.tp.mpu", "tensor_parallel.tp.tp_group"),
        '`tensor_parallel.tp.tp_group: "x"` is kept where a process group belongs, and no group comes of it',
        {"tensor_parallel": {"tp": {"tp_group": "x"}}},
        lambda saw: saw["tp_group"] == "x",
    ),
    Harm(
        "Sections without the key that they turn on",
        "missing-key",
        _IN_HAND_READ,
        "a `scheduler` without `type` is dropped, and the rate stays where it is",
        {"scheduler": {"params": {"warmup_num_steps": 100}}},
        lambda saw: saw["schedule"] == "NoneType",
    ),
)

# Kinds of rules that one rank on CPU, with a model of two layers and no engine.compile(), cannot
# show. The rules' own tests name the place of each refusal in DeepSpeed, and run it where they can.
NOT_ON_ONE_CPU_RANK: Final[Mapping[str, str]] = {
    "compile-around-experts": "engine.compile() refuses",
    "compile-offloads": "engine.compile() refuses",
    "compile-passes": "engine.compile() refuses",
    "needs-cuda": "the first use of the feature",
    "expert-options": "validate_autoep_config, called when a layer matches",
    "presets-differ": "validate_autoep_config",
    "expert-with-tensor-parallel": "validate_autoep_config",
    "expert-tensor-parallel": "validate_autoep_config",
    "expert-parallel-does-not-fit": "more ranks",
    "tensor-parallel-does-not-fit": "more ranks",
    "hpz-does-not-divide": "more ranks",
    "sequence-parallel-mesh": "more ranks",
    "nvme-path-missing": "libaio",
    "tensor-parallel-sizes": "more ranks",
    "expert-choice": "validate_autoep_config",
    "expert-part-name": "validate_autoep_config",
    "zenflow-needs-overlap": "the first update of ZenFlow",
    "contiguous-checkpoints": "deepspeed.checkpointing.configure()",
}
# Refusals at deepspeed.initialize or in the first steps, as far as rules are concerned.
BY_RULES: Final = frozenset(CASES)


def by_machine(facts: Facts) -> str:
    """Return why this machine, with this model, does not start a config; empty if it does."""
    asked = facts.values
    mu = (facts.optimizer or "").startswith("mu") and facts.optimizer != "muon"
    curriculum = facts.section("data_efficiency.data_sampling.curriculum_learning")
    reasons = {
        "the package mup": mu,
        "the package DataStates": "datastates_ckpt" in asked,
        "the package wandb": bool(facts.section("wandb").get("enabled")),
        "the package comet_ml": bool(facts.section("comet").get("enabled")),
        "an inference kernel": bool(facts.section("hybrid_engine").get("enabled")),
        "files of a curriculum": bool(curriculum.get("enabled")),
        "a model with layers to drop tokens in": bool(
            facts.section("data_efficiency.data_routing.random_ltd").get("enabled")
        ),
        "attention to split by heads": facts.section("optimizer.params").get("per_head_muon")
        is True,
        "libaio": "nvme" in (facts.optimizer_device, facts.param_device),
        "a model as deep as the profile": bool(facts.section("flops_profiler").get("enabled"))
        and facts.section("flops_profiler").get("module_depth", -1) not in (-1, 0, 1, 2),
        "minutes to compile Lion for the host": facts.optimizer == "lion"
        and facts.offloads_optimizer,
        "autotuning, which ends the process when it has measured": bool(
            facts.section("autotuning").get("enabled")
        ),
        "an optimizer from code": not facts.given("optimizer.type"),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
