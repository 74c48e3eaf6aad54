"""The bytes of a checkpoint: DeepSpeed's own files, with our state and the random state of every
rank inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.pipe import PipelineModule

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import EXPERT
from framework.checkpoint.save_stream import OpenFile
from framework.checkpoint.state.checkpoint_engine import (
    AtomicCheckpointEngine,
    keeping_copies,
    read_or_explain,
)
from framework.checkpoint.state.optimizer_shards import (
    Names,
    OptimizerViews,
    opened,
    stepped_groups,
)
from framework.checkpoint.state.reader import StoredState, describe_lacking
from framework.checkpoint.state.shard_map import STATE_KEY
from framework.checkpoint.state.tensor_split import Division, splits_of, whole_shape
from framework.engine import random_state
from framework.engine.distributed import claims_error_report, device, gather, rank
from framework.engine.failures import known_failure
from framework.engine.held_weights import held_elements, lacking_names
from framework.engine.process_group_errors import lost_peer
from framework.engine.schedules import OwnSchedule
from framework.engine.weights import gives
from framework.engine.workarounds.grad_scaler import restore_scaler, scaler_state
from framework.engine.workarounds.nvme_state import complete_nvme_state
from framework.errors import StorageError, TrainingError, explaining, in_one_line, show_value
from framework.models.adapters import put_trained
from framework.models.experts import is_elsewhere
from framework.plan.layout import Layout
from framework.system.files import FileRecord, NewFile
from framework.system.log import warn


def save_bytes(
    engine: deepspeed.DeepSpeedEngine,
    files: AtomicCheckpointEngine,
    folder: Path,
    tag: str,
    state: Mapping[str, Any],
    *,
    names: Names,
    leaves_out_frozen: bool = False,
    open_file: OpenFile = NewFile,
) -> Mapping[str, FileRecord]:
    """Write ``folder/tag``. Collective.

    `names` are the plain names of the engine's parameters and buffers; `leaves_out_frozen`: not to
    write weights that are not trained; `open_file` is where its files go.

    Returns:
        What this rank wrote.

    Raises:
        OSError: the file system refused, on this rank.
        TrainingError: kind ``checkpoint-not-written``: its files would not hold all of the model.
    """
    # At stage 3 every rank writes a file of its own. Elsewhere one serves many ranks, and holds the
    # states of all; each pipeline stage and tensor rank has one.
    own_random = random_state.capture()
    own_scaler = scaler_state(engine)
    if own_scaler is None:
        scalers = []
    else:
        scalers = gather(own_scaler)
    random_states: Any = {rank(): own_random}
    if engine.zero_optimization_stage() < 3:
        random_states = _rows_of_ranks(own_random, everywhere=engine.mp_world_size > 1)
    # One key of our own: DeepSpeed merges client state into its own dict, where `module` would
    # overwrite the weights. At stage 0 the optimizer only numbers what it steps.
    own = [
        group
        for group in stepped_groups(engine.optimizer)
        if all(parameter in names for parameter in group)
    ]
    numbered = [[names[parameter] for parameter in group] for group in own]
    own_state = {
        "state": dict(state),
        "random_states": random_states,
        "grad_scalers": scalers,
        "names": numbered,
    }
    client_state = {STATE_KEY: own_state}
    lacking: list[str] = []

    def look(content: Any) -> None:
        if isinstance(content, Mapping) and isinstance(content.get("module"), Mapping):
            lacking.extend(_lacking(engine, content, partly=leaves_out_frozen))

    files.begin(folder / tag, open_file=open_file, look=look)
    with keeping_copies(files):
        engine.save_checkpoint(
            str(folder),
            tag=tag,
            client_state=client_state,
            save_latest=False,
            exclude_frozen_parameters=leaves_out_frozen,
        )
    if lacking:
        if lacking[1:]:
            more = f" and {len(lacking) - 1} more"
        else:
            more = ""
        raise TrainingError(
            f"{folder.parent / tag}: the checkpoint is not written: no file would have the "
            f"numbers of {lacking[0]}{more}, which DeepSpeed neither steps nor knows as frozen; "
            "name what is not trained in training.freeze, and leave requires_grad as it is when "
            "training begins [checkpoint-not-written]"
        )
    return files.end()


def _rows_of_ranks(own: torch.Tensor, *, everywhere: bool) -> torch.Tensor | None:
    """Every rank's bytes, (ranks, bytes) uint8, on rank 0, which writes the model, or on all.
    Collective.
    """
    num_ranks = torch.distributed.get_world_size()
    on_device = own.to(device())
    is_writer = rank() == 0
    rows = torch.empty(
        num_ranks if everywhere or is_writer else 0, len(own), dtype=torch.uint8, device=device()
    )
    if everywhere:
        torch.distributed.all_gather(list(rows.unbind()), on_device)
    else:
        torch.distributed.gather(on_device, list(rows.unbind()) if is_writer else None, dst=0)
    if len(rows):
        return rows.cpu()
    return None


def load_bytes(
    engine: deepspeed.DeepSpeedEngine, folder: Path, tag: str, *, partly: bool = False
) -> Mapping[str, Any]:
    """Put back weights, optimizer, schedule and this rank's random state; returns the state that
    was saved. Collective.

    `partly`: frozen weights are not in it.

    Raises:
        StorageError: the files are missing or damaged.
    """
    with explaining(partial(_failed_load, folder / tag)), _reporting_restored_options(engine):
        _refuse_lacking(engine, folder, tag, partly=partly)
        own_way = _put_partly if partly else None
        path, client_state = engine.load_checkpoint(str(folder), tag=tag, custom_load_fn=own_way)
        if path is None:
            raise StorageError("DeepSpeed does not find its files there")
        complete_nvme_state(engine, folder, tag)
        _leave_file(engine.optimizer)
        saved = client_state[STATE_KEY]
    random_state.restore(saved["random_states"][rank()])
    restore_scaler(engine, saved.get("grad_scalers", ()))
    return dict(saved["state"])


def _refuse_lacking(
    engine: deepspeed.DeepSpeedEngine, folder: Path, tag: str, *, partly: bool
) -> None:
    """Refuse files without the numbers of some weight, which would stay as it was drawn. Below
    stage 3 the module's state has all names, or torch refuses it.
    """
    if engine.zero_optimization_stage() < 3:
        return
    content = read_or_explain(Path(engine._get_ckpt_name(str(folder), tag)), mmap=True)
    lacking = _lacking(engine, content, partly=partly)
    if lacking:
        raise StorageError(describe_lacking(lacking))


def _lacking(
    engine: deepspeed.DeepSpeedEngine, content: Mapping[str, Any], *, partly: bool
) -> list[str]:
    """List the names that neither a file of model states nor the optimizer's files have all numbers
    of.
    """
    names = lacking_names(engine.module, held_elements(content), partly=partly)
    if not engine.has_moe_layers:
        return names
    return [name for name in names if not EXPERT.search(name)]  # experts have files of their own


def _put_partly(src: Mapping[str, torch.Tensor], dst: torch.nn.Module) -> None:
    put_trained(dst, src)


def _leave_file(optimizer: Any) -> None:
    """Copy what an optimizer took from a mapped file as it is: the file may go before the run
    does.
    """
    while optimizer is not None:
        for state in getattr(optimizer, "state", {}).values():
            state |= {key: value.clone() for key, value in state.items() if _is_on_host(value)}
        optimizer = getattr(optimizer, "optimizer", None)


def _is_on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _failed_load(place: Path, error: Exception) -> StorageError | None:
    if lost_peer(error) or known_failure(error):  # no word of the files
        return None
    failed = _not_loaded(
        place, str(error) if isinstance(error, StorageError) else in_one_line(error, longest=300)
    )
    # the others may wait in DeepSpeed's next collective
    failed.is_of_one_rank = claims_error_report(str(failed))
    return failed


def _not_loaded(place: Path, reason: str) -> StorageError:
    return StorageError(
        f"{place}: the checkpoint cannot be loaded: {reason}; if the model's code has not "
        "changed, the files are damaged: resume from another one [checkpoint-not-loaded]"
    )


@contextmanager
def _reporting_restored_options(engine: deepspeed.DeepSpeedEngine) -> Iterator[None]:
    """Warn of options of the optimizer that are replaced by the checkpoint's: its groups are put
    back whole.

    The keys of the config are compared before (`framework.checkpoint.resumable`); what a function
    from Python gives the optimizer that it builds stands in no config.
    """
    built = _options(engine)
    yield
    changed = dict.fromkeys(
        f"{name}: {show_value(kept[name])} is kept, {show_value(value)} was given"
        for given, kept in zip(built, _options(engine), strict=False)
        for name, value in given.items()
        if name in kept and kept[name] != value
    )
    if changed:
        warn(
            f"the optimizer goes on with what the checkpoint holds ({'; '.join(changed)}); start "
            "another run with checkpoint.init_weights to change it [optimizer-options-kept]",
            is_of_all_ranks=True,
        )


def _options(engine: deepspeed.DeepSpeedEngine) -> list[dict[str, Any]]:
    """Plain values in the groups of the optimizer, without what a schedule moves."""
    moved = {"params", "lr", "initial_lr"}
    if isinstance(engine.lr_scheduler, OwnSchedule) or getattr(
        engine.lr_scheduler, "cycle_momentum", False
    ):
        moved |= {"betas", "momentum"}
    return [
        {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in group.items()
            if name not in moved and is_plain(value)
        }
        for group in getattr(engine.optimizer, "param_groups", [])
    ]


def is_plain(value: Any) -> bool:
    """Check for what JSON holds, tuples as lists: it can be compared, and written into a config."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return (
        value is None
        or isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
    )


