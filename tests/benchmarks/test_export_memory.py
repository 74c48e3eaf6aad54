"""Exporting a model costs far less memory than the model."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import export_memory
from benchmarks.export_memory import measure, write_checkpoint
from tests.warm_ranks import WarmRanks

# Pages of libraries count as well: some 80 MiB, by what of them the system has in its cache.
SIZES = {2: 256 << 20, 3: 256 << 20}


@pytest.fixture
def forks(warm: WarmRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that exports is forked from one that has imported all that an export does."""

    def fork(words: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "program.py"
        program.write_text(words[2], encoding="utf-8")
        job = warm.start(words[3:], num_ranks=1, folder=tmp_path / "said", script=program)
        (code,) = job.wait(120)
        return subprocess.CompletedProcess([*words], code, job.stated(), "")

    monkeypatch.setattr(export_memory, "subprocess", SimpleNamespace(run=fork))


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("stage", SIZES)
def test_the_peak_is_a_small_part_of_the_model(stage: int, tmp_path: Path) -> None:
    """Measured beside it: with mapped files counted it is about once the model, which is what is
    read of them.
    """
    num_bytes = SIZES[stage]
    found = measure(write_checkpoint(tmp_path, stage=stage, num_bytes=num_bytes), tmp_path / "out")
    assert found["exported_bytes"] > num_bytes
    assert found["peak_bytes_without_mapped_files"] < 0.5 * num_bytes, found
    assert found["peak_bytes"] < 1.5 * num_bytes, found
