"""From a plan to the things that the Trainer is given: agenda, loaders, monitors, and what a checkpoint says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from framework.checkpoint.async_checkpointer import AsyncCheckpointer
from framework.checkpoint.checkpointer import Checkpointer, Retention
from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.precision import BF16, FP16, FP32, Autocast
from framework.config.run_config import RunConfig
from framework.data.loaders import EvalLoader, TrainLoader
from framework.data.order import LATEST_ORDER
from framework.data.splits import Splits, tokens_sha256
from framework.engine.distributed import describe_environment, from_rank0, gather, gather_from_disks, rank
from framework.engine.protocol import Engine
from framework.plan.plan import Plan
from framework.train.monitors.base import Monitor
from framework.train.monitors.console import make_console
from framework.train.monitors.metric_files import CsvFile, JsonlFile
from framework.train.monitors.tensorboard_events import TensorBoardEvents
from framework.train.trainer import Every, Schedule

# Logged losses in a row that may be infinite in fp16: the dynamic loss scale has found its level long before.
_IN_FP16: Final = 4


def make_schedule(plan: Plan, *, tokens_per_sample: int | None = None) -> Schedule:
    """Build the schedule of what is due after which step; `tokens_per_sample` where the training data is text."""
    config, length = plan.config, plan.length
    if not length.steps_per_epoch or not length.total_steps:
        raise AssertionError("prepare() plans with the real size of the data")
    evaluation, checkpoint = config.evaluation, config.checkpoint
    return Schedule(
        total_steps=length.total_steps,
        steps_per_epoch=length.steps_per_epoch,
        samples_per_step=plan.layout.global_size,
        tokens_per_step=plan.layout.global_size * tokens_per_sample if tokens_per_sample else None,
        log=Every(config.training.log_every, at_end=True),
        evaluate=Every.of(
            every_steps=evaluation.every_steps,
            every_epochs=evaluation.every_epochs,
            at_end=evaluation.at_end,
            steps_per_epoch=length.steps_per_epoch,
        ),
        save=Every.of(
            every_steps=checkpoint.every_steps,
            every_epochs=checkpoint.every_epochs,
            at_end=checkpoint.at_end,
            steps_per_epoch=length.steps_per_epoch,
        ),
        not_finite_allowed=_IN_FP16 if computes_in_fp16(config.precision) else 0,
    )


def computes_in_fp16(precision: FP32 | FP16 | BF16 | Autocast) -> bool:
    """Check whether numbers above 65,504 are infinite; such a loss is no news of the weights, because its step is
    skipped.
    """
    return isinstance(precision, FP16) or (isinstance(precision, Autocast) and precision.compute_dtype == "fp16")


def position(plan: Plan, step: int) -> dict[str, int]:
    """Return the run's position in the data after a step; the order of the samples is a function of it and of the
    seed.
    """
    steps_per_epoch = plan.length.steps_per_epoch or 1
    epoch, step_in_epoch = divmod(step, steps_per_epoch)
    return {"epoch": epoch, "step_in_epoch": step_in_epoch, "samples": step * plan.layout.global_size}


def order_of(start: SavedCheckpoint | None) -> int:
    """Version of the order of samples: a run that goes on keeps its own, and a new one has the latest."""
    return LATEST_ORDER if start is None else int(start.manifest.get("order", 1))


def description(
    plan: Plan, splits: Splits, *, pipeline: Mapping[str, Any] | None = None, order: int = LATEST_ORDER
) -> dict[str, Any]:
    """Describe the run for its checkpoints; `pipeline` names the model's layers and where it was cut."""
    text = tokens_sha256(splits.train)
    return {
        **({"pipeline": pipeline} if pipeline else {}),
        # With other data its place in them would mean other samples.
        "order": order,
        "num_train_samples": plan.length.num_train_samples,
        **({"data_sha256": text} if text else {}),
        "steps_per_epoch": plan.length.steps_per_epoch,
        "total_steps": plan.length.total_steps,
        "layout": asdict(plan.layout),
        "versions": describe_environment()["versions"],
        "config": plan.config.to_dict(),
    }


def make_retention(config: RunConfig) -> Retention:
    """Build the retention rule of the config."""
    checkpoint = config.checkpoint
    return Retention(checkpoint.keep_last, checkpoint.keep_every, checkpoint.keep_best, checkpoint.best_is)


def make_checkpointer(
    engine: Engine,
    folder: Path,
    *,
    plan: Plan,
    description: Mapping[str, Any],
    further: Callable[[], Mapping[str, Any]],
) -> Checkpointer:
    """Build the checkpointer that saves this run in `folder`, at once or in the background; to be closed. `further`
    adds to the state of every save.

    Raises:
        StorageError: the process that would write in the background does not start.
    """
    is_own = not str(plan.config.checkpoint.keep_best).startswith(("train/", "eval/"))  # each rank measures another
    options: dict[str, Any] = {
        "retention": make_retention(plan.config),
        "is_main": rank() == 0,
        # In the background ranks meet every few seconds, however long a disk takes: there a long silence means a lost
        # peer.
        "gather": gather if plan.config.checkpoint.mode == "async" else gather_from_disks,
        "position": lambda step: {**position(plan, step), **(from_rank0(further()) if is_own else further())},
        "last_step": plan.length.total_steps,
        "description": description,
    }
    if plan.config.checkpoint.mode == "async":
        return AsyncCheckpointer(engine, folder, rank=rank(), world_size=plan.layout.world_size, **options)
    return Checkpointer(engine, folder, **options)


def make_monitors(config: RunConfig, folder: Path, *, total_steps: int, from_step: int) -> list[Monitor]:
    monitors: list[Monitor] = [JsonlFile(folder / "metrics.jsonl", from_step=from_step)]
    if config.monitors.csv:
        monitors.append(CsvFile(folder / "metrics.csv", from_step=from_step))
    if config.monitors.tensorboard:
        monitors.append(TensorBoardEvents(folder / "tensorboard", from_step=from_step))
    console = make_console(config.monitors.progress, total_steps=total_steps, from_step=from_step)
    return [*monitors, console] if console is not None else monitors


def make_train_loader(
    plan: Plan, splits: Splits, *, rank: int, num_workers: int | None = None, order: int = LATEST_ORDER
) -> TrainLoader:
    """This rank's stream of micro-batches. With `num_workers`, other than the config's, no device is touched."""
    data = plan.config.data
    return TrainLoader(
        splits.train,
        global_size=plan.layout.global_size,
        micro_size=plan.layout.micro_size,
        accumulation_steps=plan.layout.accumulation_steps,
        rank=plan.layout.data_parallel_rank(rank),
        world_size=plan.layout.data_parallel_size,
        seed=plan.config.run.seed,
        shuffle=data.shuffle,
        num_workers=data.num_workers if num_workers is None else num_workers,
        prefetch_batches=data.prefetch_batches,
        pin_memory=plan.cluster.device != "cpu" and num_workers is None,
        random_samples=data.has_random_samples(),
        order_version=order,
    )


def make_eval_loader(plan: Plan, splits: Splits, *, rank: int) -> EvalLoader | None:
    """This rank's share of the evaluation data; None where there is none."""
    if splits.evaluation is None:
        return None
    return EvalLoader(
        splits.evaluation,
        batch_size=plan.config.evaluation.batch_size or plan.layout.micro_size,
        rank=plan.layout.data_parallel_rank(rank),
        world_size=plan.layout.data_parallel_size,
        max_samples=plan.config.evaluation.max_samples,
        num_workers=plan.config.data.num_workers,
        pin_memory=plan.cluster.device != "cpu",
    )
