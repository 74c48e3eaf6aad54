"""Builds the engine of a prepared run on this rank, and the parts that its trainer is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch

from framework.checkpoint.checkpointer import Checkpointer, Retention, SaveOptions
from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.precision import FP16, Autocast, PrecisionSection, fp8_of
from framework.config.run_config import RunConfig
from framework.data.batches import in_pixels
from framework.data.loaders import EvalLoader, is_stream
from framework.data.splits import Splits
from framework.engine import random_state
from framework.engine.base_engine import BaseEngine
from framework.engine.collective_timeout import gather_from_disks
from framework.engine.distributed import claims_error_report, from_rank0, gather, rank
from framework.engine.model_build import build_model
from framework.engine.plain_engine import PlainEngine, build_engine
from framework.engine.step_batches import HALF
from framework.engine_protocol import Engine
from framework.models.prepare_model import as_fp32, prepare_model
from framework.models.unsupported import (
    in_rows,
    refuse_sparse_gradients,
)
from framework.plan.plan import Plan
from framework.setup.prepare_run import Prepared
from framework.setup.user_code import load_target
from framework.system.log import print_line
from framework.train.cadence import Every, Schedule
from framework.train.callbacks import Callbacks
from framework.train.monitors.base import Behind, Monitor, make_or_warn
from framework.train.run_folder import RunFolder

if TYPE_CHECKING:
    from framework.checkpoint.state.weight_files import LazyWeights
    from framework.data.streams import StreamEvalLoader
    from framework.engine.pipeline_engine import PipelineEngine
    from framework.engine.profile import Profiler
    from framework.engine.rank_groups import RankGroups
    from framework.train.monitors.tensorboard_events import Shown

# Logged losses in a row that may be infinite in fp16, where their steps are skipped: the dynamic
# loss scale has found its level long before.
_MOST_INFINITE_LOSSES: Final = 4


def assemble_engine(prepared: Prepared) -> PlainEngine | PipelineEngine:
    """Build the model with its optimizer, whole or as this rank's stage of a pipeline.
    Collective.
    """
    plan = prepared.plan
    parts = prepared.parts
    random_state.seed_everything(plan.config.run.seed)  # the same weights on every rank
    # A dataset's own `collate_fn` may pad every batch to another length.
    splits = parts.splits.by_name().values()
    varying_shapes = any(callable(getattr(split, "collate_fn", None)) for split in splits)
    if prepared.cut is not None:
        from framework.setup.assemble_stage import assemble_stage

        return assemble_stage(prepared, prepared.cut, varying_shapes=varying_shapes)
    groups = None
    if plan.layout.tensor_size > 1:
        from framework.engine.rank_groups import make_groups

        groups = make_groups(plan.layout)
    engine = build_engine(
        plan,
        ds_config=prepared.ds_config,
        model=_whole_model(prepared, groups, varying_shapes=varying_shapes),
        task=parts.task,
        make_optimizer=parts.make_optimizer,
        make_schedule=parts.make_schedule,
        groups=groups,
    )
    if _packs_rows_of_others(plan):
        from framework.setup.packed_rows import keep_texts_apart

        keep_texts_apart(engine, parts.task, plan)
    return engine


def _packs_rows_of_others(plan: Plan) -> bool:
    """Check whether rows are packed for a model that is not known to keep their texts apart."""
    reads_packed_rows = getattr(plan.config.model, "reads_packed_rows", False)
    return getattr(plan.config.data, "packing", False) and not reads_packed_rows


def _put_first_weights(
    model: torch.nn.Module, weights: LazyWeights, source: str, groups: RankGroups | None
) -> None:
    """Put the weights of a fresh start, read from `source`, into a model."""
    from framework.engine.weights import put_weights

    tensor_group = None if groups is None else groups.tensor
    put_weights(model, weights, source=source, tensor_group=tensor_group)
    weights.let_go()


def _whole_model(
    prepared: Prepared, groups: RankGroups | None, *, varying_shapes: bool
) -> torch.nn.Module:
    """Build this rank's model, ready for the engine. Collective."""
    plan = prepared.plan
    weights = prepared.weights
    config = plan.config
    assert not isinstance(weights, SavedCheckpoint), "they are read when the ranks have met"
    model = _built_share(prepared, groups, varying_shapes=varying_shapes)
    if config.precision.dtype not in HALF:  # below stage 3 DeepSpeed would train what it gets
        as_fp32(model)
    replicas = None if groups is None else groups.data
    model = prepare_model(model, config.training, replicas=replicas)
    refuse_sparse_gradients(model, config)
    if weights is not None:
        _put_first_weights(model, weights, str(config.checkpoint.init_weights), groups)
    if config.training.lora is not None:
        from framework.setup.assemble_adapters import with_adapters

        model = with_adapters(model, prepared, config.training.lora, groups)
    if _packs_rows_of_others(plan):
        from framework.models.packed_transformers import attend_in_packed_rows

        attend_in_packed_rows(model)
    section = fp8_of(config.precision)
    if section is not None:
        from framework.models.fp8 import compute_in_fp8

        in_fp8 = compute_in_fp8(model, section)
        if rank() == 0:
            print_line(f"precision.fp8: {in_fp8}")
    return model


