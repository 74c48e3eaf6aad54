"""Rules about what ranks share: stages of a pipeline, tensors, sequences, experts."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod
from typing import Final

from framework.config.base import ModelKind
from framework.config.model import LanguageModel, ModelSection
from framework.config.run_config import RunConfig
from framework.config.training import Batch
from framework.errors import Problem
from framework.plan.balance import stage_problems
from framework.plan.cluster import Cluster
from framework.plan.layers import num_layers
from framework.plan.layout import Layout
from framework.plan.rules.base import Found, is_on, nearest_divisor, rule
from framework.plan.zero_plus_plus import COPIES, passed_zero, size_of_copies

_QUANTIZED_GRADIENTS: Final = "zero_quantized_gradients"


@rule("tensor-not-divisible")
def parts_are_equal(config: RunConfig, cluster: Cluster) -> Found:
    """Find heads and perceptrons that the ranks cannot share evenly; vocabularies may be uneven."""
    model = config.model
    size = config.parallel.tensor
    if not isinstance(model, LanguageModel):
        return
    for key, count in _divided_counts(model):
        if count % size:
            fix = f"set model.{key} to a multiple of {size}, or another parallel.tensor"
            yield f"model.{key}", f"{size} ranks of a tensor group cannot share them evenly", fix


def _divided_counts(model: LanguageModel) -> Iterator[tuple[str, int]]:
    """Yield key and value of all that ranks of a tensor group share evenly, equal ones once."""
    for key in ("num_heads", "num_kv_heads", "mlp_size"):
        count = getattr(model, key, None)
        is_same = key == "num_kv_heads" and count == model.num_heads
        if count is not None and not is_same:
            yield key, count


@rule()
def other_parts(config: RunConfig, cluster: Cluster) -> Found:
    """Find models of known kinds without a plan, groups that reach over hosts, and DeepSpeed's
    further groups of ranks.
    """
    size = config.parallel.tensor
    model = config.model
    if size == 1:
        return
    if config.parallel.tensor_plan is None:
        yield from _missing_tensor_plan(model)
    if cluster.devices_per_host % size:
        reason = (
            f"its groups reach over hosts of {cluster.devices_per_host}, and every layer "
            "waits for their network"
        )
        fix = f"set parallel.tensor to a divisor of {cluster.devices_per_host}"
        yield Problem("tensor-over-hosts", reason, fix, "parallel.tensor", size, severity="warning")
    yield from _further_groups(config, cluster, "parallel.tensor", "not-with-tensor")


def _missing_tensor_plan(model: ModelSection) -> Iterator[Problem]:
    """Find a model of a known kind that is not divided by itself."""
    has_plan = model.is_own_code or isinstance(model, LanguageModel)
    if isinstance(model, ModelKind) and not has_plan:
        fix = 'name its layers, such as {"fc1": column, "fc2": row}, or set parallel.tensor: 1'
        reason = f"{model.kind} has no plan of its own for tensor groups"
        yield Problem("tensor-plan", reason, fix, "parallel.tensor_plan", None)


def _further_groups(
    config: RunConfig, cluster: Cluster, beside: str, kind: str
) -> Iterator[Problem]:
    """Find groups that DeepSpeed makes of all ranks for gradients in few bits, beside the groups of
    a key, `beside`.

    Within a host it quantizes no gradients (deepspeed/runtime/zero/stage3.py
    `__avg_scatter_grads`), and sums them over the ranks that hold the same.
    """
    zero = passed_zero(config)
    size = getattr(config.parallel, beside.partition(".")[2])
    if cluster.num_hosts == 1 or not is_on(zero, _QUANTIZED_GRADIENTS):
        return
    reason = (
        f"DeepSpeed makes its groups of all ranks (utils/groups.py), and with {beside}: {size} "
        "these hold different weights"
    )
    where = f"deepspeed.zero_optimization.{_QUANTIZED_GRADIENTS}"
    fix = f"remove it, or set {beside}: 1"
    yield Problem(kind, reason, fix, where, zero[_QUANTIZED_GRADIENTS])


@rule("sequence-not-shared")
def sequences_are_shared(config: RunConfig, cluster: Cluster) -> Found:
    """Find sequences that ranks cannot share: of models that read none, and of lengths that have no
    equal parts.
    """
    model = config.model
    key = "parallel.sequence"
    size = config.parallel.sequence
    if size == 1 or not isinstance(model, ModelKind) or model.is_own_code:
        return
    if not isinstance(model, LanguageModel):
        yield key, f"{model.kind} reads no sequences", f"set {key}: 1"
        return
    length = getattr(config.data, "sequence_length", None)
    if isinstance(length, int) and length % size:
        near = max(1, length // size) * size
        reason = f"sequences of {length} positions cannot be shared evenly"
        yield key, reason, f"set data.sequence_length: {near}"


@rule("no-block-of-experts")
def blocks_have_experts(config: RunConfig, cluster: Cluster) -> Found:
    """Find a model without experts in any block, because `moe.every` is more than its blocks."""
    moe = getattr(config.model, "moe", None)
    if not moe:
        return
    count = config.model.num_layers  # type: ignore[union-attr]
    if moe.every > count:
        yield (
            "model.moe.every",
            f"of {count} blocks none would have experts",
            f"write every: {count} or less",
        )


@rule("experts-not-divisible")
def experts_divide(config: RunConfig, cluster: Cluster) -> Found:
    """Find experts that do not divide over the ranks of a group, and ranks that do not divide into
    groups. Experts of a model of the user's own are counted when it is built.
    """
    size = config.parallel.expert
    moe = getattr(config.model, "moe", None)
    key = "parallel.expert"
    sizes = config.parallel.sizes()
    # Ranks that share sequences have other tokens, and may share experts.
    ranks = cluster.world_size * sizes["sequence_size"] // prod(sizes.values())
    divisible = ranks
    reasons = [(ranks, f"data-parallel ranks cannot be split evenly into groups of {size}")]
    if moe:
        divisible = gcd(ranks, moe.num_experts)
        reasons.insert(0, (moe.num_experts, f"experts cannot be split evenly over {size} ranks"))
    elif not config.model.is_own_code:
        return
    for count, reason in reasons:
        if count % size:
            divisor = nearest_divisor(divisible, near=size)
            yield key, f"{count} {reason}", f"set {key}: {divisor}"
            return


@rule()
def experts_beside_other_groups(config: RunConfig, cluster: Cluster) -> Found:
    """Find DeepSpeed's further groups of ranks beside experts that ranks share."""
    size = config.parallel.expert
    if size == 1:
        return
    yield from _further_groups(config, cluster, "parallel.expert", "expert-with-other")
    copies = size_of_copies(config)
    if copies > 1 and copies % size:
        reason = f"groups of {copies} ranks do not hold each of the {size} parts of experts equally"
        fix = f"set a multiple of {size}, or remove it"
        yield Problem("expert-with-other", reason, fix, COPIES, copies)


