"""The load of a checkpoint into an engine: of DeepSpeed's own files as they were written, or of the
files of another layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import STATE_KEY
from framework.checkpoint.state.checkpoint_engine import read_or_explain
from framework.checkpoint.state.optimizer_shards import ADAFACTOR_KEYS, OptimizerViews
from framework.checkpoint.state.reader import StoredState, describe_lacking
from framework.checkpoint.state.tensor_split import parts_of
from framework.checkpoint.state.weight_names import Names, opened
from framework.checkpoint.state.weight_parts import whole_shape
from framework.engine import random_state
from framework.engine.adam_kernel import keep_kernels, kernels_of
from framework.engine.checkpoint_bytes import lacking_weights
from framework.engine.distributed import claims_error_report, rank
from framework.engine.known_failures import known_failure
from framework.engine.process_group_errors import lost_peer
from framework.engine.schedules import OwnSchedule
from framework.engine.weights import gives
from framework.engine.workarounds.fp32_moments import keeping_moments
from framework.engine.workarounds.grad_scaler import restore_scaler
from framework.errors import StorageError, explaining, in_one_line, show_value
from framework.plan.layout import Layout
from framework.system.log import warn


def load_bytes(
    engine: deepspeed.DeepSpeedEngine,
    folder: Path,
    tag: str,
    *,
    partly: bool = False,
    restores: Mapping[str, Callable[[Any], None]] | None = None,
    changed: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Put back weights, optimizer, schedule and this rank's random state, and return the run's
    state. Collective.

    Args:
        engine: the engine to fill.
        folder: of the checkpoint.
        tag: name of the folder in it.
        partly: frozen weights are not in the files.
        restores: key of what parts of the engine saved (`save_bytes`, `further`) -> puts it back.
        changed: dotted keys of the config that stay as the engine was built.

    Raises:
        StorageError: the files are missing or damaged.
    """
    with (
        explaining(partial(_failed_load, folder / tag)),
        _reporting_restored_options(engine, changed),
        _keeping(engine, changed),
    ):
        _refuse_lacking(engine, folder, tag, partly=partly)
        # a pipeline's stage knows itself what its files leave out
        load = _put_partly if partly and not isinstance(engine.module, PipelineModule) else None
        with _completing_nvme(engine, folder, tag), keeping_moments(engine):
            path, client_state = engine.load_checkpoint(str(folder), tag=tag, custom_load_fn=load)
            if path is None:
                raise StorageError("DeepSpeed does not find its files there")
        _copy_host_tensors(engine.optimizer)
        saved = client_state[STATE_KEY]
        for key, restore in (restores or {}).items():
            restore(saved[key])
    random_state.restore(saved["random_states"][rank()])
    restore_scaler(engine, saved.get("grad_scalers", ()))
    return dict(saved["state"])


def _completing_nvme(
    engine: deepspeed.DeepSpeedEngine, folder: Path, tag: str
) -> AbstractContextManager[None]:
    """Return a context of a load, which then has put back all state on NVMe."""
    has_state = getattr(engine.optimizer, "swap_optimizer", False)
    has_weights = getattr(engine.optimizer, "params_in_nvme_and_cpu", False)
    if not has_state and not has_weights:
        return nullcontext()
    from framework.engine.workarounds.nvme_state import loading_nvme_state

    return loading_nvme_state(engine, folder, tag)


def _refuse_lacking(
    engine: deepspeed.DeepSpeedEngine, folder: Path, tag: str, *, partly: bool
) -> None:
    """Refuse files without the numbers of some weight: it would stay as it was drawn. Below stage 3
    the module's state has all names, or torch refuses it.
    """
    if engine.zero_optimization_stage() < 3:
        return
    content = read_or_explain(Path(engine._get_ckpt_name(str(folder), tag)), mmap=True)
    lacking = lacking_weights(engine, content, partly=partly)
    if lacking:
        raise StorageError(describe_lacking(lacking))


def _put_partly(src: Mapping[str, torch.Tensor], dst: torch.nn.Module) -> None:
    """Load trained weights into a module. DeepSpeed passes both by these names."""
    from framework.models.adapters import put_trained

    put_trained(dst, src)


def _copy_host_tensors(optimizer: Any) -> None:
    """Copy the optimizer's tensors on the host, which may be views of a mapped file: the file may
    go before the run does.
    """
    while optimizer is not None:
        for state in getattr(optimizer, "state", {}).values():
            for key, value in state.items():
                # DeepSpeed's swapper knows the empty ones: their numbers are on NVMe.
                if _is_on_host(value) and value.numel():
                    state[key] = value.clone()
                    # its mark that the swapper leaves it in memory
                    vars(state[key]).update(vars(value))
        optimizer = getattr(optimizer, "optimizer", None)


