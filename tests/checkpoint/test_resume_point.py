"""Which checkpoints there are, which one is chosen, and what becomes of those that are later."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from framework.checkpoint.manifest import seal
from framework.checkpoint.resume_point import absence_at, at_step, newest_at, set_aside_later
from framework.errors import ConfigError, StorageError
from tests.checkpoint.small_checkpoints import find, full, make_checkpointer, names, steps, write


class TestBest:
    """`.../best`, and steps by number."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        folder = tmp_path / "run/checkpoints"
        keeps = {"checkpoint": {"keep_best": "eval/loss", "best_is": "min"}}
        checkpointer = make_checkpointer(folder, config=full(**keeps))
        for step, loss in ((10, 0.5), (20, 0.2), (30, 0.2), (40, 0.9)):
            checkpointer.save(step, {"eval/loss": loss})
        checkpointer.save(50)
        return tmp_path / "run"

    def test_the_best_has_a_name_wherever_a_checkpoint_has_one(self, run: Path) -> None:
        for path in (run / "best", run / "checkpoints/best"):
            found = newest_at(str(path), key="load")
            assert found is not None
            assert found.step == 30
            assert find(str(path), run / "checkpoints") == 30
        assert newest_at(at_step(str(run), "best", key="x"), key="x") == found
        assert at_step(str(run), "20", key="x") == str(run / "checkpoints/global_step20")
        assert at_step(str(run), None, key="x") == str(run)
        with pytest.raises(ConfigError, match=r"there are 10, 20, 30, 40, 50, and best"):
            at_step(str(run), "25", key="x")

    def test_a_step_is_of_a_run_and_a_number_or_best(self, run: Path) -> None:
        one = run / "checkpoints/global_step20"
        for step in ("best", "30"):
            with pytest.raises(ConfigError, match=r"it is one checkpoint.*name the run folder"):
                at_step(str(one), step, key="x")
        with pytest.raises(ConfigError, match=r"bset.* is no step; write a number, or best"):
            at_step(str(run), "bset", key="x")
        assert newest_at(str(one / "best"), key="load") is None

    def test_a_folder_of_that_name_is_itself(self, run: Path) -> None:
        named = run.rename(run.with_name("best"))
        found = newest_at(str(named), key="load")
        assert found is not None
        assert found.step == 50

    def test_what_is_not_known_is_explained(self, run: Path, tmp_path: Path) -> None:
        write(tmp_path / "plain", 10)
        with pytest.raises(ConfigError, match=r"keep_best\); name a step.*\[best-not-known\]"):
            newest_at(str(tmp_path / "plain/best"), key="load")
        for step in (10, 20, 30, 40):
            shutil.rmtree(run / f"checkpoints/global_step{step}")
        with pytest.raises(ConfigError, match=r"no checkpoint has a value of eval/loss"):
            newest_at(str(run / "best"), key="load")
        assert newest_at(str(tmp_path / "nowhere/best"), key="load") is None


