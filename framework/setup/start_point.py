"""Chooses the checkpoint that a run starts from: rank 0 decides, and all ranks read the files
before they are trusted.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from framework.checkpoint.checkpointer import clear_unfinished
from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.base import targets_in
from framework.config.run_config import CODE_SECTIONS, RunConfig
from framework.engine.distributed import describe_environment, from_rank0, gather, rank
from framework.engine_protocol import Engine
from framework.errors import FrameworkError, StorageError, TrainingError, in_one_line
from framework.plan.plan import Plan
from framework.setup.prepare_run import Prepared
from framework.system.log import print_line
from framework.train.bad_steps import LeftOut, noted_windows
from framework.train.run_folder import RunFolder

if TYPE_CHECKING:
    from framework.checkpoint.verification import SharedVerification
    from framework.data.streams import StreamPlaces

DamageOf = Callable[[SavedCheckpoint], list[str]]
"""Finds damaged files of a checkpoint, a line for each."""


class _HasState(Protocol):
    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Kept:
    """Parts that a checkpoint holds beside the engine's state."""

    def __init__(self, places: StreamPlaces | None, *others: _HasState) -> None:
        self._places = places
        self._others = others

    def state(self, step: int) -> dict[str, Any]:
        """Gather the state of all parts for the checkpoint of a step. Collective."""
        state: dict[str, Any] = {}
        if self._places is not None:
            state = self._places.state(step)
        for part in self._others:
            state |= part.state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give every part its state back."""
        if self._places is not None:
            self._places.restore(state)
        for part in self._others:
            part.restore(state)


def on_rank0(work: Callable[[], Any]) -> Any:
    """Call `work` on rank 0, and return its result, or its error, which `from_rank0` raises on all
    ranks; return None on others. A lost peer is raised at once.
    """
    if rank() != 0:
        return None
    try:
        return work()
    except FrameworkError as error:
        return error
    except OSError as error:
        return StorageError(f"the run folder cannot be used: {error} [run-folder-unusable]")
    except Exception as error:
        from framework.engine.process_group_errors import is_lost_peer

        if is_lost_peer(error):
            raise
        traceback.print_exc()  # and not raised: the other ranks wait for an answer
        return TrainingError(
            f"rank 0 failed before the first step: {in_one_line(error, longest=300)} [rank0-failed]"
        )


def _damage_on_hosts(checkpoint: SavedCheckpoint) -> list[str]:
    """List what is wrong with a checkpoint's files; ranks of a host verify them in shares, if
    there are checksums. Collective.
    """
    if checkpoint.verified:
        return _verification().verify(checkpoint, on_every_host=True)
    return checkpoint.damage()


def agreed_weights(
    prepared: Prepared, start: SavedCheckpoint | None, *, average: bool = False
) -> Prepared:
    """Return the run with the weights of a fresh start, which are the same on all ranks, or without
    weights if it resumes. Collective.

    If `checkpoint.init_weights` is a checkpoint, the ranks of each host verify its files in shares.
    To be called before the run folder is opened: an earlier run of the same name is renamed then,
    and the files may be in its folder. When this returns, all ranks have opened them, or all fail.

    Args:
        prepared: the run.
        start: the checkpoint that the run resumes.
        average: take the moving average of the weights.

    Raises:
        ConfigError: the weights of the checkpoint are another model's.
        StorageError: they are damaged; or ranks have found different files. Its code lets platforms
            try again, since a host may see the files later.
    """
    if start is not None and prepared.plan.config.training.lora is None:
        return prepared.without_weights()
    if start is not None:
        prepared = prepared.without_adapter()
    path = str(prepared.plan.config.checkpoint.init_weights)
    _refuse_different_weights(prepared, path)
    checkpoint = prepared.weights
    if not isinstance(checkpoint, SavedCheckpoint):
        return prepared
    from framework.engine.weights import checkpoint_weights, refuse_other_layers

    damage = _damage_on_hosts(checkpoint)
    error = None
    try:
        weights = checkpoint_weights(checkpoint, average=average, damage=damage)
        if prepared.cut is not None:
            refuse_other_layers(weights, prepared.cut.surveyed, source=path)
    except FrameworkError as caught:
        error = caught
    for problem in gather(error):
        if problem is not None:
            raise problem
    return replace(prepared, weights=weights)


def _refuse_different_weights(prepared: Prepared, path: str) -> None:
    descriptions = gather(prepared.describe_weights())
    named = f"checkpoint.init_weights = {path}"
    folder = prepared.plan.config.training.first_adapter
    if folder is not None:
        named = f"{named}, training.lora.init_adapter = {folder}"
    for number, description in enumerate(descriptions):
        if description != descriptions[0]:
            raise StorageError(
                f"{named}: on rank {number}, {description}; on rank 0, "
                f"{descriptions[0]}; all hosts must see the same files there [weights-differ]"
            )


def _verification() -> SharedVerification:
    from framework.checkpoint.verification import SharedVerification

    return SharedVerification(
        rank=rank(), gather=gather, from_rank0=from_rank0, print_line=print_line
    )


def choose_together(
    folder: RunFolder, config: RunConfig, named: SavedCheckpoint | None
) -> SavedCheckpoint | None:
    """Return the checkpoint that the run starts from: rank 0 decides, and all ranks read the
    candidates. `named` was looked up at the path that the config names. Collective.
    """
    if config.checkpoint.resume == "never":
        from_rank0(on_rank0(folder.lock_if_exists))
        return None
    return decide_together(
        lambda damage_of: choose_start(folder, config, named=named, damage_of=damage_of)
    )


def decide_together(decide: Callable[[DamageOf], SavedCheckpoint | None]) -> SavedCheckpoint | None:
    """Have rank 0 decide, while all ranks read the checkpoints that it has to verify; returns its
    decision, or raises its error, on every rank. Collective.
    """
    shared = _verification()
    decision = None
    if rank() == 0:
        decision = on_rank0(lambda: decide(shared.ask))
        shared.end()
    else:
        shared.help()
    checkpoint: SavedCheckpoint | None = from_rank0(decision)
    return checkpoint


def choose_start(
    folder: RunFolder,
    config: RunConfig,
    *,
    named: SavedCheckpoint | None = None,
    damage_of: DamageOf = SavedCheckpoint.damage,
) -> SavedCheckpoint | None:
    """Lock the run's folder if it exists, and choose the checkpoint that the run starts from; None
    for a fresh start. Faults of later checkpoints are printed. On rank 0.
    """
    from framework.checkpoint.resume_point import find_sound_checkpoint

    folder.lock_if_exists()
    start, damaged = find_sound_checkpoint(
        config.checkpoint.resume,
        run_checkpoints=folder.checkpoints,
        allow_unverified=config.checkpoint.allow_unverified,
        damage_of=damage_of,
        named=named,
    )
    for message in damaged:
        print_line(f"warning: {message}; an earlier checkpoint is taken [checkpoint-damaged]")
    if start is not None:
        from framework.checkpoint.state.deepspeed_format import (
            describe_raw,
            refuse_to_resume,
            warn_of,
        )

        start = describe_raw(start)
        refuse_to_resume(start)
        warn_of(start, resumed=True)
    return start


def measure_cut(prepared: Prepared, start: SavedCheckpoint | None) -> Prepared:
    """Cut the pipeline by measured times, with `parallel.partition: measured`. Collective.

    Rank 0 times the layers on its device. A resumed run keeps its cuts: two measurements are never
    the same, and with other cuts the checkpoint would have to be resharded.
    """
    plan = prepared.plan
    parallel = plan.config.parallel
    cut = prepared.cut
    if cut is None or parallel.partition != "measured" or parallel.stages is not None:
        return prepared
    from framework.engine.layer_times import time_layers
    from framework.setup.pipeline_stages import cut_as_saved, cut_by_time

    saved_cut = None
    if start is not None:
        saved_cut = cut_as_saved(cut, plan, start.manifest)
    if saved_cut is not None:
        if rank() == 0:
            print_line("resume: the pipeline is cut as it was measured at the first start")
        return replace(prepared, cut=saved_cut)

    def measure() -> Sequence[float]:
        config = plan.config
        return time_layers(cut.layers, cut.inputs, seed=config.run.seed, precision=config.precision)

    seconds = from_rank0(on_rank0(measure))
    return replace(prepared, cut=cut_by_time(cut, plan, seconds))


def open_folder(folder: RunFolder, prepared: Prepared, start: SavedCheckpoint | None) -> None:
    """Open the run folder on rank 0, and wait until the other hosts see it. Collective."""
    generation = from_rank0(on_rank0(lambda: _open_folder(folder, prepared, start)))
    if generation:
        folder.wait_until_visible(generation)


def keep_ds_config(folder: RunFolder, ds_config: Mapping[str, Any]) -> None:
    """Write the JSON that DeepSpeed was given: rates for each parameter group are known when the
    model is built. Of a pipeline it is the first stage's. Collective.
    """
    from_rank0(on_rank0(lambda: folder.write_ds_config(ds_config)))


def _open_folder(folder: RunFolder, prepared: Prepared, start: SavedCheckpoint | None) -> str:
    """Refuse a start that the run cannot go on from; then open its folder, remove what an
    interruption left, set aside later checkpoints, and describe the run there. On rank 0.

    Returns the folder's generation, for hosts that may still see another folder of its name.
    """
    plan = prepared.plan
    if start is not None:
        from framework.setup.resumed_start import refuse_unfit

        refuse_unfit(start, prepared)
    continues = start is not None and start.folder.resolve() == folder.checkpoints.resolve()
    moved = folder.open(fresh=not continues)
    _report_resume(start, plan, folder)
    if continues:
        _remove_unfinished(folder)
    if moved is not None:
        print_line(f"{folder.path} held an earlier run; it is now {moved}")
        from framework.train.events import carry_over

        carry_over(moved, folder.path)
    if start is not None and continues:
        from framework.setup.resumed_start import set_aside_steps_after

        set_aside_steps_after(start)
    plan_values = plan.to_dict()
    pipeline = prepared.pipeline()
    if pipeline:
        plan_values["pipeline"] = pipeline
    folder.describe(
        config=plan.config.to_dict(),
        ds_config=prepared.ds_config,
        plan=plan_values,
        environment=describe_environment(),
    )
    _keep_tokenizer(folder, prepared)
    _note_trained(folder, plan.config)
    return folder.generation


def _note_trained(folder: RunFolder, config: RunConfig) -> None:
    """Note in the user's own files that this user trains a run with code of its config."""
    sections = [getattr(config, name) for name in CODE_SECTIONS]
    if any(True for section in sections for _ in targets_in(section)):
        from framework.checkpoint.trust import note_trained

        note_trained(folder.path, config.to_dict())


