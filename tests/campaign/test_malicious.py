"""A checkpoint that somebody changed who can write the folder and seal the manifest anew: it is refused, and nothing in
it runs.

Every file of real checkpoints is replaced by one that would write a file if it were unpickled as Python allows; ranks
that would read it are started, as train.py, and must end with one line that says what is wrong.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from framework.checkpoint.manifest import read_checkpoint, seal
from framework.system.files import hash_file
from tests.campaign.kills import CASES
from tests.campaign.kills import config as campaign_config
from tests.warm_ranks import WarmRanks

pytestmark = pytest.mark.slow

STEPS = 2
SOURCES = ("zero0", "zero2", "zero3", "pipe2")


class Gadget:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        return os.mkdir, (str(self._marker), 0o777)


def repickle(path: Path, marker: Path) -> None:
    """Put the gadget into the pickle of a file of torch.save; all else stays."""
    reader = torch._C.PyTorchFileReader(str(path))  # zipfile would miss the CRC-32, which our files go without
    members = {name: reader.get_record(name) for name in reader.get_all_records()}
    assert "data.pkl" in members
    members["data.pkl"] = pickle.dumps({"module": Gadget(marker), "optimizer_state_dict": Gadget(marker)}, protocol=2)
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


FORGERIES = {"gadget in the archive": repickle, "gadget alone": plain_pickle, "huge header": huge_pickle}


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


def start(warm: WarmRanks, values: dict[str, Any], folder: Path) -> tuple[list[int], str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    job = warm.start(["--config", str(folder / "run.yaml")], num_ranks=2, folder=folder / "said")
    return job.wait(120), job.stated()


@pytest.fixture(scope="module")
def sources(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    for case in SOURCES:
        codes, stated = start(warm, config(case, folder), folder / f"start-{case}")
        assert codes == [0, 0], stated
    return {case: folder / case / "checkpoints" / f"global_step{STEPS}" for case in SOURCES}


def first_files(checkpoint: Path) -> list[str]:
    """One file of each kind: the weights, the optimizer's of the last rank, a layer's."""
    names = sorted(path.name for path in checkpoint.glob("*.pt"))
    kinds = {name.split("_")[0] + name.split("_")[-2]: name for name in names}
    return sorted(kinds.values())


def refused(codes: list[int], stated: str, *, marker: Path, kind: str, place: str) -> None:
    assert not marker.exists(), f"code of the file was run: {stated}"
    assert "Traceback" not in stated, stated
    lines = [line for line in stated.splitlines() if kind in line]
    assert len(lines) >= 1, stated
    assert place in lines[0], stated
    assert set(codes) & {74, 78}, (codes, stated)


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("case", SOURCES)
def test_no_file_of_a_checkpoint_runs_code_when_it_is_resumed(
    warm: WarmRanks, sources: dict[str, Path], tmp_path: Path, case: str, forgery: str
) -> None:
    for number, name in enumerate(first_files(sources[case])):
        if number and forgery != "gadget in the archive":
            break  # the other kinds of files are read by the same function
        folder, marker = tmp_path / f"{number}", tmp_path / f"marker-{number}"
        checkpoint = folder / sources[case].name
        shutil.copytree(sources[case], checkpoint)
        FORGERIES[forgery](checkpoint / name, marker)
        reseal(checkpoint)
        found = read_checkpoint(checkpoint)
        assert found is not None
        assert found.damage() == []
        values = config(case, folder, training={"max_steps": STEPS + 2}, checkpoint={"resume": str(checkpoint)})
        codes, stated = start(warm, values, folder)
        refused(codes, stated, marker=marker, kind="[checkpoint-not-loaded]", place=checkpoint.name)
        assert name in next(line for line in stated.splitlines() if "[checkpoint-not-loaded]" in line), stated


@pytest.mark.parametrize("case", SOURCES)
def test_no_file_of_a_checkpoint_runs_code_when_its_weights_are_taken(
    warm: WarmRanks, sources: dict[str, Path], tmp_path: Path, case: str
) -> None:
    checkpoint, marker = tmp_path / sources[case].name, tmp_path / "marker"
    shutil.copytree(sources[case], checkpoint)
    for path in checkpoint.glob("*.pt"):
        repickle(path, marker)
    reseal(checkpoint)
    values = config(case, tmp_path, run={"name": "taken"}, checkpoint={"init_weights": str(checkpoint)})
    codes, stated = start(warm, values, tmp_path / "start")
    refused(codes, stated, marker=marker, kind="[weights-not-read]", place=checkpoint.name)


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_file_of_weights_runs_no_code(
    warm: WarmRanks, sources: dict[str, Path], tmp_path: Path, forgery: str
) -> None:
    file, marker = tmp_path / "weights.pt", tmp_path / "marker"
    shutil.copy(next(sources["zero0"].glob("mp_rank_*")), file)
    FORGERIES[forgery](file, marker)
    codes, stated = start(warm, config("zero0", tmp_path, checkpoint={"init_weights": str(file)}), tmp_path / "start")
    refused(codes, stated, marker=marker, kind="[weights-not-read]", place="weights.pt")


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
