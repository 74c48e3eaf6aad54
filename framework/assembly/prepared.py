"""Everything that a run needs before its process waits for any other: what can be wrong with it is found here."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from framework.assembly.objects import Objects, describe_objects
from framework.assembly.parts import Parts, gather_parts
from framework.assembly.stages import CutModel, check_recomputed, cut_model
from framework.backend.distributed import check_device, device_name
from framework.backend.lazy_weights import LazyWeights
from framework.backend.weights import checkpoint_weights, find_weights, refuse_other_layers
from framework.config.load import Source
from framework.config.run_config import RunConfig
from framework.ds_json.judge import judge_passed_through
from framework.ds_json.render import render
from framework.errors import ConfigError, Problem, StorageError
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from framework.train.choice import find_checkpoint
from framework.train.run_folder import RunFolder
from framework.train.saved import SavedCheckpoint

Built = TypeVar("Built")


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start.

    Attributes:
        plan: what will happen.
        ds_config: the rendered DeepSpeed JSON.
        parts: model, data, task and optimizer.
        cut: the model as layers, for a pipeline.
        weights: what a fresh start begins with, if they are not drawn.
        weights_of: a checkpoint to take them from, when its files have been verified: by all ranks, when they have met.
    """

    plan: Plan
    ds_config: dict[str, Any]
    parts: Parts
    cut: CutModel | None = None
    weights: LazyWeights | None = None
    weights_of: SavedCheckpoint | None = None

    def essence(self) -> dict[str, Any]:
        """What must be the same on every rank, or collectives would hang or mix different runs."""
        splits = self.parts.splits
        sizes: dict[str, Any] = {"training samples": len(splits.train)}
        sizes |= {"evaluation samples": len(splits.evaluation)} if splits.evaluation is not None else {}
        sums = {name: getattr(getattr(split, "tokens", None), "checksum", "") for name, split in vars(splits).items()}
        sizes |= {f"checksum of the {name} text": found for name, found in sums.items() if found}
        found = {"checkpoint.init_weights": f"{self.weights_of.tag} is found there" if self.weights_of else "no checkpoint is read"}
        return sizes | found | {f"config.{name}": section for name, section in self.plan.config.to_dict().items()}

    def with_weights(self, *, damage: Sequence[str]) -> Prepared:
        """With the weights of the checkpoint `weights_of`, in which this damage was found.

        Raises:
            ConfigError: they are another model's.
            StorageError: there is damage, or they cannot be read.
        """
        assert self.weights_of is not None
        weights = checkpoint_weights(self.weights_of, damage=damage)
        if self.cut is not None:
            refuse_other_layers(weights, self.cut.surveyed, source=str(self.plan.config.checkpoint.init_weights))
        return replace(self, weights=weights, weights_of=None)

    def pipeline(self) -> dict[str, Any] | None:
        """The layers of the model and where they are cut, as plain values; None without a pipeline."""
        return None if self.cut is None else self.cut.table.to_dict()


def prepare(config: RunConfig, *, objects: Objects | None = None, source: Source | None = None) -> Prepared:
    """Plan the run, import and build its parts, render its DeepSpeed JSON."""
    objects = objects or Objects()
    config = describe_objects(config, objects)
    cluster = Cluster.from_environment(os.environ, device=device_name())  # type: ignore[arg-type]
    make_plan(config, cluster, source=source)
    check_device(config.precision.dtype, config.run.backend)
    _check_monitors(config, source or Source())
    _with_places(source, lambda: _check_resume(config))
    RunFolder(Path(config.run.output_dir) / config.run.name).check_usable()
    parts = _with_places(source, lambda: gather_parts(config, objects))
    plan = make_plan(config, cluster, num_train_samples=len(parts.splits.train), source=source)
    ds_config = render(plan)
    problems = judge_passed_through(plan, ds_config, source=source)
    if any(problem.severity == "error" for problem in problems):
        raise ConfigError([problem for problem in problems if problem.severity == "error"])
    cut = _with_places(source, lambda: cut_model(plan, parts)) if plan.layout.pipe_size > 1 else None
    if cut is None:
        _with_places(source, lambda: check_recomputed(plan, parts))
    weights = _with_places(source, lambda: _first_weights(config, cut))
    weights, weights_of = (None, weights) if isinstance(weights, SavedCheckpoint) else (weights, None)
    return Prepared(plan=replace(plan, findings=(*plan.findings, *problems)), ds_config=ds_config, parts=parts, cut=cut,
                    weights=weights, weights_of=weights_of)  # fmt: skip


def _check_resume(config: RunConfig) -> None:
    """A path must lead to a checkpoint. Whether its bytes are those that were written is found out when the run folder is held."""
    asked, unverified = config.checkpoint.resume, config.checkpoint.allow_unverified
    if asked not in ("auto", "never"):
        with contextlib.suppress(StorageError, OSError):  # damaged, or a file system that may answer next time
            find_checkpoint(asked, run_checkpoints=Path(), allow_unverified=unverified)


def _first_weights(config: RunConfig, cut: CutModel | None) -> LazyWeights | SavedCheckpoint | None:
    """What `checkpoint.init_weights` names; None where weights are drawn, or a checkpoint will be resumed from."""
    path = config.checkpoint.init_weights
    own = Path(config.run.output_dir) / config.run.name / "checkpoints"
    unverified = config.checkpoint.allow_unverified
    if path is None or find_checkpoint(config.checkpoint.resume, run_checkpoints=own, allow_unverified=unverified) is not None:
        return None
    weights = find_weights(path, allow_unverified=unverified)
    if cut is not None and isinstance(weights, LazyWeights):
        refuse_other_layers(weights, cut.surveyed, source=path)
    return weights


def _with_places(source: Source | None, work: Callable[[], Built]) -> Built:
    """What is found wrong while the parts are built still names file and line."""
    try:
        return work()
    except ConfigError as error:
        raise ConfigError([(source or Source()).locate(problem) for problem in error.problems]) from error


def _check_monitors(config: RunConfig, source: Source) -> None:
    """On every rank: found missing on rank 0 only, and later, the others would be left waiting."""
    if config.monitors.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(source.locate(Problem(
            kind="monitor-not-installed", key="monitors.tensorboard", value=True, reason="tensorboard is not installed",
            fix="pip install tensorboard, or set monitors.tensorboard: false",
        )))  # fmt: skip
