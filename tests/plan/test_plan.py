"""The length of a run, and what a plan says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from framework.config.load import Source, config_from_values
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import Length, Plan, default_cluster, make_plan

TARGET = {"target": "a:b"}


def plan_of(values: dict[str, Any], devices: int = 1, **rest: Any) -> Plan:
    return make_plan(config_from_values(values), Cluster(devices_per_host=devices), **rest)


def problems_of(values: dict[str, Any], devices: int = 1, **rest: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_of(values, devices, **rest)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("values", "num_samples", "length"),
    [
        # 1,437 digits = 11 batches of 120 and 117 left
        ({}, None, Length(11, 11, 1437, 117)),
        ({"training": {"max_epochs": 3}}, None, Length(11, 33, 1437, 117)),
        ({"training": {"max_epochs": 3, "max_steps": 5}}, None, Length(11, 5, 1437, 117)),
        ({"data": TARGET}, None, Length(None, None, None, 0)),
        ({"data": TARGET, "training": {"max_steps": 5}}, None, Length(None, 5, None, 0)),
        ({"data": {**TARGET, "train_samples": 240}}, None, Length(2, 2, 240, 0)),
        ({"data": {**TARGET, "train_samples": 240}}, 360, Length(3, 3, 360, 0)),
    ],
)
def test_length(values: dict[str, Any], num_samples: int | None, length: Length) -> None:
    assert (
        plan_of({"batch": {"global_size": 120}, **values}, num_train_samples=num_samples).length
        == length
    )


def test_data_smaller_than_a_batch_is_refused_with_a_size_that_fits() -> None:
    assert problems_of({"batch": {"global_size": 2048}}, 8) == [
        "batch.global_size = 2048: the training data has only 1437 samples, not enough for one step; "
        "set batch.global_size: 1432 or less [dataset-smaller-than-batch]"
    ]
    assert plan_of({"batch": {"global_size": 1432}}, 8).length.steps_per_epoch == 1
    (line,) = problems_of({"batch": {"micro_size": 2000}})
    assert "use fewer devices or smaller micro-batches [dataset-smaller-than-batch]" in line


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stream_that_is_known_by_name_needs_a_length(streaming: bool) -> None:
    data = {"kind": "huggingface", "path": "rows.csv", "streaming": streaming}
    stated = "training.max_steps: the training data is a stream, which has no length; set it; or data.train_samples"
    values = {"data": data, "model": {"kind": "mlp"}}
    if streaming:
        (line,) = problems_of(values)
        assert stated in line
    for further in ({"training": {"max_steps": 5}}, {"data": data | {"train_samples": 320}}):
        assert plan_of(values | further).length.total_steps
    by_epochs = plan_of(values | {"training": {"max_steps": 5}, "checkpoint": {"every_epochs": 1}})
    with pytest.raises(
        ConfigError,
        match=r"checkpoint\.every_epochs = 1: the training data is a stream.*set every_steps",
    ):
        by_epochs.with_data(None, Source())
    assert by_epochs.with_data(320, Source()).length.steps_per_epoch


def test_no_data_at_all_is_refused() -> None:
    (line,) = problems_of({}, num_train_samples=0)
    assert "has only 0 samples" in line


def test_a_warm_up_longer_than_the_run_is_a_warning() -> None:
    values = {"batch": {"global_size": 120}, "scheduler": {"kind": "cosine", "warmup_steps": 11}}
    (finding,) = plan_of(values).findings
    assert (finding.kind, finding.severity) == ("warmup-too-long", "warning")
    assert plan_of({**values, "training": {"max_epochs": 2}}).findings == ()


@pytest.mark.parametrize(
    ("ema", "kind"),
    [
        ({"decay": 0.999}, "ema-longer-than-run"),  # 0.999 ** 220 is 0.8
        ({"decay": 0.99}, None),
        ({"decay": 0.99, "every_steps": 10}, "ema-longer-than-run"),
        ({"decay": 0.99, "start_step": 200}, "ema-longer-than-run"),
        ({"decay": 0.9, "start_step": 200}, None),
        ({"decay": 0.9, "start_step": 219}, "ema-longer-than-run"),
        ({"decay": 0.9, "start_step": 220}, "ema-never-starts"),
    ],
)
def test_an_average_of_the_first_weights_is_a_warning(
    ema: dict[str, Any], kind: str | None
) -> None:
    length = {"batch": {"global_size": 120}}
    found = plan_of({**length, "training": {"max_steps": 220, "ema": ema}}).findings
    assert [(finding.kind, finding.severity) for finding in found] == (
        [(kind, "warning")] if kind else []
    )
    for finding in found:
        if mended := re.search(r"training\.ema\.decay: ([0-9.]+)", finding.fix):
            assert (
                plan_of(
                    {
                        **length,
                        "training": {"max_steps": 220, "ema": ema | {"decay": float(mended[1])}},
                    }
                ).findings
                == ()
            )


def test_all_problems_come_at_once_and_warnings_stay_behind() -> None:
    lines = problems_of(
        {
            "batch": {"global_size": 7},
            "optimizer": {"kind": "sgd", "nesterov": True},
            "zero": {"sub_group_size": 5},
        },
        2,
    )
    assert [line.rpartition("[")[2] for line in lines] == [
        "batch-not-divisible]",
        "nesterov-needs-momentum]",
    ]


@pytest.mark.parametrize(
    ("values", "devices"),
    [
        ({}, 1),
        ({"run": {"world_size": 4}}, 4),
        ({"batch": {"global_size": 64, "micro_size": 8, "accumulation_steps": 2}}, 4),
        ({"batch": {"global_size": 65, "micro_size": 8, "accumulation_steps": 2}}, 1),
        ({"batch": {"global_size": 4, "micro_size": 8, "accumulation_steps": 2}}, 1),
    ],
)
def test_the_cluster_that_a_config_implies(values: dict[str, Any], devices: int) -> None:
    assert default_cluster(config_from_values(values)) == Cluster(devices_per_host=devices)


def test_a_plan_is_plain_json() -> None:
    plan = plan_of({"zero": {"sub_group_size": 5}}, 2)
    written = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert written["cluster"] == {
        "num_hosts": 1,
        "devices_per_host": 2,
        "device": "unknown",
        "world_size": 2,
    }
    assert written["layout"]["global_size"] == 64
    assert written["findings"][0]["kind"] == "inert-at-stage"
    assert written["findings"][0]["text"].endswith("[inert-at-stage]")


@pytest.mark.parametrize("device", ["cpu", "cuda", "unknown"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"precision": {"dtype": "bf16"}, "zero": {"stage": 0}},
        {"precision": {"dtype": "fp16"}, "zero": {"stage": 1}},
        {"training": {"max_steps": 5}, "scheduler": {"kind": "cosine", "warmup_steps": 50}},
        {
            "deepspeed": {"zero_optimization": {"zero_quantized_weights": True}},
            "zero": {"stage": 3},
        },
        {
            "model": {"kind": "gpt", "size": "tiny"},
            "data": {"kind": "text"},
            "task": {"kind": "causal_lm"},
            "precision": {"dtype": "bf16"},
        },
    ],
)
def test_a_device_that_becomes_known_gives_the_plan_that_is_made_for_it(
    values: dict[str, Any], device: Any
) -> None:
    config = config_from_values({"batch": {"global_size": 8}, **values})
    before = make_plan(config, Cluster(devices_per_host=2))
    try:
        expected: Plan | list[str] = make_plan(config, Cluster(devices_per_host=2, device=device))
    except ConfigError as error:
        expected = [str(problem) for problem in error.problems]
    try:
        found: Plan | list[str] = before.on_device(device, Source())
    except ConfigError as error:
        found = [str(problem) for problem in error.problems]
    assert found == expected
