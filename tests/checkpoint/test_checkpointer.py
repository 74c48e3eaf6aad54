"""What a save leaves: a whole checkpoint of its name, or the last good one and a warning."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint import checkpointer as publication
from framework.checkpoint.manifest import list_checkpoints, read_checkpoint
from framework.errors import StorageError
from framework.system.files import FileRecord
from tests.checkpoint.small_checkpoints import (
    CONFIG,
    LAYOUT,
    find,
    make_checkpointer,
    names,
    steps,
    write,
)
from tests.fake_engine import SavingEngine

NUM_FILES = 120


class TestWriting:
    def test_the_manifest_states_what_it_is_and_latest_names_it(self, tmp_path: Path) -> None:
        (checkpoint,) = write(tmp_path, 10)
        assert names(tmp_path) == ["global_step10", "latest"]
        assert (tmp_path / "latest").read_text(encoding="utf-8") == "global_step10"
        manifest = json.loads((checkpoint.path / "manifest.json").read_text(encoding="utf-8"))
        own = manifest.pop("sha256")
        assert manifest == {
            "format": 2,
            "saved_at": manifest["saved_at"],
            "step": 10,
            "layout": LAYOUT,
            "config": CONFIG,
            "epoch": 2,
            "steps_per_epoch": 4,
            "metrics": {},
            "files": {"weights": {"num_bytes": 2, "sha256": hashlib.sha256(b"10").hexdigest()}},
        }
        assert own == hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        assert checkpoint.damage() == []

    def test_other_ranks_name_nothing(self, tmp_path: Path) -> None:
        make_checkpointer(tmp_path, is_main=False).save(1)
        assert names(tmp_path) == [".saving"]
        assert names(tmp_path / ".saving" / "global_step1") == ["weights"]

    def test_what_an_earlier_process_left_half_done_is_removed_first(self, tmp_path: Path) -> None:
        left = tmp_path / ".saving" / "global_step5"
        left.mkdir(parents=True)
        (left / "old_optimizer_state").touch()
        engine = SavingEngine(returns_records=False)
        make_checkpointer(tmp_path, engine=engine).save(5)
        assert engine.entries_before == [[]]
        assert names(tmp_path / "global_step5") == ["manifest.json", "weights"]
        assert names(tmp_path) == ["global_step5", "latest"]

    def test_the_same_step_may_be_saved_again(self, tmp_path: Path) -> None:
        first, second = write(tmp_path, 5), write(tmp_path, 5)
        assert [len(first), len(second), second[0].damage()] == [1, 1, []]
        assert names(tmp_path) == ["global_step5", "latest"]

    @pytest.mark.parametrize(
        ("keep_last", "kept"), [(1, [30]), (2, [20, 30]), (3, [9, 20, 30]), (9, [3, 9, 20, 30])]
    )
    def test_the_newest_are_kept_by_number_not_by_name(
        self, tmp_path: Path, keep_last: int, kept: list[int]
    ) -> None:
        checkpointer = make_checkpointer(tmp_path, keep_last=keep_last)
        for step in (3, 9, 20, 30):
            checkpointer.save(step)
        assert steps(tmp_path) == kept
        assert names(tmp_path) == sorted([*(f"global_step{step}" for step in kept), "latest"])

    def test_a_later_checkpoint_of_another_past_never_costs_the_new_one(
        self, tmp_path: Path
    ) -> None:
        write(tmp_path, 10, 90)
        make_checkpointer(tmp_path, keep_last=1).save(20)
        assert steps(tmp_path) == [20, 90]

    def test_other_things_in_the_folder_are_left_alone(self, tmp_path: Path) -> None:
        for name in ("best", "global_step1.replaced", "global_step_notes", "global_stepX"):
            (tmp_path / name).mkdir()
        (tmp_path / "global_step2").touch()
        make_checkpointer(tmp_path, keep_last=1).save(7)
        assert names(tmp_path) == [
            "best",
            "global_step1.replaced",
            "global_step2",
            "global_step7",
            "global_stepX",
            "global_step_notes",
            "latest",
        ]

    @pytest.mark.parametrize(
        "error", [OSError(errno.ENOSPC, "No space left on device"), OSError("torch says: full")]
    )
    def test_a_failed_write_is_warned_of_and_leaves_the_last_good_one(
        self, tmp_path: Path, error: OSError, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(tmp_path, 1)
        text = error.strerror or str(error)
        engine = SavingEngine(failure=error)
        checkpointer = make_checkpointer(tmp_path, engine=engine)
        assert checkpointer.save(2) is False
        assert (
            f"{tmp_path}/global_step2: the checkpoint cannot be written ({text})"
            in capsys.readouterr().err
        )
        assert names(tmp_path) == ["global_step1", "latest"]
        assert find("auto", tmp_path) == 1
        engine.failure = None
        assert checkpointer.save(3) is True
        assert steps(tmp_path) == [1, 3]

    def test_the_last_save_of_a_run_must_succeed(self, tmp_path: Path) -> None:
        full = OSError(errno.ENOSPC, "No space left on device")
        checkpointer = make_checkpointer(tmp_path, engine=SavingEngine(failure=full), last_step=2)
        assert checkpointer.save(1) is False
        with pytest.raises(
            StorageError,
            match=r"global_step2: .* \(No space left on device\).*\[checkpoint-not-written\]",
        ):
            checkpointer.save(2)

    def test_another_ranks_failure_is_every_ranks(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(tmp_path, 1)
        checkpointer = make_checkpointer(tmp_path)
        answers = iter([["", ""], ["", "No space left on device"]])
        checkpointer._gather = lambda value: next(answers)
        assert checkpointer.save(2) is False
        assert "No space left on device" in capsys.readouterr().err
        assert names(tmp_path) == ["global_step1", "latest"]

    @pytest.mark.parametrize("num_bytes", [5, 1])
    def test_a_file_that_rank_0_does_not_see_is_a_failed_write(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_bytes: int
    ) -> None:
        """Two hosts without a shared run folder: each writes on its own disk."""
        write(tmp_path, 1)
        checkpointer = make_checkpointer(tmp_path)
        elsewhere = {"weights" if num_bytes == 1 else "of_host_b": FileRecord(num_bytes, "0" * 64)}
        checkpointer._gather = lambda value: [
            value,
            elsewhere if isinstance(value, dict) else value,
        ]
        assert checkpointer.save(20) is False
        assert (
            "is not whole where rank 0 looks: all hosts must share the run folder)"
            in capsys.readouterr().err
        )
        assert names(tmp_path) == ["global_step1", "latest"]

    def test_an_error_that_is_not_about_storage_is_left_as_it_is(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="NCCL"):
            make_checkpointer(tmp_path, engine=SavingEngine(failure=RuntimeError("NCCL"))).save(2)

    @pytest.mark.parametrize("name", ["manifest.json", "latest"])
    def test_a_manifest_that_cannot_be_written_is_a_failed_write(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        write(tmp_path, 1)
        real = publication.replace_text

        def full(path: Path, text: str) -> None:
            if path.name == name:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(path, text)

        monkeypatch.setattr(publication, "replace_text", full)
        assert make_checkpointer(tmp_path).save(2) is False
        assert (tmp_path / "latest").read_text(encoding="utf-8") == "global_step1"

    def test_an_old_checkpoint_that_cannot_be_deleted_is_warned_of(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(tmp_path, 1, 2)

        def forbidden(path: Path, **_: object) -> None:
            if path.name == ".leaving-global_step1":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(shutil, "rmtree", forbidden)
        make_checkpointer(tmp_path, keep_last=1).save(3)
        warning = capsys.readouterr().err
        assert warning.startswith(f"warning: {tmp_path}: an old checkpoint cannot be deleted (")
        assert "Permission denied" in warning
        assert warning.endswith("[checkpoint-not-deleted]\n")
        assert steps(tmp_path) == [2, 3], (
            "what cannot be deleted is at least no longer resumed from"
        )


class TestManyRanks:
    """What rank 0 does alone while thousands wait must not ask the file system for every file again
    and again.
    """

    def test_manifests_of_kept_checkpoints_are_read_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, *range(1, 6))
        read: list[str] = []

        def reading(path: Path) -> Any:
            read.append(path.name)
            return read_checkpoint(path)

        monkeypatch.setattr(publication, "read_checkpoint", reading)
        checkpointer = make_checkpointer(tmp_path, keep_last=7)
        for step in range(6, 12):
            checkpointer.save(step)
        assert sorted(read) == [f"global_step{step}" for step in range(1, 6)]
        assert steps(tmp_path) == list(range(5, 12))

    def test_one_deleted_meanwhile_is_forgotten(self, tmp_path: Path) -> None:
        checkpointer = make_checkpointer(tmp_path, keep_last=2)
        for step in (1, 2):
            checkpointer.save(step)
        shutil.rmtree(tmp_path / "global_step2")
        checkpointer.save(3)
        assert steps(tmp_path) == [1, 3]

    def test_files_are_listed_once_and_removed_together(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpointer = make_checkpointer(tmp_path, engine=SavingEngine(many_files), keep_last=1)
        asked: list[Path] = []
        stat = Path.stat
        monkeypatch.setattr(
            Path, "lstat", lambda path: asked.append(path) or stat(path, follow_symlinks=False)
        )
        monkeypatch.setattr(
            Path, "stat", lambda path, **options: asked.append(path) or stat(path, **options)
        )
        assert checkpointer.save(1)
        assert checkpointer.save(2)
        assert len([path for path in asked if path.name.startswith("shard")]) == 0
        assert names(tmp_path) == ["global_step2", "latest"]
        (found,) = list_checkpoints(tmp_path)
        assert len(found.manifest["files"]) == NUM_FILES
        assert found.damage() == []


def many_files(step: int) -> Mapping[str, bytes]:
    """Return as many files as many ranks write, half of them in a folder."""
    return {
        f"{'inner/' * (number % 2)}shard{number}": f"{step} {number}".encode()
        for number in range(NUM_FILES)
    }
