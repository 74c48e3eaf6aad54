"""Roll back: a run whose step was bad goes on from an earlier checkpoint, in the same processes,
without the data that led there.
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
    """Train to the end of the run, from a checkpoint again as often as it is rolled back.
    Collective.

    Raises:
        TrainingError: kind ``bad-step``: there is no checkpoint to go back to.
    """
    while True:
        try:
            return build_trainer(run).fit()
        except RolledBack as found:
            roll_back = found
        _go_back(run, roll_back)


def _go_back(run: OpenRun, found: RolledBack) -> None:
    """Load the checkpoint, note what is left out, and set aside what was saved since.
    Collective.
    """
    run.began = time.monotonic()
    bad = found.bad
    asked = run.prepared.plan.config.training.bad_steps
    assert asked is not None
    run.checkpointer.finish()
    start = _choose(run, bad.step, before=bad.step - asked.roll_back_steps)
    if start is None:
        error = (
            f"{bad}; there is no sound checkpoint before it to go back to: set "
            "checkpoint.every_steps [bad-step]"
        )
        from_rank0(on_rank0(lambda: Events.append(run.folder.events, "end", bad.step, error=error)))
        raise TrainingError(error)
    window = max(start.step, bad.step - asked.roll_back_steps) + 1, bad.step
    run.left_out.add([window])
    run.best.found = None
    run.load(start)
    run.start = start
    run.outcome = Outcome(step=start.step)

    def note() -> None:
        """Without the event a run that is resumed meets the same step, and goes back again."""
        if start.folder == run.folder.checkpoints:
            set_aside_later(start)
        Events.append(
            run.folder.events, "roll_back", bad.step, to=start.step, first=window[0], last=window[1]
        )

    from_rank0(on_rank0(note))
    warn(
        f"{bad}; rolled back to {start.path}, and the data of steps {window[0]} to {window[1]} is "
        f"left out ({len(run.left_out.windows)} of {asked.max_roll_backs}) [bad-step]",
        is_of_all_ranks=True,
    )


def _choose(run: OpenRun, step: int, *, before: int) -> SavedCheckpoint | None:
    """Choose the newest sound checkpoint up to `before`, or else the oldest before `step`, or else
    what the run began with, which may be another run's. Collective.
    """

    def choose(damage_of: DamageOf) -> SavedCheckpoint | None:
        known = [one for one in list_checkpoints(run.folder.checkpoints) if one.step < step]
        early = [one for one in known if one.step <= before]
        candidates = [*early[::-1], *known[len(early) :], *filter(None, [run.start])]
        return next((one for one in candidates if not damage_of(one)), None)

    return decide_together(choose)
