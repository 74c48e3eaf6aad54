"""Saves in the background, by real writer processes: training does not wait, and a save that fails
costs a warning.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint import async_checkpointer
from framework.checkpoint.checkpointer import Checkpointer, Retention
from framework.checkpoint.manifest import list_checkpoints
from framework.errors import StorageError
from tests.checkpoint.background_saves import (
    SECONDS,
    await_warning,
    is_dead,
    later,
    limit_file_size,
    make,
    options,
    rank_files,
    stop,
    writer,
)
from tests.checkpoint.small_checkpoints import names, steps
from tests.fake_engine import SavingEngine
from tests.until import until

__all__ = ["make"]  # a fixture


class TestWriting:
    def test_what_is_published_is_what_a_save_at_once_would_have_written(
        self, make: Any, tmp_path: Path
    ) -> None:
        Checkpointer(SavingEngine(rank_files()), tmp_path / "sync", options()).save(
            7, {"train/loss": 0.5, "eval/loss": float("nan")}
        )  # type: ignore[arg-type]
        checkpointer = make(folder=tmp_path / "async")
        assert checkpointer.save(7, {"train/loss": 0.5, "eval/loss": float("nan")})
        checkpointer.finish()
        (sync,), (found,) = (
            list_checkpoints(tmp_path / "sync"),
            list_checkpoints(tmp_path / "async"),
        )
        stated = ("saved_at", "sha256")  # a second may pass between the two
        assert {name: value for name, value in found.manifest.items() if name not in stated} == {
            name: value for name, value in sync.manifest.items() if name not in stated
        }
        assert list(found.manifest) == list(sync.manifest)
        assert found.damage() == []
        assert names(tmp_path / "async") == names(tmp_path / "sync") == ["global_step7", "latest"]

    def test_training_does_not_wait(self, make: Any, tmp_path: Path) -> None:
        checkpointer = make()
        stop(checkpointer)
        assert checkpointer.save(1), "though nothing is written"
        assert steps(tmp_path) == []
        os.kill(writer(checkpointer), signal.SIGCONT)
        until(lambda: steps(tmp_path) == [1])  # published without another word from the ranks

    def test_the_next_save_waits_for_the_one_before_and_reports_it_once(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        checkpointer = make()
        await_answer = checkpointer._await_answer

        def await_with_the_disk_back(timeout: float | None = None) -> None:
            if timeout != 0.0:  # a look alone does not wait
                os.kill(writer(checkpointer), signal.SIGCONT)
            await_answer(timeout)

        checkpointer._await_answer = await_with_the_disk_back
        for step in (1, 2, 3):
            stop(checkpointer)
            assert checkpointer.save(step)
        checkpointer.finish()
        assert steps(tmp_path) == [1, 2, 3]
        stated = capfd.readouterr().err
        assert stated.count("[checkpoint-waits]") == 1
        assert "step 2 is to be saved while step 1 is still being written" in stated

    @pytest.mark.slow
    def test_memory_is_used_again_and_grows(self, make: Any, tmp_path: Path) -> None:
        engine = SavingEngine(rank_files(num_bytes=300))
        checkpointer = make(engine)
        sizes = []
        for step, num_bytes in enumerate((300, 300, 40 << 20, 3000, 0)):
            engine.files = rank_files(num_bytes=num_bytes)
            checkpointer.save(step)
            sizes.append(os.fstat(checkpointer._staged.descriptor).st_size)
        checkpointer.finish()
        assert sizes[0] == sizes[1] < sizes[2] == sizes[3] == sizes[4]
        found = list_checkpoints(tmp_path)
        assert [checkpoint.damage() for checkpoint in found] == [[]] * 5
        assert (found[3].path / "model0.pt").read_bytes() == bytes([3, 0, 0]) * 1000

    def test_a_rank_may_have_nothing_to_write(self, make: Any, tmp_path: Path) -> None:
        checkpointer = make(SavingEngine(lambda step: {}))
        checkpointer.save(3)
        checkpointer.finish()
        assert steps(tmp_path) == [3]

    def test_retention_and_the_best(self, make: Any, tmp_path: Path) -> None:
        checkpointer = make(retention=Retention(1, best="eval/accuracy"))
        for step, accuracy in ((10, 0.2), (20, 0.9), (30, 0.1), (40, 0.3)):
            checkpointer.save(step, {"eval/accuracy": accuracy})
        checkpointer.finish()
        assert steps(tmp_path) == [20, 40]

    @pytest.mark.parametrize(
        "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
    )
    def test_what_asks_the_run_to_stop_does_not_stop_a_save(
        self, make: Any, tmp_path: Path, number: signal.Signals
    ) -> None:
        checkpointer = make()
        checkpointer.save(1)
        checkpointer.finish()  # it is up
        pid = stop(checkpointer)
        checkpointer.save(2)
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        checkpointer.finish()
        assert writer(checkpointer) == pid
        assert steps(tmp_path) == [1, 2]

    def test_closing_lets_a_save_become_whole(
        self, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(async_checkpointer, "_LAST_SECONDS", SECONDS)
        checkpointer = make()
        pid = stop(checkpointer)
        checkpointer.save(1)
        later(lambda: os.kill(pid, signal.SIGCONT))
        checkpointer.close()
        assert steps(tmp_path) == [1]
        assert not Path(f"/proc/{pid}").exists()


class TestFailing:
    def test_a_disk_that_refuses_is_reported_at_once_and_once(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        checkpointer = make()
        checkpointer.save(1)
        checkpointer.finish()
        limit_file_size(writer(checkpointer), 150_000)
        checkpointer._engine.files = rank_files(num_bytes=600_000)
        assert checkpointer.save(2)
        stated = await_warning(capfd)  # though the ranks have not met again
        checkpointer._await_answer(SECONDS)  # people read of it first
        assert checkpointer._state == "failed"
        assert (
            f"{tmp_path}/global_step2: the checkpoint cannot be written (File too large)" in stated
        )
        assert "training goes on" in stated
        limit_file_size(writer(checkpointer), resource.RLIM_INFINITY)
        checkpointer.save(3)
        checkpointer.finish()
        assert steps(tmp_path) == [1, 3]
        assert capfd.readouterr().err == ""
        assert names(tmp_path) == ["global_step1", "global_step3", "latest"]

    @pytest.mark.slow
    def test_a_writer_that_is_killed_is_replaced(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        checkpointer = make()
        checkpointer.save(1)
        checkpointer.finish()
        first = stop(checkpointer)
        checkpointer.save(2)
        os.kill(first, signal.SIGKILL)
        assert checkpointer.save(3)
        assert writer(checkpointer) != first
        stated = capfd.readouterr().err
        assert (
            "global_step2: the checkpoint cannot be written (the process that writes checkpoints was killed by signal "
            "9)" in stated
        )
        assert stated.count("[checkpoint-not-written]") == 1
        checkpointer.finish()
        assert steps(tmp_path) == [1, 3]
        # while it has nothing to do: no reason for a message
        os.kill(writer(checkpointer), signal.SIGKILL)
        until(lambda: is_dead(writer(checkpointer)))
        checkpointer.save(4)
        checkpointer.finish()
        assert steps(tmp_path) == [1, 3, 4]
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize("how", ["disk", "killed"])
    def test_the_last_save_of_a_run_must_succeed(
        self, make: Any, tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        checkpointer = make(last_step=2)
        checkpointer.save(1)
        checkpointer.finish()
        if how == "disk":
            limit_file_size(writer(checkpointer), 10)
        else:
            pid, begin = stop(checkpointer), checkpointer._begin

            def begin_and_die(order: Mapping[str, Any]) -> None:
                begin(order)
                os.kill(pid, signal.SIGKILL)

            checkpointer._begin = begin_and_die
        with pytest.raises(
            StorageError,
            match=r"global_step2: the checkpoint cannot be written .*\[checkpoint-not-written\]",
        ):
            checkpointer.save(2)
        assert capfd.readouterr().err == "", "an error, and no warning beside it"
        assert names(tmp_path) == ["global_step1", "latest"]

    def test_so_must_the_save_before_a_stop(self, make: Any) -> None:
        checkpointer = make()
        limit_file_size(writer(checkpointer), 10)
        checkpointer.save(1)
        with pytest.raises(StorageError, match="checkpoint-not-written"):
            checkpointer.finish(is_final=True)

    def test_a_folder_that_cannot_be_made_is_reported_before_anything_is_copied(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        checkpointer = make(folder=tmp_path / "file")
        assert checkpointer.save(1) is False
        assert "cannot be written (Not a directory)" in capfd.readouterr().err

    def test_files_that_were_taken_away(
        self, make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        checkpointer = make()
        pid = stop(checkpointer)
        checkpointer.save(1)
        (tmp_path / ".saving" / "global_step1").rmdir()
        os.kill(pid, signal.SIGCONT)
        checkpointer.finish()
        assert "cannot be written (No such file or directory)" in capfd.readouterr().err
        assert steps(tmp_path) == []

    @pytest.mark.parametrize("state", ["full", "read-only"])
    def test_a_real_disk(
        self, make: Any, tmp_path: Path, state: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        mounted = tmp_path / "disk"
        mounted.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "none", mounted],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(
                f"a small file system cannot be mounted here (it needs root): {done.stderr.decode().strip()}"
            )
        try:
            engine = SavingEngine(rank_files())
            checkpointer = make(engine, folder=mounted)
            checkpointer.save(1)
            checkpointer.finish()
            if state == "full":
                engine.files = rank_files(num_bytes=1_500_000)
                checkpointer.save(2)
            else:
                pid = stop(checkpointer)
                checkpointer.save(2)
                subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
                os.kill(pid, signal.SIGCONT)
            checkpointer.finish()
            reason = {"full": "No space left on device", "read-only": "Read-only file system"}[
                state
            ]
            stated = capfd.readouterr().err
            assert f"global_step2: the checkpoint cannot be written ({reason})" in stated
            assert stated.count("[checkpoint-not-written]") == 1
            if state == "read-only":
                subprocess.run(["mount", "-o", "remount,rw", mounted], check=True)
            engine.files = rank_files()
            checkpointer.save(3)
            checkpointer.finish()
            assert steps(mounted) == [1, 3]
            assert names(mounted) == ["global_step1", "global_step3", "latest"]
        finally:
            subprocess.run(["umount", "-l", mounted], check=True)
