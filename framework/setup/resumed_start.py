"""The start from a checkpoint: refused where it does not fit the run, reported, and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.names import size_of
from framework.checkpoint.resumable import (
    changed_keys,
    check_movable,
    check_reachable,
    check_resumable,
    describe_changes,
    describe_resharding,
    describe_versions,
    needs_resharding,
)
from framework.checkpoint.resume_point import set_aside_later
from framework.config.optimizer import Muon
from framework.engine.distributed import describe_environment, rank
from framework.engine_protocol import Engine
from framework.errors import ConfigError, StorageError
from framework.plan.plan import Plan
from framework.setup.prepare_run import Prepared
from framework.system.log import print_line


def set_aside_steps_after(start: SavedCheckpoint) -> None:
    """Rename checkpoints of steps that are taken again, and print their new names."""
    for replaced in set_aside_later(start):
        print_line(
            f"the steps after {start.step} are taken again; an earlier checkpoint of them is "
            f"now {replaced} ({size_of(replaced) / 1e9:.3f} GB; it stays until you delete it)"
        )


def refuse_unfit(start: SavedCheckpoint, prepared: Prepared) -> None:
    """Refuse a checkpoint that the run cannot go on from.

    Raises:
        ConfigError: as `checkpoint.resumable` finds it.
    """
    plan = prepared.plan
    description = prepared.description()
    check_movable(start, description=description)
    check_resumable(
        start,
        config=plan.config.to_dict(),
        global_size=plan.layout.global_size,
        steps_per_epoch=plan.length.steps_per_epoch or 0,
        data=description,
    )
    check_reachable(start, total_steps=plan.length.total_steps or 0)
    if isinstance(plan.config.optimizer, Muon) and start.verified:
        refuse_moments_of_adamw(start, plan.config.optimizer)


def refuse_moments_of_adamw(start: SavedCheckpoint, optimizer: Muon) -> None:
    """Refuse a checkpoint of an earlier release, which left packed experts to AdamW.

    Raises:
        ConfigError: kind ``resume-config-differs``.
    """
    from framework.checkpoint.state.reader import StoredState
    from framework.config.groups import stepped_by_muon

    try:
        stored = StoredState(start)
    except StorageError:
        return  # the load will fail with the reason
    for name, shape in stored.shapes.items():
        if len(shape) != 3 or not stepped_by_muon(name, shape, optimizer):
            continue
        keys = stored.keys_of(name)
        if keys and "momentum_buffer" not in keys:
            raise ConfigError.of(
                "resume-config-differs",
                f"it holds AdamW's moments of {name}, and Muon steps the matrices of all experts "
                "since this release",
                "start afresh under another run.name (take the weights alone with "
                "checkpoint.init_weights)",
                "checkpoint.resume",
                str(start.path),
            )


def _changed_schedule(start: SavedCheckpoint, plan: Plan) -> Iterator[str]:
    """Yield a note if the run is longer than it was and its schedule ends with the run: this moves
    the learning rate, which is allowed but never silent.
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


def report_changes(start: SavedCheckpoint, plan: Plan) -> None:
    """Print what the run has otherwise than the one that saved the checkpoint."""
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


def load_checkpoint(
    engine: Engine, start: SavedCheckpoint, description: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Load a checkpoint into the engine, resharded if it is of another layout, and return the state
    that it holds beside the engine's. Collective.
    """
    if "base" in description:
        from framework.engine.weights import refuse_other_base

        refuse_other_base(start, description["base"])
    moved = needs_resharding(start, description=description)
    if moved and rank() == 0:
        change = describe_resharding(start, description=description)
        print_line(
            f"resume: {start.path} was written in another layout ({change}) and is moved into "
            "this one"
        )
    changed = changed_keys(start, config=description["config"])
    return engine.load(start, moved=moved, changed=changed)
