"""A DeepSpeed JSON becomes a run config that renders back to the same meaning, or a problem:
nothing is dropped in silence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepspeed_lint.facts import Facts
from deepspeed_lint.keys import load_table
from deepspeed_lint.text.document import Document, parse_document
from deepspeed_lint.text.hjson import parse_hjson
from framework.cli import main
from framework.config.load import config_from_values
from framework.errors import MISSING, ConfigError
from framework.imports.deepspeed import Imported, import_deepspeed, import_document, run_config_text
from framework.imports.deepspeed_reader import dotted_leaves as leaves
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.plan.render import render
from tests.places import ROOT

RENDERED = sorted((ROOT / "ds_configs/rendered").glob("*.json"))
ON_8 = Cluster(devices_per_host=8, device="cuda")
BATCH = {"train_batch_size": 64}
# Keys whose rendering differs from the file on purpose, as the module says.
OURS = (
    *("steps_per_print", "tensorboard", "csv_monitor", "wandb", "comet"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)


def rendered(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        json.dumps(render(make_plan(config_from_values(values), ON_8)))
    )
    return found


def imported(values: dict[str, Any]) -> Imported:
    found = import_document(Document("ds.json", BATCH | values))
    text = run_config_text(found, name="ds.json")
    assert parse_document(text, name="run.yaml").value == found.values, (
        "the text says what the values say"
    )
    return found


def import_or_problems(values: dict[str, Any]) -> Imported | list[str]:
    """The run config, or the kinds of what stands in its way."""
    try:
        return imported(values)
    except ConfigError as error:
        return [problem.kind for problem in error.problems]


def kinds(values: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        imported(values)
    return [(problem.key, problem.kind) for problem in caught.value.problems]


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.stem)
def test_shipped_renderings_come_back(path: Path) -> None:
    values = json.loads(path.read_text())
    # What DeepSpeed's JSON leaves open: how many stages, and which optimizer is handed to it.
    left_open: dict[str, Any] = {}
    if "pipeline" in values:
        samples_at_once = (
            values["train_micro_batch_size_per_gpu"] * values["gradient_accumulation_steps"]
        )
        replicas = values["train_batch_size"] // samples_at_once
        left_open["parallel"] = {"pipe": ON_8.devices_per_host // replicas}
    if "optimizer" not in values:
        left_open["optimizer"] = {"kind": "muon"}
    assert rendered(import_deepspeed(values) | left_open) == values


rates = st.sampled_from([1e-4, 0.02, 1.0])
flags = st.booleans()
buckets = st.sampled_from([2, 1000, 50_000_000])
OPTIMIZERS = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["adamw", "adam"]),
            "lr": rates,
            "weight_decay": rates,
            "eps": rates,
            "implementation": st.sampled_from(["torch", "deepspeed"]),
        }
    ),
    st.fixed_dictionaries(
        {"kind": st.just("sgd"), "lr": rates, "momentum": st.just(0.9), "nesterov": flags}
    ),
    st.fixed_dictionaries({"kind": st.just("adagrad"), "lr": rates, "eps": rates}),
    st.fixed_dictionaries({"kind": st.just("lion"), "lr": rates, "betas": st.just([0.5, 0.6])}),
)
SCHEDULERS = st.one_of(
    st.sampled_from([{"kind": "constant"}, {"kind": "cosine", "warmup_steps": 3}]),
    st.fixed_dictionaries(
        {
            "kind": st.just("warmup"),
            "warmup_steps": st.integers(2, 9),
            "min_lr": rates,
            "max_lr": rates,
        }
    ),
    st.fixed_dictionaries(
        {"kind": st.just("warmup_decay"), "warmup_steps": st.just(5), "total_steps": st.just(50)}
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("warmup_cosine"),
            "warmup_steps": st.just(5),
            "cos_min_ratio": st.just(0.1),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("one_cycle"),
            "min_lr": st.just(0.1),
            "max_lr": rates,
            "first_steps": st.just(7),
            "decay_steps": st.just(3),
        }
    ),
    st.fixed_dictionaries({"kind": st.just("lr_range_test"), "min_lr": rates, "staircase": flags}),
)
ZEROS = st.one_of(
    st.just({"stage": 0}),
    st.fixed_dictionaries(
        {
            "stage": st.sampled_from([1, 2]),
            "reduce_bucket_size": buckets,
            "allgather_bucket_size": buckets,
            "overlap_comm": flags,
            "offload_optimizer": st.sampled_from([{"device": "none"}, {"device": "cpu"}]),
        }
    ),
    st.fixed_dictionaries(
        {
            "stage": st.just(3),
            "sub_group_size": buckets,
            "stage3_gather_16bit_weights_on_model_save": flags,
            "offload_optimizer": st.sampled_from(
                [
                    {"device": "none"},
                    {"device": "cpu", "pin_memory": False},
                    {"device": "nvme", "nvme_path": "/n", "buffer_count": 5},
                ]
            ),
            "offload_param": st.sampled_from(
                [{"device": "cpu"}, {"device": "nvme", "nvme_path": "/n"}]
            ),
        }
    ),
)
PRECISIONS = st.one_of(
    st.sampled_from(
        [
            {"dtype": "fp32"},
            {"dtype": "autocast"},
            {"dtype": "autocast", "lower_precision_safe_modules": ["a.B"]},
        ]
    ),
    st.fixed_dictionaries({"dtype": st.just("bf16"), "check_grad_overflow": flags}),
    st.fixed_dictionaries(
        {
            "dtype": st.just("fp16"),
            "loss_scale": st.sampled_from([0.0, 128.0]),
            "hysteresis": st.just(3),
        }
    ),
)
PASSED = st.sampled_from(
    [
        {},
        {"activation_checkpointing": {"partition_activations": True}},
        {"timers": {"throughput": {"enabled": True}}},
        {
            "wall_clock_breakdown": True,
            "data_types": {"grad_accum_dtype": "fp32"},
            "comms_logger": {"enabled": True},
        },
    ]
)
RUNS = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([{"global_size": 64}, {"micro_size": 2, "accumulation_steps": 3}]),
        "optimizer": OPTIMIZERS,
        "scheduler": SCHEDULERS,
        "zero": ZEROS,
        "precision": PRECISIONS,
        "deepspeed": PASSED,
        "training": st.sampled_from([{"clip_grad_norm": 0.0}, {"clip_grad_norm": 2.5}]),
    }
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(RUNS)
def test_what_renders_comes_back(values: dict[str, Any]) -> None:
    """Property: render, import, render gives the same JSON, unless DeepSpeed refuses what was
    rendered.
    """
    try:
        first = rendered(values)
    except ConfigError:
        return
    found = import_or_problems(first)
    if isinstance(found, list):
        assert "not-expressible" not in found
        return
    assert rendered(found.values) == first


RAW = [
    {},
    {"gradient_accumulation_steps": 2, "gradient_clipping": 0, "bfloat16": {"enabled": True}},
    {"zero_optimization": True, "optimizer": {"type": "adam", "params": {}}},
    {"zero_optimization": {"stage": "2", "cpu_offload": True}, "optimizer": {"type": "AdamW"}},
    {
        "zero_optimization": {
            "stage": 3,
            "max_live_parameters": 7,
            "offload_param": {"device": "cpu", "nvme_path": None},
        }
    },
    {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "load_from_fp32_weights": True}},
    {
        "optimizer": {"type": "ADAM", "params": {"lr": 0.1, "adam_w_mode": False}},
        "fp16": {"enabled": True, "loss_scale": 8},
    },
    {
        "optimizer": {
            "type": "AdamW",
            "params": {"torch_adam": True, "adam_w_mode": False, "weight_decay": 0.5},
        }
    },
    {"optimizer": {"type": "Lion"}},
    {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}},
    {
        "optimizer": {"type": "Adam"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    },
    {
        "optimizer": {"type": "Adam"},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 4000}},
    },
    {
        "optimizer": {"type": "Adam"},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}},
    },
    {
        "optimizer": {"type": "Adam"},
        "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 3}},
    },
    {
        "torch_autocast": {"enabled": True, "dtype": "half"},
        "communication_data_type": "FP32",
        "wandb": {"enabled": True},
    },
    {
        "pipeline": {},
        "data_efficiency": {"enabled": False, "seed": 3},
        "comet": {"workspace": None},
    },
]


@pytest.mark.parametrize("values", RAW, ids=json.dumps)
def test_every_given_key_means_the_same(values: dict[str, Any]) -> None:
    found = imported(values)
    assert not found.left_out
    table, back = load_table(), rendered(found.values)
    before, after = Facts(BATCH | values), Facts(back)
    for path in {path for path, _ in [*leaves(BATCH | values), *leaves(back)]} - set(OURS):
        today = "bf16" + path[8:] if path.startswith("bfloat16") else path
        key = table.get(
            today,
            before.optimizer if path.startswith("optimizer") else before.text("scheduler.type"),
        )
        if key is None or path.startswith(("optimizer.type", "timers", *OURS)):
            continue
        today = today if "[" in key.path else key.path
        default = None if key.default is MISSING else key.default
        if "object" in key.types:
            continue
        if before.given(today):
            assert meaning(after, today, default) == meaning(before, today, default), today
        elif before.given(today.rpartition(".")[0]) or path.startswith(
            "fp16"
        ):  # left out, decided as DeepSpeed does
            expected = {
                "scheduler.params.cycle_second_step_size": 2000,
                "scheduler.params.warmup_max_lr": default or 1e-3,
                "zero_optimization.overlap_comm": before.stage == 3,
                "optimizer.params.weight_decay": 0.0,
            }
            assert after.get(today, default) == expected.get(today, default), (
                f"{today} was left out"
            )


def _is_of_a_log_that_is_off(path: str, facts: Facts) -> bool:
    """Rendering leaves the section out: DeepSpeed turns it on wherever it stands."""
    return path.startswith("comms_logger.") and not facts.flag("comms_logger.enabled", False)


def meaning(facts: Facts, path: str, default: Any) -> Any:
    """A value as DeepSpeed uses it, whatever its spelling."""
    if path.endswith("dtype"):
        return facts.dtype(path)
    if path == "optimizer.params.adam_w_mode":
        return facts.optimizer == "adamw" or facts.flag(path, True)
    value = facts.get(path, default)
    return next(
        (
            read
            for read in (facts.flag(path, default), facts.number(path, default))
            if read is not None
        ),
        value,
    )


BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "integer": st.sampled_from([1, 2, 3, 8, 1000]),
    "number": st.sampled_from([0.0, 0.5, 1, 3.5]),
    "string": st.sampled_from(["cpu", "fp32", "x"]),
    "array": st.sampled_from([[], [1, 2]]),
    "object": st.builds(dict),
    "any": st.just(1),
}


def value_of(path: str) -> st.SearchStrategy[tuple[str, Any]]:
    key = load_table().exact(path)
    assert key is not None
    fitting = (
        st.sampled_from(key.enum) if key.enum else st.one_of([BY_TYPE[kind] for kind in key.types])
    )
    defaults = [] if key.default is MISSING else [key.default]
    return st.tuples(
        st.just(path), st.one_of(fitting, fitting, st.sampled_from([None, "auto", *defaults]))
    )


PATHS = sorted(
    path
    for path in load_table()
    if not set("*[") & set(path) and path not in ("train_batch_size", "optimizer.type")
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PATHS).flatmap(value_of), max_size=4), st.integers(0, 3))
@example([("pipeline.activation_checkpoint_interval", 2)], 1)
@example([("compile.passes", [])], 1)
@example([("compile.passes", ["z1"])], 1)
@example([("compile.passes", []), ("compile.deepcompile", True)], 1)
def test_no_key_is_dropped_in_silence(keys: list[tuple[str, Any]], stage: int) -> None:
    """Property: what an import leaves out is null, a default, decided elsewhere on purpose, or
    said.
    """
    values: dict[str, Any] = {**BATCH, "zero_optimization": {"stage": stage}}
    for path, value in keys:
        section = values
        *around, name = path.split(".")
        for part in around:
            section = section.setdefault(part, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section[name] = value
    found = import_or_problems(values)
    if isinstance(found, list):
        assert found
        return
    stated = " ".join(map(str, found.left_out))
    before, after = Facts(values), Facts(rendered(found.values))
    for written, value in leaves(values):
        known = load_table().get(written)
        if (
            known is None
            or value in (None, "auto")
            or written.startswith((*OURS, "optimizer", "scheduler"))
            # rendered with stages alone
            or written == found.sources.get("training.recompute_every")
            or written in stated
            or _is_of_a_log_that_is_off(written, before)
        ):
            continue
        path, default = known.path, None if known.default is MISSING else known.default
        if "object" not in known.types and "any" not in known.types:
            assert meaning(after, path, default) == meaning(before, path, default), written


def test_torchs_own_optimizers_become_targets() -> None:
    params = {"lr": 0.1, "alpha": 0.9}
    found = imported({"optimizer": {"type": "RMSprop", "params": params}}).values
    assert found["optimizer"] == {"target": "torch.optim:RMSprop", "args": params}
    found = imported(
        {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.1, "foreach": True}}}
    ).values
    assert found["optimizer"] == {
        "target": "torch.optim:AdamW",
        "args": {"lr": 0.1, "foreach": True},
    }
    found = imported({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "dampening": 0.5}}}).values
    assert found["optimizer"]["target"] == "torch.optim:SGD"


def test_torchs_adamw_decays_by_default() -> None:
    found = imported({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}).values[
        "optimizer"
    ]
    assert (found["weight_decay"], found["implementation"]) == (0.01, "torch")


HUGGING_FACE = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def test_hugging_face_auto() -> None:
    found = imported(HUGGING_FACE)
    assert "batch" not in found.values
    assert [omission.key for omission in found.left_out] == [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ]
    assert found.values["optimizer"]["lr"] == 1e-3
    assert found.values["zero"]["reduce_bucket_size"] == 50_000_000
    assert "total_steps" not in found.values["scheduler"]
    assert found.values["training"] == {"clip_grad_norm": 1.0, "log_every": 2000}
    assert set(found.comments) >= {
        "precision.dtype",
        "optimizer.lr",
        "optimizer.betas",
        "zero.reduce_bucket_size",
        "training.clip_grad_norm",
    }
    assert "fp16.enabled and bf16.enabled" in found.comments["precision.dtype"]
    assert "the length of the run" in found.comments["scheduler.kind"]
    assert '  lr: 0.001  # "auto" in the file; this is our default' in run_config_text(
        found, name="hf.json"
    )
    assert rendered(found.values)["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_auto_beside_an_enabled_precision_means_no() -> None:
    found = imported({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}})
    assert found.values["precision"]["dtype"] == "bf16"
    assert "precision.dtype" not in found.comments


@pytest.mark.parametrize(
    ("section", "states"),
    [
        ({"bf16": {"enabled": True}}, None),
        (
            {
                "bf16": {
                    "enabled": True,
                    "bf16_master_weights_and_grads": True,
                    "bf16_optimizer_states": True,
                }
            },
            "bf16",
        ),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_weights"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16_weights"),
    ],
    ids=json.dumps,
)
def test_states_in_half_precision_are_one_key(section: dict[str, Any], states: str | None) -> None:
    host = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    values = {"zero_optimization": host, "optimizer": {"type": "AdamW"}, **section}
    found = imported(values).values
    assert found["precision"].get("states") == states
    given = dict(leaves(section))
    back = dict(leaves(rendered(found)))
    assert {path: back.get(path) for path in given} == given


def test_keys_without_effect_are_named() -> None:
    found = imported(
        {
            "_comment": "mine",
            "elasticity": {"enabled": False},
            "pipeline": {"stages": "auto"},
            "zero_optimization": {
                "stage": 1,
                "allgather_partitions": True,
                "sub_group_size": 5,
                "mics_shard_size": -1,
                "offload_param": {"device": "cpu"},
            },
            "fp16": {"enabled": False, "hysteresis": 7},
            "tensorboard": {"enabled": True, "job_name": "x"},
            "wandb": {"enabled": True, "team": "us", "project": "p"},
            "comet": {"enabled": True, "api_key": "abc"},
        }
    )
    assert {omission.key for omission in found.left_out} == {
        "_comment",
        "elasticity",
        "pipeline.stages",
        "zero_optimization.allgather_partitions",
        "zero_optimization.sub_group_size",
        "zero_optimization.mics_shard_size",
        "zero_optimization.offload_param.device",
        "fp16.hysteresis",
        "tensorboard.job_name",
        "comet.api_key",
    }
    assert found.values["monitors"] == {
        "tensorboard": True,
        "wandb": {"project": "p", "entity": "us"},
        "comet": True,
    }
    assert "abc" not in "".join(map(str, found.left_out))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (
            {"zero_optimization": {"stage": 2, "parameter_alignment": True}},
            "zero_optimization.parameter_alignment",
        ),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        (
            {"optimizer": {"type": "Muon", "params": {"per_head_muon": True}}},
            "optimizer.params.per_head_muon",
        ),
        (
            {"optimizer": {"type": "Lamb", "params": {"eps_inside_sqrt": True}}},
            "optimizer.params.eps_inside_sqrt",
        ),
        (
            {"zero_optimization": {"stage": 1}, "compile": {"deepcompile": True, "passes": ["z3"]}},
            "compile.passes",
        ),
        (
            {
                "optimizer": {"type": "Adam"},
                "scheduler": {"type": "StepLR", "params": {"step_size": 3}},
            },
            "scheduler.type",
        ),
        (
            {
                "optimizer": {"type": "Adam"},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}},
            },
            "scheduler.params.warmup_max_lr",
        ),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype"),
    ],
    ids=json.dumps,
)
def test_what_cannot_be_expressed_is_a_problem(values: dict[str, Any], key: str) -> None:
    assert (key, "not-expressible") in kinds(values)


@pytest.mark.parametrize(
    "values",
    [
        {
            "zero_optimization": {
                "stage": 3,
                "zero_hpz_partition_size": 8,
                "leaf_module": {"names": ["a"]},
            }
        },
        {"zero_optimization": {"stage": 1, "ignore_unused_parameters": False}},
        {"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}},
        {"bf16": {"enabled": True, "immediate_grad_update": True}},
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "cpuadam_cores_perc": 0.5},
            }
        },
    ],
    ids=json.dumps,
)
def test_keys_without_a_typed_one_pass_through(values: dict[str, Any]) -> None:
    found = imported(values)
    given, back = dict(leaves(values)), dict(leaves(rendered(found.values)))
    assert {path: back.get(path) for path in given} == given
    assert found.values["deepspeed"]
    assert not found.left_out


@pytest.mark.parametrize(
    ("written", "device", "distance"),
    [
        ({}, "nvme", None),
        ({"stage3_max_reuse_distance": 7}, "nvme", 7),
        ({"max_reuse_distance": 7}, "nvme", 7),
        ({}, "cpu", 1_000_000_000),
    ],
)
def test_weights_on_nvme_are_released_unless_the_file_says_otherwise(
    written: dict[str, int], device: str, distance: int | None
) -> None:
    weights = {"device": device, "nvme_path": "/n"}
    found = imported({"zero_optimization": {"stage": 3, "offload_param": weights, **written}})
    assert found.values["zero"].get("stage3_max_reuse_distance") == distance
    of_a_run = rendered(found.values)["zero_optimization"]["stage3_max_reuse_distance"]
    assert of_a_run == (distance or 0)


@pytest.mark.parametrize(
    "values",
    [
        {"zero_optimisation": {"stage": 3}},
        {"pipeline": {"x": 1}},
        {"zero_optimization.stage": 3},
        {"vocab_size": 3},
    ],
    ids=json.dumps,
)
def test_a_key_that_deepspeed_would_drop_stops_an_import(values: dict[str, Any]) -> None:
    """What is left out of an import is as gone as what DeepSpeed drops."""
    assert {kind for _, kind in kinds(values)} <= {"unknown-key", "dotted-key"}


# Keys that are gone: how they meant something, and how they meant nothing.
GONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "amp": (
        {"amp": {"enabled": True, "opt_level": "O1"}},
        {"amp": {"enabled": False, "opt_level": "O1"}},
    ),
    "elasticity": ({"elasticity": {"enabled": True}}, {"elasticity": {}}),
    "compression_training": (
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
        {"compression_training": {}},
    ),
    "sparse_gradients": ({"sparse_gradients": True}, {"sparse_gradients": False}),
    "zero_optimization.mics_shard_size": (
        {"zero_optimization": {"mics_shard_size": 8}},
        {"zero_optimization": {"mics_shard_size": -1}},
    ),
    "optimizer.params.max_grad_norm": (
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0.0}}},
    ),
}


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_stops_an_import_unless_it_was_off(key: str) -> None:
    on, off = GONE[key]
    assert kinds(on) == [(key, "removed-key")]
    assert [omission.key for omission in imported(off).left_out] == [key]


def test_a_key_of_a_newer_release_stops_an_import_unless_it_is_off() -> None:
    def by(value: bool) -> Imported:
        values = {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "super_offload": value},
            }
        }
        return import_document(Document("ds.json", BATCH | values), release="0.16.9")

    with pytest.raises(ConfigError) as caught:
        by(True)
    assert {problem.kind for problem in caught.value.problems} == {"key-of-another-release"}
    assert by(False).left_out


def test_what_only_a_run_config_refuses_is_reported_at_the_key_and_line_of_the_file() -> None:
    text = """{"train_batch_size": 8,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.001,
        "eps": 0}},
      "scheduler": {"type": "LRRangeTest", "params": {
        "lr_range_test_min_lr": 0}},
      "zero_optimization": {"stage": 3,
        "sub_group_size": 0}}"""
    assert (
        imported({"zero_optimization": {"stage": 3, "sub_group_size": 0}}).values["zero"][
            "sub_group_size"
        ]
        == 0
    )
    with pytest.raises(ConfigError) as caught:
        import_document(parse_hjson(text, name="ds.json"))
    assert {(problem.key, problem.file, problem.line) for problem in caught.value.problems} == {
        ("optimizer.params.eps", "ds.json", 3),
        ("scheduler.params.lr_range_test_min_lr", "ds.json", 5),
    }
    assert all("of a run config" in problem.reason for problem in caught.value.problems)


def test_the_loss_scale_that_deepspeed_began_with_for_years_is_imported() -> None:
    found = imported({"fp16": {"enabled": True, "initial_scale_power": 32}})
    assert rendered(found.values)["fp16"]["initial_scale_power"] == 32


def test_what_deepspeed_refuses_is_not_imported() -> None:
    assert kinds({"zero_optimization": {"stage": 5}}) == [
        ("zero_optimization.stage", "wrong-value")
    ]
    assert ("bf16.check_overflow", "unknown-key") in kinds({"bf16": {"check_overflow": True}})


def test_a_large_batch_gets_a_placeholder_that_can_be_planned() -> None:
    found = imported({"train_batch_size": 4096})
    assert found.values["data"]["kind"] == "synthetic_images"
    assert rendered(found.values)["train_batch_size"] == 4096


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_batch_size": 64, /* why */ "data_types": {"grad_accum_dtype": "fp32"},}'
    )
    assert main(["import", str(file)]) == 0
    run = tmp_path / "run.yaml"
    run.write_text(capsys.readouterr().out)
    assert main(["render", str(run)]) == 0
    assert json.loads(capsys.readouterr().out)["data_types"] == {"grad_accum_dtype": "fp32"}
    assert main(["import", str(run)]) == 64
    assert "run config already" in capsys.readouterr().err
    file.write_text('{"train_batch_size": 64,\n "sequence_parallel_size": 2}')
    assert main(["import", str(file)]) == 0
    assert (
        f"{file}:2: sequence_parallel_size = 2: DeepSpeed would divide the model itself"
        in capsys.readouterr().err
    )


def test_a_null_that_means_something_is_refused_and_not_dropped() -> None:
    """DeepSpeed stops at a KeyError where `model_mask_name` is left out."""
    random_ltd = {"enabled": False, "model_mask_name": None}
    values = {
        "data_efficiency": {
            "enabled": True,
            "data_routing": {"enabled": True, "random_ltd": random_ltd},
        }
    }
    assert ("data_efficiency.data_routing.random_ltd.model_mask_name", "not-expressible") in kinds(
        values
    )


def test_a_rate_that_the_file_does_not_have_is_commented() -> None:
    found = imported(optimizer_section := {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
    assert found.values["scheduler"] == {"kind": "constant"}
    assert "our cosine" in found.comments["scheduler"]
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    assert "scheduler" not in imported(optimizer_section | schedule).comments


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, {"global_size": 128}),
        ({"train_micro_batch_size_per_gpu": 4}, {"micro_size": 4}),
        # of any number of ranks
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, {"micro_size": 4}),
    ],
)
def test_micro_batches_of_zenflow_are_those_of_a_step(
    batch: dict[str, int], expected: dict[str, int]
) -> None:
    zenflow = {"topk_ratio": 0.1, "update_interval": 4, "overlap_step": False}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": zenflow}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    found = import_deepspeed(batch | {"zero_optimization": zero, "optimizer": optimizer})
    assert found["batch"] == {**expected, "accumulation_steps": 4}


PIPELINE = {
    "activation_checkpoint_interval": 2,
    "stages": 4,
    "seed_layers": True,
    "use_reentrant": False,
    "grad_partitioned": False,
    "pipe_partitioned": True,
}


def test_the_section_of_pipelines() -> None:
    """As the one of a script with a `PipelineModule`; what the code decides is named."""
    found = imported({"pipeline": PIPELINE})
    assert found.values["training"]["recompute_every"] == 2
    assert found.sources["training.recompute_every"] == "pipeline.activation_checkpoint_interval"
    assert [omission.key for omission in found.left_out] == [
        "pipeline.stages",
        "pipeline.seed_layers",
        "pipeline.use_reentrant",
        "pipeline.grad_partitioned",
    ]
    assert all(omission.reason for omission in found.left_out)
    json_again = rendered({**found.values, "parallel": {"pipe": 2}})
    assert json_again["pipeline"] == {"activation_checkpoint_interval": 2}


def test_the_command_goes_on_without_keys_that_have_no_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    values = {
        "gradient_clipping": 0.5,
        "scheduler": {"type": "StepLR", "params": {"step_size": 3}},
        "sparse_attention": {"mode": "fixed"},
        "gradient_cliping": 1.0,
    }
    file.write_text(json.dumps(BATCH | values))
    assert main(["import", str(file)]) == 0
    printed = capsys.readouterr()
    assert parse_document(printed.out, name="run.yaml").value["training"]["clip_grad_norm"] == 0.5
    for key, kind in {
        "scheduler.type": "not-expressible",
        "sparse_attention": "removed-key",
        "gradient_cliping": "unknown-key",
    }.items():
        (line,) = [line for line in printed.err.splitlines() if f"{key} = " in line]
        assert line.startswith("warning: ")
        assert f"[{kind}]" in line
        assert f"#   {key}: " in printed.out, "the file names it as well"
    with pytest.raises(ConfigError):
        import_deepspeed(BATCH | values)
    file.write_text(json.dumps(BATCH | {"zero_optimization": {"stage": 7}}))
    assert main(["import", str(file)]) == 78, "DeepSpeed refuses it"


def test_muon_and_deepcompile_become_those_of_a_run() -> None:
    params = {"lr": 0.001, "muon_lr": 0.02, "weight_decay": 0.1, "ns_method": "standard"}
    file = {
        "optimizer": {"type": "Muon", "params": params},
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2, "save_muon_momentum_buffer_in_memory": True},
        "compile": {"deepcompile": True, "passes": ["z1"], "debug_log": True},
    }
    values = import_deepspeed(file)
    assert values["optimizer"] == {
        "kind": "muon",
        "lr": 0.02,
        "adam_lr": 0.001,
        "momentum": 0.95,
        "weight_decay": 0.1,
        "betas": [0.9, 0.95],
        "eps": 1e-10,
    }
    assert values["training"]["compile"] == {"backend": "deepcompile", "passes": ["z1"]}
    assert values["deepspeed"] == {"compile": {"debug_log": True}}


def test_lamb_becomes_that_of_a_run() -> None:
    """As DeepSpeed's own example for BERT has it."""
    params = {"lr": 0.011, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3}
    file = {"optimizer": {"type": "Lamb", "params": params}, "train_batch_size": 8}
    values = import_deepspeed(file)
    assert values["optimizer"] == {
        "kind": "lamb",
        "lr": 0.011,
        "weight_decay": 0.01,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "max_coeff": 0.3,
        "min_coeff": 0.01,
        "bias_correction": False,
    }
    assert not values.get("deepspeed", {}).get("optimizer")


def test_keys_of_what_a_run_does_not_have_go_with_it() -> None:
    """AutoEP and SuperOffload as DeepSpeed's own examples have them."""
    offload = {"device": "cpu", "super_offload": True, "cpuadam_cores_perc": 0.9}
    experts = {"enabled": True, "autoep_size": 8, "preset_model": "qwen3_5_moe"}
    file = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "optimizer": {"type": "AdamW"},
        "expert_parallel": experts,
    }
    found = import_document(Document("file", file), partly=True)
    assert "deepspeed" not in found.values
    assert {problem.key for problem in found.not_taken} == {
        "zero_optimization.offload_optimizer.super_offload",
        "expert_parallel.enabled",
        "expert_parallel.autoep_size",
    }
