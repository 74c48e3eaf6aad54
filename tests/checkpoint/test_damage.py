"""Checkpoints whose bytes or names were changed after they were written: each change is named, and
the one before is taken.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.checkpointer import clear_unfinished
from framework.checkpoint.manifest import list_checkpoints, read_checkpoint, seal
from framework.checkpoint.names import find_raw
from framework.checkpoint.resume_point import (
    find_checkpoint,
    find_sound_checkpoint,
    newest_at,
    set_aside_later,
)
from framework.commands.inspect import run_inspect
from framework.errors import ConfigError, StorageError
from tests.checkpoint.test_every_fault import before
from tests.places import ROOT

NUM_SEEDS = 23
Mutation = Callable[[Path, random.Random], None]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def flip_bit(checkpoint: Path, draw: random.Random) -> None:
    path = draw.choice(files(checkpoint))
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut_off(checkpoint: Path, draw: random.Random) -> None:
    path = draw.choice(files(checkpoint))
    os.truncate(path, draw.randrange(path.stat().st_size))


def lengthen(checkpoint: Path, draw: random.Random) -> None:
    with draw.choice(files(checkpoint)).open("ab") as stream:
        stream.write(bytes(draw.randrange(1, 50)) + b"x")


def zero_block(checkpoint: Path, draw: random.Random) -> None:
    path = draw.choice(files(checkpoint))
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    data[start : start + 64] = bytes(len(data[start : start + 64]))
    path.write_bytes(data)


def remove(checkpoint: Path, draw: random.Random) -> None:
    draw.choice(files(checkpoint)).unlink()


def rename(checkpoint: Path, draw: random.Random) -> None:
    path = draw.choice(files(checkpoint))
    path.rename(path.with_name(f"{path.name}.{draw.randrange(10)}"))


def swap(checkpoint: Path, draw: random.Random) -> None:
    first, second = draw.sample(files(checkpoint), 2)
    first.rename(checkpoint / "held")
    second.rename(first)
    (checkpoint / "held").rename(second)


def take_older(checkpoint: Path, draw: random.Random) -> None:
    """A file of the checkpoint before, as a backup put back carelessly would leave it."""
    path = draw.choice(files(checkpoint))
    shutil.copy2(checkpoint.with_name("global_step10") / path.name, path)


def add_stranger(checkpoint: Path, draw: random.Random) -> None:
    (checkpoint / f"layer_{draw.randrange(100):02d}-model_states.pt").write_bytes(b"pickle")


def link(checkpoint: Path, draw: random.Random) -> None:
    path = draw.choice(files(checkpoint))
    path.rename(checkpoint.parent / f"moved-{path.name}")
    path.symlink_to(checkpoint.parent / f"moved-{path.name}")


def make_folder(checkpoint: Path, draw: random.Random) -> None:
    path = draw.choice(files(checkpoint))
    path.unlink()
    path.mkdir()


MUTATIONS: list[Mutation] = [
    flip_bit,
    cut_off,
    lengthen,
    zero_block,
    remove,
    rename,
    swap,
    take_older,
    add_stranger,
    link,
    make_folder,
]


def refuse_to_open(monkeypatch: pytest.MonkeyPatch, path: Path, number: int) -> None:
    """root may read everything, and no disk here fails when it is asked to."""
    real = os.open

    def refuse(name: Any, *arguments: Any, **options: Any) -> int:
        if str(name) == str(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(name, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    before(folder)
    return folder


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_every_change_is_found_and_the_checkpoint_before_is_taken(
    sound: Path, tmp_path: Path, mutation: Mutation
) -> None:
    for seed in range(NUM_SEEDS):
        folder = tmp_path / f"{seed}"
        shutil.copytree(sound, folder)
        mutation(folder / "global_step20", random.Random(seed))
        found, refused = find_sound_checkpoint("auto", run_checkpoints=folder)
        assert found is not None, seed
        assert found.step == 10, seed
        assert len(refused) == 1, seed
        assert f"{folder}/global_step20/" in refused[0]
        with pytest.raises(
            StorageError,
            match=r"the checkpoint is damaged: .*global_step20/.*\[checkpoint-damaged\]",
        ):
            # the newest of a folder is asked for
            find_sound_checkpoint(str(folder), run_checkpoints=folder)
        # the manifest itself is as it was written
        if read_checkpoint(folder / "global_step20") is not None:
            with pytest.raises(
                StorageError,
                match=r"the checkpoint is damaged: .*global_step20/.*\[checkpoint-damaged\]",
            ):
                find_sound_checkpoint(str(folder / "global_step20"), run_checkpoints=folder)
        else:
            with pytest.raises(ConfigError, match="there is no finished checkpoint"):
                find_sound_checkpoint(str(folder / "global_step20"), run_checkpoints=folder)
        shutil.rmtree(folder)


def other_release(manifest: Path) -> None:
    content = json.loads(manifest.read_text())
    content.pop("sha256")
    manifest.write_text(seal(content | {"format": 1}))


@pytest.mark.parametrize(
    "change", [Path.unlink, other_release, lambda manifest: os.truncate(manifest, 9)]
)
def test_a_manifest_that_cannot_be_read_is_no_reason_to_start_afresh(
    sound: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    shutil.copytree(sound, tmp_path / "run")
    change(tmp_path / "run" / "global_step10" / "manifest.json")
    found, refused = find_sound_checkpoint("auto", run_checkpoints=tmp_path / "run")
    assert found is not None
    assert (found.step, refused) == (20, []), "an older one is nobody's concern"
    change(tmp_path / "run" / "global_step20" / "manifest.json")
    with pytest.raises(
        StorageError,
        match=r"no checkpoint is sound: .*step20/manifest.json: .*step10/manifest.json",
    ) as no:
        find_sound_checkpoint("auto", run_checkpoints=tmp_path / "run")
    assert no.value.exit_code == 74
    assert "allow_unverified" not in str(no.value)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_manifest_that_storage_does_not_give_out_is_damage(
    number: int, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with every other file: `auto` goes back to the one before, and starts afresh with none."""
    run, why = shutil.copytree(sound, tmp_path / "run"), os.strerror(number)
    refuse_to_open(monkeypatch, run / "global_step20" / "manifest.json", number)
    found, refused = find_sound_checkpoint("auto", run_checkpoints=run)
    assert found is not None
    assert (found.step, refused) == (
        10,
        [f"{run}/global_step20/manifest.json: it cannot be read: {why}"],
    )
    before = find_checkpoint("auto", run_checkpoints=run)
    assert before is not None
    assert before.step == 10
    with pytest.raises(
        StorageError,
        match=rf"manifest.json: it cannot be read: {why}; try again .*\[checkpoint-not-read\]",
    ):
        find_checkpoint(str(run / "global_step20"), run_checkpoints=run)
    refuse_to_open(monkeypatch, run / "global_step10" / "manifest.json", number)
    for find in (find_sound_checkpoint, find_checkpoint):
        with pytest.raises(
            StorageError, match=rf"no checkpoint is sound: .*step20/.*{why}; .*step10/.*{why}"
        ):
            find("auto", run_checkpoints=run)


