"""Old content or new content, after a failure at any point, and nothing left beside it."""

from __future__ import annotations

import errno
import hashlib
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from framework.system import files
from framework.system.files import (
    NewFile,
    digest_of,
    hash_file,
    replace_text,
    sync_folder,
    write_new,
)


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    replace_text(path, "one\r\nü")
    assert path.read_bytes() == "one\r\nü".encode()
    replace_text(path, "two")
    assert path.read_text(encoding="utf-8") == "two"
    assert names(tmp_path) == ["note.txt"]


@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace", "interrupt"])
def test_a_failure_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "note.txt"
    path.write_text("old", encoding="utf-8")
    error: BaseException = KeyboardInterrupt() if step == "interrupt" else FULL
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync" if step == "interrupt" else step, failing(error))
        with pytest.raises(type(error)):
            replace_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert names(tmp_path) == ["note.txt"]


def test_text_that_cannot_be_encoded_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "note.txt", "\ud800")
    assert names(tmp_path) == []


def test_a_parent_that_is_a_file_reports_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        replace_text(tmp_path / "file" / "note.txt", "text")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_cannot_flush_folders_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(files.os, "fsync", failing(OSError(number, os.strerror(number))))
    sync_folder(tmp_path)


def test_a_disk_error_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "fsync", failing(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        sync_folder(tmp_path)


def test_a_new_file_is_hashed_as_it_is_written_and_never_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "data"
    stream = NewFile(path)
    assert stream.write(b"abc") == 3
    stream.write(memoryview(np.arange(4, dtype=np.int32)))
    record = stream.close()
    assert record == hash_file(path)
    assert (record.num_bytes, record.sha256) == (19, hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(FileExistsError):
        NewFile(path)


def test_a_write_returns_bytes_of_any_type_of_data(tmp_path: Path) -> None:
    stream = NewFile(tmp_path / "data")
    assert stream.write(memoryview(array("d", [1.0, 2.0]))) == 16
    assert stream.close().num_bytes == 16


def test_a_new_file_is_no_way_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="File exists"):
        NewFile(tmp_path / "link")


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(files.os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    stream = NewFile(tmp_path / "data")
    stream.write(b"0123456789")
    assert stream.close().num_bytes == 10
    assert (tmp_path / "data").read_bytes() == b"0123456789"


class TestWritingWhatIsInMemory:
    @pytest.mark.parametrize("num_bytes", [0, 1, (8 << 20) + 5])
    def test_writes_all_of_it(
        self, tmp_path: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = os.urandom(num_bytes)
        real = os.write
        # cut short
        monkeypatch.setattr(
            os, "write", lambda descriptor, data: real(descriptor, data[:1_000_003])
        )
        write_new(tmp_path / "file", memoryview(content))
        assert (tmp_path / "file").read_bytes() == content
        assert digest_of(memoryview(content)) == hash_file(tmp_path / "file").sha256

    def test_what_is_there_is_not_touched(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("old")
        with pytest.raises(FileExistsError):
            write_new(tmp_path / "file", memoryview(b"new"))
        assert (tmp_path / "file").read_text() == "old"
