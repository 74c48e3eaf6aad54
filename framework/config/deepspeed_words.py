"""DeepSpeed's top-level keys and where a run config says the same: for people who know DeepSpeed's words and write them
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from framework.config.base import Section
from framework.config.optimizer import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from framework.config.precision import BF16, FP16
from framework.config.zero import OFFLOADS, Zero

# DeepSpeed key -> the section of a run config that decides it.
OWNED: Final[Mapping[str, str]] = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.accumulation_steps",
    "fp16": "precision",
    "bf16": "precision",
    "bfloat16": "precision",
    "torch_autocast": "precision",
    "zero_optimization": "zero",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "gradient_clipping": "training.clip_grad_norm",
    "tensorboard": "monitors.tensorboard",
    "csv_monitor": "monitors.csv",
    "wandb": "monitors.wandb",
    "comet": "monitors.comet",
    "steps_per_print": "training.log_every",
    "zero_allow_untested_optimizer": "optimizer",
    "zero_force_ds_cpu_optimizer": "optimizer",
    "managed_gradient_accumulation": "batch.accumulation_steps",
    "pipeline": "parallel",
}
# Top-level keys that DeepSpeed 0.19.8 reads and no section decides (runtime/config.py, runtime/constants.py).
PASSED_THROUGH: Final = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "autotuning",
        "checkpoint",
        "comms_logger",
        "communication_data_type",
        "compile",
        "data_efficiency",
        "data_types",
        "disable_python_gc",
        "dump_state",
        "expert_parallel",
        "flops_profiler",
        "gradient_allreduce_op",
        "gradient_predivide_factor",
        "hybrid_engine",
        "log_level",
        "memory_breakdown",
        "prescale_gradients",
        "seq_parallel_communication_data_type",
        "tensor_parallel",
        "timers",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "weight_quantization",
    }
)
# Sections of these that further keys can be put into.
SHARED: Final = frozenset(
    {"fp16", "bf16", "torch_autocast", "data_types", "zero_optimization", "optimizer", "scheduler", "pipeline"}
)
_WARMUP: Final = {"warmup_steps": "warmup_num_steps", "curve": "warmup_type"}
_LEVELS: Final = {"min_lr": "warmup_min_lr", "max_lr": "warmup_max_lr"}
_TOTAL: Final = {"total_steps": "total_num_steps"}
# Each of DeepSpeed's schedules: its name, and our field -> DeepSpeed's parameter.
SCHEDULES: Final[Mapping[type[Section], tuple[str, Mapping[str, str]]]] = {
    WarmupLR: ("WarmupLR", {**_LEVELS, **_WARMUP}),
    WarmupDecayLR: ("WarmupDecayLR", {**_TOTAL, **_LEVELS, **_WARMUP}),
    WarmupCosineLR: (
        "WarmupCosineLR",
        {
            **_TOTAL,
            "warmup_min_ratio": "warmup_min_ratio",
            "warmup_steps": "warmup_num_steps",
            "cos_min_ratio": "cos_min_ratio",
            "curve": "warmup_type",
        },
    ),
    OneCycle: (
        "OneCycle",
        {
            "min_lr": "cycle_min_lr",
            "max_lr": "cycle_max_lr",
            "decay_lr_rate": "decay_lr_rate",
            "first_steps": "cycle_first_step_size",
            "second_steps": "cycle_second_step_size",
            "decay_steps": "decay_step_size",
            "cycle_momentum": "cycle_momentum",
            "min_momentum": "cycle_min_mom",
            "max_momentum": "cycle_max_mom",
        },
    ),
    LRRangeTest: (
        "LRRangeTest",
        {
            "min_lr": "lr_range_test_min_lr",
            "step_size": "lr_range_test_step_size",
            "step_rate": "lr_range_test_step_rate",
            "staircase": "lr_range_test_staircase",
        },
    ),
}
_SCHEDULE: Final = {theirs: ours for _, names in SCHEDULES.values() for ours, theirs in names.items()}
_OPTIMIZER: Final = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov", "max_coeff", "min_coeff")
_ELSEWHERE: Final = {"dtype", "grad_accumulation", "grad_reduction"}
# DeepSpeed's dotted key -> ours, for every key that rendering writes into a shared section or that is another name of
# one.
TYPED: Final[Mapping[str, str]] = {
    **{
        f"zero_optimization.{theirs}": f"zero.{name}"
        for name in Zero.model_fields
        for theirs in (name, name.removeprefix("stage3_"))
        if name not in OFFLOADS
    },
    **{
        f"zero_optimization.{name}.{field}": f"zero.{name}.{field}"
        for name, devices in OFFLOADS.items()
        for device in devices.values()
        for field in device.model_fields
    },
    "zero_optimization.cpu_offload": "zero.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero.offload_param",
    "zero_optimization.cpu_offload_use_pin_memory": "zero.offload_optimizer.pin_memory",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "zero.stage3_gather_16bit_weights_on_model_save",
    **{f"{section}.enabled": "precision.dtype" for section in ("fp16", "bf16", "torch_autocast")},
    **{f"fp16.{name}": f"precision.{name}" for name in FP16.model_fields if name not in _ELSEWHERE},
    **{f"bf16.{name}": f"precision.{name}" for name in BF16.model_fields if name not in _ELSEWHERE},
    "torch_autocast.dtype": "precision.compute_dtype",
    "torch_autocast.lower_precision_safe_modules": "precision.lower_precision_safe_modules",
    "optimizer.type": "optimizer.kind",
    **{f"optimizer.params.{name}": f"optimizer.{name}" for name in _OPTIMIZER},
    "optimizer.params.torch_adam": "optimizer.implementation",
    "optimizer.params.adam_w_mode": "optimizer.kind",
    "scheduler.type": "scheduler.kind",
    **{f"scheduler.params.{name}": f"scheduler.{ours}" for name, ours in _SCHEDULE.items()},
    "pipeline.activation_checkpoint_interval": "training.recompute_every",
    "pipeline.stages": "parallel.pipe",
    "pipeline.partition": "parallel.partition",
}


def place_here(name: str) -> str:
    """Describe where a run config takes a DeepSpeed key; empty where the name is none."""
    if name in OWNED:
        return f"DeepSpeed's {name} is {OWNED[name]} here"
    return f"write it as deepspeed.{name}, where DeepSpeed's further keys go" if name in PASSED_THROUGH else ""
