"""The checkpoint of a resume is looked up once, from the choice of `auto` keys to the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import framework
from framework.checkpoint import resume_point
from framework.checkpoint.resume_point import ResumeLookup
from framework.errors import StorageError
from framework.setup import start_point
from framework.setup.prepare_run import prepare
from framework.setup.user_code import Objects
from framework.train.run_folder import RunFolder
from tests.checkpoint.small_checkpoints import write

DATA = TensorDataset(torch.zeros(64, 3), torch.zeros(64, dtype=torch.long))


class Looks:
    """Counts reads of the list of checkpoints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("_checkpoints_at", "list_checkpoints"):
            monkeypatch.setattr(resume_point, name, self._counted(getattr(resume_point, name)))
        self._depth = 0

    def _counted(self, look: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            if self._depth == 1:  # the one calls the other
                self.count += 1
            try:
                return look(*arguments, **named)
            finally:
                self._depth -= 1

        return counted


def begin(tmp_path: Path, resume: str, **checkpoint: Any) -> start_point.SavedCheckpoint | None:
    """Prepare a run, as its rank does, and choose its start."""
    config = framework.RunConfig.model_validate(
        {
            "run": {"name": "run", "output_dir": str(tmp_path)},
            "checkpoint": {"resume": resume} | checkpoint,
        }
    )
    lookup = ResumeLookup(config)
    lookup.manifest()  # as for keys that are `auto`
    objects = Objects(model=torch.nn.Linear(3, 2), train_data=DATA)
    prepared = prepare(config, objects=objects, lookup=lookup)
    folder = RunFolder(config.run.folder)
    try:
        return start_point.choose_start(folder, config, named=prepared.named)
    finally:
        folder.close()


def test_a_path_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "earlier/checkpoints", 10, 20)
    looks = Looks(monkeypatch)
    start = begin(tmp_path, str(tmp_path / "earlier"))
    assert start is not None
    assert (start.step, looks.count) == (20, 1)


def test_a_checkpoint_that_was_damaged_since_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are verified at the start, however early the checkpoint was looked up."""
    write(tmp_path / "earlier/checkpoints", 10)
    choose = start_point.choose_start

    def damaged(*arguments: Any, **named: Any) -> Any:
        files = tmp_path.glob("earlier/checkpoints/global_step10/weights")
        for path in files:
            path.unlink()
        return choose(*arguments, **named, damage_of=lambda checkpoint: ["weights: missing"])

    monkeypatch.setattr(start_point, "choose_start", damaged)
    with pytest.raises(StorageError, match="checkpoint-damaged"):
        begin(tmp_path, str(tmp_path / "earlier"))


def test_auto_is_looked_up_once_before_and_once_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier start may save until the folder is locked."""
    write(tmp_path / "run/checkpoints", 10)
    looks = Looks(monkeypatch)
    choose = start_point.choose_start

    def late(folder: RunFolder, *arguments: Any, **named: Any) -> Any:
        write(tmp_path / "run/checkpoints", 20)
        looks.count = 0
        return choose(folder, *arguments, **named)

    monkeypatch.setattr(start_point, "choose_start", late)
    start = begin(tmp_path, "auto")
    assert start is not None
    assert (start.step, looks.count) == (20, 1)


def test_no_lookup_where_nothing_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    assert begin(tmp_path, "never") is None
    assert looks.count == 0
