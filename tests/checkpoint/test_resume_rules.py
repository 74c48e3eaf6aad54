"""Every key of a run config has a rule for a resume, the page says which, and the rules are
kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import BaseModel

from deepspeed_lint.keys import load_table
from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.resumable import (
    RULES,
    check_resumable,
    describe_changes,
    describe_versions,
    rule_of,
)
from framework.config.base import members_of
from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.errors import ConfigError
from framework.setup.handed_over import describe_objects
from framework.setup.user_code import Objects
from tests.places import ROOT

# Sections whose rule holds for whatever they have or will have: what they decide is restored from
# the checkpoint, or moved.
WHOLE = {
    "model",
    "data",
    "task",
    "optimizer",
    "scheduler",
    "deepspeed",
    "zero",
    "monitors",
    "profile",
    "supervision",
    "training.ema",
} | {
    "evaluation.metrics",
    "training.lora",
    "training.compile",
    "training.bad_steps",
    "precision.fp8",
}
PAGE = ROOT / "docs" / "checkpoints.md"
TORCHS = {"kind": "adamw", "implementation": "torch"}
FP16 = {"dtype": "fp16"}
STATES = "precision.states"


def states(states: str) -> dict[str, str]:
    return {"dtype": "bf16", "states": states}


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a section and of those in it, dotted, of whatever kind."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        types = [
            part
            for part in (field.annotation, *get_args(field.annotation))
            if isinstance(part, type)
        ]
        inner = [*members_of(field.annotation).values()] or [
            part for part in types if issubclass(part, BaseModel)
        ]
        yield from {found for part in inner for found in keys(part, f"{key}.")} or {key}


def test_every_key_has_a_rule_of_its_own_or_of_a_whole_section() -> None:
    known = sorted(set(keys(RunConfig)))
    assert len(known) > 150
    left = [
        key
        for key in known
        if key not in RULES and not any(key.startswith(f"{section}.") for section in WHOLE)
    ]
    assert left == [], (
        "say in framework/checkpoint/resumable.py what becomes of it when a run is resumed"
    )


def test_every_rule_is_of_a_key_that_exists() -> None:
    passed_through = {f"deepspeed.{path.partition('.')[0]}" for path in load_table("0.19.8")}
    known = set(keys(RunConfig)) | passed_through
    assert [
        key
        for key in RULES
        if key not in known and not any(found.startswith(f"{key}.") for found in known)
    ] == []


def test_what_is_unknown_is_refused() -> None:
    assert (
        rule_of("nonsense")
        == rule_of("run.nonsense")
        == rule_of("optimizer.nonsense.deep")
        == "refused"
    )
    assert (rule_of("zero.anything"), rule_of("data.root"), rule_of("data.kind")) == (
        "applied",
        "applied",
        "refused",
    )


def test_the_page_has_the_table() -> None:
    rows = re.findall(
        r"^\| (applied|refused|irrelevant) \| (.*) \|",
        PAGE.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    reported = {key: rule for rule, cell in rows for key in re.findall(r"`([a-z0-9_.]+)`", cell)}
    assert reported == RULES


def checkpoint(**sections: Any) -> SavedCheckpoint:
    manifest = {
        "step": 10,
        "layout": {"global_size": 8},
        "steps_per_epoch": 4,
        "config": config(**sections),
    }
    return SavedCheckpoint(Path("x"), "global_step10", manifest)


def config(**sections: Any) -> dict[str, Any]:
    return config_from_values(sections).to_dict()


def refused(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    try:
        check_resumable(
            checkpoint(**before), config=config(**now), global_size=8, steps_per_epoch=4, data={}
        )
    except ConfigError as error:
        return [str(problem.key) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("before", "now", "keys"),
    [
        ({}, {"optimizer": {"kind": "adamw", "lr": 0.5}}, ["optimizer.lr"]),
        ({"optimizer": TORCHS}, {"optimizer": {"kind": "adamw"}}, []),
        (
            {"optimizer": TORCHS},
            {"optimizer": {"kind": "adamw", "implementation": "deepspeed"}},
            ["optimizer.implementation"],
        ),
        ({}, {"optimizer": {"kind": "adamw", "weight_decay": 0.5}}, ["optimizer.weight_decay"]),
        (
            {},
            {"scheduler": {"kind": "cosine", "warmup_steps": 3}},
            ["scheduler.cycles", "scheduler.kind", "scheduler.min_ratio", "scheduler.warmup_steps"],
        ),
        ({}, {"training": {"freeze": ["fc.*"]}}, ["training.freeze"]),
        (
            {"training": {"lora": {"target_modules": ["fc1"]}}},
            {"training": {"lora": {"target_modules": ["fc1"], "r": 4}}},
            ["training.lora.r"],
        ),
        (
            {"precision": FP16},
            {"precision": FP16 | {"loss_scale_window": 7}},
            ["precision.loss_scale_window"],
        ),
        (
            {"precision": FP16},
            {"precision": FP16 | {"loss_scale": 128.0}},
            ["precision.loss_scale"],
        ),
        ({"precision": FP16}, {"precision": FP16 | {"initial_scale_power": 4}}, []),
        ({"precision": FP16}, {"precision": {"dtype": "bf16"}}, []),
        ({"precision": states("bf16")}, {"precision": states("bf16")}, []),
        ({"precision": states("bf16")}, {"precision": states("bf16_weights")}, []),
        ({"precision": states("bf16_weights")}, {"precision": states("fp32")}, []),
        ({"precision": states("bf16")}, {}, []),
        ({"precision": states("bf16_weights")}, {"precision": states("bf16")}, [STATES]),
        ({}, {"precision": states("bf16")}, [STATES]),
        (
            {"precision": states("bf16")},
            {"precision": FP16 | {"states": "fp16_weights"}},
            [STATES],
        ),
        ({}, {"precision": FP16}, []),
        (
            {
                "data": {"kind": "text", "path": "here"},
                "model": {"kind": "gpt"},
                "task": {"kind": "causal_lm"},
            },
            {
                "data": {"kind": "text", "path": "there"},
                "model": {"kind": "gpt"},
                "task": {"kind": "causal_lm"},
            },
            [],
        ),
        ({}, {"training": {"ema": {"decay": 0.5}}}, []),
        ({}, {"batch": {"global_size": 8, "micro_size": 2}}, []),
        (
            {},
            {
                "deepspeed": {
                    "wall_clock_breakdown": True,
                    "flops_profiler": {"enabled": True, "profile_step": 3},
                }
            },
            [],
        ),
        (
            {"deepspeed": {"comms_logger": {"enabled": True}}},
            {"deepspeed": {"gradient_predivide_factor": 2.0}},
            ["deepspeed.gradient_predivide_factor"],
        ),
    ],
)
def test_what_may_not_change_is_refused_by_name(
    before: dict[str, Any], now: dict[str, Any], keys: list[str]
) -> None:
    """DeepSpeed would restore all of it from the checkpoint, and the new value would be lost."""
    assert refused(before, now) == keys


def handed_over(**keywords: Any) -> dict[str, Any]:
    return describe_objects(
        config_from_values({}), Objects(optimizer=partial(torch.optim.SGD, lr=0.1, **keywords))
    ).to_dict()


def test_the_keywords_of_an_optimizer_from_python_are_compared() -> None:
    """DeepSpeed would put the old ones back without a word."""
    manifest = {
        "step": 10,
        "layout": {"global_size": 8},
        "config": handed_over(momentum=0.9, weight_decay=1e-4),
    }
    start = SavedCheckpoint(Path("x"), "global_step10", manifest)
    check_resumable(
        start,
        config=handed_over(momentum=0.9, weight_decay=1e-4),
        global_size=8,
        steps_per_epoch=4,
        data={},
    )
    with pytest.raises(ConfigError) as caught:
        check_resumable(
            start,
            config=handed_over(momentum=0.5, nesterov=True),
            global_size=8,
            steps_per_epoch=4,
            data={},
        )
    assert [problem.key for problem in caught.value.problems] == [
        "optimizer.args.momentum",
        "optimizer.args.nesterov",
        "optimizer.args.weight_decay",
    ]


def test_an_older_release_did_not_note_them() -> None:
    older = handed_over()
    del older["optimizer"]["args"]
    start = SavedCheckpoint(
        Path("x"), "global_step10", {"step": 10, "layout": {"global_size": 8}, "config": older}
    )
    check_resumable(
        start, config=handed_over(momentum=0.9), global_size=8, steps_per_epoch=4, data={}
    )


@pytest.mark.parametrize(
    ("before", "now", "stated"),
    [
        ({}, {}, []),
        (
            {},
            {
                "run": {"name": "other"},
                "monitors": {"csv": False},
                "checkpoint": {"resume": "auto"},
            },
            [],
        ),
        (
            {},
            {"training": {"max_steps": 50}, "zero": {"stage": 2}},
            ["training.max_steps: null -> 50", "zero.stage: 0 -> 2"],
        ),
        (
            {},
            {"training": {"ema": {"decay": 0.5}}},
            ["training.ema: the moving average begins with the weights of step 10"],
        ),
        (
            {"training": {"ema": {}}},
            {},
            ["training.ema: the moving average of the weights is dropped"],
        ),
        (
            {"training": {"ema": {}}},
            {"training": {"ema": {"decay": 0.5}}},
            [
                "training.ema: {decay: 0.999, every_steps: 1, start_step: 0} -> {decay: 0.5, every_steps: 1, "
                "start_step: 0}"
            ],
        ),
    ],
)
def test_what_is_applied_is_reported(
    before: dict[str, Any], now: dict[str, Any], stated: list[str]
) -> None:
    assert describe_changes(checkpoint(**before), config=config(**now)) == stated


@pytest.mark.parametrize(
    ("before", "now", "stated"),
    [
        (
            {"torch": "2.15.0", "deepspeed": "0.19.8"},
            {"torch": "2.15.0", "deepspeed": "0.19.8"},
            "",
        ),
        (
            {"torch": "2.14.1", "deepspeed": "0.19.8", "dsf-trainer": "0.1.0", "python": "3.10.1"},
            {"torch": "2.15.0", "deepspeed": "0.19.8", "dsf-trainer": "0.2.0", "python": "3.11.9"},
            "dsf-trainer 0.1.0 -> 0.2.0, torch 2.14.1 -> 2.15.0",
        ),
        ({"dsframework": "0.1.0"}, {"dsf-trainer": "0.1.0"}, ""),  # its former name
        ({"dsframework": "0.1.0"}, {"dsf-trainer": "0.2.0"}, "dsf-trainer 0.1.0 -> 0.2.0"),
        ({}, {"torch": "2.15.0"}, ""),
    ],
)
def test_other_releases_are_named(
    before: dict[str, str], now: dict[str, str | None], stated: str
) -> None:
    plain = checkpoint()
    saved = SavedCheckpoint(plain.folder, plain.tag, {**plain.manifest, "versions": before})
    assert describe_versions(saved, versions=now) == stated
    assert describe_versions(plain, versions=now) == ""


DATA = {"num_train_samples": 1437, "data_sha256": "aa"}


@pytest.mark.parametrize(
    ("saved", "now", "stated"),
    [
        (DATA, DATA, ""),
        (
            DATA,
            DATA | {"num_train_samples": 1400},
            "its training data had 1,437 samples and now has 1,400",
        ),
        (DATA, DATA | {"data_sha256": "bb"}, "its training data had other tokens"),
        (DATA | {"lanes": 6}, DATA | {"lanes": 4}, "its stream was read in 6 lanes and now has 4"),
        ({}, DATA, ""),  # of an older release
        (DATA, {"num_train_samples": 1437}, ""),
    ],
)
def test_other_training_data_is_refused_where_an_epoch_has_as_many_steps(
    saved: dict[str, Any], now: dict[str, Any], stated: str
) -> None:
    plain = checkpoint()
    start = SavedCheckpoint(plain.folder, plain.tag, {**plain.manifest, **saved})
    with pytest.raises(ConfigError) if stated else nullcontext() as caught:
        check_resumable(start, config=config(), global_size=8, steps_per_epoch=4, data=now)
    if caught is not None:
        assert [problem.kind for problem in caught.value.problems] == ["resume-data-differs"]
        assert stated in str(caught.value)
