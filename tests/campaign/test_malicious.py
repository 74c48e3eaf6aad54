"""A checkpoint changed by an attacker who can write the folder and seal the manifest anew: it is
refused, and nothing in it runs.

Every file of real checkpoints is replaced by one that would write a file if it were unpickled as
Python allows; ranks that would read it are started, as train.py, and must end with one line that
says what is wrong. Most of that is waiting for a rank that is gone: many of them are started before
the first is waited for.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from framework.checkpoint.manifest import read_checkpoint, seal
from framework.system.files import hash_file
from tests.campaign.kills import CASES
from tests.campaign.kills import config as campaign_config
from tests.warm_ranks import Job, WarmRanks

pytestmark = pytest.mark.slow

STEPS = 2
SOURCES = ("zero0", "zero2", "zero3", "pipe2")
ALL_FORGERIES = "zero2"


class Gadget:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        return os.mkdir, (str(self._marker), 0o777)


def repickle(path: Path, marker: Path) -> None:
    """Put the gadget into the pickle of a file of torch.save; all else stays."""
    # zipfile would miss the CRC-32, which our files go without
    reader = torch._C.PyTorchFileReader(str(path))
    members = {name: reader.get_record(name) for name in reader.get_all_records()}
    assert "data.pkl" in members
    members["data.pkl"] = pickle.dumps(
        {"module": Gadget(marker), "optimizer_state_dict": Gadget(marker)}, protocol=2
    )
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(f"archive/{member}", data)


def plain_pickle(path: Path, marker: Path) -> None:
    """torch.load also reads files that are no archive."""
    path.write_bytes(pickle.dumps(Gadget(marker), protocol=2))


def huge_pickle(path: Path, marker: Path) -> None:
    """A header that promises a string of two gigabytes and an archive of nothing."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02X\xff\xff\xff\x7f")
        archive.writestr("archive/version", b"3\n")
    path.write_bytes(data.getvalue())


FORGERIES = {
    "gadget in the archive": repickle,
    "gadget alone": plain_pickle,
    "huge header": huge_pickle,
}


