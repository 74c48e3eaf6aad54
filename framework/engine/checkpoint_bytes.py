"""The bytes of a checkpoint: DeepSpeed's own files, with the run's state and the random state of
every rank inside. `checkpoint_load.py` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed

from framework.checkpoint.names import EXPERT, STATE_KEY
from framework.checkpoint.state.checkpoint_engine import AtomicCheckpointEngine, keeping_copies
from framework.checkpoint.state.weight_names import Names, stepped_groups
from framework.engine import random_state
from framework.engine.distributed import device, gather, rank
from framework.engine.held_weights import held_elements, lacking_names
from framework.engine.workarounds.grad_scaler import scaler_state
from framework.errors import TrainingError
from framework.system.files import FileRecord, NewFile

if TYPE_CHECKING:
    from framework.checkpoint.save_stream import OpenFile


def save_bytes(
    engine: deepspeed.DeepSpeedEngine,
    files: AtomicCheckpointEngine,
    folder: Path,
    tag: str,
    state: Mapping[str, Any],
    *,
    names: Names,
    leaves_out_frozen: bool = False,
    further: Mapping[str, Any] | None = None,
    open_file: OpenFile = NewFile,
) -> Mapping[str, FileRecord]:
    """Write ``folder/tag``. Collective.

    Args:
        engine: the engine to save.
        files: DeepSpeed's checkpoint engine, which writes the files.
        folder: folder of the checkpoint.
        tag: name of the folder in it.
        state: the run's state.
        names: plain names of the engine's parameters and buffers.
        leaves_out_frozen: whether weights that are not trained are left out.
        further: what parts of the engine go on with beside it, the same on all ranks.
        open_file: takes the path of a file and returns what its bytes are written to.

    Returns:
        The files that this rank wrote.

    Raises:
        OSError: the file system refused, on this rank.
        TrainingError: kind ``checkpoint-not-written``: its files would not hold all of the model.
    """
    client_state = _client_state(engine, state, names)
    client_state[STATE_KEY] |= further or {}
    lacking: list[str] = []

    def look(content: Any) -> None:
        if isinstance(content, Mapping) and isinstance(content.get("module"), Mapping):
            if leaves_out_frozen:
                _leave_out_tied(engine, content["module"])
            lacking.extend(lacking_weights(engine, content, partly=leaves_out_frozen))

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
        example = lacking[0]
        if len(lacking) > 1:
            example += f" and {len(lacking) - 1} more"
        raise TrainingError(
            f"{folder.parent / tag}: the checkpoint is not written: no file would have the "
            f"numbers of {example}, which DeepSpeed neither steps nor knows as frozen; "
            "name what is not trained in training.freeze, and leave requires_grad as it is when "
            "training begins [checkpoint-not-written]"
        )
    return files.end()


def _leave_out_tied(engine: deepspeed.DeepSpeedEngine, weights: Any) -> None:
    """Leave the further names of frozen weights out of what is saved: DeepSpeed leaves out the
    first one alone (deepspeed/runtime/engine.py, `module_state_dict`).
    """
    for name, weight in engine.module.named_parameters(remove_duplicate=False):
        if not weight.requires_grad:
            weights.pop(name, None)


def _client_state(
    engine: deepspeed.DeepSpeedEngine, state: Mapping[str, Any], names: Names
) -> dict[str, Any]:
    """Return the run's state, and what resuming needs beside DeepSpeed's own. Collective.

    It is under one key: DeepSpeed merges client state into its own dict, in which `module` would
    overwrite the weights.
    """
    # At stage 3 every rank writes a file of its own. At other stages one file serves many ranks and
    # has the states of all of them; each pipeline stage and tensor rank has one.
    rank_random_state = random_state.capture()
    rank_scaler = scaler_state(engine)
    scalers = []
    if rank_scaler is not None:
        scalers = gather(rank_scaler)
    if engine.zero_optimization_stage() < 3:
        everywhere = engine.mp_world_size > 1
        random_states: Any = _rows_of_ranks(rank_random_state, everywhere=everywhere)
    else:
        random_states = {rank(): rank_random_state}
    # At stage 0 the optimizer's state knows its weights by number: these are their names.
    names_of_groups: list[list[str]] = []
    for group in stepped_groups(engine.optimizer):
        if all(parameter in names for parameter in group):
            names_of_groups.append([names[parameter] for parameter in group])
    saved = {
        "state": dict(state),
        "random_states": random_states,
        "grad_scalers": scalers,
        "names": names_of_groups,
    }
    if getattr(engine.optimizer, "swap_optimizer", False):
        from framework.checkpoint.state.swapped import SWAPPED_KEY, swapped_groups

        saved[SWAPPED_KEY] = swapped_groups(engine.optimizer)
    return {STATE_KEY: saved}


def _rows_of_ranks(row: torch.Tensor, *, everywhere: bool) -> torch.Tensor | None:
    """Return every rank's bytes, (ranks, bytes) uint8: on all ranks, or on rank 0, which writes the
    model, and None elsewhere. Collective.
    """
    is_receiver = everywhere or rank() == 0
    num_rows = torch.distributed.get_world_size() if is_receiver else 0
    rows = torch.empty(num_rows, len(row), dtype=torch.uint8, device=device())
    rank_row = row.to(device())
    if everywhere:
        torch.distributed.all_gather(list(rows.unbind()), rank_row)
    elif is_receiver:
        torch.distributed.gather(rank_row, list(rows.unbind()), dst=0)
    else:
        torch.distributed.gather(rank_row, None, dst=0)
    if num_rows:
        return rows.cpu()
    return None


def lacking_weights(
    engine: deepspeed.DeepSpeedEngine, content: Mapping[str, Any], *, partly: bool
) -> list[str]:
    """List the weights that are complete neither in a file of model states nor in the optimizer's
    files. With `partly` frozen weights may be in none.
    """
    names = lacking_names(engine.module, held_elements(content), partly=partly)
    if not engine.has_moe_layers:
        return names
    return [name for name in names if not EXPERT.search(name)]  # experts have files of their own
