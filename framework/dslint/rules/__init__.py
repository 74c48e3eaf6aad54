"""Rules between the keys of a DeepSpeed JSON: what DeepSpeed refuses, breaks on, or silently does otherwise.

A rule is a function from `Facts` to problems, under one stable kind. An error is what DeepSpeed stops at, when it reads
the file, at `deepspeed.initialize`, in the first step, or in the call that the key is for. A warning is what it takes
and does otherwise. A note depends on code outside the JSON. `ALL` lists them; a new rule is a function in the module of
its theme and its name here. Unknown keys, types, ranges and removed keys are the key table's
(`framework/dslint/keys.py`).

Left out, and why:

- Single keys whose type, range, choices or status say it all, in the key table: batch sizes and accumulation below 1 or
as
  floats, `steps_per_print: 0`, dtypes of `communication_data_type`, `torch_autocast.dtype` and `data_types`, texts for
  truth values, `load_balance_coeff`, parameters of optimizers and schedules
  (`max_grad_norm`, what Muon swallows, floats for `warmup_num_steps`), `tag_validation` and
  `checkpoint.writer` choices, pipe and grad `_partitioned`, inert keys (`pipeline.stages`, `allgather_partitions`,
  `disable_allgather`, `tp.tp_size` without AutoTP), both names of one key.
- `communication_data_type` with reduce-scatter: what parses is always allowed.
- Code decides, and the JSON does not even hint at it: `mpu` objects and their float world sizes,
  `args.deepspeed_config` beside `config=`, `tp_model_init`, `no_sync()`, `loss.backward()`, `zero.Init` without a
  config, a schedule of another optimizer, a client optimizer beside the section, `set_epoch`, saving between two steps,
  DualPipeV.
- The model decides: native MoE with stage 3 or without groups, experts per rank, kv heads of AutoTP and Ulysses, shapes
  and layers of a pipeline, AutoEP that matches no layer, batches that differ within a tensor-parallel group.
- The machine decides: wandb, comet and tensorboard packages, libaio and compilers, LOCAL_RANK, device counts for
  quantized gradients on one node, the loss scale that falls to its minimum. The preflight looks at them.
- A checkpoint decides: a missing `latest`, hyper-parameters that come back from it.
"""

from __future__ import annotations

from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.rules import batch, offload, optimizer, parallel, precision, scheduler, silent, zero
from framework.dslint.rules import features as compiling
from framework.dslint.rules import features as experts
from framework.dslint.rules.base import Rule
from framework.errors import Problem

