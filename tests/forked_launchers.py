"""Launchers and their ranks without a cold start, by `tests/jobs/forking_launcher.py`: for tests of
what happens between a launcher and its ranks. That a launcher starts Python is tested elsewhere:
torchrun and `deepspeed` in tests/test_train_script.py, `dsf launch` in tests/test_quickstart.py.
"""

from __future__ import annotations

from pathlib import Path

from tests.launched import ROOT
from tests.warm_ranks import Job, WarmRanks


def launch(warm: WarmRanks, module: str, *words: str, folder: Path, cwd: Path | None = None) -> Job:
    """Start ``python -m MODULE WORD ...``: a job of one process, the launcher; what it and its ranks
    print goes to the folder.
    """
    pids = folder / "pids"
    pids.mkdir(parents=True, exist_ok=True)
    for file in pids.iterdir():
        file.unlink()  # of an earlier start
    script = ROOT / "tests/jobs/forking_launcher.py"
    arguments = [str(pids), module, *words]
    return warm.start(arguments, num_ranks=1, folder=folder, script=script, cwd=cwd or folder)


def rank_pids(folder: Path) -> dict[int, int]:
    """Return the process of each rank that the launcher of a folder has started so far."""
    texts = {int(file.name[4:]): file.read_text() for file in (folder / "pids").glob("rank*")}
    return {rank: int(text) for rank, text in texts.items() if text}  # else it is being written