def _is_on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _failed_load(place: Path, error: Exception) -> StorageError | None:
    """Explain an error of a load; None for errors that are no fault of the files. It may block for
    seconds, until it is known which rank reports.
    """
    if lost_peer(error) or known_failure(error):  # not the fault of the files
        return None
    if isinstance(error, StorageError):
        reason = str(error)
    else:
        reason = in_one_line(error, longest=300)
    failure = _not_loaded(place, reason)
    # the others may wait in DeepSpeed's next collective
    failure.is_of_one_rank = claims_error_report(str(failure))
    return failure


def _not_loaded(place: Path, reason: str) -> StorageError:
    return StorageError(
        f"{place}: the checkpoint cannot be loaded: {reason}; if the model's code has not "
        "changed, the files are damaged: resume from another one [checkpoint-not-loaded]"
    )


def _keeping(
    engine: deepspeed.DeepSpeedEngine, changed: Sequence[str]
) -> AbstractContextManager[None]:
    """Return a context of a load in which changed settings stay as they are."""
    if not changed:
        return nullcontext()
    from framework.engine.changed_settings import keeping_changed

    return keeping_changed(engine, changed)


@contextmanager
def _reporting_restored_options(
    engine: deepspeed.DeepSpeedEngine, changed: Sequence[str]
) -> Iterator[None]:
    """Warn of options of the optimizer that the checkpoint's replace: its groups are put back
    whole; unless some are `changed`, as the run allows.

    The keys of the config are compared before (`framework.checkpoint.resumable`). Options with
    which a user's function builds an optimizer are in no config.
    """
    built = _options(engine)
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    kernels = kernels_of(base)
    yield
    keep_kernels(base, kernels)
    if changed:
        return
    replaced: dict[str, None] = {}
    for built_options, kept_options in zip(built, _options(engine), strict=False):
        for name, value in built_options.items():
            if name in kept_options and kept_options[name] != value:
                kept = show_value(kept_options[name])
                replaced[f"{name}: {kept} is kept, {show_value(value)} was given"] = None
    if replaced:
        warn(
            f"the optimizer goes on with what the checkpoint holds ({'; '.join(replaced)}); start "
            "another run with checkpoint.init_weights to change it [optimizer-options-kept]",
            is_of_all_ranks=True,
        )


def _options(engine: deepspeed.DeepSpeedEngine) -> list[dict[str, Any]]:
    """Return the plain values in each group of the optimizer, without those that a schedule
    moves.
    """
    from framework.engine.parameter_groups import plain_options

    left_out = {"params", "lr", "initial_lr"}
    schedule = engine.lr_scheduler
    if isinstance(schedule, OwnSchedule) or getattr(schedule, "cycle_momentum", False):
        left_out |= {"betas", "momentum"}
    all_options = plain_options(engine, left_out=left_out)
    for options in all_options:
        for name, value in options.items():
            if isinstance(value, tuple):  # a checkpoint may have it as a list
                options[name] = list(value)
    return all_options


