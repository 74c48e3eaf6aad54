"""Rules between keys: each is a small function that yields the problems it sees, under a stable kind.

A rule knows the config, the cluster and nothing else: it reads no file, clock, environment or device. `ALL` lists them,
in the order in which they are told; a new rule is a function in the module of its theme and its name here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.rules import devices, model, optimizer, parts, pipe, schedule
from framework.plan.rules import devices as precision
from framework.plan.rules import metrics_and_ema as ema
from framework.plan.rules import metrics_and_ema as metrics
from framework.plan.rules import optimizer as zero
from framework.plan.rules import passthrough as passed_keys

Rule = Callable[[RunConfig, Cluster], Iterator[Problem]]

ALL: Final[tuple[Rule, ...]] = (
    devices.world_size_differs,
    devices.fp16_needs_gpu,
    devices.optimizer_needs_gpu,
    precision.autocast_fp16_needs_plain_ranks,
    precision.batch_norm_in_half_precision,
    precision.fp32_sums_need_zero,
    zero.offload_needs_stage,
    zero.inert_stage3_keys,
    optimizer.momentum_order,
    optimizer.offload_needs_adam,
    optimizer.lamb_needs_dynamic_scale,
    optimizer.lamb_sees_shards,
    optimizer.decay_on_matrices_of_nothing,
    optimizer.slow_host_optimizer,
    schedule.schedule_needs_lr,
    schedule.warmup_fits,
    schedule.cycle_order,
    parts.image_shapes_agree,
    parts.parts_speak_of_the_same,
    parts.sequence_fits,
    parts.vocabulary_fits,
    model.heads_divide,
    model.recompute_in_parts,
    model.inert_model_options,
    model.channels_last_with_pipeline,
    model.freeze_patterns,
    pipe.zero_with_pipeline,
    pipe.bf16_pipeline_needs_zero1,
    pipe.enough_layers,
    pipe.stages_as_written,
    pipe.stages_need_a_pipeline,
    pipe.partition_beside_stages,
    pipe.idle_stages,
    ema.ema_measured_and_not_kept,
    ema.ema_beside_its_weights,
    ema.ema_with_lamb,
    metrics.best_is_measured,
    metrics.best_has_a_direction,
    passed_keys.deepspeed_section,
    passed_keys.deepspeed_values,
)


def apply_rules(config: RunConfig, cluster: Cluster) -> list[Problem]:
    """Everything that every rule sees."""
    return [problem for rule in ALL for problem in rule(config, cluster)]
