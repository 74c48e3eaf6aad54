"""Draws DeepSpeed configs from the key table: valid ones, and valid ones with one thing wrong. A
seed gives the same ones again.

A valid config is drawn until `lint` finds no error in it, so the question to DeepSpeed is: is it
taken there, too?
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from deepspeed_lint.errors import MISSING, Problem
from deepspeed_lint.keys import Key, KeyTable, load_table
from deepspeed_lint.lint import lint
from deepspeed_lint.text.document import Document
from deepspeed_lint.topology import Topology
from tests.deepspeed_lint.differential import mutate

RELEASE: Final = "0.19.8"
WORLDS: Final = (1, 1, 2, 4, 8)
_SECTION: Final = 0.12  # how often a section is there
_KEY: Final = 0.3  # how often a key is in a section that is there
_OPTIMIZERS: Final = (
    "AdamW",
    "AdamW",
    "AdamW",
    "adam",
    "Adam",
    "Adagrad",
    "Lion",
    "Lamb",
    "Muon",
    "MuAdamW",
    "SGD",
    "RMSprop",
)
_SCHEDULERS: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
# Keys with values that the table does not have.
_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "betas": ([0.9, 0.95], [0.8, 0.999]),
    "eps": (1e-8, 1e-6),
    "lr": (0.001, 0.0001),
    "weight_decay": (0.0, 0.1, 0.01),
    "momentum": (0.9, 0.0),
    "warmup_min_lr": (0.0, 1e-5),
    "warmup_max_lr": (0.001, 0.01),
    "total_num_steps": (100, 10000),
    "warmup_num_steps": (1, 10, 50),
    "warmup_min_ratio": (0.0, 0.01),
    "cos_min_ratio": (0.0001, 0.1),
    "cycle_min_lr": (0.0001, 0.001),
    "cycle_max_lr": (0.01, 0.1),
    "passes": (None, ["z1"], ["z3"], ["autotp"]),
    "prof_ops": ([], ["all_reduce"]),
    "nvme_path": ("/tmp", None),
    "shape": ([2, -1], None),
    "classes": (["torch.nn.Linear"],),
    "lower_precision_safe_modules": (["torch.nn.Linear"], None),
    "output_path": ("", "logs"),
    "max_step": ([10, 20],),
    "difficulty": ([8, 16, 32],),
    "top_k": ("auto", 2),
    "routed_scaling_factor": ("auto", 1.0, 2.5),
    "select_interval": ("auto", 1, 4),
    "update_interval": ("auto", 1, 4),
    "keep_in_fp32_modules": ("auto", ["norm"], []),
    "ns_method": ("gram", "standard"),
    "last_batch_iteration": (-1,),
    "log_level": ("info", "warning"),
}


@dataclass(frozen=True)
class Question:
    """One config, the ranks it is for, and what was done to it."""

    config: Mapping[str, Any]
    world: int
    mutation: str = "none"
    detail: str = ""

    def topology(self) -> Topology:
        """Return the topology as `lint` takes it; DeepSpeed runs on CPU."""
        return Topology(world_size=self.world, device="cpu")

    def errors(self) -> list[Problem]:
        """List the errors that `check` refuses it for."""
        document = Document(name="ds.json", value=copy.deepcopy(dict(self.config)))
        return [
            p
            for p in lint(document, release=RELEASE, topology=self.topology())
            if p.severity == "error"
        ]


def questions(seed: int, count: int) -> Iterator[Question]:
    """Yield configs, about half of them with one thing wrong; kinds of wrong in turn."""
    rng = random.Random(seed)
    drawn = _Draw(rng, load_table(RELEASE))
    kinds = list(mutate.MUTATIONS)
    for number in range(count):
        world = rng.choice(WORLDS)
        valid = _valid(drawn, world)
        if number % 3 == 0:
            yield valid
            continue
        kind = kinds[number % len(kinds)]
        config = copy.deepcopy(dict(valid.config))
        detail = mutate.MUTATIONS[kind](rng, config, drawn.table, world)
        yield Question(config, world, kind, detail)


def _valid(drawn: _Draw, world: int) -> Question:
    while True:
        question = Question(drawn.config(world), world)
        if not question.errors():
            return question


class _Draw:
    """Draw values that the table allows."""

    def __init__(self, rng: random.Random, table: KeyTable) -> None:
        self.rng = rng
        self.table = table

    def config(self, world: int) -> dict[str, Any]:
        """Draw a config that may still break a rule between keys."""
        found = (
            self._batch(world)
            | self._optimizer()
            | self._scheduler()
            | self._precision()
            | self._zero()
        )
        for path in self.table.children():
            key = self.table.get(path)
            if (
                key is None
                or key.status in ("refused", "deprecated")
                or path in found
                or path in _BY_HAND
            ):
                continue
            # it could not be started: it takes a package
            if path == "datastates_ckpt" and world == 1:
                continue
            if key.types == ("object",):
                if self.rng.random() < _SECTION:
                    found[path] = self._section(path)
            elif self.rng.random() < _KEY / 2:
                found[path] = self._value(key)
        return found

    def _batch(self, world: int) -> dict[str, Any]:
        micro, steps = self.rng.choice((1, 2, 4, 8)), self.rng.choice((1, 1, 2))
        sizes = {
            "train_batch_size": micro * steps * world,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
        }
        left_out = self.rng.choice(
            (
                "",
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps",
            )
        )
        return {name: size for name, size in sizes.items() if name != left_out}

    def _optimizer(self) -> dict[str, Any]:
        if self.rng.random() < 0.05:
            return {}
        name = self.rng.choice(_OPTIMIZERS)
        known = {kind.lower(): kind for kind in self.table.variants("optimizer.params")}
        if name.lower() not in known:
            return {
                "optimizer": {"type": name, "params": {"lr": 0.01}},
                "zero_allow_untested_optimizer": True,
            }
        params = self._section(f"optimizer.params[{known[name.lower()]}]") | {"lr": 0.001}
        if name.lower() in ("adam", "adamw"):
            params["torch_adam"] = self.rng.random() < 0.6
        return {"optimizer": {"type": name, "params": params}}

    def _scheduler(self) -> dict[str, Any]:
        if self.rng.random() < 0.5:
            return {}
        name = self.rng.choice(_SCHEDULERS)
        return {"scheduler": {"type": name, "params": self._section(f"scheduler.params[{name}]")}}

    def _precision(self) -> dict[str, Any]:
        name = self.rng.choice(("", "bf16", "bf16", "fp16", "torch_autocast"))
        return (
            {name: self._section(name) | {"enabled": name != "fp16" or self.rng.random() < 0.2}}
            if name
            else {}
        )

    def _zero(self) -> dict[str, Any]:
        if self.rng.random() < 0.2:
            return {}
        stage = self.rng.choice((0, 1, 2, 3))
        section = self._section("zero_optimization") | {"stage": stage}
        for name in ("zenflow", "leaf_module", "offload_param"):
            if stage != 3 or self.rng.random() < 0.6:
                section.pop(name, None)
        return {"zero_optimization": section}

    def _section(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for child in self.table.children(path):
            key = self.table.get(child)
            if key is None or key.status in ("refused", "deprecated") or key.from_python:
                continue
            if key.name == "*":
                found["seqlen"] = self._section(child)
            elif key.required or self.rng.random() < _KEY:
                found[key.name] = (
                    self._section(child) if key.types == ("object",) else self._value(key)
                )
        return found

    def _value(self, key: Key) -> Any:
        if key.name in _VALUES:
            return self.rng.choice(_VALUES[key.name])
        if key.enum:
            return self.rng.choice(key.enum)
        if key.nullable and self.rng.random() < 0.1:
            return None
        kind = self.rng.choice(key.types)
        if kind == "boolean":
            return self.rng.random() < 0.5
        if kind in ("integer", "number"):
            return self._number(key, kind)
        if kind == "string":
            # two keys may name two files
            return self.rng.choice(key.examples) if key.examples else f"a {key.name}"
        if kind == "array":
            item = f"{key.path}.*"
            return (
                [self._section(item) for _ in range(self.rng.choice((1, 2)))]
                if self.table.get(item)
                else []
            )
        return {}

    def _number(self, key: Key, kind: str) -> float:
        least = key.minimum if key.minimum is not None else key.exclusive_minimum
        most = key.maximum if key.maximum is not None else key.exclusive_maximum
        choices: list[float] = [4, 16, 1000] if most is None else []
        if key.default is not MISSING and isinstance(key.default, (int, float)):
            choices.append(key.default)
        if key.minimum is not None:
            choices.append(key.minimum)
        if most is not None:
            choices.append(((least or 0) + most) / 2)
        number = self.rng.choice(choices or [1])
        return int(number) if kind == "integer" else float(number)


_BY_HAND: Final = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "optimizer",
        "scheduler",
        "bf16",
        "fp16",
        "torch_autocast",
        "zero_optimization",
        "sequence_parallel_size",
        "data_parallel_size",
        "zero_allow_untested_optimizer",
    }
)