ALL: Final[tuple[Rule, ...]] = (
    batch.batch_size_missing,
    batch.batch_arithmetic,
    batch.elastic_batch,
    batch.tensor_parallel_batch,
    batch.data_parallel_alone,
    batch.sequence_parallel_mesh,
    batch.sequence_parallel_fraction,
    batch.sequence_parallel_gradients,
    batch.sequence_parallel_alone,
    optimizer.optimizer_known,
    optimizer.optimizer_steps_alone,
    optimizer.optimizer_tested_with_zero,
    optimizer.optimizer_from_code,
    optimizer.offload_with_client_optimizer,
    optimizer.lamb_needs_dynamic_scale,
    optimizer.muon_reduce_scatter,
    optimizer.muon_quantized_gradients,
    optimizer.adam_is_adamw,
    optimizer.adamw_stays_adamw,
    optimizer.amsgrad,
    optimizer.kernel_without_amsgrad,
    optimizer.amsgrad_of_adagrad,
    optimizer.one_bit_without_zero,
    scheduler.scheduler_known,
    scheduler.schedule_from_code,
    scheduler.torch_schedule_of_a_wrapper,
    scheduler.plateau_without_a_metric,
    scheduler.warmup_decay_peak,
    scheduler.warmup_peak,
    scheduler.warmup_falls,
    scheduler.warmup_never_ends,
    scheduler.warmup_of_no_steps,
    precision.two_half_precisions,
    precision.amp_goes_alone,
    precision.auto_cast_without_fp16,
    precision.dynamic_loss_scale,
    precision.loss_scale_stands_still,
    precision.loss_scale_is_a_number,
    precision.half_precision_of_the_device,
    precision.emulated_bf16,
    precision.accumulation_dtype,
    precision.param_dtype,
    precision.keep_in_fp32_patterns,
    precision.fp16_master_needs_stage2,
    precision.master_weights_need_zero,
    precision.bf16_states_need_bf16_master,
    precision.two_master_dtypes,
    precision.master_weights_need_cpu_adam,
    precision.autocast_without_dtype,
    precision.autocast_in_int8,
    precision.autocast_module_paths,
    precision.autocast_of_half_weights,
    precision.autocast_with_half_precision,
    precision.autocast_with_quantized_weights,
    zero.stage_left_out,
    zero.zero_as_switch,
    zero.bucket_too_large,
    zero.inert_at_stage,
    zero.legacy_stage1,
    zero.odd_allgather_bucket,
    zero.compute_grad_norm_stage,
    zero.compute_grad_norm_for_clipping,
    zero.compute_grad_norm_elsewhere,
    zero.prescale_with_reduce_scatter,
    zero.unmanaged_with_overlap,
    zero.unmanaged_with_deepcompile,
    zero.sum_of_gradients,
    zero.quantized_gradients_need_reduce_scatter,
    zero.hpz_divides,
    zero.hpz_clamped,
    zero.elastic_checkpoint,
    zero.deprecated_with_its_heir,
    offload.optimizer_offload_without_zero,
    offload.lamb_stays_on_the_device,
    offload.nvme_optimizer_needs_stage_3,
    offload.param_offload_needs_stage_3,
    offload.nvme_path,
    offload.partial_offload_needs_stage_3,
    offload.partial_offload_needs_cpu_adam,
    offload.super_offload_needs_stage_3,
    offload.super_offload_needs_adam,
    offload.super_offload_needs_cores,
    offload.contiguous_gradients_forced,
    offload.zenflow_needs_offload,
    offload.zenflow_intervals,
    offload.zenflow_needs_overlap,
    offload.zenflow_params,
    offload.zenflow_needs_adam,
    offload.zenflow_replaces_accumulation,
    parallel.tensor_parallel_fits,
    parallel.tensor_parallel_below_0,
    parallel.tensor_parallel_sizes_agree,
    parallel.tensor_parallel_preset,
    parallel.pipeline_with_zero,
    parallel.pipeline_with_tensor_parallel,
    parallel.pipeline_needs_steps_per_print,
    parallel.pipeline_unmanaged,
    parallel.pipeline_overlap,
    parallel.pipeline_bf16_checkpoint,
    parallel.expert_parallel_fits,
    parallel.expert_tensor_parallel,
    parallel.expert_with_tensor_parallel,
    parallel.presets_agree,
    parallel.expert_parallel_at_stage_3,
    parallel.expert_options,
    experts.expert_choices,
    experts.expert_part_names,
    compiling.compile_waits_for_code,
    compiling.deepcompile_without_zero,
    compiling.compile_offloads,
    compiling.compile_pass_names,
    compiling.compile_passes,
    compiling.autosp_at_stage,
    compiling.compile_around_experts,
    silent.clipping_left_out,
    silent.section_not_enabled,
    silent.two_bf16_sections,
    silent.monitors_have_no_loss,
    silent.activation_checkpointing_waits_for_code,
    silent.contiguous_checkpoints,
    silent.checkpoint_writer_needs_launcher,
    silent.checkpoint_writer_needs_data_parallel,
    silent.curriculum_needs_metrics,
    silent.curriculum_without_parents,
    silent.random_ltd_needs,
    silent.dynamic_batching_needs_tokens,
    silent.dynamic_batching_waits_for_code,
    silent.vocabulary_alignment,
    silent.profile_as_deep_as_the_model,
    silent.autotuning_folders,
    silent.needs_cuda,
    silent.auto_value,
)


def apply_rules(facts: Facts) -> list[Problem]:
    """Everything that every rule sees."""
    return [problem for rule in ALL for problem in rule(facts)]
