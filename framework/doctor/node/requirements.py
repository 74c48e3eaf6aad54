"""Requirements of a run on each of its hosts, read off its plan: the preflight compares machines
with them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from framework.checkpoint.names import CHECKPOINTS
from framework.config.base import Section
from framework.config.optimizer import Constant
from framework.config.run_config import RunConfig
from framework.doctor.node.findings import Check
from framework.errors import ConfigError, Problem
from framework.plan.cluster import Cluster
from framework.plan.compiled_ops import Op, needed_ops
from framework.plan.compiling import BY_INDUCTOR
from framework.plan.plan import Plan
from framework.plan.render import render


@dataclass(frozen=True)
class Requirements:
    """Requirements on a host.

    Attributes:
        num_workers, prefetch_batches: processes for each rank that fetch batches, and micro-batches
            that each process keeps ready.
        run_folder: where the run writes; None without a run config.
        num_kept, kept_by: most checkpoints that are there at the same time, and the keys that keep
            them.
        inputs: files and folders that are read, as key of the run config and path.
        targets: modules of the user's own that the config names.
        host_bytes: memory that all ranks of a host take of it for what is offloaded and for
            saves in the background, by estimate; 0: none, or not estimated.
        compiles: whether torch.compile's inductor makes kernels.
        config_hash: of the resolved config; hosts must agree. Empty without a run config.
    """

    cluster: Cluster
    ops: tuple[Op, ...] = ()
    num_workers: int = 0
    prefetch_batches: int = 0
    run_folder: Path | None = None
    num_kept: int = 0
    kept_by: str = ""
    saves: bool = True
    nvme_folders: tuple[Path, ...] = ()
    inputs: tuple[tuple[str, Path], ...] = ()
    targets: tuple[str, ...] = ()
    host_bytes: int = 0
    compiles: bool = False
    config_hash: str = ""

    @property
    def checkpoints(self) -> Path | None:
        """Folder of checkpoints; None without a run config."""
        if self.run_folder is None:
            return None
        return self.run_folder / CHECKPOINTS


def requirements_of(plan: Plan) -> Requirements:
    """Return the requirements of this plan on every host that it names."""
    config = plan.config
    cluster = plan.cluster
    try:
        rendered = render(plan)
    except ConfigError:  # only the length of a schedule is missing, which comes with the data
        unscheduled = config.model_copy(update={"scheduler": Constant()})
        rendered = render(replace(plan, config=unscheduled))
    offloads = (config.zero.offload_optimizer, config.zero.offload_param)
    kept = _kept(plan)
    checkpoint = config.checkpoint
    return Requirements(
        cluster=cluster,
        ops=needed_ops(rendered, device=cluster.device),
        num_workers=getattr(config.data, "num_workers", 0),
        prefetch_batches=getattr(config.data, "prefetch_batches", 0),
        run_folder=config.run.folder.absolute(),
        num_kept=sum(kept.values()),
        kept_by=", ".join(kept),
        saves=checkpoint.at_end or checkpoint.is_often,
        nvme_folders=tuple(Path(each.nvme_path) for each in offloads if each.device == "nvme"),
        inputs=tuple(_inputs(config)),
        targets=tuple(sorted(_target_modules(config))),
        host_bytes=_bytes_on_host(plan),
        compiles=getattr(config.training.compile, "backend", "") in BY_INDUCTOR,
        config_hash=config_hash(config),
    )


def _target_modules(config: RunConfig) -> set[str]:
    """Return the modules of the user's own targets in the config's sections."""
    modules: set[str] = set()
    for name in type(config).model_fields:
        section = getattr(config, name)
        factory = section.own_factory() if isinstance(section, Section) else None
        if factory is not None:
            modules.add(factory.path.partition(":")[0])
    return modules


def _bytes_on_host(plan: Plan) -> int:
    """Estimate the bytes that all ranks of a host take of its memory (`Requirements.host_bytes`).

    On processors the host is the device, and a run takes more of it.
    """
    if plan.cluster.device == "cpu":
        return 0
    from framework.plan.hardware import host_bytes
    from framework.plan.memory import NotEstimatedError, estimate

    try:
        return host_bytes(estimate(plan), plan.cluster.devices_per_host)
    except NotEstimatedError:
        return 0


def requirements_without_config(cluster: Cluster) -> Requirements:
    """Return the requirements of any run on a host."""
    return Requirements(cluster=cluster, ops=needed_ops({}, device=cluster.device))


def config_hash(config: RunConfig) -> str:
    """Return a hash of the resolved config, which does not depend on its spelling."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _kept(plan: Plan) -> dict[str, int]:
    """Return the most checkpoints that each rule keeps at the end of the run, by the rule.

    Several rules may keep the same checkpoint.
    """
    checkpoint = plan.config.checkpoint
    total_steps = plan.length.total_steps
    kept = {}
    newest = plan.num_newest_kept()
    if newest is not None:
        kept[f"checkpoint.keep_last: {checkpoint.keep_last}"] = newest
    if checkpoint.keep_every is not None and total_steps is not None:
        every_steps = checkpoint.every_steps if checkpoint.every_epochs is None else None
        every = math.lcm(checkpoint.keep_every, every_steps or 1)  # only saved steps are kept
        kept[f"checkpoint.keep_every: {checkpoint.keep_every}"] = total_steps // every
    if checkpoint.keep_best is not None:
        kept[f"checkpoint.keep_best: {checkpoint.keep_best}"] = 1
    return kept


def _inputs(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yield the files and folders that the run reads, each with its key."""
    for name in ("root", "path"):
        path = getattr(config.data, name, None)
        if isinstance(path, str) and not getattr(config.data, "download", False):
            yield f"data.{name}", Path(path).absolute()
    if config.checkpoint.init_weights is not None:
        yield "checkpoint.init_weights", Path(config.checkpoint.init_weights).absolute()
    if config.training.first_adapter is not None:
        yield "training.lora.init_adapter", Path(config.training.first_adapter).absolute()
    if config.checkpoint.resume not in ("auto", "never"):
        yield "checkpoint.resume", Path(config.checkpoint.resume).absolute()


def check_inputs(requirements: Requirements) -> Check:
    """Check the files and folders that the config names, but not their content."""
    problems = []
    paths = []
    for key, path in requirements.inputs:
        paths.append(str(path))
        access = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
        if not os.access(path, access):
            if os.path.lexists(path):
                reason = "it cannot be read"
            else:
                reason = "it is not on this node"
            fix = "name a path that every node has, or bring it there"
            problems.append(Problem("input-not-found", reason, fix, key=key, value=str(path)))
    outcome = ", ".join(paths) or "nothing is read from files that the config names"
    return Check("inputs", outcome, problems)
