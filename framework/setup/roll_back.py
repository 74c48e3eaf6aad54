"""Roll back: after a bad step the run goes on from an earlier checkpoint, in the same processes,
without the data that led to the step.
"""

from __future__ import annotations

import time

from framework.checkpoint.manifest import SavedCheckpoint, list_checkpoints
from framework.checkpoint.resume_point import set_aside_later
from framework.engine.distributed import from_rank0
from framework.errors import TrainingError
from framework.setup.open_run import OpenRun, build_trainer
from framework.setup.start_point import DamageOf, decide_together, on_rank0
from framework.system.log import warn
from framework.train.bad_steps import RolledBack
from framework.train.events import Events
from framework.train.trainer import Outcome


def train(run: OpenRun) -> Outcome:
    """Train to the end of the run; after each roll back, train again from a checkpoint. Collective.

    Raises:
        TrainingError: kind ``bad-step``: there is no checkpoint to go back to.
    """
    while True:
        try:
            return build_trainer(run).fit()
        except RolledBack as request:
            roll_back = request
        _go_back(run, roll_back)


def _go_back(run: OpenRun, roll_back: RolledBack) -> None:
    """Load an earlier checkpoint, leave out the data since, and set aside later saves.
    Collective.
    """
    run.began = time.monotonic()
    bad = roll_back.bad
    section = run.prepared.plan.config.training.bad_steps
    assert section is not None
    run.checkpointer.finish()
    latest_step = bad.step - section.roll_back_steps
    start = _choose(run, bad.step, before=latest_step)
    if start is None:
        error = (
            f"{bad}; there is no sound checkpoint before it to go back to: set "
            "checkpoint.every_steps [bad-step]"
        )
        from_rank0(on_rank0(lambda: Events.append(run.folder.events, "end", bad.step, error=error)))
        raise TrainingError(error)
    first = max(start.step, latest_step) + 1
    run.left_out.add([(first, bad.step)])
    run.best.found = None
    run.load(start)
    run.start = start
    run.outcome = Outcome(step=start.step)

    def note() -> None:
        """Record the roll back: without the event a resumed run meets the bad step again."""
        if start.folder == run.folder.checkpoints:
            set_aside_later(start)
        Events.append(
            run.folder.events, "roll_back", bad.step, to=start.step, first=first, last=bad.step
        )

    from_rank0(on_rank0(note))
    warn(
        f"{bad}; rolled back to {start.path}, and the data of steps {first} to {bad.step} is "
        f"left out ({len(run.left_out.windows)} of {section.max_roll_backs}) [bad-step]",
        is_of_all_ranks=True,
    )


def _choose(run: OpenRun, step: int, *, before: int) -> SavedCheckpoint | None:
    """Return the newest sound checkpoint up to `before`, or else the oldest before `step`, or else
    the one that the run started from, which may be another run's. Collective.
    """

    def choose(damage_of: DamageOf) -> SavedCheckpoint | None:
        early = []
        late = []
        for checkpoint in list_checkpoints(run.folder.checkpoints):
            if checkpoint.step <= before:
                early.append(checkpoint)
            elif checkpoint.step < step:
                late.append(checkpoint)
        candidates = early[::-1] + late
        if run.start is not None:
            candidates.append(run.start)
        for checkpoint in candidates:
            if not damage_of(checkpoint):
                return checkpoint
        return None

    return decide_together(choose)
