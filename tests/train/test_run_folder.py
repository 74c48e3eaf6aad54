"""One writer, one run per folder, nothing lost, and files that our own reader reads back."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_lint.text.document import read_document
from framework.config.load import config_from_values, load_config
from framework.errors import ConfigError, StorageError
from framework.system.files import open_own
from framework.train.run_folder import RunFolder
from tests.warm_ranks import WarmRanks

HOLD = """
import sys
from pathlib import Path
from framework.train.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.open(fresh=False)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_run(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def finished_run(path: Path, *, marker: str = "1") -> None:
    folder = RunFolder(path)
    folder.open(fresh=False)
    (path / "metrics.jsonl").write_text(marker, encoding="utf-8")
    folder.close()


def test_a_new_folder_has_its_parents_and_its_places(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b" / "run")
    assert folder.open(fresh=True) is None
    assert names(folder.path) == [".lock", "checkpoints", "logs"]
    assert (folder.checkpoints, folder.logs) == (folder.path / "checkpoints", folder.path / "logs")
    folder.close()
    folder.close()


def test_a_second_process_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    finished_run(path)
    before = names(path)
    with another_run(path):
        for fresh in (True, False):
            with pytest.raises(
                StorageError,
                match=r"run\.name = run: another run is writing to .*\[run-folder-busy\]",
            ) as no:
                RunFolder(path).open(fresh=fresh)
            assert no.value.exit_code == 74  # 78 would keep a scheduler from trying again
        assert (names(tmp_path), names(path)) == (["run"], before)


def test_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with another_run(path) as process:
        process.kill()
        process.wait()
    folder = RunFolder(path)
    folder.open(fresh=False)
    folder.close()


def test_a_fresh_start_renames_the_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    finished_run(path, marker="first")
    os.utime(path, (0, 1_000_000_000))
    folder = RunFolder(path)
    moved = folder.open(fresh=True)
    assert moved is not None
    assert moved.name.startswith("run.2001090")
    assert (moved / "metrics.jsonl").read_text(encoding="utf-8") == "first"
    assert names(path) == [".lock", "checkpoints", "logs"]
    with pytest.raises(StorageError, match="run-folder-busy"):
        RunFolder(path).open(fresh=True)
    folder.close()
    RunFolder(moved).open(fresh=False)


@pytest.mark.slow
def test_another_host_waits_until_it_sees_the_new_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system shows it the earlier one of the same name for a minute."""
    finished_run(tmp_path / "night")
    folder = RunFolder(tmp_path / "night")
    folder.open(fresh=True)
    with closing(folder):
        assert folder.generation
        seen = RunFolder(tmp_path / "another-view" / "night")
        finished_run(seen.path)
        begin = time.monotonic()
        Timer(0.6, lambda: shutil.copy(folder.path / ".lock", seen.path / ".lock")).start()
        seen.wait_until_visible(folder.generation, wait_seconds=30)
        assert 0.5 < time.monotonic() - begin < 20
        seen.wait_until_visible("another word", wait_seconds=0.1)
        assert capsys.readouterr().err.count("[run-folder-not-shared]") == 1
        # on one host no rank waits
        monkeypatch.setattr("framework.train.run_folder._POLL_SECONDS", 3600.0)
        RunFolder(folder.path).wait_until_visible(folder.generation)


@pytest.mark.parametrize("is_there", [True, False])
def test_where_nothing_was_renamed_there_is_nothing_to_wait_for(
    tmp_path: Path, is_there: bool
) -> None:
    if is_there:
        finished_run(tmp_path / "night")
    folder = RunFolder(tmp_path / "night")
    folder.open(fresh=not is_there)
    assert folder.generation == ""
    folder.close()


def test_runs_that_ended_in_the_same_second_get_different_names(tmp_path: Path) -> None:
    path = tmp_path / "run"
    found = []
    for number in range(4):
        finished_run(path, marker=str(number))
        os.utime(path, (0, 1_000_000_000))
        folder = RunFolder(path)
        moved = folder.open(fresh=True)
        assert moved is not None
        found.append((moved / "metrics.jsonl").read_text(encoding="utf-8"))
        folder.close()
        shutil.rmtree(path)
    assert found == ["0", "1", "2", "3"]
    assert len(names(tmp_path)) == 4


def test_going_on_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "run"
    finished_run(path)
    folder = RunFolder(path)
    assert folder.open(fresh=False) is None
    folder.close()
    assert (path / "metrics.jsonl").exists()
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize("content", [[], [".lock"]])
def test_an_empty_folder_is_used_as_it_is(tmp_path: Path, content: list[str]) -> None:
    path = tmp_path / "run"
    path.mkdir()
    for name in content:
        (path / name).touch()
    folder = RunFolder(path)
    assert folder.open(fresh=True) is None
    folder.close()
    assert names(tmp_path) == ["run"]


def test_it_is_held_before_it_is_looked_into(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunFolder(path).lock_if_exists()
    assert not path.exists()
    with another_run(path), pytest.raises(StorageError, match="run-folder-busy"):
        RunFolder(path).lock_if_exists()
    for fresh in (False, True):
        (path / "metrics.jsonl").touch()
        folder = RunFolder(path)
        folder.lock_if_exists()
        for _ in range(2):
            with pytest.raises(StorageError, match="run-folder-busy"):
                RunFolder(path).open(fresh=True)
            assert (folder.open(fresh=fresh) is None) is not fresh
            fresh = False
        folder.close()


def test_a_folder_that_cannot_be_held_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(tmp_path / "run")

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(fcntl, "flock", stale)
    with pytest.raises(StorageError, match=r"\(Stale file handle\).*\[run-folder-unusable\]"):
        RunFolder(tmp_path / "run").lock_if_exists()


def test_a_users_own_folder_is_neither_renamed_nor_written_to(tmp_path: Path) -> None:
    path = tmp_path / "src"
    path.mkdir()
    (path / "thesis.tex").touch()
    with pytest.raises(
        ConfigError,
        match=r"run\.name = src: .*/src holds files that are no run's; .*\[run-folder-foreign\]",
    ):
        RunFolder(path).open(fresh=True)
    assert (names(tmp_path), names(path)) == (["src"], ["thesis.tex"])


def test_a_folder_that_was_renamed_while_it_was_opened_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process's fresh start comes between opening the lock file and locking it."""
    path = tmp_path / "run"
    finished_run(path)
    real, other = fcntl.flock, RunFolder(path)

    def late(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        assert other.open(fresh=True) is not None
        other.close()
        (path / "metrics.jsonl").write_text("the other's", encoding="utf-8")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(StorageError, match="run-folder-busy"):
        RunFolder(path).open(fresh=True)
    assert (path / "metrics.jsonl").read_text(encoding="utf-8") == "the other's"


class TestUnusable:
    @staticmethod
    def refused(path: Path) -> str:
        folder = RunFolder(path)
        with pytest.raises(StorageError) as caught:
            folder.open(fresh=True)
        text = str(caught.value)
        assert text.startswith(f"run.output_dir: {path} cannot be used as run folder (")
        assert text.endswith("[run-folder-unusable]")
        return text

    def test_a_file_is_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("mine", encoding="utf-8")
        assert "(File exists)" in self.refused(tmp_path / "run")
        assert (tmp_path / "run").read_text(encoding="utf-8") == "mine"

    def test_a_file_is_in_the_place_of_its_parent(self, tmp_path: Path) -> None:
        (tmp_path / "runs").touch()
        assert "(Not a directory)" in self.refused(tmp_path / "runs" / "run")

    def test_a_name_is_too_long(self, tmp_path: Path) -> None:
        assert "(File name too long)" in self.refused(tmp_path / ("x" * 300))

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_the_parent_is_read_only(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        try:
            assert "(Permission denied)" in self.refused(tmp_path / "run")
        finally:
            tmp_path.chmod(0o700)

    @pytest.mark.parametrize("refused", [".lock", "checkpoints", "logs"])
    def test_a_refused_new_folder_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
    ) -> None:
        def guard(name: str) -> None:
            real = getattr(Path, name)

            def guarded(path: Path, *args: Any, **kwargs: Any) -> Any:
                if path.name == refused:
                    raise OSError(errno.EDQUOT, "Disk quota exceeded")
                return real(path, *args, **kwargs)

            monkeypatch.setattr(Path, name, guarded)

        def guarded_open(path: Path, mode: str) -> Any:
            if path.name == refused:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            return open_own(path, mode)

        guard("mkdir")
        monkeypatch.setattr("framework.train.run_folder.open_own", guarded_open)
        assert "(Disk quota exceeded)" in self.refused(tmp_path / "run")
        assert names(tmp_path) == []

    @pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
    def test_a_file_system_without_locks_is_warned_of(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        number: int,
    ) -> None:
        def no_locks(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", no_locks)
        folder = RunFolder(tmp_path / "run")
        assert folder.open(fresh=True) is None
        folder.close()
        assert "[run-folder-not-locked]" in capsys.readouterr().err


def describe(path: Path, config: dict[str, Any]) -> None:
    path.mkdir(exist_ok=True)
    RunFolder(path).describe(
        config=config, ds_config={"a": 1}, plan={"b": Path("x")}, environment={"c": None}
    )


def test_the_described_run_can_be_read_back(tmp_path: Path) -> None:
    config = config_from_values(
        {
            "run": {"name": "1e3", "output_dir": "0x10"},
            "optimizer": {"kind": "adamw", "lr": 1e-5, "eps": 1e-8},
            "zero": {"stage": 3, "reduce_bucket_size": 5e8},
            "model": {
                "target": "a:b",
                "args": {
                    "text": "1e-3",
                    "no": "no",
                    "date": "2020-01-01",
                    "sizes": [1, 2.5, None, True],
                },
            },
        }
    )
    describe(tmp_path, config.to_dict())
    assert load_config(tmp_path / "config.yaml") == config
    for name, content in (
        ("ds_config", {"a": 1}),
        ("plan", {"b": "x"}),
        ("environment", {"c": None}),
    ):
        assert json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) == content


TEXTS = (
    st.text(max_size=8)
    | st.from_regex(r"[-+]?[0-9._]{0,4}([eE][-+]?[0-9]{1,2})?", fullmatch=True)
    | st.sampled_from(
        [
            "null",
            "~",
            "1e" + "9" * 40,
            "9" * 40,
            "yes",
            "on",
            "True",
            ".nan",
            "-.inf",
            "1:30",
            "0o7",
            "0x1f",
            "=",
            "<<",
            "-",
            "? a",
            "# x",
            "a: b",
            " x ",
            "",
            "'",
        ]
    )
)


def readable(text: str) -> bool:
    """YAML has no lone surrogates, and our reader refuses what cannot be printed."""
    return all(character.isprintable() for character in text)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    args=st.dictionaries(
        TEXTS.filter(readable),
        TEXTS.filter(readable) | st.floats(allow_nan=False) | st.integers(-(10**20), 10**20),
        max_size=4,
    )
)
def test_any_text_and_any_number_is_read_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, args: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "described"
    args = {
        key: value
        for key, value in args.items()
        if not (isinstance(value, float) and math.isinf(value))
    }
    describe(path, {"args": args})
    found = read_document(path / "config.yaml", name="config.yaml").value
    assert found == {"args": args}
    assert {key: type(value) for key, value in found["args"].items()} == {
        key: type(value) for key, value in args.items()
    }


@pytest.mark.parametrize(
    "loss", ["removed", "renamed", "lock removed", "lock replaced", "another run's"]
)
def test_a_folder_that_is_lost_in_mid_run_ends_the_run(loss: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with closing(RunFolder(run)) as folder:
        folder.check_held()
        folder.open(fresh=False)
        folder.check_held()
        if loss == "removed":
            shutil.rmtree(run)
        elif loss in ("renamed", "another run's"):
            run.rename(tmp_path / "elsewhere")
        else:
            (run / ".lock").unlink()
        if loss == "lock replaced":
            (run / ".lock").touch()
        if loss == "another run's":
            finished_run(run)
        with pytest.raises(
            StorageError, match=r"run: the run folder was lost .*\[run-folder-lost\]"
        ) as caught:
            folder.check_held()
        assert caught.value.exit_code == 74
        if loss == "removed":
            assert not run.exists()


@pytest.mark.slow
def test_a_run_whose_folder_is_removed_ends_with_74_and_makes_none(
    warm: WarmRanks, tmp_path: Path
) -> None:
    """Two ranks; nothing is saved before the end, and nothing of a folder is there afterwards."""
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run: {{name: lost, output_dir: {tmp_path}/runs}}\n"
        "model: {kind: mlp, hidden_sizes: [8]}\ntraining: {max_steps: 200000, log_every: 5}\n"
        "data: {kind: digits}\nbatch: {global_size: 16}\nmonitors: {tensorboard: false}\n"
    )
    job = warm.start(["--config", str(config)], num_ranks=2, folder=tmp_path / "said")
    while not job.is_over() and not re.search("step.*loss", job.stated(0)):
        time.sleep(0.02)
    shutil.rmtree(tmp_path / "runs" / "lost")
    assert 74 in job.wait(120), job.stated()
    assert "[run-folder-lost]" in job.stated()
    assert not (tmp_path / "runs" / "lost").exists()
