"""The bytes of a checkpoint: DeepSpeed's own files, with our state and the random state of every rank inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.pipe import PipelineModule

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.save_stream import OpenFile
from framework.checkpoint.state.checkpoint_engine import AtomicCheckpointEngine, keeping_copies
from framework.checkpoint.state.optimizer_shards import Names, OptimizerViews, opened, stepped_groups
from framework.checkpoint.state.reader import StoredState
from framework.checkpoint.state.shard_map import STATE_KEY
from framework.engine import random_state
from framework.engine.distributed import claims_error_report, gather
from framework.engine.failures import known_failure
from framework.engine.rendezvous import failure_of_nccl, is_lost_peer
from framework.engine.workarounds.grad_scaler import restore_scaler, scaler_state
from framework.engine.workarounds.nvme_state import complete_nvme_state
from framework.engine.workarounds.restored_options import reporting_restored_options
from framework.errors import StorageError, in_one_line
from framework.system.files import FileRecord, NewFile


def save_bytes(
    engine: deepspeed.DeepSpeedEngine,
    files: AtomicCheckpointEngine,
    folder: Path,
    tag: str,
    state: Mapping[str, Any],
    *,
    names: Names,
    open_file: OpenFile = NewFile,
) -> Mapping[str, FileRecord]:
    """Write ``folder/tag``. Collective.

    `names` are the plain names of the engine's parameters and buffers; `open_file` is where its files go.

    Returns:
        What this rank wrote.

    Raises:
        OSError: the file system refused, on this rank.
    """
    # At stage 3 every rank writes a file of its own. Elsewhere one serves many ranks, and holds the states of all.
    own_random = random_state.capture()
    has_own_file = engine.zero_optimization_stage() == 3
    of_ranks = gather((None if has_own_file else own_random, scaler_state(engine)))
    states, scalers = map(list, zip(*of_ranks, strict=True))
    random_states = {torch.distributed.get_rank(): own_random} if has_own_file else states
    # One key of our own: DeepSpeed merges client state into its own dict, where `module` would overwrite the weights.
    # At stage 0 the optimizer only numbers what it steps.
    own = [group for group in stepped_groups(engine.optimizer) if all(parameter in names for parameter in group)]
    numbered = [[names[parameter] for parameter in group] for group in own]
    own_state = {"state": dict(state), "random_states": random_states, "grad_scalers": scalers, "names": numbered}
    client_state = {STATE_KEY: own_state}
    files.begin(folder / tag, open_file=open_file)
    with keeping_copies(files):
        engine.save_checkpoint(str(folder), tag=tag, client_state=client_state, save_latest=False)
    return files.end()


def load_bytes(engine: deepspeed.DeepSpeedEngine, folder: Path, tag: str) -> Mapping[str, Any]:
    """Put back weights, optimizer, schedule and this rank's random state; returns the state that was saved. Collective.

    Raises:
        StorageError: the files are missing or damaged.
    """
    try:
        with reporting_restored_options(engine):
            path, client_state = engine.load_checkpoint(str(folder), tag=tag)
            if path is not None:
                complete_nvme_state(engine, folder, tag)
        saved = client_state[STATE_KEY] if path is not None else None
    except StorageError as error:
        raise _by_whom(_not_loaded(folder / tag, str(error))) from error
    except Exception as error:
        if is_lost_peer(error) or failure_of_nccl(error) or known_failure(error):  # no word of the files
            raise
        raise _by_whom(_not_loaded(folder / tag, in_one_line(error, longest=300))) from error
    if saved is None:
        raise _by_whom(_not_loaded(folder / tag, "DeepSpeed does not find its files there"))
    random_state.restore(saved["random_states"][torch.distributed.get_rank()])
    restore_scaler(engine, saved.get("grad_scalers", ()))
    return dict(saved["state"])


def move_in(engine: deepspeed.DeepSpeedEngine, checkpoint: SavedCheckpoint, *, names: Names) -> Mapping[str, Any]:
    """Fill an engine from a checkpoint of another layout: other ranks, another ZeRO stage, other pipeline stages.
    Collective.

    Every rank reads what it holds. Returns the state that was saved. Random generators go on where they were if the
    ranks mean the same; otherwise as they were seeded, because their states belonged to other ranks.

    Raises:
        StorageError: the files do not hold what the model needs.
    """
    try:
        return _move_in(engine, checkpoint, names=names)
    except StorageError as error:
        _by_whom(error)
        raise


def _move_in(engine: deepspeed.DeepSpeedEngine, checkpoint: SavedCheckpoint, *, names: Names) -> Mapping[str, Any]:
    stored = StoredState(checkpoint)
    _refuse_other_model(engine, stored, names)
    views = OptimizerViews(engine, names)
    if not checkpoint.verified:
        _refuse_other_optimizer(views, stored, checkpoint.path)
    with opened(engine.optimizer):
        for view in views.views(stored.keys):
            view.values.copy_(stored.read(view.name, view.key, view.start, view.values.numel()))
        views.set_step(stored.step)
        if checkpoint.verified:
            with reporting_restored_options(engine):
                views.set_groups(stored.group_of)
        views.set_loss_scale(stored.loss_scale)
        _fill_weights(engine, stored, names)
        views.spread_weights()
    common = stored.common
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, common[counter])
    if not checkpoint.verified:
        _advance_schedule(engine)
        return {"step": checkpoint.step}
    if engine.lr_scheduler is not None and common.get("lr_scheduler") is not None:
        _take_up_schedule(engine.lr_scheduler, common["lr_scheduler"])
    saved = common[STATE_KEY]
    if _has_same_ranks(engine, checkpoint) and (own := stored.random_state(torch.distributed.get_rank())) is not None:
        random_state.restore(own)
    restore_scaler(engine, saved.get("grad_scalers", ()))
    return dict(saved["state"])


def _take_up_schedule(schedule: Any, state: Mapping[str, Any]) -> None:
    """DeepSpeed's schedules only note their place, and give the optimizer its rate with the next step: one too late."""
    schedule.load_state_dict(state)
    place = getattr(schedule, "last_batch_iteration", -1)
    if place >= 0:
        schedule.step(place)