def move_in(
    engine: deepspeed.DeepSpeedEngine, checkpoint: SavedCheckpoint, *, names: Names, layout: Layout
) -> Mapping[str, Any]:
    """Fill an engine, whose run has this layout, from a checkpoint of another one: other ranks,
    another ZeRO stage, other pipeline stages or tensor ranks. Collective.

    Every rank reads what it holds. Returns the state that was saved. Random generators go on where
    they were if the ranks mean the same; otherwise as they were seeded, because their states
    belonged to other ranks.

    Raises:
        StorageError: the files do not hold what the model needs.
    """
    try:
        return _move_in(engine, checkpoint, names=names, layout=layout)
    except StorageError as error:
        error.is_of_one_rank = claims_error_report(str(error))
        raise


def _move_in(
    engine: deepspeed.DeepSpeedEngine, checkpoint: SavedCheckpoint, *, names: Names, layout: Layout
) -> Mapping[str, Any]:
    splits = splits_of(names)
    if splits:
        division = Division(splits, layout.tensor_rank(rank()), layout.tensor_size)
    else:
        division = Division()
    stored = StoredState(checkpoint, division=division)
    _refuse_other_model(engine, stored, names)
    views = OptimizerViews(engine, names)
    if not checkpoint.verified:
        _refuse_other_optimizer(views, stored, checkpoint.path)
    with opened(engine.optimizer):
        for view in views.views(stored.keys, keys_of=stored.keys_of):
            view.values.copy_(stored.read(view.name, view.key, view.start, view.values.numel()))
        views.set_steps(stored.step_of)
        if checkpoint.verified:
            with _reporting_restored_options(engine):
                views.set_groups(stored.group_of)
        views.set_loss_scale(stored.loss_scale)
        whole = views.spread_weights()
        _fill_weights(
            {tensor: name for tensor, name in names.items() if tensor not in whole}, stored
        )
    common = stored.common
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, common[counter])
    schedule = engine.lr_scheduler
    if not checkpoint.verified:
        # Nobody knows which schedule a checkpoint without a manifest was of: the run's own is
        # brought to its place.
        for _ in range(engine.global_steps - engine.skipped_steps if schedule is not None else 0):
            schedule.step()
        return {"step": checkpoint.step}
    if schedule is not None and common.get("lr_scheduler") is not None:
        schedule.load_state_dict(common["lr_scheduler"])
        # DeepSpeed's schedules only note their place, and give the optimizer its rate with the next
        # step: too late.
        place = getattr(schedule, "last_batch_iteration", -1)
        if place >= 0:
            schedule.step(place)
    saved = common[STATE_KEY]
    if _has_same_ranks(layout, checkpoint) and (own := stored.random_state(rank())) is not None:
        random_state.restore(own)
    restore_scaler(engine, saved.get("grad_scalers", ()))
    return dict(saved["state"])


