"""Files that commands write at a given path: other people's files are left alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from framework.cli import main
from framework.errors import StorageError
from framework.launch.job import hand_out
from framework.system.files import refuse_foreign
from tests.report.made_runs import write_run

FOREIGN = (
    b'{"a": 1}',
    b"<html>mine</html>",
    b"\x89PNG\r\n\x1a\n",
    b"no newline",
    b"#!/bin/bash\n#SBATCH -N 2\n",
)


def test_a_mark_at_the_begin_or_the_end_is_found(tmp_path: Path) -> None:
    file = tmp_path / "file"
    refuse_foreign(file, marks=[b"ours"])
    for content in (b"", b"ours", b"ours" + bytes(1 << 18), bytes(1 << 18) + b"ours"):
        file.write_bytes(content)
        refuse_foreign(file, marks=[b"theirs", b"ours"])
    file.write_bytes(bytes(1 << 17) + b"ours" + bytes(1 << 17))
    with pytest.raises(FileExistsError, match="of another origin"):
        refuse_foreign(file, marks=[b"ours"])
    file.write_bytes(b"ours")
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(FileExistsError, match="no regular file"):
            refuse_foreign(tmp_path / name, marks=[b"ours"])
    with pytest.raises(OSError, match=r"regular file|directory"):
        refuse_foreign(tmp_path, marks=[b"ours"])


@pytest.mark.parametrize("content", FOREIGN)
def test_report_writes_over_its_own_files_alone(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    page, charts = tmp_path / "page.html", tmp_path / "charts"
    words = ["report", str(run), "--out", str(page), "--svg", str(charts)]
    for _ in range(2):  # over its own the second time
        assert main(words) == 0
    chart = next(charts.iterdir())
    for place in (page, chart):
        before = place.read_bytes()
        place.write_bytes(content)
        capsys.readouterr()
        assert main(words) == 74
        printed = capsys.readouterr().err
        assert "a file of another origin is there, and is left alone" in printed
        assert "[report-not-written]" in printed
        assert place.read_bytes() == content
        place.write_bytes(before)
    linked = tmp_path / "linked.html"
    linked.symlink_to(page)
    before = page.read_bytes()
    assert main(["report", str(run), "--out", str(linked)]) == 74
    assert page.read_bytes() == before


@pytest.mark.parametrize("content", FOREIGN)
def test_a_script_replaces_one_of_its_kind_alone(tmp_path: Path, content: bytes) -> None:
    place = tmp_path / "job.sh"
    hand_out("mark one\n", to=str(place), mark=b"mark")
    hand_out("mark two\n", to=str(place), mark=b"mark")
    assert place.read_text() == "mark two\n"
    place.write_bytes(content)
    with pytest.raises(StorageError, match=r"left alone.*\[not-written\]"):
        hand_out("mark three\n", to=str(place), mark=b"mark")
    assert place.read_bytes() == content
    hand_out("mark\n", to="/dev/null", mark=b"mark")


def test_a_resolved_config_replaces_a_config_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "ds.json", tmp_path / "out.json"
    config.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}}))
    words = ["check", "--resolve", str(config), "-o", str(out)]
    for content in (None, b"", config.read_bytes()):
        if content is not None:
            out.write_bytes(content)
        assert main(words) == 0, capsys.readouterr().err
        assert json.loads(out.read_text())["train_batch_size"] == 8
    for content in FOREIGN:
        out.write_bytes(content)
        assert main(words) == 74
        assert out.read_bytes() == content
    assert "a file of another origin is there" in capsys.readouterr().err
