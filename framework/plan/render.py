"""`render`: the exact DeepSpeed JSON of a plan. Every decided value is written out: no "auto", no
null, no left-out default.

Some defaults of DeepSpeed 0.19.8 cost time on every step and are decided otherwise here:
`timers.throughput` (two device synchronisations per micro-batch), `bf16.check_grad_overflow` (two
per step), and clipping, which is 1.0 when left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from framework.config.deepspeed_words import OUTSIDE_OF_PRECISION, SCHEDULES, SHARED
from framework.config.optimizer import (
    GROUP_KEYS,
    Adafactor,
    AdamW,
    AdamW8bit,
    BuiltInOptimizer,
    DeepSpeedSchedule,
    Lamb,
    Lion,
    Muon,
    OneCycle,
    ScheduleFree,
    optimizer_lr,
)
from framework.config.precision import BF16, FP16, FP32, Autocast
from framework.config.zero import STAGE3_KEYS, Zero
from framework.errors import ConfigError
from framework.plan.compiling import uses_deepcompile
from framework.plan.plan import Plan
from framework.plan.rules.devices import sums_of

Json = dict[str, Any]
# DeepSpeed's own progress line would repeat ours; `null` breaks its pipeline engine, so it is put
# out of reach.
_NEVER: Final = 1_000_000_000


def render(plan: Plan) -> Json:
    """Return the DeepSpeed config of a plan, for `deepspeed.initialize(config=...)` or a file.

    Raises:
        ConfigError: a schedule needs the length of the run and the size of the data is not known.
    """
    config = plan.config
    layout = plan.layout
    decided: Json = {
        # DeepSpeed counts the ranks of a sequence as data-parallel ones, each with samples.
        "train_batch_size": layout.global_size * layout.sequence_size,
        "train_micro_batch_size_per_gpu": layout.micro_size,
        "gradient_accumulation_steps": layout.accumulation_steps,
        "gradient_clipping": float(config.training.clip_grad_norm),
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
    }
    decided |= _precision(plan)
    decided |= _sums(plan)
    decided["zero_optimization"] = _zero(config.zero) | _zenflow(plan)
    if layout.pipe_size > 1:
        interval = config.training.recompute_every
        decided["pipeline"] = {"activation_checkpoint_interval": interval}
    if uses_deepcompile(config):
        decided["compile"] = {"deepcompile": True}
    decided |= _optimizer(plan)
    decided |= _scheduler(plan)
    for key, value in config.deepspeed.items():
        is_log = key == "comms_logger" and isinstance(value, Mapping)
        if is_log and not value.get("enabled"):
            continue  # DeepSpeed turns it on wherever the section stands (comm/config.py)
        if key in SHARED:
            value = merged(decided.get(key, {}), value)
        decided[key] = value
    return decided


def merged(section: Any, further: Any) -> Any:
    """Return two sections in one; a plan has checked that no plain value is in both."""
    if not isinstance(section, Mapping) or not isinstance(further, Mapping):
        return further
    both = dict(section)
    for key, value in further.items():
        both[key] = merged(section.get(key, {}), value)
    return both


def _precision(plan: Plan) -> Json:
    precision = plan.config.precision
    sections: Json = {name: {"enabled": False} for name in ("fp16", "bf16", "torch_autocast")}
    if isinstance(precision, Autocast):
        names = {"bf16": "bfloat16", "fp16": "float16"}
        modules = precision.model_dump(include={"lower_precision_safe_modules"}, exclude_none=True)
        sections["torch_autocast"] = {
            "enabled": True,
            "dtype": names[precision.compute_dtype],
            **modules,
        }
    elif not isinstance(precision, FP32):
        options = precision.model_dump(exclude=OUTSIDE_OF_PRECISION)
        sections[precision.dtype] = {"enabled": True, **options, **_states(precision)}
    return sections


def _states(precision: FP16 | BF16) -> Json:
    """Return the keys of a section ``fp16`` or ``bf16`` for an optimizer's state in it."""
    if precision.states == "fp32":
        return {}
    keys = {f"{precision.dtype}_master_weights_and_grads": True}
    if precision.states == "bf16":
        keys["bf16_optimizer_states"] = True
    return keys


def _sums(plan: Plan) -> Json:
    """Return the types that half-precision gradients are summed in; their own type is DeepSpeed's
    default.
    """
    accumulation, reduction = sums_of(plan.config, plan.layout)
    sections: Json = {}
    if accumulation:
        sections["data_types"] = {"grad_accum_dtype": accumulation}
    if reduction:
        sections["communication_data_type"] = reduction
    return sections


def _zero(zero: Zero) -> Json:
    if zero.stage == 0:
        return {"stage": 0}
    section: Json = {
        "stage": zero.stage,
        "reduce_bucket_size": zero.reduce_bucket_size,
        "overlap_comm": zero.sums_overlap,
        "contiguous_gradients": zero.contiguous_gradients,
        "reduce_scatter": zero.reduce_scatter,
        "round_robin_gradients": zero.round_robin_gradients,
    }
    if zero.offload_optimizer.device != "none":
        section["offload_optimizer"] = zero.offload_optimizer.model_dump(exclude={"zenflow"})
    if zero.stage < 3:
        section["allgather_bucket_size"] = zero.allgather_bucket_size
    else:
        section |= _stage3(zero)
    return section