def _has_same_ranks(layout: Layout, checkpoint: SavedCheckpoint) -> bool:
    """Check whether ranks stand for the same shares of the data, stages and parts as where it was
    written.
    """
    written_by = checkpoint.manifest.get("layout")
    sizes = ("world_size", "pipe_size", "tensor_size", "sequence_size")
    return written_by is not None and all(
        written_by.get(size, 1) == getattr(layout, size) for size in sizes
    )


def _refuse_other_model(
    engine: deepspeed.DeepSpeedEngine, stored: StoredState, names: Names
) -> None:
    """Before a number is changed. Every rank sees the whole model; in a pipeline the other stages
    have the rest.
    """
    for tensor, name in names.items():
        stored.refuse_other_shape(name, whole_shape(tensor))
    if not isinstance(engine.module, PipelineModule):
        names_of_all = engine.module.state_dict(keep_vars=True)  # of what is shared, all names
        stored.refuse_others(names_of_all, is_elsewhere=is_elsewhere(engine.module))


def _refuse_other_optimizer(views: OptimizerViews, stored: StoredState, place: Path) -> None:
    """Moments of another optimizer would be taken for this one's; only a manifest has the configs
    to compare.
    """
    known = views.known_keys()
    reason = ""
    if not stored.keys and (known is None or known):
        reason = (
            "its optimizer's state cannot be told apart (there is none, or it has several "
            "parameter groups with weights of one shape); checkpoint.init_weights takes the "
            "weights alone"
        )
    elif known is not None and set(stored.keys) != known:
        reason = (
            f"its optimizer's state is {', '.join(stored.keys)}, and this run's optimizer has "
            f"{', '.join(sorted(known)) or 'none'}; name the same optimizer, or take the weights "
            "alone with checkpoint.init_weights"
        )
    if reason:
        raise _not_loaded(place, reason)


def _fill_weights(names: Names, stored: StoredState) -> None:
    """Fill buffers and the weights that the model computes with, but not those that stage 3 has
    partitioned.
    """
    with torch.no_grad():
        for tensor, name in names.items():
            if not hasattr(tensor, "ds_id"):
                tensor.copy_(stored.weight(name, tensor.shape))
            elif not tensor.requires_grad:
                with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
                    if gives(tensor):
                        tensor.copy_(stored.weight(name, tensor.shape))
