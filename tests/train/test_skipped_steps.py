"""When steps that are skipped are worth a warning, and when they end a run."""

from __future__ import annotations

import pytest

from framework.errors import TrainingError
from framework.train.throughput import SkippedSteps


def run(
    taken: str,
    *,
    log_every: int = 1,
    start_step: int = 0,
    before: int = 0,
    scales: list[float] | None = None,
    last: bool = False,
) -> None:
    """Steps as a word, ``-`` where one was skipped and ``x`` where it was taken."""
    steps, skipped = SkippedSteps(start_step), before
    for number, step in enumerate(taken, start=1):
        skipped += step == "-"
        if number % log_every == 0 or number == len(taken):
            metrics = {"train/loss": 1.0, "train/skipped_steps": float(skipped)}
            metrics |= {} if scales is None else {"train/loss_scale": scales[number - 1]}
            steps.note(start_step + number, metrics, is_last=last and number == len(taken))


@pytest.mark.parametrize("taken", ["x" * 30, "x-" * 30, "-" * 19 + "x" + "-" * 19, "x----x" * 5])
def test_steps_that_are_skipped_now_and_then_are_no_reason_to_end(taken: str) -> None:
    run(taken, last=True)


def test_one_warning_where_many_steps_in_a_row_were_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("xxxxx----------xxxxx-----xxxxx", log_every=5)
    assert capsys.readouterr().err.splitlines() == [
        "warning: step 10: each of the last 5 steps was skipped, because its gradients were not finite; look for a "
        "root, a norm or a division at zero in the model or the loss, or lower optimizer.lr [every-step-skipped]"
    ]
    run("x----", log_every=5)
    run("x----x----x", log_every=1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("log_every", "ends_at"), [(1, 20), (4, 20), (10, 50)])
def test_a_run_that_takes_no_step_ends(log_every: int, ends_at: int) -> None:
    run("-" * (ends_at - log_every), log_every=log_every)
    with pytest.raises(
        TrainingError,
        match=rf"step {ends_at}: each of the last {ends_at} steps.*\[every-step-skipped\]",
    ):
        run("-" * 200, log_every=log_every)


def test_a_short_run_that_took_no_step_at_all_does_not_end_well() -> None:
    with pytest.raises(TrainingError, match=r"each of the last 8 steps.*nothing is trained"):
        run("-" * 8, log_every=10, last=True)
    run("x" + "-" * 8, log_every=10, last=True)


def test_what_was_skipped_before_a_resume_is_not_counted_again() -> None:
    run("x" * 8, start_step=50, before=50, last=True)
    run("-" * 20, start_step=50, before=7)  # the first point only has how many there were
    with pytest.raises(TrainingError, match="each of the last 20 steps"):
        run("-" * 21, start_step=50, before=7)


def test_while_the_loss_scale_falls_steps_are_skipped_rightly() -> None:
    run("-" * 40, scales=[2.0**-number for number in range(40)], last=True)
    with pytest.raises(TrainingError, match="step 60: "):
        run("-" * 80, scales=[2.0 ** -min(number, 39) for number in range(80)])
