"""README and the tutorials are true: their files and commands, from top to bottom, in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.run_page import Page, comparable, is_shown, playing
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