def _built_share(
    prepared: Prepared, groups: RankGroups | None, *, varying_shapes: bool
) -> torch.nn.Module:
    """Build the model as the run's parts make it: of a tensor group this rank's share, of mixtures
    its experts, partitioned at stage 3. Collective.
    """
    plan = prepared.plan
    parts = prepared.parts
    config = plan.config
    build = in_rows(parts.build_model, config)
    if groups is not None:
        from framework.engine.tensor_cut import TensorCut

        build = TensorCut(groups.tensor, config.parallel.tensor_plan, parts.task).after(build)
    copies_of_experts = _group_of_copies(prepared)
    if plan.layout.expert_size > 1:
        from framework.engine.expert_parallel import building_experts, expert_group, place_experts

        # Other ranks have other experts, so no rank can send its weights to another.
        with building_experts(plan, varies=varying_shapes or plan.layout.micro_size == 1):
            model = build()
        if config.model.is_own_code:
            from framework.engine.packed_experts import divide_packed, refuse_without_packed

            refuse_without_packed(model, plan.layout.expert_size)
            divide_packed(model, expert_group(plan))
        if config.zero.stage < 3:
            return model
        from framework.engine.stage3_build import partition

        place_experts(model)
        return partition(model, prepared.ds_config, groups, copies_of_experts=copies_of_experts)
    # Modules of our own draw in their own constructors.
    is_ours = not config.model.is_own_code
    return build_model(build, ds_config=prepared.ds_config, draws_in_pieces=is_ours, groups=groups)


def _group_of_copies(prepared: Prepared) -> Any:
    """Make the groups that share second copies of weights (hpZ), if the run has any; return this
    rank's for divided experts, or None without them. Collective.
    """
    config = prepared.plan.config
    if config.zero.stage < 3:
        return None
    from framework.plan.zero_plus_plus import size_of_copies

    size = size_of_copies(config)
    if size == 1:
        return None
    from framework.engine.zero_plus_plus import make_copy_groups

    return make_copy_groups(prepared.plan.layout, size)


def watch_samples(
    engine: Engine, prepared: Prepared, monitors: Sequence[Monitor], folder: RunFolder
) -> Callable[[int], object] | None:
    """Let TensorBoard show samples of evaluations; returns the function that shows histograms of
    the weights of a step, or None without histograms.
    """
    plan = prepared.plan
    section = plan.config.monitors.tensorboard
    board = next((monitor for monitor in monitors if monitor.name == "tensorboard"), None)
    if section is None:
        return None
    # Ranks with parts of the logits look at them together.
    vocabulary = getattr(prepared.parts.task, "vocabulary", None)
    is_looking = isinstance(board, Behind) or vocabulary is not None
    if section.samples and is_looking and isinstance(engine, PlainEngine):
        from framework.setup.tensorboard import SampleWatch

        show: Callable[[Sequence[Shown]], object] | None = None
        if isinstance(board, Behind):
            show = partial(_show_at_step, engine, board)
        engine.show_batch = SampleWatch(
            show,
            folder.path,
            section.samples,
            step=lambda: engine.steps_taken,
            vocabulary=vocabulary,
        )
    if not section.histograms_every_steps:
        return None
    return lambda step: show_histograms(engine, plan, board, step)


def _show_at_step(engine: Engine, board: Behind, shown: Sequence[Shown]) -> None:
    board.show(engine.steps_taken, shown)