def _zenflow(plan: Plan) -> Json:
    """Return the section ``zenflow``, which DeepSpeed counts in micro-batches."""
    zenflow = plan.config.zero.zenflow
    if zenflow is None:
        return {}
    micro_batches = plan.layout.accumulation_steps
    steps = zenflow.select_every
    if steps == "epoch":
        steps = plan.length.steps_per_epoch or 0  # 0: once
    section: Json = {
        "topk_ratio": zenflow.topk_ratio,
        "select_strategy": "step",
        "select_interval": steps * micro_batches,
        "update_interval": micro_batches,
        "full_warm_up_rounds": zenflow.full_warm_up_steps * micro_batches,
        "offload": zenflow.offload,
    }
    return {"zenflow": section}


def _stage3(zero: Zero) -> Json:
    section: Json = {key: getattr(zero, key) for key in STAGE3_KEYS}
    section["stage3_max_reuse_distance"] = zero.reuse_distance
    if zero.offload_param.device != "none":
        section["offload_param"] = zero.offload_param.model_dump()
    return section


def _optimizer(plan: Plan) -> Json:
    optimizer = plan.config.optimizer
    offloaded = plan.config.zero.offload_optimizer.device != "none"
    if is_made_here(plan) or not isinstance(optimizer, BuiltInOptimizer):
        # Built by us and handed to deepspeed.initialize; the two flags only let ZeRO accept it.
        return {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": not offloaded}
    params: Json = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    name = type(optimizer).__name__  # DeepSpeed's too
    if isinstance(optimizer, AdamW):
        on_cuda = plan.cluster.device == "cuda" and not offloaded
        params |= _adam(optimizer, is_fused=optimizer.is_fused(is_on_cuda=on_cuda))
        if plan.config.zero.zenflow is not None:
            # ZenFlow hands all parameters on to torch's AdamW, which knows neither; both are as
            # DeepSpeed has them by default.
            del params["torch_adam"], params["adam_w_mode"]
    else:
        params |= optimizer.model_dump(exclude={"kind", "lr", "weight_decay", *GROUP_KEYS})
    return {
        "optimizer": {"type": name, "params": params},
        "zero_allow_untested_optimizer": not isinstance(optimizer, AdamW),
    }


def is_made_here(plan: Plan) -> bool:
    """Check whether the framework makes the named optimizer, and hands it to DeepSpeed."""
    optimizer = plan.config.optimizer
    if isinstance(optimizer, Lion):
        is_on_host = plan.config.zero.offload_optimizer.device != "none"
        return not is_on_host and plan.cluster.device != "cuda"
    if isinstance(optimizer, Adafactor):  # torch's, where a rank has whole weights
        return plan.config.zero.stage > 0 or plan.layout.tensor_size > 1
    return isinstance(optimizer, Muon | AdamW8bit | ScheduleFree | Lamb)


def _adam(optimizer: AdamW, *, is_fused: bool) -> Json:
    """Return the parameters of AdamW, or of Adam, which differs in adam_w_mode only."""
    params: Json = {
        "betas": list(optimizer.betas),
        "eps": optimizer.eps,
        "torch_adam": optimizer.implementation != "deepspeed",
        "adam_w_mode": type(optimizer).__name__ == "AdamW",
    }
    if is_fused:
        params["fused"] = True
    return params


def _scheduler(plan: Plan) -> Json:
    scheduler = plan.config.scheduler
    if not isinstance(scheduler, DeepSpeedSchedule):  # framework/engine/schedules.py
        return {}
    name, names = SCHEDULES[type(scheduler)]  # our fields -> DeepSpeed's
    params = {key: _schedule_value(plan, field) for field, key in names.items()}
    return {"scheduler": {"type": name, "params": params}}


def _schedule_value(plan: Plan, field: str) -> Any:
    """Return the value of a schedule's field, or what stands for it where it was left out; raises
    as `schedule_steps` does.
    """
    scheduler = plan.config.scheduler
    value = getattr(scheduler, field)
    if value is not None:
        return value
    if field == "max_lr":
        return optimizer_lr(plan.config.optimizer)
    if field == "second_steps" and isinstance(scheduler, OneCycle):
        return scheduler.first_steps
    assert field == "total_steps", field
    return schedule_steps(plan)


def schedule_steps(plan: Plan) -> int:
    """Return the length of the schedule in steps: as configured, or the length of the run.

    Raises:
        ConfigError: neither is known.
    """
    steps = getattr(plan.config.scheduler, "total_steps", None) or plan.length.total_steps
    if steps is None:
        raise ConfigError.of(
            "run-length-unknown",
            "the schedule needs the number of steps, and the size of the data is only known when "
            "it is read",
            "set training.max_steps, scheduler.total_steps or data.train_samples",
            key="scheduler.total_steps",
        )
    return int(steps)
