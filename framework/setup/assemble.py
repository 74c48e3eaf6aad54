"""From a prepared run to its engine: the model with its weights and its optimizer, on this rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from framework.checkpoint.async_checkpointer import AsyncCheckpointer
from framework.checkpoint.checkpointer import Checkpointer
from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.state.weight_files import LazyWeights
from framework.config.base import Object, Target
from framework.engine import random_state
from framework.engine.distributed import from_rank0, rank
from framework.engine.failures import ExplainedData
from framework.engine.model_build import build_model
from framework.engine.pipeline_engine import build_pipeline
from framework.engine.plain_engine import build_engine
from framework.engine.protocol import Engine
from framework.engine.weights import put_layer_weights, put_weights
from framework.models.adapt import prepare_model
from framework.models.sync_batch_norm import with_sync_batch_norm
from framework.setup.parts import Parts
from framework.setup.prepared import Prepared
from framework.setup.start_point import on_rank0
from framework.setup.wiring import make_eval_loader, make_monitors, make_schedule, make_train_loader, order_of
from framework.train.best import BestSoFar
from framework.train.monitors.base import HeldFolder, Monitor
from framework.train.monitors.console import LogLines
from framework.train.run_folder import RunFolder
from framework.train.trainer import Trainer


def assemble_engine(prepared: Prepared) -> Engine:
    """The model with its optimizer, plain or as this rank's stage of a pipeline. Collective."""
    assert prepared.weights_of is None, "they are read when the ranks have met"
    plan, parts, cut, ds_config = prepared.plan, prepared.parts, prepared.cut, prepared.ds_config
    random_state.seed_everything(plan.config.run.seed)  # the same weights on every rank
    training, weights = plan.config.training, prepared.weights
    if cut is not None:
        stage = build_pipeline(
            plan,
            ds_config=ds_config,
            layers=cut.layers,
            bounds=cut.table.bounds,
            task=parts.task,
            make_optimizer=parts.make_optimizer,
            adapt=partial(_adapt_layer, prepared),
            varying_shapes=_may_vary(parts),
        )
        _let_go(weights)
        return stage
    is_ours = not isinstance(plan.config.model, (Target, Object))  # whose modules draw in their own constructors
    model = prepare_model(build_model(parts.build_model, ds_config=ds_config, draws_in_pieces=is_ours), training)
    if weights is not None:
        put_weights(model, weights, source=str(plan.config.checkpoint.init_weights))
        _let_go(weights)
    return build_engine(plan, ds_config=ds_config, model=model, task=parts.task, make_optimizer=parts.make_optimizer)


def _may_vary(parts: Parts) -> bool:
    """Check whether batches may differ in more than their number of samples: a dataset's own `collate_fn` pads as it
    likes.
    """
    return any(callable(getattr(split, "collate_fn", None)) for split in (parts.splits.train, parts.splits.evaluation))


def _let_go(weights: LazyWeights | None) -> None:
    """`Prepared` would hold them to the end of the run."""
    if weights is not None:
        weights.let_go()


def _adapt_layer(prepared: Prepared, module: torch.nn.Module, layer: str, data_parallel_group: Any) -> torch.nn.Module:
    """Apply to one layer of a stage what `prepare_model` does to a whole model."""
    config, cut = prepared.plan.config, prepared.cut
    assert cut is not None
    if prepared.weights is not None:
        put_layer_weights(module, prepared.weights, layer=layer)
    for name, parameter in module.named_parameters():
        if f"{layer}.{name}" in cut.frozen:
            parameter.requires_grad_(False)
    return (
        with_sync_batch_norm(module, process_group=data_parallel_group) if config.training.sync_batch_norm else module
    )


def build_trainer(
    engine: Engine,
    prepared: Prepared,
    folder: RunFolder,
    checkpointer: Checkpointer | AsyncCheckpointer,
    best: BestSoFar,
    start: SavedCheckpoint | None,
    *,
    stop: Callable[[int], str],
) -> Trainer:
    """Build the Trainer of a run with its data and its monitors. Collective."""
    plan, splits, start_step = prepared.plan, prepared.parts.splits, start.step if start is not None else 0
    schedule = make_schedule(plan, tokens_per_sample=getattr(splits.train, "tokens_per_sample", None))
    monitors: list[Monitor] = [HeldFolder(folder), best, LogLines(schedule.total_steps)]

    def add_monitors() -> None:
        monitors.extend(make_monitors(plan.config, folder.path, total_steps=schedule.total_steps, from_step=start_step))

    from_rank0(on_rank0(add_monitors))
    eval_loader = make_eval_loader(plan, splits, rank=rank())
    return Trainer(
        engine,
        agenda=schedule,
        train_data=ExplainedData(make_train_loader(plan, splits, rank=rank(), order=order_of(start))),
        eval_data=ExplainedData(eval_loader) if eval_loader is not None else None,
        monitors=monitors,
        save=checkpointer.save,
        start_step=start_step,
        stop=stop,
    )
