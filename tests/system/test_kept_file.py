"""Files whose storage was away: which file is gone on with afterwards."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from framework.system import kept_file
from framework.system.kept_file import KeptFile


def stale(descriptor: int, data: bytes) -> int:
    """Fail as a write to a file of NFS that is gone on the server."""
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_file, "_AGAIN_SECONDS", 0.0)


def lose_the_descriptor(kept: KeptFile, record: bytes) -> None:
    """Append a record while the file's descriptor works no more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_file, "write_all", stale)
        kept.append(record)


def test_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    kept = KeptFile(path)
    kept.append(b"first\n")
    lose_the_descriptor(kept, b"second\n")
    kept.close()
    assert path.read_bytes() == b"first\nsecond\n"


def test_another_file_of_its_name_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    kept = KeptFile(path)
    kept.append(b"first\n")
    path.rename(tmp_path / "moved.jsonl")
    path.write_bytes(b"a record of another run\n")
    lose_the_descriptor(kept, b"second\n")
    kept.close()
    assert path.read_bytes() == b"a record of another run\n"
    assert (tmp_path / "moved.jsonl").read_bytes().startswith(b"first\n")
