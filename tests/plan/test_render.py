"""Every decided value is in the DeepSpeed JSON, under DeepSpeed's own words; nothing is left to
"auto" or null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.config.load import config_from_values
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.plan.render import render

BATCH = {"global_size": 120}  # 11 steps per epoch of the digits


def rendered(values: Mapping[str, Any], devices: int = 2) -> dict[str, Any]:
    """The DeepSpeed JSON of a config, after one trip through text."""
    plan = make_plan(
        config_from_values({"batch": BATCH, **values}),
        Cluster(devices_per_host=devices, device="cuda"),
    )
    written: dict[str, Any] = json.loads(json.dumps(render(plan), allow_nan=False))
    return written


def test_batch_and_clipping() -> None:
    found = rendered(
        {"batch": {"global_size": 120, "accumulation_steps": 3}, "training": {"clip_grad_norm": 0}},
        4,
    )
    assert {
        key: found[key]
        for key in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    } == {
        "train_batch_size": 120,
        "train_micro_batch_size_per_gpu": 10,
        "gradient_accumulation_steps": 3,
    }
    assert found["gradient_clipping"] == 0.0
    assert rendered({})["gradient_clipping"] == 1.0


def test_what_deepspeed_would_cost_or_print_on_every_step_is_off() -> None:
    found = rendered({})
    assert found["timers"] == {"throughput": {"enabled": False, "synchronized": False}}
    assert found["wall_clock_breakdown"] is False
    assert found["steps_per_print"] > 10**6


OFF = {"enabled": False}


@pytest.mark.parametrize(
    ("precision", "sections"),
    [
        ({"dtype": "fp32"}, {"fp16": OFF, "bf16": OFF, "torch_autocast": OFF}),
        ({"dtype": "fp32", "matmul": "high"}, {"fp16": OFF, "bf16": OFF, "torch_autocast": OFF}),
        (
            {"dtype": "fp16", "loss_scale": 128},
            {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 128.0,
                    "initial_scale_power": 16,
                    "loss_scale_window": 1000,
                    "hysteresis": 2,
                    "consecutive_hysteresis": False,
                    "min_loss_scale": 1.0,
                },
                "bf16": OFF,
                "torch_autocast": OFF,
            },
        ),
        (
            {"dtype": "bf16"},
            {
                "fp16": OFF,
                "bf16": {"enabled": True, "check_grad_overflow": False},
                "torch_autocast": OFF,
            },
        ),
        (
            {"dtype": "autocast"},
            {"fp16": OFF, "bf16": OFF, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        ),
        (
            {
                "dtype": "autocast",
                "compute_dtype": "fp16",
                "lower_precision_safe_modules": ["torch.nn.Linear"],
            },
            {
                "fp16": OFF,
                "bf16": OFF,
                "torch_autocast": {
                    "enabled": True,
                    "dtype": "float16",
                    "lower_precision_safe_modules": ["torch.nn.Linear"],
                },
            },
        ),
    ],
    ids=str,
)
def test_precision(precision: dict[str, Any], sections: dict[str, Any]) -> None:
    found = rendered({"precision": precision})
    assert {key: found[key] for key in ("fp16", "bf16", "torch_autocast")} == sections


COMMON = {
    "reduce_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "round_robin_gradients",
}
STAGE3 = {
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save",
}


STAGES_1_2 = COMMON | {"allgather_bucket_size"}


@pytest.mark.parametrize(
    ("stage", "keys"), [(0, set()), (1, STAGES_1_2), (2, STAGES_1_2), (3, COMMON | STAGE3)]
)
def test_zero_stages(stage: int, keys: set[str]) -> None:
    found = rendered({"zero": {"stage": stage}})["zero_optimization"]
    assert found["stage"] == stage
    assert set(found) == {"stage"} | keys
    if keys:
        assert (
            found["reduce_bucket_size"]
            == found.get("allgather_bucket_size", 50_000_000)
            == 50_000_000
        )
        assert found["overlap_comm"] is (stage == 3)


def test_overlap_is_as_asked() -> None:
    assert (
        rendered({"zero": {"stage": 2, "overlap_comm": True}})["zero_optimization"]["overlap_comm"]
        is True
    )
    assert (
        rendered({"zero": {"stage": 3, "overlap_comm": False}})["zero_optimization"]["overlap_comm"]
        is False
    )


def test_offload() -> None:
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
    }
    found = rendered({"zero": zero})["zero_optimization"]
    assert found["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 1.0}
    assert found["offload_param"] == {
        "device": "nvme",
        "nvme_path": "/nvme",
        "pin_memory": True,
        "buffer_count": 5,
        "buffer_size": 100_000_000,
        "max_in_cpu": 1_000_000_000,
    }
    nvme = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pin_memory": False},
    }
    assert rendered({"zero": nvme})["zero_optimization"]["offload_optimizer"] == {
        "device": "nvme",
        "nvme_path": "/nvme",
        "pin_memory": False,
        "buffer_count": 4,
        "pipeline_read": False,
        "pipeline_write": False,
    }


ADAM = {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8}


@pytest.mark.parametrize(
    ("optimizer", "name", "params", "untested"),
    [
        (
            {"kind": "adamw", "implementation": "torch"},
            "AdamW",
            {**ADAM, "weight_decay": 0.01, "torch_adam": True, "adam_w_mode": True},
            False,
        ),
        # DeepSpeed's "Adam" is AdamW unless adam_w_mode says otherwise
        (
            {"kind": "adam"},
            "Adam",
            {
                **ADAM,
                "weight_decay": 0.0,
                "torch_adam": True,
                "adam_w_mode": False,
                "fused": True,
            },
            False,
        ),
        (
            {"kind": "adamw", "implementation": "deepspeed", "lr": 1},
            "AdamW",
            {**ADAM, "lr": 1.0, "weight_decay": 0.01, "torch_adam": False, "adam_w_mode": True},
            False,
        ),
        (
            {"kind": "adam", "implementation": "deepspeed"},
            "Adam",
            {**ADAM, "weight_decay": 0.0, "torch_adam": False, "adam_w_mode": False},
            False,
        ),
        (
            {"kind": "sgd", "momentum": 0.9, "nesterov": True},
            "SGD",
            {"lr": 0.01, "weight_decay": 0.0, "momentum": 0.9, "nesterov": True},
            True,
        ),
        ({"kind": "adagrad"}, "Adagrad", {"lr": 0.01, "weight_decay": 0.0, "eps": 1e-10}, True),
        ({"kind": "lion"}, "Lion", {"lr": 1e-4, "weight_decay": 0.0, "betas": [0.9, 0.99]}, True),
    ],
    ids=str,
)
def test_optimizers(
    optimizer: dict[str, Any], name: str, params: dict[str, Any], untested: bool
) -> None:
    found = rendered({"optimizer": optimizer})
    assert found["optimizer"] == {"type": name, "params": params}
    assert found["zero_allow_untested_optimizer"] is untested


@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize(
    ("device", "offload", "is_fused"),
    [("cuda", "none", True), ("cuda", "cpu", False), ("cpu", "none", False)],
)
def test_torchs_fused_kernel_steps_weights_on_cuda(
    device: Any, offload: str, is_fused: bool, kind: str
) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": offload}}
    config = config_from_values({"optimizer": {"kind": kind}, "zero": zero})
    plan = make_plan(config, Cluster(devices_per_host=1, device=device))
    assert ("fused" in render(plan)["optimizer"]["params"]) is is_fused


@pytest.mark.parametrize("offload", [True, False])
def test_an_optimizer_of_the_user_is_not_in_the_json(offload: bool) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu" if offload else "none"}}
    found = rendered({"optimizer": {"target": "torch.optim:RMSprop"}, "zero": zero})
    assert "optimizer" not in found
    assert found["zero_allow_untested_optimizer"] is True
    assert found["zero_force_ds_cpu_optimizer"] is not offload


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({"kind": "constant"}, None),
        ({"kind": "cosine", "warmup_steps": 3}, None),
        (
            {"kind": "warmup", "warmup_steps": 3},
            {
                "type": "WarmupLR",
                "params": {
                    "warmup_min_lr": 0.0,
                    "warmup_max_lr": 0.001,
                    "warmup_num_steps": 3,
                    "warmup_type": "log",
                },
            },
        ),
        (
            {"kind": "warmup_decay", "warmup_steps": 3, "max_lr": 0.5, "curve": "linear"},
            {
                "type": "WarmupDecayLR",
                "params": {
                    "total_num_steps": 22,
                    "warmup_min_lr": 0.0,
                    "warmup_max_lr": 0.5,
                    "warmup_num_steps": 3,
                    "warmup_type": "linear",
                },
            },
        ),
        (
            {"kind": "warmup_cosine", "warmup_steps": 3, "total_steps": 9},
            {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": 9,
                    "warmup_min_ratio": 0.0,
                    "warmup_num_steps": 3,
                    "cos_min_ratio": 1e-4,
                    "warmup_type": "log",
                },
            },
        ),
        (
            {"kind": "one_cycle", "min_lr": 0.1, "max_lr": 1, "first_steps": 7},
            {
                "type": "OneCycle",
                "params": {
                    "cycle_min_lr": 0.1,
                    "cycle_max_lr": 1.0,
                    "decay_lr_rate": 0.0,
                    "cycle_first_step_size": 7,
                    "cycle_second_step_size": 7,
                    "decay_step_size": 0,
                    "cycle_momentum": False,
                    "cycle_min_mom": 0.8,
                    "cycle_max_mom": 0.9,
                },
            },
        ),
        (
            {"kind": "lr_range_test"},
            {
                "type": "LRRangeTest",
                "params": {
                    "lr_range_test_min_lr": 0.001,
                    "lr_range_test_step_size": 2000,
                    "lr_range_test_step_rate": 1.0,
                    "lr_range_test_staircase": False,
                },
            },
        ),
    ],
    ids=str,
)
def test_schedules(scheduler: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert (
        rendered({"scheduler": scheduler, "training": {"max_epochs": 2}}).get("scheduler")
        == expected
    )


def test_the_rate_of_a_warm_up_is_the_optimizers_wherever_it_stands() -> None:
    optimizer = {"target": "torch.optim:SGD", "args": {"lr": 0.25}}
    found = rendered({"optimizer": optimizer, "scheduler": {"kind": "warmup", "warmup_steps": 2}})
    assert found["scheduler"]["params"]["warmup_max_lr"] == 0.25


@pytest.mark.parametrize("kind", ["warmup_decay", "warmup_cosine"])
def test_a_schedule_without_an_end_is_refused(kind: str) -> None:
    values = {"data": {"target": "a:b"}, "scheduler": {"kind": kind, "warmup_steps": 2}}
    with pytest.raises(ConfigError) as caught:
        rendered(values)
    assert str(caught.value) == (
        "scheduler.total_steps: the schedule needs the number of steps, and the size of the data is only known when "
        "it is read; set training.max_steps, scheduler.total_steps or data.train_samples [run-length-unknown]"
    )
    for fix in ({"training": {"max_steps": 9}}, {"data": {"target": "a:b", "train_samples": 1200}}):
        assert "scheduler" in rendered({**values, **fix})


def test_further_deepspeed_keys_pass_through() -> None:
    section = {"flops_profiler": {"enabled": True, "profile_step": 3}, "wall_clock_breakdown": True}
    found = rendered({"deepspeed": section})
    assert {key: found[key] for key in section} == section


def test_keys_that_a_section_decides_do_not_pass() -> None:
    with pytest.raises(ConfigError, match="section-clash"):
        rendered({"deepspeed": {"zero_optimization": {"stage": 1}}})


DEVICE = st.sampled_from(["none", "cpu", "nvme"])
PRECISION = st.one_of(
    st.fixed_dictionaries(
        {"dtype": st.just("fp32")}, optional={"matmul": st.sampled_from(["highest", "high"])}
    ),
    st.fixed_dictionaries({"dtype": st.just("fp16")}, optional={"hysteresis": st.integers(1, 9)}),
    st.fixed_dictionaries(
        {"dtype": st.just("bf16")}, optional={"check_grad_overflow": st.booleans()}
    ),
    st.fixed_dictionaries(
        {"dtype": st.just("autocast")},
        optional={
            "lower_precision_safe_modules": st.none() | st.lists(st.sampled_from(["a.B", "c.D"]))
        },
    ),
)
OPTIMIZER = st.one_of(
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["adamw", "adam"])},
        optional={"implementation": st.sampled_from(["torch", "deepspeed"]), "lr": st.floats(0, 1)},
    ),
    st.fixed_dictionaries({"kind": st.sampled_from(["sgd", "adagrad", "lion"])}),
    st.just({"target": "a:b", "args": {"lr": 0.1, "none": None, "word": "auto"}}),
)
SCHEDULER = st.one_of(
    st.fixed_dictionaries({"kind": st.sampled_from(["constant", "cosine", "lr_range_test"])}),
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["warmup", "warmup_decay"]), "warmup_steps": st.integers(2, 5)},
        optional={
            "max_lr": st.none() | st.floats(0, 1),
            "curve": st.sampled_from(["log", "linear"]),
        },
    ),
    st.fixed_dictionaries(
        {"kind": st.just("warmup_cosine"), "warmup_steps": st.integers(2, 5)},
        optional={"total_steps": st.none() | st.integers(6, 99)},
    ),
    st.fixed_dictionaries(
        {"kind": st.just("one_cycle"), "min_lr": st.floats(0, 0.4), "max_lr": st.floats(0.5, 1)},
        optional={"second_steps": st.none() | st.integers(1, 9)},
    ),
)


@st.composite
def zeros(draw: st.DrawFn) -> dict[str, Any]:
    stage = draw(st.integers(0, 3))
    places = {0: ["none"], 1: ["none", "cpu"], 2: ["none", "cpu"], 3: ["none", "cpu", "nvme"]}[
        stage
    ]

    def offload(devices: list[str]) -> dict[str, Any]:
        device = draw(st.sampled_from(devices))
        return {"device": device, **({"nvme_path": "/nvme"} if device == "nvme" else {})}

    params = offload(places) if stage == 3 else {"device": "none"}
    overlap = draw(st.none() | st.booleans())
    return {
        "stage": stage,
        "offload_optimizer": offload(places),
        "offload_param": params,
        "overlap_comm": overlap,
    }


CONFIGS = st.fixed_dictionaries(
    {
        "batch": st.just(BATCH),
        "precision": PRECISION,
        "zero": zeros(),
        "optimizer": OPTIMIZER,
        "scheduler": SCHEDULER,
        "training": st.fixed_dictionaries(
            {}, optional={"max_steps": st.none() | st.integers(6, 99)}
        ),
        "deepspeed": st.fixed_dictionaries(
            {}, optional={"dump_state": st.booleans(), "comms_logger": st.just({"debug": False})}
        ),
    }
)


@pytest.mark.slow
@given(CONFIGS)
def test_no_rendering_holds_auto_or_null(values: dict[str, Any]) -> None:
    found = rendered(values)
    assert [path for path, value in leaves(found) if value is None or value == "auto"] == []
    assert list(found)[:3] == [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}.{index}")
    else:
        yield path, value


@pytest.mark.parametrize(
    ("precision", "accumulation", "devices", "expected"),
    [
        ({"dtype": "bf16"}, 8, 8, (None, None)),
        ({"dtype": "bf16"}, 9, 8, ("fp32", None)),
        ({"dtype": "bf16"}, 1, 9, (None, "fp32")),
        ({"dtype": "fp16"}, 9, 9, ("fp32", "fp32")),
        (
            {"dtype": "bf16", "grad_accumulation": "bf16", "grad_reduction": "bf16"},
            9,
            9,
            (None, None),
        ),
        (
            {"dtype": "bf16", "grad_accumulation": "fp32", "grad_reduction": "fp32"},
            1,
            1,
            ("fp32", "fp32"),
        ),
        ({"dtype": "fp32"}, 9, 9, (None, None)),
    ],
)
def test_long_sums_of_half_precision_are_fp32(
    precision: dict[str, Any],
    accumulation: int,
    devices: int,
    expected: tuple[str | None, str | None],
) -> None:
    values = {
        "precision": precision,
        "zero": {"stage": 2},
        "batch": {"micro_size": 1, "accumulation_steps": accumulation},
    }
    ds_config = rendered(values, devices)
    found = (
        ds_config.get("data_types", {}).get("grad_accum_dtype"),
        ds_config.get("communication_data_type"),
    )
    assert found == expected


def test_further_data_types_stand_beside_the_sums() -> None:
    values = {
        "precision": {"dtype": "bf16", "grad_accumulation": "fp32"},
        "zero": {"stage": 2},
        "deepspeed": {
            "data_types": {"keep_in_fp32_modules": "auto"},
            "communication_data_type": "fp32",
        },
    }
    assert rendered(values)["data_types"] == {
        "grad_accum_dtype": "fp32",
        "keep_in_fp32_modules": "auto",
    }
    assert rendered(values)["communication_data_type"] == "fp32"


UNTIED = {"kind": "gpt", "size": "tiny", "tie_embeddings": False}


@pytest.mark.parametrize(
    ("changed", "is_noted"),
    [
        ({"parallel": {"pipe": 2}}, True),
        ({"training": {"loss_tile": 0}}, True),
        ({}, False),  # its loss is in tiles
        # the product itself is filled up
        ({"model": {"kind": "gpt"}, "training": {"loss_tile": 0}}, False),
        ({"model": UNTIED | {"vocab_size": 320}, "training": {"loss_tile": 0}}, False),
        ({"precision": {"dtype": "fp32"}, "training": {"loss_tile": 0}}, False),
    ],
)
def test_rows_that_gpus_multiply_slowly_are_noted(changed: dict[str, Any], is_noted: bool) -> None:
    values: dict[str, Any] = {
        "model": UNTIED,
        "task": {"kind": "causal_lm"},
    }
    values |= {
        "data": {"kind": "text", "sequence_length": 32},
        "precision": {"dtype": "bf16"},
        "zero": {"stage": 1},
    }
    for device in ("cpu", "cuda"):
        cluster = Cluster(devices_per_host=2, device=device)  # type: ignore[arg-type]
        found = [
            one
            for one in make_plan(config_from_values(values | changed), cluster).findings
            if "slow" in one.kind
        ]
        assert [(one.kind, one.severity) for one in found] == [("slow-vocabulary", "note")] * (
            is_noted and device == "cuda"
        )
        assert all("set it to 320" in str(one) for one in found)


def test_a_long_sum_that_deepspeed_rounds_is_noted() -> None:
    values = {"precision": {"dtype": "bf16"}, "batch": {"micro_size": 1, "accumulation_steps": 9}}
    findings = make_plan(config_from_values(values), Cluster(devices_per_host=1)).findings
    assert [found.kind for found in findings] == ["long-sum-in-half-precision"]
