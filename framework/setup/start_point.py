"""Choice of the checkpoint that a run starts from: decided by rank 0, read by all ranks before it
is trusted.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from framework.checkpoint.checkpointer import clear_unfinished
from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import size_of
from framework.checkpoint.resumable import (
    check_movable,
    check_reachable,
    check_resumable,
    describe_changes,
    describe_resharding,
    describe_versions,
    needs_resharding,
)
from framework.checkpoint.resume_point import find_sound_checkpoint, set_aside_later
from framework.checkpoint.state.deepspeed_format import describe_raw, warn_of
from framework.checkpoint.verification import SharedVerification
from framework.config.run_config import RunConfig
from framework.data.streams import StreamPlaces
from framework.data.token_files import KEPT_TOKENIZER, keep_tokenizer
from framework.engine.distributed import describe_environment, from_rank0, gather, rank
from framework.engine.metrics import time_layers
from framework.engine.process_group_errors import is_lost_peer
from framework.engine.protocol import Engine
from framework.engine.weights import (
    checkpoint_weights,
    describe_base,
    refuse_other_base,
    refuse_other_layers,
)
from framework.errors import FrameworkError, StorageError, TrainingError, in_one_line
from framework.plan.plan import Plan
from framework.setup.pipeline_stages import cut_as_saved, cut_by_time
from framework.setup.prepare_run import Prepared
from framework.system.log import print_line
from framework.train.bad_steps import LeftOut, noted_windows
from framework.train.events import carry_over
from framework.train.run_folder import RunFolder

DamageOf = Callable[[SavedCheckpoint], list[str]]
"""Finds what of a checkpoint is not as it was written, a line for each file."""


class _HasState(Protocol):
    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Kept:
    """Parts that a checkpoint holds beside the engine's state."""

    def __init__(self, places: StreamPlaces, *others: _HasState) -> None:
        self._places = places
        self._others = others

    def state(self, step: int) -> dict[str, Any]:
        """Gather it for the checkpoint of a step. Collective."""
        found = self._places.state(step)
        for each in self._others:
            found |= each.state()
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give it back."""
        self._places.restore(state)
        for each in self._others:
            each.restore(state)


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
        return TrainingError(
            f"rank 0 failed before the first step: {in_one_line(error, longest=300)} [rank0-failed]"
        )


def agreed_weights(
    prepared: Prepared, start: SavedCheckpoint | None, *, average: bool = False
) -> Prepared:
    """With the weights of a fresh start, or their moving average, or without, as all ranks have
    them. Collective.

    The files of a checkpoint as `checkpoint.init_weights` are verified by the ranks of each host in
    shares. Before the run folder is touched: an earlier run of the same name, whose weights these
    may be, is renamed then. So all ranks have opened the files, or all fail, when this returns.

    Raises:
        ConfigError: the weights of the checkpoint are another model's.
        StorageError: they are damaged; or not all ranks have found the same, with a code that
            platforms try again, for their hosts may yet.
    """
    if start is not None and prepared.plan.config.training.lora is None:
        return prepared.without_weights()
    path = str(prepared.plan.config.checkpoint.init_weights)
    everyone = gather(prepared.describe_weights())
    for number, other in enumerate(everyone):
        if other != everyone[0]:
            raise StorageError(
                f"checkpoint.init_weights = {path}: on rank {number}, {other}; on rank 0, "
                f"{everyone[0]}; all hosts must see the same files there [weights-differ]"
            )
    of = prepared.weights
    if not isinstance(of, SavedCheckpoint):
        return prepared
    if of.verified:
        damage = _verification().verify(of, on_every_host=True)
    else:
        damage = of.damage()
    error = None
    try:
        weights = checkpoint_weights(of, average=average, damage=damage)
        if prepared.cut is not None:
            refuse_other_layers(weights, prepared.cut.surveyed, source=path)
    except FrameworkError as own:
        error = own
    for problem in gather(error):
        if problem is not None:
            raise problem
    return replace(prepared, weights=weights)


def _verification() -> SharedVerification:
    return SharedVerification(
        rank=rank(), gather=gather, from_rank0=from_rank0, print_line=print_line
    )


def choose_together(folder: RunFolder, config: RunConfig) -> SavedCheckpoint | None:
    """Rank 0 decides where the run starts from, and all ranks read the checkpoints that it thinks
    of. Collective.
    """
    return decide_together(lambda damage_of: choose_start(folder, config, damage_of=damage_of))


def decide_together(decide: Callable[[DamageOf], SavedCheckpoint | None]) -> SavedCheckpoint | None:
    """Have rank 0 decide, while all ranks read the checkpoints whose damage it asks about.
    Collective.
    """
    shared = _verification()
    if rank() != 0:
        shared.help()
        found = None
    else:
        found = on_rank0(lambda: decide(shared.ask))
        shared.end()
    chosen: SavedCheckpoint | None = from_rank0(found)
    return chosen


def choose_start(
    folder: RunFolder, config: RunConfig, *, damage_of: DamageOf = SavedCheckpoint.damage
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


def measure_cut(prepared: Prepared, start: SavedCheckpoint | None) -> Prepared:
    """With `parallel.partition: measured`: rank 0 times the layers on its device, and all ranks cut
    by that. Collective.

    A run that goes on is cut as it was: no two measurements are the same, and another cut would be
    a move.
    """
    plan = prepared.plan
    cut = prepared.cut
    if (
        cut is None
        or plan.config.parallel.partition != "measured"
        or plan.config.parallel.stages is not None
    ):
        return prepared
    if start is not None and (as_saved := cut_as_saved(cut, plan, start.manifest)):
        if rank() == 0:
            print_line("resume: the pipeline is cut as it was measured at the first start")
        return replace(prepared, cut=as_saved)
    seed = plan.config.run.seed
    precision = plan.config.precision
    seconds = from_rank0(
        on_rank0(lambda: time_layers(cut.layers, cut.inputs, seed=seed, precision=precision))
    )
    return replace(prepared, cut=cut_by_time(cut, plan, seconds))


def open_folder(folder: RunFolder, prepared: Prepared, start: SavedCheckpoint | None) -> None:
    """Open the run folder on rank 0, and wait until the other hosts see it. Collective."""
    generation = from_rank0(on_rank0(lambda: _open_folder(folder, prepared, start)))
    if generation:
        folder.wait_until_visible(generation)


def _open_folder(folder: RunFolder, prepared: Prepared, start: SavedCheckpoint | None) -> str:
    """See whether the run may go on from where it starts, then open its folder.

    Returns its generation, for hosts that may still see another folder of its name.
    """
    config = prepared.plan.config
    plan = prepared.plan
    if start is not None:
        described = prepared.description()
        check_movable(start, description=described)
        check_resumable(
            start,
            config=config.to_dict(),
            global_size=plan.layout.global_size,
            steps_per_epoch=plan.length.steps_per_epoch or 0,
            data=described,
        )
        check_reachable(start, total_steps=plan.length.total_steps or 0)
    continues = start is not None and start.folder.resolve() == folder.checkpoints.resolve()
    moved = folder.open(fresh=not continues)
    _report_resume(start, plan, folder)
    if continues:
        for removed in clear_unfinished(folder.checkpoints):
            print_line(
                f"removed {folder.checkpoints}/{removed}, which an interrupted save or deletion "
                "left"
            )
    if moved is not None:
        print_line(f"{folder.path} held an earlier run; it is now {moved}")
        carry_over(moved, folder.path)
    if start is not None and continues:
        for replaced in set_aside_later(start):
            print_line(
                f"the steps after {start.step} are taken again; an earlier checkpoint of them is "
                f"now {replaced} ({size_of(replaced) / 1e9:.3f} GB; it stays until somebody "
                "deletes it)"
            )
    pipeline = prepared.pipeline()
    folder.describe(
        config=config.to_dict(),
        ds_config=prepared.ds_config,
        plan=plan.to_dict() | ({"pipeline": pipeline} if pipeline else {}),
        environment=describe_environment(),
    )
    tokenizer = getattr(prepared.parts.splits.train, "tokenizer", None)
    if tokenizer:
        tokenizer.save_pretrained(folder.path / KEPT_TOKENIZER)
        for split in vars(prepared.parts.splits).values():
            stated = getattr(split, "stated", "")
            if stated:
                print_line(stated)
    elif tokens := getattr(config.data, "path", None):
        keep_tokenizer(tokens, folder.path)
    return folder.generation


def _report_resume(start: SavedCheckpoint | None, plan: Plan, folder: RunFolder) -> None:
    """Print the checkpoint that the run starts from, and what is not as it was there."""
    if start is None:
        if plan.config.checkpoint.resume == "auto":
            print_line(f"resume: auto: no checkpoint in {folder.path}, starting afresh")
        return
    print_line(
        f"resume: {'auto: ' if plan.config.checkpoint.resume == 'auto' else ''}from {start.path}"
    )
    for change in describe_changes(start, config=plan.config.to_dict()):
        print_line(f"resume: changed since the save, and applied: {change}")
    versions = describe_versions(start, versions=describe_environment()["versions"])
    if versions:
        print_line(
            f"note: other releases wrote this checkpoint ({versions}); an unbroken run may differ "
            "in the last bits"
        )
    for note in _changed_schedule(start, plan):
        print_line(f"note: {note}")


def _changed_schedule(start: SavedCheckpoint, plan: Plan) -> Iterator[str]:
    """A run that is made longer stretches a schedule that ends with it: allowed, but never
    silently.
    """
    scheduler = plan.config.scheduler
    before = start.manifest.get("total_steps")
    now = plan.length.total_steps
    ends_with_run = (
        "total_steps" in type(scheduler).model_fields
        and getattr(scheduler, "total_steps", None) is None
    )
    if ends_with_run and before is not None and before != now:
        yield (
            f"the {getattr(scheduler, 'kind', 'own')} schedule now ends at step {now} instead of "
            f"{before}, so the learning rate goes on from another point of its curve; "
            f"scheduler.total_steps={before} keeps it"
        )


def describe_frozen(engine: Engine, config: RunConfig) -> dict[str, Any]:
    """The weights under adapters, for checkpoints, which do not hold them; nothing without
    adapters. Collective.
    """
    if config.training.lora is None:
        return {}
    return {"base": describe_base(engine.engine.module, config.checkpoint.init_weights)}  # type: ignore[attr-defined]


def steps_left_out(folder: RunFolder, start: SavedCheckpoint | None, config: RunConfig) -> LeftOut:
    """Know the roll backs of a run from its events: a checkpoint from before one holds nothing of
    it. Collective.
    """
    left_out = LeftOut()
    own = folder.checkpoints.resolve()
    if (
        config.training.bad_steps is not None
        and start is not None
        and start.folder.resolve() == own
    ):
        left_out.add(from_rank0(on_rank0(lambda: noted_windows(folder.events))))
    return left_out


def load_start(
    engine: Engine, start: SavedCheckpoint | None, kept: Kept, description: Mapping[str, Any]
) -> int:
    """Load the checkpoint that the run starts from, moved into the run's layout, and give back what
    it holds of `kept`; returns its step, 0 without one. Collective.
    """
    if start is None:
        return 0
    if "base" in description:
        refuse_other_base(start, description["base"])
    moved = needs_resharding(start, description=description)
    if moved and rank() == 0:
        stated = describe_resharding(start, description=description)
        print_line(
            f"resume: {start.path} was written in another layout ({stated}) and is moved into "
            "this one"
        )
    state = engine.load(start, moved=moved)
    kept.restore(state)
    return int(state["step"])
