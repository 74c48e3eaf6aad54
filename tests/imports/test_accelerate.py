"""Accelerate's config file becomes a run config; keys that nothing reads are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from framework.config.load import config_from_values
from tests.imports.trainer_files import imported, refused

ACCELERATE = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {gradient_accumulation_steps: 4, gradient_clipping: 0.5, offload_optimizer_device: cpu, zero_stage: 2}
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""


def test_accelerates_file() -> None:
    found = imported(yaml.safe_load(ACCELERATE))
    config = config_from_values(found.values)
    assert (config.zero.stage, config.zero.offload_optimizer.device, config.precision.dtype) == (
        2,
        "cpu",
        "bf16",
    )
    assert (config.batch.accumulation_steps, config.training.clip_grad_norm) == (4, 0.5)
    assert [omission.key for omission in found.left_out] == ["num_processes"]
    fsdp = {
        "distributed_type": "FSDP",
        "compute_environment": "x",
        "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
    }
    assert imported(fsdp).values["zero"] == {"stage": 2}


def test_accelerate_takes_no_keys_of_its_own_beside_a_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(
        json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 3}})
    )
    inner = {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}
    outer = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": inner,
    }
    assert imported(outer).values["zero"]["stage"] == 3
    more = inner | {"zero_stage": 2, "gradient_clipping": 1.0}
    found = refused(outer | {"mixed_precision": "bf16", "deepspeed_config": more})
    assert found == [
        ("deepspeed_config.gradient_clipping", 1.0),
        ("deepspeed_config.zero_stage", 2),
        ("mixed_precision", "bf16"),
    ]


def test_keys_of_nested_sections_that_nothing_reads_are_named() -> None:
    inner = {
        "gradient_clip": 1.0,
        "train_micro_batch_size_per_gpu": 2,
        "zero_stage": 3,
        "zero3_save_16bit_model": True,
        "deepspeed_inclusion_filter": "a@b:0",
        "deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock",
        "list": [1],
        "nothing": None,
    }
    outer = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "fp8_config": {"backend": "TE"},
    }
    found = imported(
        outer | {"deepspeed_config": inner, "dynamo_config": {"dynamo_mod": "default"}}
    )
    assert found.values["zero"] == {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    names = {omission.key for omission in found.left_out}
    misspelt = {"deepspeed_config.gradient_clip", "deepspeed_config.train_micro_batch_size_per_gpu"}
    further = {
        "deepspeed_config.deepspeed_inclusion_filter",
        "deepspeed_config.deepspeed_moe_layer_cls_names",
    }
    assert names == misspelt | further | {
        "deepspeed_config.list",
        "fp8_config",
        "dynamo_config.dynamo_mod",
    }
    fsdp = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_parms": True}
    lines = imported(
        {"compute_environment": "x", "distributed_type": "FSDP", "fsdp_config": fsdp}
    ).left_out
    assert [omission.key for omission in lines] == ["fsdp_config.fsdp_offload_parms"]
