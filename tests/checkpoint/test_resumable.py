"""What a run may change when it goes on from a checkpoint, and what it may not."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.checkpoint.resumable import changed_keys, check_resumable, describe_changes
from framework.errors import ConfigError, StorageError
from tests.checkpoint.small_checkpoints import full, saved


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The text of every problem, for configs that are given as nested dicts or in full."""
    try:
        check_resumable(saved(before), config=now, global_size=8, steps_per_epoch=4, data={})
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


class TestResumable:
    def test_the_same_config_is(self) -> None:
        values: dict[str, Any] = {
            "optimizer": {"kind": "adamw", "lr": 1e-3, "betas": [0.9, 0.95]},
            "zero": {"stage": 2, "reduce_bucket_size": 5e8},
            "model": {
                "target": "a:b",
                "args": {"sizes": [1, 2, {"deep": None}], "name": "x", "rate": 1e-8},
            },
            "deepspeed": {"aio": {"block_size": 1048576}},
        }
        assert differences(full(**values), full(**values)) == []

    @pytest.mark.parametrize(
        "sections",
        [
            {"training": {"max_epochs": 50}},
            {"training": {"max_steps": 50, "log_every": 1}},
            {"monitors": {"csv": False}},
            {"run": {"name": "other", "output_dir": "/data"}},
            {"evaluation": {"every_steps": 5, "batch_size": 7}},
            {"checkpoint": {"every_steps": 5, "resume": "auto"}},
            {"data": {"kind": "digits", "num_workers": 4}},
            {"zero": {"stage": 3}},
            {"parallel": {"pipe": 2}},
            {"precision": {"dtype": "bf16"}},
            {"batch": {"micro_size": 2, "accumulation_steps": 2}},
        ],
    )
    def test_what_does_not_change_a_step_may_differ(self, sections: dict[str, Any]) -> None:
        assert differences(full(), full(**sections)) == []

    @pytest.mark.parametrize(
        ("sections", "line"),
        [
            (
                {"training": {"clip_grad_norm": 0.5}},
                "training.clip_grad_norm = 0.5: the checkpoint PATH was trained with 1.0; ",
            ),
            ({"run": {"seed": 7}}, "run.seed = 7: the checkpoint PATH was trained with 0; "),
            (
                {"data": {"kind": "digits", "shuffle": False}},
                "data.shuffle = false: the checkpoint PATH was trained with true; ",
            ),
            (
                {"optimizer": {"kind": "adamw", "betas": [0.9, 0.95]}},
                "optimizer.betas = [0.9, 0.95]: the checkpoint PATH was trained with [0.9, 0.999]; ",
            ),
            (
                {"deepspeed": {"prescale_gradients": True}},
                "deepspeed.prescale_gradients = true: the checkpoint PATH was trained without it; ",
            ),
        ],
    )
    def test_what_changes_a_step_may_not(self, sections: dict[str, Any], line: str) -> None:
        found = differences(full(), full(**sections))
        expected = line.replace("PATH", "runs/x/checkpoints/global_step10")
        assert any(text.startswith(expected) for text in found), found
        assert all(text.endswith("[resume-config-differs]") for text in found)

    @pytest.mark.parametrize(
        ("sections", "allowed", "left"),
        [
            ({"optimizer": {"kind": "adamw", "lr": 0.5, "eps": 1e-6}}, ["optimizer.lr"], "eps"),
            ({"scheduler": {"kind": "cosine"}}, ["scheduler"], ""),
            ({"data": {"kind": "digits", "shuffle": False}}, ["data"], ""),
            ({"data": {"kind": "digits", "shuffle": False}}, ["data.shuffle"], ""),
            ({"training": {"clip_grad_norm": 0.5}}, ["training.clip_grad_norm"], ""),
            ({"run": {"seed": 7}}, ["optimizer.lr", "scheduler", "data", "task"], "run.seed"),
        ],
    )
    def test_what_is_allowed_may_change(
        self, sections: dict[str, Any], allowed: list[str], left: str
    ) -> None:
        now = full(**sections, checkpoint={"allow_changed": allowed})
        found = differences(full(), now)
        assert bool(found) == bool(left)
        assert all(left in text for text in found)
        listed = changed_keys(saved(full()), config=now)
        assert all(key.startswith(tuple(allowed)) for key in listed)
        shown = describe_changes(saved(full()), config=now)
        assert len([line for line in shown if "allow_changed" not in line]) == len(listed)

    def test_the_refusal_names_the_door(self) -> None:
        door = "go on with checkpoint.allow_changed: [{}], which keeps the moments"
        for sections, key in (
            ({"optimizer": {"kind": "adamw", "lr": 0.5}}, "optimizer.lr"),
            ({"scheduler": {"kind": "cosine"}}, "scheduler"),
        ):
            for text in differences(full(), full(**sections)):
                assert door.format(key) in text
        (seed,) = differences(full(), full(run={"seed": 7}))
        assert "start afresh" in seed
        with pytest.raises(ConfigError, match="not a key that a resumed run can change"):
            full(checkpoint={"allow_changed": ["optimizer.kind"]})

    @pytest.mark.parametrize(
        ("optimizer", "scheduler", "left"),
        [
            ({"lr": 0.5}, {}, "optimizer.lr"),
            ({"betas": [0.8, 0.999]}, {}, "optimizer.betas"),
            ({}, {"warmup_steps": 7}, "scheduler.warmup_steps"),
            ({"weight_decay": 0.5}, {}, ""),
        ],
    )
    def test_an_average_of_all_steps_keeps_what_it_follows_from(
        self, optimizer: dict[str, Any], scheduler: dict[str, Any], left: str
    ) -> None:
        kind = {"kind": "schedule_free"}
        constant = {"kind": "constant"}
        allowed = ["optimizer.lr", "optimizer.betas", "optimizer.weight_decay", "scheduler"]
        now = full(
            optimizer={**kind, **optimizer},
            scheduler={**constant, **scheduler},
            checkpoint={"allow_changed": allowed},
        )
        found = differences(full(optimizer=kind, scheduler=constant), now)
        assert [text.partition(" = ")[0] for text in found] == ([left] if left else [])
        assert all("start afresh" in text for text in found)

    def test_a_key_that_is_gone_has_no_value(self) -> None:
        (text,) = differences(full(deepspeed={"prescale_gradients": True}), full())
        assert text.startswith(
            "deepspeed.prescale_gradients: the checkpoint runs/x/checkpoints/global_step10 was trained with true"
        )

    def test_another_kind_shows_every_key_of_both(self) -> None:
        found = differences(full(), full(optimizer={"kind": "sgd"}))
        keys = [text.split(":")[0].split(" ")[0] for text in found]
        assert {"optimizer.kind", "optimizer.betas", "optimizer.momentum"} <= set(keys)
        assert keys == sorted(keys)

    def test_a_value_that_became_a_section(self) -> None:
        before = {"model": {"args": {"norm": "batch"}}}
        now = {"model": {"args": {"norm": {"kind": "batch"}}}}
        assert [text.split(":")[0] for text in differences(before, now)] == [
            "model.args.norm",
            "model.args.norm.kind = batch",
        ]

    def test_left_out_and_null_are_the_same(self) -> None:
        assert differences({"zero": {"new_key": None, "empty": {}}}, {"zero": {}}) == []

    @pytest.mark.parametrize(
        ("before", "now"), [(1, 1.0), (1e-3, 0.001), (5e8, 500_000_000), (1e16, 10**16)]
    )
    def test_numbers_are_compared_as_numbers(self, before: float, now: float) -> None:
        assert (
            differences(
                {"optimizer": {"x": before, "y": [before]}}, {"optimizer": {"x": now, "y": [now]}}
            )
            == []
        )

    @pytest.mark.parametrize(
        ("before", "now", "expected"),
        [
            ("torch.optim.sgd.SGD", "torch.optim.adam.Adam", ["optimizer.object"]),
            ("functools.partial", "torch.optim.sgd.SGD", []),  # an older release's
        ],
    )
    def test_another_optimizer_object_is_refused(
        self, before: str, now: str, expected: list[str]
    ) -> None:
        sections = [{"optimizer": {"object": name, "args": {}}} for name in (before, now)]
        keys = [text.split(" ")[0] for text in differences(*sections)]
        assert [key for key in keys if key.startswith("optimizer")] == expected

    def test_data_of_another_size_is_refused(self) -> None:
        with pytest.raises(ConfigError) as caught:
            check_resumable(saved(full()), config=full(), global_size=8, steps_per_epoch=5, data={})
        assert [problem.kind for problem in caught.value.problems] == ["resume-data-differs"]
        assert "its epochs had 4 steps and now they have 5" in str(caught.value)

    def test_other_data_is_allowed_unless_it_is_a_stream(self) -> None:
        now = full(checkpoint={"allow_changed": ["data"]})
        options: dict[str, Any] = {"config": now, "global_size": 8, "steps_per_epoch": 5}
        check_resumable(saved(full()), **options, data={"num_train_samples": 40})
        with pytest.raises(ConfigError, match="a stream has a place only in itself"):
            check_resumable(saved(full(), lanes=4), **options, data={"lanes": 4})

    def test_other_steps_are_refused_together_with_what_else_differs(self) -> None:
        with pytest.raises(ConfigError) as caught:
            check_resumable(
                saved(full()),
                config=full(run={"seed": 1}),
                global_size=16,
                steps_per_epoch=2,
                data={},
            )
        assert [problem.kind for problem in caught.value.problems] == [
            "resume-global-size",
            "resume-config-differs",
        ]
        assert "was trained with 8 samples per step" in str(caught.value)
        assert "set batch.global_size: 8" in str(caught.value)


def test_what_rank_0_finds_travels_to_the_other_ranks() -> None:
    """`from_rank0` pickles the checkpoint to start from, or the reason why there is none."""
    start = saved(full())
    assert pickle.loads(pickle.dumps(start)) == start
    with pytest.raises(ConfigError) as caught:
        check_resumable(
            start, config=full(run={"seed": 3}), global_size=16, steps_per_epoch=11, data={}
        )
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.problems, copy.exit_code) == (
        str(caught.value),
        caught.value.problems,
        78,
    )
    storage = pickle.loads(pickle.dumps(StorageError("no space [checkpoint-not-written]")))
    assert (str(storage), storage.exit_code) == ("no space [checkpoint-not-written]", 74)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc.", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(args=st.dictionaries(st.text("ab", min_size=1, max_size=2), VALUES, max_size=3))
def test_any_saved_value_equals_itself_when_it_is_read_back(args: dict[str, Any]) -> None:
    assert differences({"model": {"args": args}}, {"model": {"args": args}}) == []