class TestFinding:
    def test_never_and_auto(self, tmp_path: Path) -> None:
        assert find("never", tmp_path) is None
        assert find("auto", tmp_path / "nowhere") is None
        assert find("auto", tmp_path) is None
        write(tmp_path, 10, 9)
        assert find("never", tmp_path) is None
        assert find("auto", tmp_path) == 10

    @pytest.mark.parametrize(
        "manifest",
        [
            None,
            "",
            "{",
            "[]",
            "3",
            "null",
            '"text"',
            "\x00" * 20,
            '{"format": 2}',
            "[" * 100_000,
            '{"format": 1, "step": 9, "world_size": 2, "config": {}}',
            seal({"format": 1, "step": 9, "files": {}}),
            seal({"format": 2, "step": 8, "files": {}}),
            seal({"format": 2, "step": 9, "files": {"../x": {}}}),
            seal({"format": 2, "step": 9, "files": {"/x": {}}}),
            seal({"format": 2, "step": 9, "files": {}})[:-9] + '"}',
        ],
    )
    def test_an_unfinished_or_foreign_checkpoint_is_passed_over(
        self, tmp_path: Path, manifest: str | None
    ) -> None:
        write(tmp_path, 4)
        unfinished = tmp_path / "global_step9"
        unfinished.mkdir()
        if manifest is not None:
            (unfinished / "manifest.json").write_text(manifest, encoding="utf-8")
        assert find("auto", tmp_path) == 4
        with pytest.raises(ConfigError, match="there is no finished checkpoint"):
            find(unfinished, tmp_path)

    @pytest.mark.parametrize(
        "tag",
        [
            "global_stepX",
            "global_step",
            "global_step-1",
            "global_step9.replaced",
            "step9",
            "global_step\uff19",
        ],
    )
    def test_other_names_are_no_checkpoints(self, tmp_path: Path, tag: str) -> None:
        write(tmp_path, 4, 9)
        (tmp_path / "global_step9").rename(tmp_path / tag)
        assert find("auto", tmp_path) == 4

    def test_zeros_in_front_do_not_matter(self, tmp_path: Path) -> None:
        write(tmp_path, 4, 9)
        (tmp_path / "global_step9").rename(tmp_path / "global_step009")
        assert find("auto", tmp_path) == 9
        assert find(tmp_path / "global_step009", tmp_path) == 9

    @pytest.mark.parametrize(
        ("path", "step"),
        [
            ("", 9),
            ("/", 9),
            ("/checkpoints", 9),
            ("/checkpoints/", 9),
            ("/checkpoints/global_step4", 4),
            ("/checkpoints/global_step4/", 4),
            ("/checkpoints/../checkpoints/global_step4", 4),
            ("/best", 4),
        ],
    )
    def test_a_path_may_be_the_run_its_checkpoints_or_one_of_them(
        self, tmp_path: Path, path: str, step: int
    ) -> None:
        run = tmp_path / "global_step_run"
        write(run / "checkpoints", 4, 9)
        (run / "best").symlink_to("checkpoints/global_step4")
        assert find(f"{run}{path}", tmp_path / "another") == step

    def test_here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path / "checkpoints", 4, 9)
        monkeypatch.chdir(tmp_path)
        assert find(".", tmp_path) == 9
        monkeypatch.chdir(tmp_path / "checkpoints" / "global_step4")
        assert find(".", tmp_path) == 4

    @pytest.mark.parametrize("name", ["auto", "never"])
    def test_a_path_is_a_path_where_the_newest_at_it_is_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert newest_at(name, key="CHECKPOINT") is None
        assert absence_at(name, key="CHECKPOINT") == "there is no such folder"
        write(tmp_path / name / "checkpoints", 4, 9)
        found = newest_at(name, key="CHECKPOINT")
        assert found is not None
        assert found.path == Path(name, "checkpoints", "global_step9")

    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            ("nowhere", "there is no such folder"),
            ("empty", "there is no finished checkpoint"),
            ("file", "there is no finished checkpoint"),
            ("empty/../file", "there is no finished checkpoint"),
            ("file/checkpoints", "there is no such folder"),
        ],
    )
    def test_a_path_without_a_checkpoint_is_refused(
        self, tmp_path: Path, path: str, reason: str
    ) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError) as caught:
            find(tmp_path / path, tmp_path)
        (problem,) = caught.value.problems
        assert (problem.kind, problem.key, problem.reason) == (
            "checkpoint-not-found",
            "checkpoint.resume",
            reason,
        )

    def test_a_file_system_that_does_not_answer_is_not_an_empty_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, 4)

        def stale(*_: object, **__: object) -> int:
            raise OSError(errno.ESTALE, "Stale file handle")

        monkeypatch.setattr(os, "open", stale)
        with pytest.raises(
            StorageError,
            match=r"no checkpoint is sound: .*manifest.json: it cannot be read: Stale file",
        ):
            find("auto", tmp_path)


class TestGoingBack:
    def test_later_checkpoints_are_set_aside_not_deleted(self, tmp_path: Path) -> None:
        start = write(tmp_path, 10, 20, 30)[0]
        assert [path.name for path in set_aside_later(start)] == [
            "global_step20.replaced",
            "global_step30.replaced",
        ]
        assert steps(tmp_path) == [10]
        assert (tmp_path / "latest").read_text(encoding="utf-8") == "global_step10"
        assert (tmp_path / "global_step30.replaced" / "weights").read_text(encoding="utf-8") == "30"

    def test_twice(self, tmp_path: Path) -> None:
        start = write(tmp_path, 10, 20)[0]
        set_aside_later(start)
        write(tmp_path, 20)
        assert [path.name for path in set_aside_later(start)] == ["global_step20.replaced-1"]

    def test_nothing_is_later_than_the_newest(self, tmp_path: Path) -> None:
        start = write(tmp_path, 10, 20)[-1]
        before = names(tmp_path)
        assert set_aside_later(start) == []
        assert names(tmp_path) == before
