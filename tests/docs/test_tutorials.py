"""README and the tutorials are true: their files and commands, from top to bottom, in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from framework.checkpoint.names import CALLBACKS, STATE_KEY
from tests.docs.run_page import Page, comparable, is_shown, playing
from tests.launched import series
from tests.places import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]
NEEDS = {"from-huggingface": "transformers", "from-lightning": "pytorch_lightning"}


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_tutorial_prints_what_it_shows(path: Path, tmp_path: Path) -> None:
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem], reason=f"{NEEDS[path.stem]} comes with the dev extra")
    commands = 0
    with playing(tmp_path):
        for command, shown, printed in Page(path, tmp_path).steps():
            assert is_shown(comparable(command, shown), comparable(command, printed)), (
                f"{command}\n{printed}"
            )
            commands += 1
    assert commands >= 2
    if path.stem == "from-deepspeed":
        check_pipeline(tmp_path)


def check_pipeline(folder: Path) -> None:
    """The losses of a `PipelineModule` that DeepSpeed trains, and of the run that it became."""
    file = folder / "old_pipe/global_step20/mp_rank_00_model_states.pt"
    script = torch.load(file, weights_only=True)
    losses = list(series(folder / "runs/pipe", "train/loss").values())
    assert len(losses) == 20
    assert losses == pytest.approx(script["losses"], abs=1e-5)
    rates = series(folder / "runs/pipe", "train/lr")
    assert rates[10] == pytest.approx(0.008), "of step 10, and not of the next"
    saved = folder / "runs/pipe/checkpoints/global_step20/mp_rank_00_model_states.pt"
    states = torch.load(saved, weights_only=True)[STATE_KEY]["state"][CALLBACKS]
    assert [state["loss"] for state in states.values()] == [min(losses)]


@pytest.mark.parametrize(
    ("shown", "printed", "holds"),
    [
        (["a", "..."], ["a", "b", "c"], True),
        (["...", "c"], ["a", "b", "c"], True),
        (["a", "c"], ["a", "b", "c"], False),
        (["a", "...", "d"], ["a", "b", "c"], False),
    ],
)
def test_what_is_left_out_is_marked(shown: list[str], printed: list[str], holds: bool) -> None:
    assert is_shown(shown, printed) is holds


def test_figures_of_a_training_may_differ_and_words_may_not() -> None:
    def lines(text: str) -> list[str]:
        return comparable("dsf train run.yaml --num_gpus 2", text)

    assert lines("step 8/32  loss 0.5, 1,200 samples/s") == lines(
        "step 8/32  loss 0.51,   90 samples/s"
    )
    assert lines("loss 0.5") != lines("lr 0.5")
    assert comparable("dsf check a.yaml", "8 devices") != comparable("x", "9 devices")
