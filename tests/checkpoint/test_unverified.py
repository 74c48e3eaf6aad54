"""Checkpoints without a manifest are found by the names of their files, and by nothing that leads
elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from framework.checkpoint.names import find_raw, irregular, read_names
from framework.checkpoint.resume_point import find_checkpoint, find_sound_checkpoint
from framework.errors import ConfigError, StorageError

STAGES = {
    "stage 0": ({"mp_rank_00_model_states.pt"}, (0,), None),
    "stage 1 or 2": (
        {
            "mp_rank_00_model_states.pt",
            *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)),
        },
        (1, 2),
        4,
    ),
    "stage 3": (
        {
            f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
            for rank in range(2)
            for kind in ("model", "optim")
        },
        (3,),
        2,
    ),
}


def raw(folder: Path, names: set[str] | None = None) -> Path:
    folder.mkdir(parents=True)
    for name in names or {"mp_rank_00_model_states.pt"}:
        (folder / name).write_bytes(b"12")
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_names_hold_stage_and_ranks(stage: str, tmp_path: Path) -> None:
    names, stages, ranks = STAGES[stage]
    found = read_names(raw(tmp_path / "global_step12", names))
    assert (found.stages, found.ranks, found.step) == (stages, ranks, 12)
    assert (found.num_files, found.num_bytes, found.model_parallel, found.has_layers) == (
        len(names),
        2 * len(names),
        1,
        False,
    )


def test_the_folder_itself_or_what_latest_names(tmp_path: Path) -> None:
    folder = raw(tmp_path / "run" / "my.tag-1")
    assert find_raw(folder) == folder
    assert find_raw(folder.parent) is None
    (folder.parent / "latest").write_text("my.tag-1\n")
    assert find_raw(folder.parent) == folder


@pytest.mark.parametrize("what", ["valid", "damaged", "broken link"])
def test_a_manifest_of_any_kind_makes_it_another_thing(what: str, tmp_path: Path) -> None:
    """Damage is not a reason to read on without checksums."""
    folder = raw(tmp_path / "global_step1")
    manifest = folder / "manifest.json"
    if what == "broken link":
        manifest.symlink_to("nowhere")
    else:
        manifest.write_text("{}" if what == "valid" else '{"for')
    assert find_raw(folder) is None
    with pytest.raises(ConfigError, match=r"\[checkpoint-not-found\]"):
        find_checkpoint(str(folder), run_checkpoints=tmp_path, allow_unverified=True)


def test_it_is_asked_for_by_name(tmp_path: Path) -> None:
    folder = raw(tmp_path / "global_step1")
    with pytest.raises(
        ConfigError, match=r"checkpoint.allow_unverified: true reads it .*\[checkpoint-unverified\]"
    ):
        find_checkpoint(str(folder), run_checkpoints=tmp_path)
    found = find_checkpoint(str(folder), run_checkpoints=tmp_path, allow_unverified=True)
    assert found is not None
    assert (found.path, found.verified) == (folder, False)
    # What `auto` looks for is what this framework wrote; but it does not start afresh where a
    # checkpoint is.
    with pytest.raises(
        StorageError,
        match=r"global_step1 with checkpoint.allow_unverified=true .*\[checkpoint-damaged\]",
    ):
        find_sound_checkpoint("auto", run_checkpoints=tmp_path, allow_unverified=True)


def test_links_and_pipes_are_named(tmp_path: Path) -> None:
    folder = raw(tmp_path / "global_step1")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "inner").mkdir()
    (folder / "inner" / "linked").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    assert sorted(irregular(folder)) == [
        "inner/linked: it is a symbolic link",
        "link: it is a symbolic link",
        "pipe: it is not a regular file",
    ]
    linked = tmp_path / "global_step2"
    linked.symlink_to(folder)
    (tmp_path / "latest").write_text("global_step2")
    assert find_raw(tmp_path) is None