def test_a_folder_that_does_not_answer_is_not_an_empty_one(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(sound, tmp_path / "run")

    def stale(_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(run))

    monkeypatch.setattr(os, "scandir", stale)
    for find in (find_sound_checkpoint, find_checkpoint):
        with pytest.raises(
            StorageError,
            match=r"checkpoint.resume = auto: .*Stale file handle.*\[checkpoint-not-read\]",
        ):
            find("auto", run_checkpoints=run)


def test_a_lost_manifest_is_reported_in_the_words_of_the_command(
    sound: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(sound, tmp_path / "run")
    newest = run / "global_step20"
    (newest / "weights.pt").rename(newest / "mp_rank_00_model_states.pt")
    (newest / "manifest.json").unlink()
    with pytest.raises(
        StorageError,
        match=rf"manifest.json: it is missing \({newest} --allow-unverified reads it without one\)",
    ):
        newest_at(str(run), key="CHECKPOINT")
    with pytest.raises(
        ConfigError,
        match=r"it has no manifest \(DeepSpeed wrote it by itself, or the manifest is lost\)",
    ):
        newest_at(str(newest), key="CHECKPOINT")


def test_one_that_was_set_aside_is_read_but_not_resumed_from(sound: Path, tmp_path: Path) -> None:
    run = shutil.copytree(sound, tmp_path / "run")
    start, _ = list_checkpoints(run)
    (aside,) = set_aside_later(start)
    found = newest_at(str(aside), key="CHECKPOINT")
    assert found is not None
    assert (found.step, found.path, found.damage()) == (20, aside, [])
    with pytest.raises(
        ConfigError,
        match=rf"rename it back to {run}/global_step20 and name that \[checkpoint-replaced\]",
    ):
        find_sound_checkpoint(str(aside), run_checkpoints=run)
    aside.rename(run / "global_step20")
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [10, 20]


def test_a_folder_whose_newest_checkpoint_is_damaged_is_not_taken_for_an_older_one(
    sound: Path, tmp_path: Path
) -> None:
    """What `export`, `generate` and `init_weights` are given: older weights would pass for the
    newest.
    """
    run = shutil.copytree(sound, tmp_path / "run")
    other_release(run / "global_step20" / "manifest.json")
    with pytest.raises(
        StorageError,
        match=r"CHECKPOINT = .*step20/manifest.json: .*name an older one, such as .*step10 \[",
    ):
        newest_at(str(run), key="CHECKPOINT")
    named = find_checkpoint(str(run / "global_step10"), run_checkpoints=run)
    assert named is not None
    assert named.step == 10


def test_a_checkpoint_whose_manifest_is_damaged_is_set_aside_with_the_later_ones(
    sound: Path, tmp_path: Path
) -> None:
    """Under its name it would be deleted by the save of the same step."""
    shutil.copytree(sound, tmp_path / "run")
    other_release(tmp_path / "run" / "global_step20" / "manifest.json")
    found, _ = find_sound_checkpoint("auto", run_checkpoints=tmp_path / "run")
    assert found is not None
    assert [path.name for path in set_aside_later(found)] == ["global_step20.replaced"]
    assert find_sound_checkpoint("auto", run_checkpoints=tmp_path / "run")[1] == []


def test_there_are_as_many_changes_as_the_page_states() -> None:
    (stated,) = re.findall(
        r"[Oo]f (\d+) changes to the bytes", (ROOT / "docs/promises.md").read_text(encoding="utf-8")
    )
    assert int(stated) == NUM_SEEDS * len(MUTATIONS)


def test_the_damage_is_named(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "run")
    checkpoint = list_checkpoints(tmp_path / "run")[-1]
    os.truncate(checkpoint.path / "optimizer.pt", 7)
    data = bytearray((checkpoint.path / "weights.pt").read_bytes())
    data[100] ^= 1
    (checkpoint.path / "weights.pt").write_bytes(data)
    (checkpoint.path / "stranger.pt").touch()
    assert checkpoint.damage() == [
        "optimizer.pt: 7 bytes where 2,400 were written",
        "stranger.pt: it was not there when the checkpoint was written",
        "weights.pt: its content has changed since it was written",
    ]


@pytest.mark.timeout(60)
def test_a_pipe_is_not_waited_for(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe without a writer keeps `open` waiting for ever; a link leads to one."""
    shutil.copytree(sound, tmp_path / "run")
    for name in ("global_step20/manifest.json", "latest"):
        (tmp_path / "run" / name).unlink()
        os.mkfifo(tmp_path / "run" / name)
    assert find_raw(tmp_path / "run") is None
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [10]
    assert run_inspect(str(tmp_path / "run"), verify=True, as_json=False) == 74
    assert "damaged: global_step20/manifest.json" in capsys.readouterr().out
    clear_unfinished(tmp_path / "run")
    assert (tmp_path / "run" / "latest").read_text() == "global_step10"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run" / "latest").unlink()
    (tmp_path / "run" / "latest").symlink_to(tmp_path / "pipe")
    clear_unfinished(tmp_path / "run")
    assert (tmp_path / "run" / "latest").read_text() == "global_step10"


def test_a_checkpoint_under_another_name_is_none(sound: Path, tmp_path: Path) -> None:
    """Renamed by hand to be the newest, its contents would be taken for those of another step."""
    shutil.copytree(sound, tmp_path / "run")
    (tmp_path / "run" / "global_step10").rename(tmp_path / "run" / "global_step90")
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [20]


@pytest.mark.parametrize("name", ["../../victim", "/etc/passwd", "a/../../b"])
def test_a_manifest_does_not_lead_out_of_its_folder(sound: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(sound, tmp_path / "run")
    path = tmp_path / "run" / "global_step20" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    manifest["files"][name] = {"num_bytes": 1, "sha256": "0" * 64}
    path.write_text(seal(manifest))
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [10]


@pytest.mark.parametrize(
    "tag", ["../elsewhere", "/tmp", "global_step20/../global_step10", "global_step9" + "9" * 30]
)
def test_latest_leads_nowhere(sound: Path, tmp_path: Path, tag: str) -> None:
    """`latest` is written for DeepSpeed's own tools; nothing here follows it."""
    shutil.copytree(sound, tmp_path / "run")
    (tmp_path / "run" / "latest").write_text(tag)
    found, _ = find_sound_checkpoint("auto", run_checkpoints=tmp_path / "run")
    assert found is not None
    assert found.step == 20


def test_a_linked_checkpoint_folder_is_none(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "run")
    (tmp_path / "run" / "global_step20").rename(tmp_path / "moved")
    (tmp_path / "run" / "global_step20").symlink_to(tmp_path / "moved")
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [10]
    _, refused = find_sound_checkpoint("auto", run_checkpoints=tmp_path / "run")
    assert refused == [f"{tmp_path}/run/global_step20: it is a symbolic link"]
