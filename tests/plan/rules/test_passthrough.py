"""What passes through `deepspeed:`, what a typed section decides, and what a run cannot have."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from deepspeed_lint.keys import load_table
from framework.config.deepspeed_words import OWNED, PASSED_THROUGH, SHARED, TYPED
from framework.config.load import config_from_values
from framework.errors import ConfigError, Problem
from framework.imports.deepspeed_reader import dotted_leaves as leaves
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.plan.render import render
from framework.plan.rules import passthrough as passed_keys
from framework.plan.rules.passthrough import REMOVED, not_in_a_run

ON_4 = Cluster(devices_per_host=4, device="cuda")
NOT_IN = passed_keys._NOT_IN_A_RUN


def problems(values: dict[str, Any]) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        make_plan(config_from_values(values), ON_4)
    return list(caught.value.problems)


def rendered(values: dict[str, Any]) -> dict[str, Any]:
    return render(make_plan(config_from_values(values), ON_4))


def test_a_key_has_one_owner_and_every_key_has_one() -> None:
    groups = [
        set(PASSED_THROUGH),
        set(OWNED),
        set(REMOVED),
        {path for path in NOT_IN if "." not in path},
    ]
    for number, group in enumerate(groups):
        for other in groups[number + 1 :]:
            assert not group & other
    assert set(load_table().children()) == set.union(*groups), (
        "no key of DeepSpeed is called unknown"
    )


@pytest.mark.parametrize("path", [*TYPED, *(path for path in NOT_IN if path != "allgather_size")])
def test_every_key_that_is_named_is_one_of_deepspeeds(path: str) -> None:
    variant = {"optimizer": None, "scheduler": None}.get(path.partition(".")[0])
    known = load_table().get(path, variant)
    assert known is not None or path in ("optimizer.params.nesterov", "optimizer.params.momentum")


RUNS: list[dict[str, Any]] = [
    {
        "optimizer": {"kind": kind},
        "zero": zero,
        "precision": precision,
        "scheduler": scheduler,
        "parallel": parallel,
    }
    for kind, zero, precision, scheduler, parallel in [
        (
            "adamw",
            {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            {"dtype": "bf16"},
            {"kind": "warmup", "warmup_steps": 2},
            {},
        ),
        (
            "sgd",
            {"stage": 2},
            {"dtype": "fp16"},
            {"kind": "one_cycle", "min_lr": 0.1, "max_lr": 1.0},
            {},
        ),
        (
            "lamb",
            {"stage": 0},
            {"dtype": "autocast", "lower_precision_safe_modules": ["a.B"]},
            {"kind": "lr_range_test", "min_lr": 0.1},
            {},
        ),
        (
            "lion",
            {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/n"},
                "offload_param": {"device": "nvme", "nvme_path": "/n"},
            },
            {"dtype": "fp32"},
            {"kind": "warmup_cosine", "warmup_steps": 2, "total_steps": 9},
            {},
        ),
        (
            "adagrad",
            {"stage": 1},
            {"dtype": "fp32"},
            {"kind": "warmup_decay", "warmup_steps": 2, "total_steps": 9},
            {"pipe": 2},
        ),
    ]
]


@pytest.mark.parametrize("values", RUNS, ids=lambda values: str(values["optimizer"]["kind"]))
def test_all_that_rendering_writes_is_refused_a_second_time(values: dict[str, Any]) -> None:
    """The table of typed keys cannot fall behind the rendering."""
    written = {
        path: value for path, value in leaves(rendered(values)) if path.partition(".")[0] in SHARED
    }
    assert written
    for path, value in written.items():
        passed: Any = value
        for name in reversed(path.split(".")):
            passed = {name: passed}
        assert [(found.kind, found.key) for found in problems(values | {"deepspeed": passed})] == [
            ("section-clash", f"deepspeed.{path}")
        ]


@pytest.mark.parametrize(
    ("values", "passed"),
    [
        (
            {"zero": {"stage": 3}},
            {"zero_optimization": {"zero_hpz_partition_size": 2, "zero_quantized_weights": True}},
        ),
        ({"zero": {"stage": 3}}, {"zero_optimization": {"leaf_module": {"classes": ["a.B"]}}}),
        (
            {"zero": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}},
            {"zero_optimization": {"offload_optimizer": {"fast_init": True}}},
        ),
        ({"precision": {"dtype": "bf16"}}, {"bf16": {"immediate_grad_update": True}}),
        (
            {"optimizer": {"kind": "adamw", "implementation": "deepspeed"}},
            {"optimizer": {"params": {"bias_correction": False}}},
        ),
        ({"optimizer": {"kind": "sgd"}}, {"optimizer": {"params": {"dampening": 0.1}}}),
        (
            {"scheduler": {"kind": "one_cycle", "min_lr": 0.1, "max_lr": 1.0}},
            {"scheduler": {"params": {"decay_mom_rate": 0.1}}},
        ),
        ({"parallel": {"pipe": 2}}, {"pipeline": {"use_reentrant": False}}),
        ({}, {"timers": {"throughput": {"enabled": True}}, "tensor_parallel": {"autotp_size": 1}}),
    ],
)
def test_further_keys_stand_beside_those_of_the_typed_section(
    values: dict[str, Any], passed: dict[str, Any]
) -> None:
    plain, both = (
        dict(leaves(rendered(values))),
        dict(leaves(rendered(values | {"deepspeed": passed}))),
    )
    further = dict(leaves(passed))
    # a section that nothing typed decides is the user's as a whole
    throughput = "timers.throughput.synchronized"
    assert (
        both
        == {
            key: value
            for key, value in plain.items()
            if key != throughput or "timers" not in passed
        }
        | further
    )


@pytest.mark.parametrize(
    ("values", "passed", "kind", "ours"),
    [
        ({}, {"bfloat16": {"enabled": True}}, "section-clash", "precision"),
        ({}, {"zero_optimization": True}, "section-clash", "zero"),
        (
            {},
            {"zero_optimization": {"max_live_parameters": 3}},
            "section-clash",
            "zero.stage3_max_live_parameters",
        ),
        (
            {},
            {"zero_optimization": {"cpu_offload": True}},
            "section-clash",
            "zero.offload_optimizer",
        ),
        (
            {"zero": {"stage": 2}},
            {"zero_optimization": {"offload_optimizer": {"cpuadam_cores_perc": 0.5}}},
            "section-clash",
            "zero.offload_optimizer",
        ),
        (
            {},
            {"scheduler": {"params": {"last_batch_iteration": 3}}},
            "section-clash",
            "scheduler.kind",
        ),
        (
            {"optimizer": {"target": "torch.optim:RMSprop"}},
            {"optimizer": {"params": {"alpha": 0.5}}},
            "section-clash",
            "optimizer.target",
        ),
        (
            {"optimizer": {"kind": "lamb"}},
            {"optimizer": {"params": {"bias_correction": False}}},
            "section-clash",
            "optimizer.bias_correction",
        ),
        (
            {"optimizer": {"kind": "lamb"}},
            {"optimizer": {"params": {"set_grad_none": False}}},
            "section-clash",
            "optimizer.kind",
        ),
        ({}, {"pipeline": {"use_reentrant": False}}, "section-clash", "parallel.pipe"),
        ({}, {"tensor_parallel": {"autotp_size": 2}}, "not-in-a-run", "divide the model itself"),
        (
            {"parallel": {"pipe": 2}},
            {"tensor_parallel": {"autotp_size": 2}},
            "not-in-a-run",
            "divide the model itself",
        ),
        ({}, {"expert_parallel": {"autoep_size": 2}}, "not-in-a-run", "divide the model itself"),
        ({}, {"sequence_parallel_size": 2}, "not-in-a-run", "divide the model itself"),
        ({}, {"data_parallel_size": 2}, "not-in-a-run", "layout"),
        (
            {"zero": {"stage": 2}},
            {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
            "section-clash",
            "zero.offload_optimizer.zenflow.topk_ratio",
        ),
        (
            {"zero": {"stage": 2}},
            {"zero_optimization": {"zenflow": {"overlap_step": True}}},
            "not-in-a-run",
            "which no checkpoint reaches",
        ),
        (
            {"zero": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
            {"zero_optimization": {"offload_optimizer": {"super_offload": True}}},
            "not-in-a-run",
            "on CUDA alone",
        ),
        (
            {"zero": {"stage": 1}},
            {"zero_optimization": {"parameter_alignment": True}},
            "not-in-a-run",
            "padded",
        ),
        (
            {"precision": {"dtype": "bf16"}, "zero": {"stage": 2}},
            {"bf16": {"bf16_master_weights_and_grads": True}},
            "section-clash",
            "precision.states",
        ),
        ({}, {"optimizer": {"params": {"amsgrad": True}}}, "not-in-a-run", "third moment"),
        ({}, {"checkpoint": {"load_universal": True}}, "not-in-a-run", "any layout"),
        ({}, {"checkpoint": {"writer": {"type": "FAST"}}}, "not-in-a-run", "verified"),
        ({}, {"autotuning": {"enabled": True}}, "not-in-a-run", "ends every rank"),
        ({}, {"dataloader_drop_last": True}, "not-in-a-run", "loader of the framework"),
        (
            {},
            {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}},
            "not-in-a-run",
            "curriculum",
        ),
        (
            {},
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
            "not-in-a-run",
            "curriculum",
        ),
        ({}, {"hybrid_engine": {"enabled": True}}, "not-in-a-run", "another engine"),
        ({}, {"gradient_cliping": 1.0}, "unknown-deepspeed-key", "reads no such key"),
        (
            {},
            {"gradient_allreduce_op": "sum"},
            "not-in-a-run",
            "as many times too large as there are ranks",
        ),
        (
            {},
            {"seq_parallel_communication_data_type": "fp16"},
            "not-in-a-run",
            "its own sequence parallelism",
        ),
        (
            {},
            {"weight_quantization": {"quantized_initialization": {"num_bits": 4}}},
            "not-in-a-run",
            "for inference",
        ),
        ({}, {"compile": {"deepcompile": True}}, "section-clash", "training.compile.backend"),
        ({}, {"compile": {"passes": ["z1"]}}, "section-clash", "training.compile.passes"),
        (
            {},
            {
                "data_efficiency": {
                    "enabled": True,
                    "data_routing": {"random_ltd": {"enabled": True}},
                }
            },
            "not-in-a-run",
            "random-LTD",
        ),
        (
            {},
            {
                "data_efficiency": {
                    "data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 512}}
                }
            },
            "not-in-a-run",
            "one learning rate",
        ),
        ({}, {"checkpoint": {"use_node_local_storage": True}}, "not-in-a-run", "one folder"),
        ({}, {"checkpoint": {"checkpoint_serialization": False}}, "not-in-a-run", "own writers"),
        (
            {},
            {"expert_parallel": {"enabled": True}},
            "not-in-a-run",
            "in place of the model's experts",
        ),
    ],
)
def test_what_cannot_pass_gives_the_reason(
    values: dict[str, Any], passed: dict[str, Any], kind: str, ours: str
) -> None:
    (found,) = problems(values | {"deepspeed": passed})
    assert found.kind == kind
    assert ours in found.reason
    assert found.key.startswith("deepspeed.")


@pytest.mark.parametrize("path", [path for path in NOT_IN if load_table().get(path) is not None])
def test_a_default_is_no_reason_to_refuse(path: str) -> None:
    key = load_table().get(path)
    assert key is not None
    if key.default is False or (key.default is True and path.startswith(("zero", "optimizer"))):
        assert not_in_a_run(path, key.default) is None
    assert not_in_a_run(path, 7) is not None


@pytest.mark.parametrize(
    "passed",
    [
        {"gradient_allreduce_op": "mean"},
        {"weight_quantization": {"enabled": False}},
        {"dataloader_drop_last": False},
        {"data_efficiency": {"enabled": False, "data_routing": {"enabled": False}}},
        {"comms_logger": {"enabled": True, "verbose": True}},
    ],
)
def test_what_is_as_good_as_left_out_passes_without_a_word(passed: dict[str, Any]) -> None:
    assert not make_plan(config_from_values({"deepspeed": passed}), ON_4).findings


QUANTIZED = {"zero_optimization": {"zero_quantized_gradients": True}}
HOSTS = Cluster(num_hosts=2, devices_per_host=4, device="cuda")


@pytest.mark.parametrize(
    ("passed", "cluster", "fix"),
    [
        ({"comms_logger": {"enabled": True}}, ON_4, "profile: {steps: 10-11, communication: true}"),
        (QUANTIZED, ON_4, "start it on several hosts"),
        (QUANTIZED, HOSTS, ""),
    ],
)
def test_what_does_nothing_as_the_run_is_has_a_note(
    passed: dict[str, Any], cluster: Cluster, fix: str
) -> None:
    plan = make_plan(config_from_values({"zero": {"stage": 3}, "deepspeed": passed}), cluster)
    assert [(one.kind, one.severity) for one in plan.findings] == [
        ("inert-in-a-run", "note")
    ] * bool(fix)
    assert all(fix in one.fix for one in plan.findings)


def test_what_the_note_on_counts_names_is_taken_by_the_plan() -> None:
    (note,) = make_plan(
        config_from_values({"deepspeed": {"comms_logger": {"enabled": True}}}), ON_4
    ).findings
    section = re.search(r"profile: \{.*?\}", note.fix)
    assert section is not None
    assert not make_plan(config_from_values(yaml.safe_load(section[0])), ON_4).findings


@pytest.mark.parametrize(
    "name",
    [
        "zero_quantized_weights",
        *QUANTIZED["zero_optimization"],
    ],
)
def test_what_is_quantized_needs_a_gpu_where_the_device_is_known(name: str) -> None:
    config = config_from_values(
        {"zero": {"stage": 3}, "deepspeed": {"zero_optimization": {name: True}}}
    )
    with pytest.raises(ConfigError) as caught:
        make_plan(config, Cluster(device="cpu"))
    assert [one.kind for one in caught.value.problems] == ["needs-cuda"]
    for device in ("cuda", "unknown"):
        make_plan(config, Cluster(num_hosts=2, device=device))  # type: ignore[arg-type]
