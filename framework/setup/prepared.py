"""Everything that a run needs before its process waits for any other: what can be wrong with it is found here."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.resume_point import find_checkpoint
from framework.checkpoint.state.weight_files import LazyWeights
from framework.config.load import Source
from framework.config.run_config import RunConfig
from framework.data.splits import tokens_sha256
from framework.dslint.judge import judge_passed_through
from framework.engine.distributed import check_device, check_device_of_rank, device_name
from framework.engine.weights import checkpoint_weights, find_weights, refuse_other_layers
from framework.errors import ConfigError, Problem, StorageError, counted
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan
from framework.plan.render import render
from framework.setup.objects import Objects, describe_objects
from framework.setup.parts import Parts, gather_parts
from framework.setup.stages import CutModel, check_recomputed, cut_model
from framework.train.run_folder import RunFolder


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

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that must be equal on every rank, or collectives would hang or mix different runs."""
        splits = self.parts.splits
        sizes: dict[str, Any] = {"training samples": len(splits.train)}
        sizes |= {"evaluation samples": len(splits.evaluation)} if splits.evaluation is not None else {}
        sums = {name: tokens_sha256(split) for name, split in vars(splits).items()}
        sizes |= {f"checksum of the {name} text": found for name, found in sums.items() if found}
        return sizes | {f"config.{name}": section for name, section in self.plan.config.to_dict().items()}

    def describe_weights(self) -> str:
        """Describe the weights that this rank has found for a fresh start, before the ranks met: a file system may not
        show all of them the same yet.
        """
        if self.weights_of is not None:
            return f"{self.weights_of.tag} is found there"
        return (
            "no weights are read" if self.weights is None else f"{counted(len(self.weights), 'tensor')} are found there"
        )

    def without_weights(self) -> Prepared:
        """A checkpoint is resumed from, whatever this rank has seen of it when it looked."""
        return (
            self if self.weights is None and self.weights_of is None else replace(self, weights=None, weights_of=None)
        )

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
    objects, source = objects or Objects(), source or Source()
    config = describe_objects(config, objects)
    cluster = Cluster.from_environment(os.environ, device=device_name())  # type: ignore[arg-type]
    make_plan(config, cluster, source=source)  # what is wrong with the config alone is told before anything is imported
    check_device(config.precision.dtype, config.run.backend)
    check_device_of_rank(os.environ)
    with _placing(source):
        _check_monitors(config)
        RunFolder(config.run.folder).check_usable()
        resumed = _find_resumed(config)
        parts = gather_parts(config, objects)
    plan = make_plan(config, cluster, num_train_samples=len(parts.splits.train), source=source)
    ds_config = render(plan)
    problems = judge_passed_through(plan, ds_config, source=source)
    if any(problem.severity == "error" for problem in problems):
        raise ConfigError([problem for problem in problems if problem.severity == "error"])
    with _placing(source):
        cut = cut_model(plan, parts) if plan.layout.pipe_size > 1 else None
        if cut is None:
            check_recomputed(plan, parts)
        weights, weights_of = (None, None) if resumed is not None else _first_weights(config, cut)
    return Prepared(
        plan=replace(plan, findings=(*plan.findings, *problems)),
        ds_config=ds_config,
        parts=parts,
        cut=cut,
        weights=weights,
        weights_of=weights_of,
    )


def _find_resumed(config: RunConfig) -> SavedCheckpoint | None:
    """Look up the checkpoint that is resumed from, where a path must lead to one or first weights depend on it. Whether
    its bytes are those that were written is found out when the run folder is held.
    """
    asked, unverified = config.checkpoint.resume, config.checkpoint.allow_unverified
    own, first_weights = RunFolder(config.run.folder).checkpoints, config.checkpoint.init_weights
    if first_weights is None and asked in ("auto", "never"):
        return None
    try:
        return find_checkpoint(asked, run_checkpoints=own, allow_unverified=unverified)
    except (StorageError, OSError):  # damaged, or a file system that may answer next time
        if first_weights is None:
            return None
        raise


def _first_weights(config: RunConfig, cut: CutModel | None) -> tuple[LazyWeights | None, SavedCheckpoint | None]:
    """Find the weights that `checkpoint.init_weights` names, or a checkpoint that holds them; neither where weights are
    drawn.
    """
    path, unverified = config.checkpoint.init_weights, config.checkpoint.allow_unverified
    if path is None:
        return None, None
    found = find_weights(path, allow_unverified=unverified)
    if isinstance(found, SavedCheckpoint):
        return None, found
    if cut is not None:
        refuse_other_layers(found, cut.surveyed, source=path)
    return found, None


@contextlib.contextmanager
def _placing(source: Source) -> Iterator[None]:
    """Add file and line to problems found while the parts are built."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([source.locate(problem) for problem in error.problems]) from error


def _check_monitors(config: RunConfig) -> None:
    """On every rank: found missing on rank 0 only, and later, the others would be left waiting."""
    if config.monitors.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            Problem(
                kind="package-missing",
                key="monitors.tensorboard",
                value=True,
                reason="tensorboard is not installed",
                fix="pip install tensorboard, or set monitors.tensorboard: false",
            )
        )
