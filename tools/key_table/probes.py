"""Configs that open every hand-read section of DeepSpeed, so that its parser asks for the keys in
it.

A name chosen by the user stands as ``*``. A section that a release has removed is left out of its
probes.
"""

from __future__ import annotations

from typing import Any, Final

Config = dict[str, Any]

_GROUPS: Final = ("sparse_pruning", "row_pruning", "head_pruning", "channel_pruning")


def _compression() -> Config:
    """Two quantization blocks and four pruning blocks, each with shared parameters and one
    group.
    """
    group = {"modules": ["*"], "related_modules": None}
    quantized = {"start_bits": 8, "target_bits": 8, "quantization_period": 1}
    shared = {"enabled": True, "fp16_mixed_quantize": {"enabled": True}}
    config: Config = {
        "layer_reduction": {"enabled": True},
        "weight_quantization": {
            "shared_parameters": shared,
            "different_groups": {"*": {"params": quantized, **group}},
        },
        "activation_quantization": {
            "shared_parameters": {"enabled": True},
            "different_groups": {"*": {"params": {"bits": 8}, **group}},
        },
    }
    for name in _GROUPS:
        parameters = {
            "enabled": True,
            "num_heads": 4,
            "schedule_offset": 0,
            "schedule_offset_end": 1,
        }
        config[name] = {
            "shared_parameters": parameters
            | ({"method": "snip_momentum"} if name == "sparse_pruning" else {}),
            "different_groups": {"*": {"params": {"dense_ratio": 0.5}, **group}},
        }
    return config


def probes(removed: frozenset[str]) -> list[Config]:
    """Configs that one release parses without an error; together they reach every branch of its
    getters.
    """
    full: Config = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "torch_autocast": {"enabled": False, "dtype": "bf16", "lower_precision_safe_modules": []},
        "data_types": {},
        "aio": {},
        "flops_profiler": {},
        "activation_checkpointing": {},
        "comms_logger": {},
        "weight_quantization": {},
        "timers": {"throughput": {}},
        "checkpoint": {"parallel_write": {}, "writer": {}},
        "autotuning": {"enabled": True, "model_info": {}},
        "expert_parallel": {"enabled": False, "load_balance_coeff": None, "expert_w3": None},
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {"enabled": True, "curriculum_metrics": {}},
                "dynamic_batching": {"enabled": True, "max_tokens": 1, "max_batch_size": 1},
            },
            "data_routing": {"enabled": True, "random_ltd": {"enabled": True}},
        },
        "progressive_layer_drop": {"enabled": True},
        "curriculum_learning": {"enabled": True},
        "amp": {"enabled": False},
        "elasticity": {"enabled": False},
        "nebula": {"enabled": True, "persistent_storage_path": "/"},
        "compression_training": _compression(),
    }
    modes = ("dense", "fixed", "variable", "bigbird", "bslongformer")
    more = [{"train_batch_size": 8, "sparse_attention": {"mode": mode}} for mode in modes]
    more += [
        {"train_batch_size": 8, "zero_optimization": True, "cpu_offload": False},
        {"train_batch_size": 8, "amp": {"enabled": True}},
        {"train_batch_size": 8, "fp16": {"enabled": True}},
        {"train_batch_size": 8, "fp16": {"enabled": True, "initial_scale_power": 8}},
        {"train_batch_size": 8, "bf16": {"enabled": True}},
        {"train_batch_size": 8, "sequence_parallel_size": 1},
    ]
    return [
        {name: value for name, value in probe.items() if name not in removed}
        for probe in (full, *more)
    ]


CURRICULA: Final[tuple[Config, ...]] = tuple(
    {"min_difficulty": 1, "max_difficulty": 2, "schedule_type": kind, "schedule_config": config}
    for kind, config in (
        ("fixed_discrete", {"difficulty": [1, 2], "max_step": [1]}),
        ("fixed_linear", {"total_curriculum_step": 1, "difficulty_step": 8}),
        ("fixed_root", {"total_curriculum_step": 1, "difficulty_step": 8, "root_degree": 2}),
    )
)
RANDOM_LTD: Final[Config] = {
    "total_layer_num": 2,
    "random_ltd_layer_num": 1,
    "global_batch_size": 1,
    "layer_token_lr_schedule": {"enabled": False},
    "random_ltd_schedule": {
        "min_value": 1,
        "max_value": 2,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 1, "seq_per_step": 1},
    },
}
TENSOR_PARALLEL: Final[Config] = {"layer_specs": []}
ELASTICITY: Final[Config] = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [1]}
