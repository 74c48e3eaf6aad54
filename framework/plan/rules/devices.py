"""Rules between a run and the devices it is to run on."""

from __future__ import annotations

from collections.abc import Iterator

from framework.config.optimizer import Lamb, Lion
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster


def world_size_differs(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """The run is meant for another number of devices."""
    planned = config.run.world_size
    if planned is not None and planned != cluster.world_size:
        yield Problem(
            kind="world-size-differs",
            key="run.world_size",
            value=planned,
            reason=f"the run is meant for another number of devices than the {cluster.world_size} given ({cluster})",
            fix=f"start it on {planned} (without its hostfile the deepspeed launcher lets every node train alone), or "
            f"set run.world_size: {cluster.world_size}",
        )


def fp16_needs_gpu(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/runtime/engine.py `_do_sanity_check`: "Type fp16 is not supported on your device"."""
    if config.precision.dtype == "fp16" and cluster.device == "cpu":
        yield Problem(
            kind="fp16-on-cpu",
            key="precision.dtype",
            value="fp16",
            reason="DeepSpeed's cpu accelerator cannot train in fp16",
            fix="use bf16, fp32 or autocast here",
        )


def optimizer_needs_gpu(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """deepspeed/ops/op_builder/cpu/no_impl.py: FusedLion and FusedLamb have no CPU kernel."""
    optimizer, offloaded = config.optimizer, config.zero.offload_optimizer.device != "none"
    if (
        cluster.device == "cpu"
        and isinstance(optimizer, (Lion, Lamb))
        and not (isinstance(optimizer, Lion) and offloaded)
    ):
        yield Problem(
            kind="optimizer-on-cpu",
            key="optimizer.kind",
            value=optimizer.kind,
            reason="DeepSpeed has no kernel of it for cpu devices",
            fix="use adamw here",
        )