def _explained_write(error: Exception) -> str:
    """Explain an error of a callback that writes into a weight which stage 3 has spread; return
    empty text for any other error.
    """
    from framework.engine.spread_weights import written_while_spread

    problem = written_while_spread(error)
    if problem is None:
        return ""
    return str(problem)


def make_callbacks(engine: Engine, prepared: Prepared) -> Callbacks:
    """Build the object that calls the run's callbacks on this rank."""
    return Callbacks(
        prepared.parts.callbacks,
        gather=gather,
        is_main=rank() == 0,
        model=engine.module,
        scale_lr=engine.scale_lr,
        engine=engine,
        explain=_explained_write,
    )


def make_profiler(
    engine: BaseEngine, plan: Plan, folder: RunFolder, *, start_step: int
) -> Profiler | None:
    """Build the profiler of the config's steps, or None if all of them were taken before."""
    section = plan.config.profile
    if section is None or start_step >= section.last:
        return None
    from framework.engine.profile import Profiler

    return Profiler(engine, section, folder.path, stage=plan.layout.stage_of(rank()))


def show_histograms(engine: Engine, plan: Plan, board: Monitor | None, step: int) -> None:
    """Hand histograms of the weights to TensorBoard. Collective; only rank 0 has a board."""
    from framework.setup.tensorboard import weight_histograms

    histograms = weight_histograms(engine.module, plan)
    if isinstance(board, Behind):
        board.show(step, histograms)


def make_schedule(
    plan: Plan,
    *,
    tokens_per_sample: int | None = None,
    per_step: Mapping[str, float] = MappingProxyType({}),
) -> Schedule:
    """Build the schedule of logs, evaluations and saves.

    Args:
        plan: of the run.
        tokens_per_sample: if the training data is text.
        per_step: as `Schedule` has it.
    """
    config = plan.config
    steps_per_epoch = plan.length.epoch
    total_steps = plan.length.total_steps or 0
    assert total_steps, "prepare() plans with the real size of the data"
    evaluation = config.evaluation
    checkpoint = config.checkpoint
    tensorboard = config.monitors.tensorboard
    show_weights = Every()
    if tensorboard is not None and tensorboard.histograms_every_steps:
        show_weights = Every(tensorboard.histograms_every_steps)
    tokens_per_step = None
    if tokens_per_sample:
        tokens_per_step = plan.layout.global_size * tokens_per_sample
    return Schedule(
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        samples_per_step=plan.layout.global_size,
        tokens_per_step=tokens_per_step,
        per_step=per_step,
        log=Every(config.training.log_every, at_end=True),
        evaluate=Every.of(
            every_steps=evaluation.every_steps,
            every_epochs=evaluation.every_epochs,
            steps_per_epoch=steps_per_epoch,
            at_end=evaluation.at_end,
            at_start=evaluation.at_start,
            start_step=evaluation.start_step,
        ),
        save=Every.of(
            every_steps=checkpoint.every_steps,
            every_epochs=checkpoint.every_epochs,
            steps_per_epoch=steps_per_epoch,
            at_end=checkpoint.at_end,
        ),
        show_weights=show_weights,
        not_finite_allowed=_MOST_INFINITE_LOSSES if _is_in_fp16(config.precision) else 0,
    )


def _is_in_fp16(precision: PrecisionSection) -> bool:
    """Check whether a run computes in fp16, where the first losses may be infinite."""
    if isinstance(precision, Autocast):
        return precision.compute_dtype == "fp16"
    return isinstance(precision, FP16)


def make_checkpointer(
    engine: Engine,
    folder: Path,
    *,
    plan: Plan,
    description: Mapping[str, Any],
    further: Callable[[int], Mapping[str, Any]],
) -> Checkpointer:
    """Build the checkpointer that saves this run in `folder`, at once or in the background. The
    caller closes it. `further` returns more state for the save of a step.

    Raises:
        StorageError: the process that writes in the background does not start.
    """
    section = plan.config.checkpoint
    # A metric that each rank measures for itself differs between ranks: all save rank 0's.
    differs = section.keep_best is not None and not section.keep_best.startswith(
        ("train/", "eval/")
    )

    def position(step: int) -> dict[str, Any]:
        """Return the position in the data, which determines the order of samples with the seed,
        and the `further` state.
        """
        epoch, step_in_epoch = divmod(step, plan.length.epoch)
        samples = step * plan.layout.global_size
        values: dict[str, Any] = {"epoch": epoch, "step_in_epoch": step_in_epoch}
        values["samples"] = samples
        more = further(step)
        if differs:
            more = from_rank0(more)
        return values | dict(more)

    options = SaveOptions(
        Retention(section.keep_last, section.keep_every, section.keep_best, section.best_is),
        is_main=rank() == 0,
        gather=gather_from_disks,
        position=position,
        description=description,
        last_step=plan.length.total_steps,
    )
    if section.mode != "async":
        return Checkpointer(engine, folder, options)
    from framework.checkpoint.async_checkpointer import AsyncCheckpointer

    # In the background ranks meet every few seconds, however long a disk takes: there a long
    # silence means a lost peer.
    return AsyncCheckpointer(
        engine,
        folder,
        replace(options, gather=gather),
        rank=rank(),
        world_size=plan.layout.world_size,
    )


