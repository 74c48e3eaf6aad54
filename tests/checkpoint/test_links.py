"""Files of a run folder are never reached through a link or a pipe: refused, by the path's name."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from framework.checkpoint.checkpointer import clear_unfinished, make_room
from framework.data.token_files import keep_tokenizer
from framework.errors import StorageError
from framework.system.files import open_own
from framework.train.monitors.metric_files import CsvFile, JsonlFile
from framework.train.monitors.tensorboard_events import TensorBoardEvents
from framework.train.run_folder import RunFolder


def open_folder(run: Path) -> None:
    with closing(RunFolder(run)) as folder:
        folder.open(fresh=False)


def keep(run: Path) -> None:
    source = run.parent / "tokens"
    source.mkdir()
    (source / "meta.json").write_text("{}")
    keep_tokenizer(str(source), run)


OPENERS: dict[str, Callable[[Path], object]] = {
    ".lock": open_folder,
    "logs/": open_folder,
    "checkpoints/": open_folder,
    "metrics.jsonl": lambda run: JsonlFile(run / "metrics.jsonl", from_step=0),
    "metrics.csv": lambda run: CsvFile(run / "metrics.csv", from_step=0),
    "tensorboard/": lambda run: TensorBoardEvents(run / "tensorboard", from_step=0),
    "tokenizer/": keep,
    "tokenizer/meta.json": keep,
    "checkpoints/.saving/": lambda run: make_room(run / "checkpoints"),
    "checkpoints/.leaving-global_step1/": lambda run: clear_unfinished(run / "checkpoints"),
    "logs/rank0.log": lambda run: open_own(run / "logs" / "rank0.log", "a"),
}


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("name", OPENERS)
def test_a_planted_link_is_refused_and_named(name: str, dangling: bool, tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    planted = run / name.removesuffix("/")
    planted.parent.mkdir(parents=True)
    if not dangling:
        victim.mkdir() if name.endswith("/") else victim.write_text("mine\n")
    planted.symlink_to(victim)
    with pytest.raises((OSError, StorageError)) as caught:
        OPENERS[name](run)
    assert str(planted) in str(caught.value)
    assert "Errno" not in str(getattr(caught.value, "strerror", ""))
    assert planted.is_symlink()
    if dangling:
        assert not os.path.lexists(victim)
    elif victim.is_dir():
        assert list(victim.iterdir()) == []
    else:
        assert victim.read_text() == "mine\n"


def test_a_planted_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    for mode in ("a", "r", "wb"):
        with pytest.raises(OSError, match="no regular file"):
            open_own(tmp_path / "metrics.jsonl", mode)


def test_a_link_for_checkpoints_has_a_fix_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    with pytest.raises(
        StorageError, match=r"move the whole run folder there and set run\.output_dir"
    ) as caught:
        open_folder(tmp_path / "run")
    assert "a folder you can write to" not in str(caught.value)
