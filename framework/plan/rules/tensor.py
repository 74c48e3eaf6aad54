"""Rules about tensor groups: what does not divide, and what they are not proven with."""

from __future__ import annotations

from typing import Final

from framework.config.base import ModelKind
from framework.config.model import LanguageModel
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.rules.base import Found, rule

# Keys that are counted over all ranks, or made for a layer that holds all of its weight.
_OF_ZERO: Final = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "mics_shard_size",
)


@rule("tensor-not-divisible")
def parts_are_equal(config: RunConfig, cluster: Cluster) -> Found:
    """Find heads and perceptrons that the ranks cannot share evenly; vocabularies may be uneven."""
    model = config.model
    size = config.parallel.tensor
    if not isinstance(model, LanguageModel):
        return
    for key in ("num_heads", "num_kv_heads", "mlp_size"):
        count = getattr(model, key, None)
        is_same = key == "num_kv_heads" and count == model.num_heads
        if count is not None and count % size and not is_same:
            fix = f"set model.{key} to a multiple of {size}, or another parallel.tensor"
            yield f"model.{key}", f"{size} ranks of a tensor group cannot share them evenly", fix


@rule()
def other_parts(config: RunConfig, cluster: Cluster) -> Found:
    """Find models of known kinds without a plan, groups that reach over hosts, and DeepSpeed's
    further groups of ranks.
    """
    size = config.parallel.tensor
    model = config.model
    if size == 1:
        return
    has_plan = model.is_own_code or isinstance(model, LanguageModel)
    if config.parallel.tensor_plan is None and isinstance(model, ModelKind) and not has_plan:
        fix = 'name its layers, such as {"fc1": column, "fc2": row}, or set parallel.tensor: 1'
        reason = f"{model.kind} has no plan of its own for tensor groups"
        yield Problem("tensor-plan", reason, fix, "parallel.tensor_plan", None)
    if cluster.devices_per_host % size:
        reason = (
            f"its groups reach over hosts of {cluster.devices_per_host}, and every layer "
            "waits for their network"
        )
        fix = f"set parallel.tensor to a divisor of {cluster.devices_per_host}"
        yield Problem("tensor-over-hosts", reason, fix, "parallel.tensor", size, severity="warning")
    zero = config.deepspeed.get("zero_optimization", {})
    for key in _OF_ZERO:
        if isinstance(zero, dict) and zero.get(key, False) not in (False, None, 1, -1):
            where = f"deepspeed.zero_optimization.{key}"
            reason = f"with parallel.tensor: {size} it is not shown to be right"
            yield Problem(
                "not-with-tensor", reason, "remove it, or set parallel.tensor: 1", where, zero[key]
            )
