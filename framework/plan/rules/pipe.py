"""Rules between `parallel` and the other sections."""

from __future__ import annotations

from collections.abc import Iterator

from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.balance import pattern_complaint, stages_complaint, too_few_layers
from framework.plan.cluster import Cluster


def zero_with_pipeline(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/pipe/engine.py `PipelineEngine.__init__`: "ZeRO-2 and ZeRO-3 are incompatible with
    pipeline".
    """
    if config.parallel.pipe > 1 and config.zero.stage > 1:
        yield Problem(
            kind="zero-with-pipeline",
            key="zero.stage",
            value=config.zero.stage,
            reason="pipeline engines accept stage 0 or 1",
            fix="set zero.stage: 1 or parallel.pipe: 1",
        )


def bf16_pipeline_needs_zero1(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/bf16_optimizer.py `load_state_dict`: such a run saves checkpoints that fail to load, KeyError
    '0'.
    """
    if config.parallel.pipe > 1 and config.precision.dtype == "bf16" and config.zero.stage == 0:
        yield Problem(
            kind="bf16-pipeline-without-zero",
            key="zero.stage",
            value=0,
            reason="a bf16 pipeline at stage 0 writes checkpoints that DeepSpeed cannot load again",
            fix="set zero.stage: 1",
        )


def enough_layers(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """A stage without a layer. For models that are not known by name it is found when they are built."""
    count = getattr(config.model, "num_layers_in_list", lambda: None)()
    if config.parallel.pipe > 1 and count is not None and count < config.parallel.pipe:
        yield too_few_layers(config.parallel, count)


def stages_as_written(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """`parallel.stages` and `parallel.partition` by themselves, and with models that are known by name."""
    if config.parallel.pipe == 1:
        return
    count = getattr(config.model, "num_layers_in_list", lambda: None)()
    if config.parallel.stages is None:
        complaint = pattern_complaint(config.parallel)
    else:
        complaint = stages_complaint(config.parallel, num_layers=count)
    if complaint is not None:
        yield complaint


def partition_beside_stages(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Two ways to cut were written down, and one of them decides."""
    parallel = config.parallel
    # A resolved config writes the default down too.
    is_asked = parallel.partition != type(parallel).model_fields["partition"].default
    if parallel.pipe > 1 and parallel.stages is not None and is_asked:
        yield Problem(
            kind="inert-beside-stages",
            key="parallel.partition",
            value=parallel.partition,
            severity="warning",
            reason="parallel.stages names the stage of every layer",
            fix="remove one of them",
        )


def stages_need_a_pipeline(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """A way to cut is written down, and nothing is cut."""
    for key in ("partition", "stages"):
        if config.parallel.pipe == 1 and key in config.parallel.model_fields_set:
            yield Problem(
                kind="inert-without-pipe",
                key=f"parallel.{key}",
                value=getattr(config.parallel, key),
                severity="warning",
                reason="with one stage nothing is cut",
                fix="remove it or set parallel.pipe",
            )


def idle_stages(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Share of a step in which a stage waits: (p - 1) / (m + p - 1) (Narayanan et al. 2021, "Efficient Large-Scale
    Language Model Training", section 2.2)."""
    stages, micro_batches = config.parallel.pipe, config.batch.accumulation_steps
    if micro_batches is None and config.batch.global_size and config.batch.micro_size:
        micro_batches = config.batch.global_size * stages // (config.batch.micro_size * cluster.world_size)
    if stages > 1 and (micro_batches or 1) < stages:
        count = micro_batches or 1
        idle = (stages - 1) / (count + stages - 1)
        yield Problem(
            kind="pipeline-idle",
            key="batch.accumulation_steps",
            value=count,
            severity="note",
            reason=f"with {count} micro-batch{'es' if count > 1 else ''} per step {stages} stages stand idle "
            f"{idle:.0%} of the time",
            fix=f"set batch.accumulation_steps: {4 * stages} for {_idle(stages):.0%}",
        )


def _idle(stages: int) -> float:
    return (stages - 1) / (4 * stages + stages - 1)