def _has_same_ranks(engine: deepspeed.DeepSpeedEngine, checkpoint: SavedCheckpoint) -> bool:
    """Check whether a rank's number stands for the same share of the data and the same stage as where the checkpoint
    was written.
    """
    layout, module = checkpoint.manifest.get("layout"), engine.module
    if layout is None:  # DeepSpeed's own
        return False
    pipe_size = module.num_stages if isinstance(module, PipelineModule) else 1
    return (layout["world_size"], layout["pipe_size"]) == (torch.distributed.get_world_size(), pipe_size)


def _refuse_other_model(engine: deepspeed.DeepSpeedEngine, stored: StoredState, names: Names) -> None:
    """Before a number is changed. Every rank sees the whole model, except in a pipeline: there the other stages have
    the rest.
    """
    for tensor, name in names.items():
        # Stage 3 has cut them up: what is left is empty, or one rank's piece.
        stored.refuse_other_shape(name, getattr(tensor, "ds_shape", tensor.shape))
    if not isinstance(engine.module, PipelineModule):
        stored.refuse_others(engine.module.state_dict(keep_vars=True))  # of what is shared, all names


def _advance_schedule(engine: deepspeed.DeepSpeedEngine) -> None:
    """Bring the run's own schedule to where the engine is: nobody knows which one a checkpoint without a manifest was
    of.
    """
    if engine.lr_scheduler is not None:
        for _ in range(engine.global_steps - engine.skipped_steps):
            engine.lr_scheduler.step()


def _refuse_other_optimizer(views: OptimizerViews, stored: StoredState, place: Path) -> None:
    """Moments of another optimizer would be taken for this one's. Where there is a manifest, the configs have been
    compared.
    """
    known = views.known_keys()
    if not stored.keys and (known is None or known):
        raise _not_loaded(
            place,
            "its optimizer's state cannot be told apart (there is none, or it has several parameter groups "
            "with weights of one shape); checkpoint.init_weights takes the weights alone",
        )
    if known is not None and set(stored.keys) != known:
        raise _not_loaded(
            place,
            f"its optimizer's state is {', '.join(stored.keys)}, and this run's optimizer has "
            f"{', '.join(sorted(known)) or 'none'}; name the same optimizer, or take the weights alone with "
            "checkpoint.init_weights",
        )


def _fill_weights(engine: deepspeed.DeepSpeedEngine, stored: StoredState, names: Names) -> None:
    """Fill the weights that the model computes with: buffers, and all weights but those that stage 3 has
    partitioned.
    """
    with torch.no_grad():
        for tensor, name in names.items():
            if not hasattr(tensor, "ds_id"):
                tensor.copy_(stored.weight(name, tensor.shape))
            elif not tensor.requires_grad:
                with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
                    tensor.copy_(stored.weight(name, tensor.shape))


def _not_loaded(place: Path, reason: str) -> StorageError:
    return StorageError(
        f"{place}: the checkpoint cannot be loaded: {reason}; if the model's code has not changed, the files are "
        "damaged: resume from another one [checkpoint-not-loaded]"
    )


def _by_whom(reported: StorageError) -> StorageError:
    """Some files are read by one rank only, and the others wait for it in DeepSpeed's next collective. To be asked
    once.
    """
    reported.is_of_one_rank = claims_error_report(str(reported))
    return reported