def make_monitors(
    config: RunConfig, folder: Path, *, total_steps: int, from_step: int, held: Behind | None = None
) -> list[Monitor]:
    """Build the monitors: files of metrics, the console, services, and the user's own.

    Nothing is written to files before `held` has shown that this run still holds the folder. If a
    monitor other than ``metrics.jsonl`` cannot be made, that costs a warning.
    """
    from framework.train.monitors.console import make_console
    from framework.train.monitors.metric_files import JsonlFile

    section = config.monitors
    files: list[Monitor] = [JsonlFile(folder / "metrics.jsonl", from_step=from_step)]
    if section.csv:
        from framework.train.monitors.metric_files import CsvFile

        files += make_or_warn(
            "metrics.csv", lambda: CsvFile(folder / "metrics.csv", from_step=from_step)
        )
    if section.tensorboard:
        from framework.train.monitors.tensorboard_events import TensorBoardEvents

        files += make_or_warn(
            "tensorboard",
            lambda: TensorBoardEvents(
                folder / "tensorboard", from_step=from_step, config=config.to_dict()
            ),
        )
    console = make_console(section.progress, total_steps=total_steps, from_step=from_step)
    make_by_target = []
    for other in section.others:
        factory = other.factory()
        target = load_target(factory.path, key="monitors.others")
        make_by_target.append((factory.path, partial(target, **factory.kwargs)))
    monitors: list[Monitor] = [Behind(file, after=held) for file in files]
    if console is not None:
        monitors.append(console)
    monitors += _services(config, folder, from_step=from_step)
    for name, make in make_by_target:
        from framework.train.monitors.aside import Aside

        monitors.append(Aside(name, make, wait_seconds=section.wait_seconds))
    return monitors


def _services(config: RunConfig, folder: Path, *, from_step: int) -> list[Monitor]:
    """Build the monitors that have a process of their own, as they may talk to a server."""
    section = config.monitors
    sinks = {name: sink for name, sink in section.sinks().items() if name != "tensorboard"}
    if not sinks:
        return []
    from framework.train.monitors.services import Described, ServiceProcess

    run = Described(folder, config.run.name, config.to_dict(), from_step)
    seconds = section.wait_seconds
    monitors: list[Monitor] = []
    for name, sink in sinks.items():
        options = sink.model_dump()
        monitors += make_or_warn(
            name, partial(ServiceProcess, name, run, options, wait_seconds=seconds)
        )
    return monitors


def make_eval_loaders(
    plan: Plan, splits: Splits, *, rank: int
) -> dict[str, EvalLoader | StreamEvalLoader]:
    """Return this rank's loader of its share of every evaluation set, by the set's name."""
    make = partial(
        _eval_loader,
        batch_size=plan.config.evaluation.batch_size or plan.layout.micro_size,
        rank=plan.layout.data_parallel_rank(rank),
        world_size=plan.layout.data_parallel_size,
        max_samples=plan.config.evaluation.max_samples,
        num_workers=plan.config.data.num_workers,
        pin_memory=plan.cluster.device != "cpu",
        claims=claims_error_report,
    )
    return {name: make(dataset) for name, dataset in splits.evaluations.items()}


def _eval_loader(dataset: Any, **options: Any) -> EvalLoader | StreamEvalLoader:
    if is_stream(dataset):
        from framework.data.streams import StreamEvalLoader

        return StreamEvalLoader(dataset, gather=gather, **options)
    if options["pin_memory"]:  # a device: images stay pixels until they are there
        dataset = in_pixels(dataset)
    return EvalLoader(dataset, **options)