def move_in(
    engine: deepspeed.DeepSpeedEngine,
    checkpoint: SavedCheckpoint,
    *,
    names: Names,
    layout: Layout,
    changed: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Fill an engine from a checkpoint of another layout: other ranks, another ZeRO stage, other
    pipeline stages or tensor ranks. Return the run's state. Collective.

    Every rank reads its own part. Random generators go on where they were if the ranks stand for
    the same shares. Otherwise they stay as they were seeded: their states belonged to other ranks.

    Args:
        engine: the engine to fill.
        checkpoint: finished, its bytes verified.
        names: plain names of the engine's parameters and buffers.
        layout: layout of the engine's run.
        changed: dotted keys of the config that stay as the engine was built.

    Raises:
        StorageError: the files lack something that the model needs.
    """
    try:
        with _keeping(engine, changed):
            return _move_in(engine, checkpoint, names=names, layout=layout, changed=changed)
    except StorageError as error:
        error.is_of_one_rank = claims_error_report(str(error))
        raise


def _move_in(
    engine: deepspeed.DeepSpeedEngine,
    checkpoint: SavedCheckpoint,
    *,
    names: Names,
    layout: Layout,
    changed: Sequence[str],
) -> Mapping[str, Any]:
    tensor_rank = 0
    if layout.tensor_size > 1:
        tensor_rank = layout.tensor_rank(rank())
    parts = parts_of(names, tensor_rank=tensor_rank, tensor_size=layout.tensor_size)
    stored = StoredState(checkpoint, parts=parts)
    _refuse_other_model(engine, stored, names)
    _fill_optimizer_and_weights(engine, checkpoint, stored, names, changed)
    common = stored.common
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, common[counter])
    if not checkpoint.verified:
        # A checkpoint without a manifest does not show which schedule it is of: the run's own is
        # stepped up to its place.
        if engine.lr_scheduler is not None:
            for _ in range(engine.global_steps - engine.skipped_steps):
                engine.lr_scheduler.step()
        return {"step": checkpoint.step}
    if engine.lr_scheduler is not None and common.get("lr_scheduler") is not None:
        _restore_schedule(engine.lr_scheduler, common["lr_scheduler"])
    saved = common[STATE_KEY]
    if _has_same_ranks(layout, checkpoint):
        rank_random_state = stored.random_state(rank())
        if rank_random_state is not None:
            random_state.restore(rank_random_state)
    restore_scaler(engine, saved.get("grad_scalers", ()))
    return dict(saved["state"])


def _fill_optimizer_and_weights(
    engine: deepspeed.DeepSpeedEngine,
    checkpoint: SavedCheckpoint,
    stored: StoredState,
    names: Names,
    changed: Sequence[str],
) -> None:
    views = OptimizerViews(engine, names)
    if not checkpoint.verified:
        _refuse_other_optimizer(views, stored, checkpoint.path)
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    whole_keys = ADAFACTOR_KEYS if hasattr(base, "whole_state") else frozenset()

    def keys_in_shares(name: str) -> list[str]:
        return [key for key in stored.keys_of(name) if key not in whole_keys]

    keys = [key for key in stored.keys if key not in whole_keys]
    with opened(engine.optimizer):
        for view in views.views(keys, keys_of=keys_in_shares):
            view.values.copy_(stored.read(view.name, view.key, view.start, view.values.numel()))
        if whole_keys:
            for weight, key, values in base.whole_state():
                values.view(-1).copy_(stored.whole_state(names[weight], key))
        views.set_steps(stored.step_of)
        views.set_scalars(stored.scalars_of)
        if checkpoint.verified:
            with _reporting_restored_options(engine, changed):
                views.set_groups(stored.group_of)
        views.set_loss_scale(stored.loss_scale)
        filled = views.spread_weights()
        others = {tensor: name for tensor, name in names.items() if tensor not in filled}
        _fill_weights(others, stored)


def _restore_schedule(schedule: Any, state: Any) -> None:
    schedule.load_state_dict(state)
    # DeepSpeed's schedules only note their place, and give the optimizer its rate with the next
    # step: too late.
    place = getattr(schedule, "last_batch_iteration", -1)
    if place >= 0:
        schedule.step(place)


def _has_same_ranks(layout: Layout, checkpoint: SavedCheckpoint) -> bool:
    """Check whether ranks stand for the same shares of the data, stages and parts as in the run
    that wrote a checkpoint.
    """
    written_by = checkpoint.manifest.get("layout")
    if written_by is None:
        return False
    sizes = ("world_size", "pipe_size", "tensor_size", "sequence_size")
    return all(written_by.get(size, 1) == getattr(layout, size) for size in sizes)


def _refuse_other_model(
    engine: deepspeed.DeepSpeedEngine, stored: StoredState, names: Names
) -> None:
    """Refuse a checkpoint of another model, before a number is changed. Every rank checks the whole
    model; in a pipeline its own stage.
    """
    for tensor, name in names.items():
        stored.refuse_other_shape(name, whole_shape(tensor))
    if not isinstance(engine.module, PipelineModule):
        from framework.models.experts import is_elsewhere

        state = engine.module.state_dict(keep_vars=True)  # has all names of tied weights
        stored.refuse_others(state, is_elsewhere=is_elsewhere(engine.module))


def _refuse_other_optimizer(views: OptimizerViews, stored: StoredState, place: Path) -> None:
    """Refuse moments of another optimizer in a checkpoint without a manifest, which has no config
    to compare: they would be taken for this optimizer's.
    """
    known = views.known_keys()  # None for an optimizer of unknown state
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
    """Fill buffers and the weights that the model computes with; of weights that stage 3 has
    partitioned only frozen ones.
    """
    with torch.no_grad():
        for tensor, name in names.items():
            if not hasattr(tensor, "ds_id"):  # not partitioned
                tensor.copy_(stored.weight(name, tensor.shape))
            elif not tensor.requires_grad:
                with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
                    if gives(tensor):
                        tensor.copy_(stored.weight(name, tensor.shape))
