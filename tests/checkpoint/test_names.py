"""What things are called in a run folder: read back as they are written, and nothing else is taken
for them.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest

from framework.checkpoint.names import (
    LAYER_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    REPLACED,
    TAG,
    latest_tag,
    layer_file,
    model_file_of,
    named_folders,
    replaced_folders,
    replaced_names,
    size_of,
    tag_of,
)


@pytest.mark.parametrize("step", [0, 7, 10**18 - 1])
def test_a_tag_has_its_step(step: int) -> None:
    found = TAG.match(tag_of(step))
    assert found is not None
    assert int(found["step"]) == step


def test_every_name_for_what_is_set_aside_is_known_again() -> None:
    names = list(islice(replaced_names(tag_of(10)), 2000))
    assert names[:2] == ["global_step10.replaced", "global_step10.replaced-1"]
    assert len(set(names)) == 2000
    assert [found["tag"] for name in names if (found := REPLACED.match(name))] == [
        tag_of(10)
    ] * 2000


@pytest.mark.parametrize(
    "name",
    [
        "global_step",
        "global_step1.tar",
        "global_step" + "9" * 19,
        "xglobal_step1",
        "global_step10\n",
    ],
)
def test_other_names_are_no_tags(name: str) -> None:
    assert TAG.match(name) is None
    assert REPLACED.match(f"{name}.replaced") is None


@pytest.mark.parametrize(
    ("name", "rank", "model_rank"),
    [
        ("mp_rank_00_model_states.pt", None, "00"),
        (model_file_of(3), "3", "00"),
        ("zero_pp_rank_12_mp_rank_01_model_states.pt", "12", "01"),
    ],
)
def test_model_files(name: str, rank: str | None, model_rank: str) -> None:
    found = MODEL_FILE.fullmatch(name)
    assert found is not None
    assert (found["rank"], found["model_rank"]) == (rank, model_rank)
    assert OPTIMIZER_FILE.fullmatch(name) is None


@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_optimizer_files(prefix: str) -> None:
    found = OPTIMIZER_FILE.fullmatch(f"{prefix}zero_pp_rank_12_mp_rank_01_optim_states.pt")
    assert found is not None
    assert (found["rank"], found["model_rank"]) == ("12", "01")


@pytest.mark.parametrize("number", [0, 7, 123])
def test_layer_files(number: int) -> None:
    assert LAYER_FILE.fullmatch(layer_file(number))
    assert MODEL_FILE.fullmatch(layer_file(number)) is None


def test_latest(tmp_path: Path) -> None:
    assert latest_tag(tmp_path / "nowhere") == latest_tag(tmp_path) == ""
    (tmp_path / "latest").write_text("global_step4\n", encoding="utf-8")
    assert latest_tag(tmp_path) == "global_step4"
    (tmp_path / "latest").write_bytes(b"\xff" * 1000)
    assert len(latest_tag(tmp_path)) == 256
    (tmp_path / "latest").rename(tmp_path / "other")
    (tmp_path / "latest").symlink_to("other")
    assert latest_tag(tmp_path) == "", "a link may lead to a pipe that no program writes to"


def test_folders_by_their_names(tmp_path: Path) -> None:
    assert named_folders(tmp_path / "nowhere") == replaced_folders(tmp_path / "nowhere") == []
    for name in (
        "global_step10",
        "global_step9",
        "global_step9.replaced",
        "global_step9.replaced-2",
        ".saving",
        "other",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step1").touch()
    (tmp_path / "global_step2").symlink_to("nowhere")
    assert [(step, path.name) for step, path in named_folders(tmp_path)] == [
        (2, "global_step2"),
        (9, "global_step9"),
        (10, "global_step10"),
    ]
    assert [path.name for path in replaced_folders(tmp_path)] == [
        "global_step9.replaced",
        "global_step9.replaced-2",
    ]
    assert named_folders(tmp_path / "global_step1") == []


def test_a_size_is_that_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("a", "inner/b"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 500)
    assert size_of(tmp_path) == 1000
    assert size_of(tmp_path / "nowhere") == 0