def _remove_unfinished(folder: RunFolder) -> None:
    """Remove what interrupted saves and deletions left, and print what that was."""
    for removed in clear_unfinished(folder.checkpoints):
        print_line(
            f"removed {folder.checkpoints}/{removed}, which an interrupted save or deletion left"
        )


def _keep_tokenizer(folder: RunFolder, prepared: Prepared) -> None:
    """Copy the tokenizer of the data into the run folder, and print the facts about the data."""
    splits = prepared.parts.splits
    for split in (splits.train, splits.evaluation):
        facts = getattr(split, "stated", "")
        if isinstance(facts, str) and facts:
            print_line(facts)
    tokenizer = getattr(splits.train, "tokenizer", None)
    if tokenizer:
        from framework.data.token_files import KEPT_TOKENIZER

        tokenizer.save_pretrained(folder.path / KEPT_TOKENIZER)
        return
    path = getattr(prepared.plan.config.data, "path", None)
    if path:
        from framework.data.token_files import keep_tokenizer

        keep_tokenizer(path, folder.path)


def _report_resume(start: SavedCheckpoint | None, plan: Plan, folder: RunFolder) -> None:
    """Print the checkpoint that the run starts from, and the changes since its save."""
    is_auto = plan.config.checkpoint.resume == "auto"
    if start is None:
        if is_auto:
            print_line(f"resume: auto: no checkpoint in {folder.path}, starting afresh")
        return
    from framework.setup.resumed_start import report_changes

    mode = "auto: " if is_auto else ""
    print_line(f"resume: {mode}from {start.path}")
    report_changes(start, plan)