@rule()
def stages_fit(config: RunConfig, cluster: Cluster) -> Found:
    """Find what is wrong with the cut into stages; models that are not known by name are checked
    when they are built.
    """
    if config.parallel.pipe > 1:
        yield from stage_problems(config.parallel, num_layers(config.model))


@rule("not-in-pipelines")
def memory_for_length(config: RunConfig, cluster: Cluster) -> Found:
    """Find activations on the host, which a pipeline does not hold there: several micro-batches
    wait for their backward passes, the first of them longest, and copies come back in the reverse
    order.
    """
    if config.parallel.pipe == 1:
        return
    if config.training.offload_activations:
        key = "training.offload_activations"
        reason = "activations of a pipeline's micro-batches are not held on the host"
        yield key, reason, f"set {key}: false, or parallel.pipe: 1"


@rule("inert-beside-stages", "warning")
def partition_beside_stages(config: RunConfig, cluster: Cluster) -> Found:
    """Find two ways to cut a model: one of them has no effect."""
    parallel = config.parallel
    # A resolved config has the default, too.
    is_changed = parallel.partition != type(parallel).model_fields["partition"].default
    if parallel.pipe > 1 and parallel.stages is not None and is_changed:
        yield (
            "parallel.partition",
            "parallel.stages names the stage of every layer",
            "remove one of them",
        )


def idle_stages(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Find pipelines with fewer micro-batches than stages: a stage waits (p - 1) / (m + p - 1) of a
    step (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2).
    """
    stages = layout.pipe_size
    count = layout.accumulation_steps
    if not 1 < stages > count:
        return
    idle = (stages - 1) / (count + stages - 1)
    batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    reason = f"with {batches} per step {stages} stages stand idle {idle:.0%} of the time"
    yield Problem(
        "pipeline-idle",
        reason,
        _fix_of_idle_stages(config.batch, layout),
        "batch.accumulation_steps",
        count,
        severity="note",
    )


def _fix_of_idle_stages(batch: Batch, layout: Layout) -> str:
    """Return the settings with four micro-batches for each stage, or as many as the samples of a
    step have; a global size that is fixed stays, unless it has fewer samples than there are stages.
    """
    stages = layout.pipe_size
    wanted = 4 * stages
    if batch.global_size is None:
        then_idle = (stages - 1) / (wanted + stages - 1)
        return f"set batch.accumulation_steps: {wanted} for {then_idle:.0%}"
    share = layout.micro_size * layout.accumulation_steps
    counts = [count for count in range(1, share + 1) if share % count == 0]
    enough = [count for count in counts if count >= wanted]
    count = min(enough, default=counts[-1])
    sizes = f"batch.micro_size: {share // count} and batch.accumulation_steps: {count}"
    if count < stages:
        count = stages
        larger = layout.data_parallel_size * count
        sizes = f"batch.global_size: {larger}, batch.micro_size: 1"
        sizes += f" and batch.accumulation_steps: {count}"
    then_idle = (stages - 1) / (count + stages - 1)
    return f"set {sizes} for {then_idle:.0%}"
