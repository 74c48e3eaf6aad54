"""Choice of the checkpoint that a run starts from: decided by rank 0, read by all ranks before it is trusted."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.resume_point import find_sound_checkpoint
from framework.checkpoint.state.raw import describe_raw, warn_of
from framework.checkpoint.verification import SharedVerification
from framework.config.run_config import RunConfig
from framework.engine.distributed import from_rank0, gather, rank
from framework.engine.lost_peers import is_lost_peer
from framework.errors import FrameworkError, StorageError, TrainingError, in_one_line
from framework.setup.prepared import Prepared
from framework.system.log import print_line
from framework.train.run_folder import RunFolder


def on_rank0(work: Callable[[], Any]) -> Any:
    """The result of `work` on rank 0, or its error, to be handed to all ranks; None elsewhere."""
    if rank() != 0:
        return None
    try:
        return work()
    except FrameworkError as error:
        return error
    except OSError as error:
        return StorageError(f"the run folder cannot be used: {error} [run-folder-unusable]")
    except Exception as error:
        if is_lost_peer(error):
            raise
        traceback.print_exc()  # and the other ranks wait for an answer
        return TrainingError(f"rank 0 failed before the first step: {in_one_line(error, longest=300)} [rank0-failed]")


def agreed_weights(prepared: Prepared, start: SavedCheckpoint | None) -> Prepared:
    """With the weights of a fresh start, or without, as all ranks have them. Collective.

    Raises:
        StorageError: not all of them have found the same; with a code that platforms try again, for their hosts may
        yet.
    """
    if start is not None:
        return prepared.without_weights()
    everyone = gather(prepared.describe_weights())
    for number, other in enumerate(everyone):
        if other != everyone[0]:
            path = prepared.plan.config.checkpoint.init_weights
            raise StorageError(
                f"checkpoint.init_weights = {path}: on rank {number}, {other}; on rank 0, {everyone[0]}; all hosts "
                "must see the same files there [weights-differ]"
            )
    return with_verified_weights(prepared)


def with_verified_weights(prepared: Prepared) -> Prepared:
    """With a checkpoint as `checkpoint.init_weights`: its files, which the ranks of each host verify in shares.
    Collective.

    Before the run folder is touched: an earlier run of the same name, whose weights these may be, is renamed then. So
    all ranks have opened the files, or all fail, when this returns.
    """
    of = prepared.weights_of
    if of is None:
        return prepared
    damage = _verification().verify(of, on_every_host=True) if of.verified else of.damage()
    error = None
    try:
        prepared = prepared.with_weights(damage=damage)
    except FrameworkError as own:
        error = own
    for problem in gather(error):
        if problem is not None:
            raise problem
    return prepared


def _verification() -> SharedVerification:
    return SharedVerification(rank=rank(), gather=gather, from_rank0=from_rank0, print_line=print_line)


def choose_together(folder: RunFolder, config: RunConfig) -> SavedCheckpoint | None:
    """Rank 0 decides where the run starts from, and all ranks read the checkpoints that it thinks of. Collective."""
    shared = _verification()
    if rank() != 0:
        shared.help()
        start = None
    else:
        start = on_rank0(lambda: choose_start(folder, config, damage_of=shared.ask))
        shared.end()
    chosen: SavedCheckpoint | None = from_rank0(start)
    return chosen


def choose_start(
    folder: RunFolder, config: RunConfig, *, damage_of: Callable[[SavedCheckpoint], list[str]] = SavedCheckpoint.damage
) -> SavedCheckpoint | None:
    """Take the run's folder if there is one, and decide where the run starts from."""
    folder.lock_if_exists()
    start, damaged = find_sound_checkpoint(
        config.checkpoint.resume,
        run_checkpoints=folder.checkpoints,
        allow_unverified=config.checkpoint.allow_unverified,
        damage_of=damage_of,
    )
    for stated in damaged:
        print_line(f"warning: {stated}; an earlier checkpoint is taken [checkpoint-damaged]")
    if start is not None:
        start = describe_raw(start)
        warn_of(start, resumed=True)
    return start