def describe_frozen(engine: Engine, config: RunConfig) -> dict[str, Any]:
    """Describe the frozen weights under adapters, which checkpoints do not hold; empty without
    adapters. Collective.
    """
    if config.training.lora is None:
        return {}
    from framework.engine.base_engine import BaseEngine
    from framework.engine.weights import describe_base

    assert isinstance(engine, BaseEngine)
    return {
        "base": describe_base(
            engine.module,
            config.checkpoint.init_weights,
            plain_name=engine.name_weight,
            is_stage=config.parallel.pipe > 1,
        )
    }


def steps_left_out(folder: RunFolder, start: SavedCheckpoint | None, config: RunConfig) -> LeftOut:
    """Return the steps that earlier roll backs of the run leave out, read from its events.
    Collective.

    A checkpoint from before a roll back does not know of it.
    """
    left_out = LeftOut()
    run_checkpoints = folder.checkpoints.resolve()
    if config.training.bad_steps is None or start is None:
        return left_out
    if start.folder.resolve() == run_checkpoints:
        left_out.add(from_rank0(on_rank0(lambda: noted_windows(folder.events))))
    return left_out


def load_start(
    engine: Engine, start: SavedCheckpoint | None, kept: Kept, description: Mapping[str, Any]
) -> int:
    """Load the checkpoint that the run starts from into the engine and into `kept`; a checkpoint of
    another layout is resharded. Returns its step, or 0 without a checkpoint. Collective.
    """
    if start is None:
        if "base" in description:
            from framework.engine.adapter_weights import refuse_adapter_of_other_base

            refuse_adapter_of_other_base(description["config"], description["base"])
        return 0
    from framework.setup.resumed_start import load_checkpoint

    state = load_checkpoint(engine, start, description)
    kept.restore(state)
    return int(state["step"])
