"""Prepares a run before its process waits for any other, so that its errors are found first."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.load import Source
from framework.config.precision import fp8_of
from framework.config.run_config import RunConfig
from framework.config.training import MEASURED, Compile
from framework.data.loaders import is_stream, num_samples_of
from framework.data.order import LATEST_ORDER
from framework.data.splits import tokens_sha256
from framework.engine.distributed import (
    check_device,
    describe_environment,
    device_name,
    take_device_of_rank,
)
from framework.errors import ConfigError, Problem, StorageError, counted
from framework.plan.cluster import Cluster, Device
from framework.plan.plan import Plan, accepted, make_plan
from framework.plan.render import render
from framework.plan.rules.devices import missing_metrics_package
from framework.setup.components import Parts, gather_parts
from framework.setup.user_code import Objects, check_arguments, load_target
from framework.system.waiting import waiting
from framework.train.run_folder import RunFolder

if TYPE_CHECKING:  # a plain run reads no weights and no checkpoint
    from framework.checkpoint.resume_point import ResumeLookup
    from framework.checkpoint.state.weight_files import LazyWeights
    from framework.setup.pipeline_stages import CutModel


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start.

    Attributes:
        plan: of the run.
        ds_config: the rendered DeepSpeed JSON.
        parts: model, data, task and optimizer.
        cut: the model as layers, for a pipeline.
        named: the checkpoint at the path that `checkpoint.resume` is set to, if it is one.
        weights: of a fresh start, if they are not drawn; or the checkpoint to read them from, once
            all ranks have met and verified its files.
        adapter: of a fresh start, if adapters are not drawn, under the names in peft's files.
        measured: what `batch.micro_size: measured` has found, for the events.
    """

    plan: Plan
    ds_config: dict[str, Any]
    parts: Parts
    cut: CutModel | None = None
    named: SavedCheckpoint | None = None
    weights: LazyWeights | SavedCheckpoint | None = None
    adapter: LazyWeights | None = None
    measured: Mapping[str, Any] | None = None

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that must be equal on every rank, or collectives would hang or mix
        different runs.
        """
        splits = self.parts.splits.by_name()
        values: dict[str, Any] = {}
        for name, split in splits.items():
            values[f"{name} samples"] = num_samples_of(split)
        for name, split in splits.items():
            checksum = tokens_sha256(split)
            if checksum:
                values[f"checksum of the {name} text"] = checksum
        for name, section in self.plan.config.to_dict().items():
            values[f"config.{name}"] = section
        return values

    def describe_weights(self) -> str:
        """Describe the weights that this rank has found for a fresh start; on another host the file
        system may hold others.
        """
        if self.weights is None:
            found = "no weights are read"
        elif isinstance(self.weights, SavedCheckpoint):
            found = f"{self.weights.tag} is found there"
        else:
            found = f"{counted(len(self.weights), 'tensor')} are found there"
        if self.adapter is None:
            return found
        return f"{found}, and {counted(len(self.adapter), 'tensor')} of adapters"

    def without_weights(self) -> Prepared:
        """Return the run without weights of a fresh start, for one that resumes a checkpoint."""
        return replace(self, weights=None)

    def without_adapter(self) -> Prepared:
        """Return the run without adapters of a fresh start, for one that resumes a checkpoint."""
        return replace(self, adapter=None)

    def pipeline(self) -> dict[str, Any] | None:
        """Return the layers of the model and their cuts as plain values; None without a
        pipeline.
        """
        if self.cut is None:
            return None
        return self.cut.table.to_dict()

    def description(self, *, order: int = LATEST_ORDER) -> dict[str, Any]:
        """Describe the run for its checkpoints; `order` is the version of the order of its
        samples.
        """
        plan = self.plan
        values: dict[str, Any] = {}
        pipeline = self.pipeline()
        if pipeline:
            values["pipeline"] = pipeline
        values["order"] = order
        # With other data a position in them would mean other samples.
        values["num_train_samples"] = plan.length.num_train_samples
        checksum = tokens_sha256(self.parts.splits.train)
        if checksum:
            values["data_sha256"] = checksum
        lanes = _num_lanes(plan, self.parts)
        if lanes:
            values["lanes"] = lanes
        values["steps_per_epoch"] = plan.length.steps_per_epoch
        values["total_steps"] = plan.length.total_steps
        values["layout"] = asdict(plan.layout)
        values["versions"] = describe_environment()["versions"]
        values["config"] = plan.config.to_dict()
        return values


def order_of(start: SavedCheckpoint | None) -> int:
    """Return the version of the order of samples: a resumed run keeps its own, and a new one has
    the latest.
    """
    if start is None:
        return LATEST_ORDER
    order: int = start.manifest.get("order", 1)
    return order


def prepare(
    config: RunConfig,
    *,
    objects: Objects | None = None,
    source: Source | None = None,
    plan: Plan | None = None,
    lookup: ResumeLookup | None = None,
) -> Prepared:
    """Import and build the parts of a run, and render its DeepSpeed JSON; makes this rank's device
    the current one. Not collective.

    Args:
        config: of the run.
        objects: parts of it that were handed over.
        source: where the config's values came from.
        plan: of the config for this cluster, if it was made before the device was known.
        lookup: of the checkpoint to resume, if one was made before.

    Raises:
        ConfigError, StorageError: the run cannot work.
    """
    source = source or Source()
    device = cast(Device, device_name())
    if objects is None:
        objects = Objects()
    else:
        from framework.setup.handed_over import describe_objects

        config = describe_objects(config, objects)
    if lookup is None:
        lookup = _lookup_of(config)
    # Errors of the config alone are raised before anything is imported.
    if plan is None:
        plan = _plan_here(config, device, lookup, source)
        config = plan.config
    else:
        plan = plan.on_device(device, source)
    take_device_of_rank(os.environ)
    check_device(config.precision.dtype, config.run.backend)
    with _placing(source):
        _check_packages(config, device)
        RunFolder(config.run.folder).check_usable()
        resumed = _find_resumed(config, lookup)
        with waiting("the data: it is read, downloaded or made ready (data)"):
            parts = gather_parts(config, objects)
        _check_kept(parts, plan)
    plan = plan.with_data(parts.splits.num_train, source)
    texts_per_row = getattr(parts.splits.train, "texts_per_row", 1.0)
    plan = replace(plan, texts_per_row=texts_per_row)
    findings = list(plan.findings)
    findings += [source.locate(problem) for problem in _shared_lanes(plan, parts)]
    ds_config = render(plan)
    findings += _problems_of_passed_keys(plan, ds_config, source)
    with _placing(source):
        cut = _cut_into_stages(plan, parts)
        weights, adapter, warnings = _starting_weights(
            config, cut, source, is_resumed=resumed is not None
        )
    findings += warnings
    named = None
    if _names_checkpoint(config):
        named = resumed
    plan = replace(plan, findings=tuple(findings))
    return Prepared(plan, ds_config, parts, cut, named, weights, adapter)


def _check_kept(parts: Parts, plan: Plan) -> None:
    """Refuse a run in which micro-batches are others than the sampler of its data makes."""
    check_kept = getattr(parts.splits.train, "check_kept", None)
    if check_kept is None:  # no sampler makes them
        return
    micro_size: Any = plan.layout.micro_size
    if plan.config.batch.micro_size == MEASURED:
        micro_size = MEASURED
    data = plan.config.data
    by_length = {
        "data.bucket_steps": data.bucket_steps,
        "data.curriculum_steps": data.curriculum_steps,
    }
    check_kept(micro_size=micro_size, by_length=by_length)


def _plan_here(
    config: RunConfig, device: Device, lookup: ResumeLookup | None, source: Source
) -> Plan:
    """Return the plan of a config, with its ``auto`` values chosen, for the ranks of this job."""
    cluster = Cluster.from_environment(os.environ, device=device)
    if config.auto:
        from framework.plan.auto import chosen_here

        assert lookup is not None

        config = chosen_here(config, cluster, lookup.manifest, source=source)
    return make_plan(config, cluster, source=source)


def _cut_into_stages(plan: Plan, parts: Parts) -> CutModel | None:
    """Return the model's layers by stage; without a pipeline None, after a check of layers that are
    to be recomputed.
    """
    if plan.layout.pipe_size > 1:
        from framework.setup.pipeline_stages import cut_model

        return cut_model(plan, parts)
    if plan.config.training.recompute_every:
        from framework.setup.pipeline_stages import check_recomputed

        check_recomputed(plan, parts)
    return None


def _problems_of_passed_keys(
    plan: Plan, ds_config: dict[str, Any], source: Source
) -> tuple[Problem, ...]:
    """Return warnings about keys that the config passes to DeepSpeed. Raises ConfigError for
    errors.
    """
    if not plan.config.deepspeed:
        return ()
    from framework.plan.judge_passed import judge_passed_through

    return accepted(judge_passed_through(plan, ds_config, source=source), source)


def _num_lanes(plan: Plan, parts: Parts) -> int:
    """Return the number of lanes of the training stream; 0 for data with a length."""
    train = parts.splits.train
    if not is_stream(train):
        return 0
    from framework.data.streams import num_lanes

    requested = getattr(plan.config.data, "lanes", None)
    return num_lanes(train, global_size=plan.layout.global_size, requested=requested)


def _shared_lanes(plan: Plan, parts: Parts) -> Iterator[Problem]:
    """Yield a warning if the lanes of the training stream cannot be divided evenly over ranks."""
    lanes = _num_lanes(plan, parts)
    ranks = plan.layout.data_parallel_size
    if lanes % ranks:
        reason = (
            f"{ranks} ranks share {counted(lanes, 'part')} of the training stream: several "
            "read a part, each its share"
        )
        fix = f"give the stream num_shards, a multiple of {ranks}, and shard(num_shards, index)"
        yield Problem("stream-lanes-shared", reason, fix, "data.lanes", lanes, severity="warning")


def _lookup_of(config: RunConfig) -> ResumeLookup | None:
    """Return a lookup of the checkpoint to resume, if the plan or the first weights need it."""
    if not config.auto and not _reads_checkpoint(config):
        return None
    from framework.checkpoint.resume_point import ResumeLookup

    return ResumeLookup(config)


def _names_checkpoint(config: RunConfig) -> bool:
    """Check whether `checkpoint.resume` is a path."""
    return config.checkpoint.resume not in ("auto", "never")


def _reads_checkpoint(config: RunConfig) -> bool:
    """Check whether `checkpoint.resume` is a path, or first weights depend on the checkpoint that
    the run resumes.
    """
    if _names_checkpoint(config):
        return True
    return bool(config.checkpoint.init_weights or config.training.first_adapter)


def _find_resumed(config: RunConfig, lookup: ResumeLookup | None) -> SavedCheckpoint | None:
    """Return the checkpoint that the run resumes, if that is read before all ranks have met;
    otherwise None.

    Its bytes are verified later, when the run folder is held.
    """
    if lookup is None or not _reads_checkpoint(config):
        return None
    first_weights = config.checkpoint.init_weights or config.training.first_adapter
    try:
        return lookup.checkpoint
    except (StorageError, OSError):  # damaged, or a file system that may answer next time
        if first_weights is None:
            return None
        raise


def _starting_weights(
    config: RunConfig, cut: CutModel | None, source: Source, *, is_resumed: bool
) -> tuple[LazyWeights | SavedCheckpoint | None, LazyWeights | None, list[Problem]]:
    """Return the weights and the adapters that the run starts from, if they are read, and the
    warnings about them.
    """
    if config.checkpoint.init_weights is None and config.training.first_adapter is None:
        return None, None, []
    from framework.setup.first_weights import starting_weights

    return starting_weights(config, cut, source, is_resumed=is_resumed)


@contextlib.contextmanager
def _placing(source: Source) -> Iterator[None]:
    """Add file and line to problems found while the parts are built."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([source.locate(problem) for problem in error.problems]) from error


def _check_packages(config: RunConfig, device: Device) -> None:
    """Refuse a run that lacks a package. Every rank checks: if rank 0 alone failed later, the
    others would wait for it.
    """
    problems = []
    for key, name in config.monitors.missing_packages():
        fix = f"pip install {name}, or set {key}: false"
        problems.append(Problem("package-missing", f"{name} is not installed", fix, key))
    if config.training.lora is not None and importlib.util.find_spec("peft") is None:
        reason = "peft, which adds adapters to models, is not installed"
        fix = "pip install peft"
        problems.append(Problem("package-missing", reason, fix, "training.lora"))
    problems += missing_metrics_package(config)
    if isinstance(config.training.compile, Compile) or fp8_of(config.precision) is not None:
        from framework.setup.device_needs import missing_for_device

        problems += missing_for_device(config, device)
    if problems:
        raise ConfigError(problems)
    for number, section in enumerate(config.monitors.others):
        key = f"monitors.others.{number}"
        factory = section.factory()
        target = load_target(factory.path, key=f"{key}.target")
        check_arguments(target, factory.kwargs, key=key)
