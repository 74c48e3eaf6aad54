"""A disk that is full, read-only, or fails on one rank only costs saves and nothing else: two real
ranks on a small tmpfs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.disk_full import CYCLES, SAVE_EVERY
from tests.launched import ROOT, run_ranks

pytestmark = pytest.mark.slow

DISK_BYTES = 12 << 20


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("disk")
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", folder],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"") or str(error).encode()
        pytest.skip(
            f"a small file system cannot be mounted here (it needs root): {reason.decode().strip()}"
        )
    yield folder
    subprocess.run(["umount", "-R", folder], check=True)


@pytest.fixture(scope="module")
def reported(mounted: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = tmp_path_factory.mktemp("told") / "told"
    # A rank that waits for one that has failed would wait longer than this.
    printed = run_ranks(
        ROOT / "tests/jobs/disk_full.py",
        str(mounted),
        str(results),
        num_ranks=2,
        cwd=results.parent,
        timeout=420,
    )
    return {
        "printed": printed,
        **{
            str(rank): json.loads(results.with_suffix(f".{rank}.json").read_text())
            for rank in (0, 1)
        },
    }


def test_every_save_is_written_or_leaves_the_ones_before(reported: dict[str, Any]) -> None:
    saves, there = reported["0"]["fills-up"]["saves"], list[int]()
    assert [save["step"] for save in saves] == [
        SAVE_EVERY * (number + 1) for number in range(len(CYCLES))
    ]
    assert len(saves) >= 20
    for save in saves:
        there = [*there, save["step"]][-2:] if save["written"] else there
        assert save["there"] == there, save
        assert save["sound"] == there[-1], save
        assert save["damaged"] == [], save
        assert save["hidden"] == [], save


def test_a_save_fails_where_it_must_and_only_there(reported: dict[str, Any]) -> None:
    for save in reported["0"]["fills-up"]["saves"]:
        if save["state"] == "free" and save["value"] is None:
            assert save["written"], save
        elif save["value"] in (0, 4096, 8192) or save["state"] in (
            "read-only",
            "rank0-write",
            "rank1-write",
        ):
            assert not save["written"], save
    outcomes = [
        save["written"]
        for save in reported["0"]["fills-up"]["saves"]
        if (save["value"] or 0) >= 65_536
    ]
    assert True in outcomes
    assert False in outcomes


def test_the_run_ends_well_on_every_rank(reported: dict[str, Any]) -> None:
    for rank in ("0", "1"):
        assert reported[rank]["fills-up"]["step"] == SAVE_EVERY * len(CYCLES)
        assert reported[rank]["fills-up"]["exit_code"] == 0


def test_each_failed_save_is_one_warning(reported: dict[str, Any]) -> None:
    num_failed = sum(not save["written"] for save in reported["0"]["fills-up"]["saves"])
    warnings = [
        line for line in reported["printed"].splitlines() if "[checkpoint-not-written]" in line
    ]
    assert len(warnings) == num_failed
    assert any("(Read-only file system)" in line for line in warnings)
    assert all("training goes on" in line for line in warnings)


def test_nothing_ends_in_a_traceback(reported: dict[str, Any]) -> None:
    assert "Traceback" not in reported["printed"], reported["printed"][-6000:]
    assert "--- Logging error ---" not in reported["printed"]


def test_the_last_save_is_an_error_on_every_rank(reported: dict[str, Any]) -> None:
    for rank in ("0", "1"):
        assert reported[rank]["last-fails"]["exit_code"] == 74
        assert (
            "global_step6: the checkpoint cannot be written (No space left on device)"
            in reported[rank]["last-fails"]["error"]
        )
        assert "[checkpoint-not-written]" in reported[rank]["last-fails"]["error"]