def reseal(checkpoint: Path) -> None:
    """Make the manifest agree with the files."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest.pop("sha256")
    manifest["files"] = {name: vars(hash_file(checkpoint / name)) for name in manifest["files"]}
    (checkpoint / "manifest.json").write_text(seal(manifest))


def config(case: str, folder: Path, **sections: Any) -> dict[str, Any]:
    base = campaign_config(case, folder)
    base["training"]["max_steps"], base["checkpoint"] = STEPS, {"every_steps": STEPS}
    return {name: section | sections.get(name, {}) for name, section in base.items()}


def start(warm: WarmRanks, values: dict[str, Any], folder: Path) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return warm.start(["--config", str(folder / "run.yaml")], num_ranks=2, folder=folder / "said")


@pytest.fixture(scope="module")
def sources(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    jobs = [start(warm, config(case, folder), folder / f"start-{case}") for case in SOURCES]
    for job in jobs:
        assert job.wait(120) == [0, 0], job.stated()
    return {case: folder / case / "checkpoints" / f"global_step{STEPS}" for case in SOURCES}


def first_files(checkpoint: Path) -> list[str]:
    """One file of each kind: the weights, the optimizer's of the last rank, a layer's."""
    names = sorted(path.name for path in checkpoint.glob("*.pt"))
    kinds = {re.sub(r"\d", "", name.split("_")[0] + name.split("_")[-2]): name for name in names}
    return sorted(kinds.values())


def wait_for(jobs: Iterable[Job]) -> None:
    """Wait for all at once: of each a rank is left, which has a moment to say so."""
    with ThreadPoolExecutor(max_workers=32) as threads:
        assert all(threads.map(lambda job: job.wait(120), jobs))


def refused(job: Job, *, marker: Path, kind: str, place: str) -> None:
    codes, stated = job.wait(120), job.stated()
    assert not marker.exists(), f"code of the file was run: {stated}"
    assert "Traceback" not in stated, stated
    lines = [line for line in stated.splitlines() if kind in line]
    assert len(lines) >= 1, stated
    assert place in lines[0], stated
    assert set(codes) & {74, 78}, (codes, stated)


@pytest.fixture(scope="module")
def resumed(
    warm: WarmRanks, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str, str], tuple[Job, Path]]:
    """Runs that have resumed a forged file: (case, forgery, file) -> the job, and what the forgery
    would make.
    """
    jobs = {}
    for case, forgery in product(SOURCES, FORGERIES):
        for number, name in enumerate(first_files(sources[case])):
            if forgery != "gadget in the archive" and (number or case != ALL_FORGERIES):
                break  # the other kinds of files are read by the same function, in every layout
            folder = tmp_path_factory.mktemp("resumed")
            checkpoint, marker = folder / sources[case].name, folder / "marker"
            shutil.copytree(sources[case], checkpoint)
            FORGERIES[forgery](checkpoint / name, marker)
            reseal(checkpoint)
            found = read_checkpoint(checkpoint)
            assert found is not None
            assert found.damage() == []
            sections = {
                "training": {"max_steps": STEPS + 2},
                "checkpoint": {"resume": str(checkpoint)},
            }
            jobs[case, forgery, name] = (
                start(warm, config(case, folder, **sections), folder),
                marker,
            )
    wait_for(job for job, _ in jobs.values())
    return jobs


@pytest.mark.parametrize("case", SOURCES)
def test_no_file_of_a_checkpoint_runs_code_when_it_is_resumed(
    resumed: dict[tuple[str, str, str], tuple[Job, Path]], case: str
) -> None:
    of_case = {place: started for place, started in resumed.items() if place[0] == case}
    assert len(of_case) >= 1
    for (_, _, name), (job, marker) in of_case.items():
        refused(job, marker=marker, kind="[checkpoint-not-loaded]", place=f"global_step{STEPS}")
        line = next(line for line in job.stated().splitlines() if "[checkpoint-not-loaded]" in line)
        assert name in line, job.stated()


@pytest.fixture(scope="module")
def taken(
    warm: WarmRanks, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Job, Path]]:
    """Runs that begin with forged weights: of each case's checkpoint, and of a file for each
    forgery.
    """
    jobs = {}
    for name in (*SOURCES, *FORGERIES):
        folder = tmp_path_factory.mktemp("taken")
        marker, case = folder / "marker", name if name in SOURCES else "zero0"
        if name in SOURCES:
            place = folder / sources[case].name
            shutil.copytree(sources[case], place)
            for path in place.glob("*.pt"):
                repickle(path, marker)
            reseal(place)
        else:
            place = folder / "weights.pt"
            shutil.copy(next(sources[case].glob("mp_rank_*")), place)
            FORGERIES[name](place, marker)
        values = config(
            case, folder, run={"name": "taken"}, checkpoint={"init_weights": str(place)}
        )
        jobs[name] = start(warm, values, folder / "start"), marker
    wait_for(job for job, _ in jobs.values())
    return jobs


@pytest.mark.parametrize("case", SOURCES)
def test_no_file_of_a_checkpoint_runs_code_when_its_weights_are_taken(
    taken: dict[str, tuple[Job, Path]], case: str
) -> None:
    job, marker = taken[case]
    refused(job, marker=marker, kind="[weights-not-read]", place=f"global_step{STEPS}")


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_file_of_weights_runs_no_code(taken: dict[str, tuple[Job, Path]], forgery: str) -> None:
    job, marker = taken[forgery]
    refused(job, marker=marker, kind="[weights-not-read]", place="weights.pt")


def test_the_gadget_works_where_pickle_is_trusted(tmp_path: Path) -> None:
    """Or the tests above would prove nothing."""
    pickle.loads(pickle.dumps(Gadget(tmp_path / "marker")))
    assert (tmp_path / "marker").is_dir()


def test_every_case_has_files_of_each_kind(sources: dict[str, Path]) -> None:
    assert set(SOURCES) <= set(CASES)
    assert any(name.startswith("layer_") for name in first_files(sources["pipe2"]))
    for case in ("zero2", "zero3"):
        assert any(name.endswith("optim_states.pt") for name in first_files(sources[case]))
        assert any(name.endswith("model_states.pt") for name in first_files(sources[case]))
