"""Disks that are full, read-only, remote or too small for the next checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.names import size_of
from framework.commands.doctor import doctor
from framework.config.load import config_from_values
from framework.doctor.node import storage
from framework.doctor.node.findings import Node
from framework.doctor.node.machine import examine
from framework.doctor.node.requirements import Requirements, requirements_of
from framework.doctor.node.storage import (
    check_home,
    check_offload,
    check_run_folder,
    file_system,
    is_remote,
)
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from tests.doctor.node.broken import QUICKSTART, findings, why_no_mounts

needs_mounts = pytest.mark.skipif(bool(why_no_mounts()), reason=why_no_mounts() or "it can")


def need(folder: Path, **more: object) -> Requirements:
    return Requirements(Cluster(device="cpu"), run_folder=folder, num_kept=3, **more)  # type: ignore[arg-type]


@pytest.mark.slow
@needs_mounts
def test_a_full_store(tmp_path: Path) -> None:
    found = findings(
        QUICKSTART,
        f"run.output_dir={tmp_path}",
        mounts=[f"-t tmpfs -o size=2m tmpfs {tmp_path}"],
        before=[f"head -c 2M /dev/zero > {tmp_path}/others"],
    )
    assert found["run-folder-unwritable"]["severity"] == "error"
    assert "No space left" in found["run-folder-unwritable"]["found"]


@pytest.mark.slow
@needs_mounts
def test_a_read_only_store(tmp_path: Path) -> None:
    found = findings(
        QUICKSTART, f"run.output_dir={tmp_path}", mounts=[f"-t tmpfs -o ro tmpfs {tmp_path}"]
    )
    assert "Read-only file system" in found["run-folder-unwritable"]["found"]


@pytest.mark.slow
@needs_mounts
@pytest.mark.parametrize(
    ("free", "keep_last", "severity"), [(16, 3, "error"), (58, 4, "warning"), (62, 3, None)]
)
def test_room_for_the_next_checkpoints(
    tmp_path: Path, free: int, keep_last: int, severity: str | None
) -> None:
    """Two checkpoints of 20 MiB are there; one more than is kept must fit, because it is written
    before the oldest goes.
    """
    saved = [f"mkdir -p {tmp_path}/quickstart/checkpoints/global_step{step}" for step in (1, 2)]
    saved += [
        f"head -c 20M /dev/zero > {tmp_path}/quickstart/checkpoints/global_step{step}/weights"
        for step in (1, 2)
    ]
    found = findings(
        QUICKSTART,
        f"run.output_dir={tmp_path}",
        f"checkpoint.keep_last={keep_last}",
        before=saved,
        mounts=[f"-t tmpfs -o size={free + 41}m tmpfs {tmp_path}"],
    )
    assert found.get("disk-full", {}).get("severity") == severity


@pytest.mark.parametrize(
    ("checkpoint", "num_kept", "kept_by"),
    [
        ({"keep_last": 2}, 2, "checkpoint.keep_last: 2"),
        (
            {"keep_last": 2, "every_steps": 10, "keep_every": 25},
            2 + 20,
            "checkpoint.keep_last: 2, checkpoint.keep_every: 25",
        ),
        (
            {"keep_best": "eval/loss", "best_is": "min"},
            3 + 1,
            "checkpoint.keep_last: 3, checkpoint.keep_best: eval/loss",
        ),
        ({"keep_last": "all", "every_steps": 300}, 4, "checkpoint.keep_last: all"),
        ({"keep_last": "all", "every_steps": 250}, 4, "checkpoint.keep_last: all"),
    ],
)
def test_everything_that_is_kept_must_fit(
    checkpoint: dict[str, Any], num_kept: int, kept_by: str, tmp_path: Path
) -> None:
    """Only saved steps count among the steps that `keep_every` names: here every 50th."""
    config = config_from_values(
        {
            "run": {"name": "x", "output_dir": str(tmp_path)},
            "training": {"max_steps": 1000},
            "evaluation": {"every_steps": 10},
            "checkpoint": checkpoint,
        }
    )
    found = requirements_of(make_plan(config, Cluster(device="cpu")))
    assert (found.num_kept, found.kept_by) == (num_kept, kept_by)
    saved = tmp_path / "x" / "checkpoints" / "global_step10"
    saved.mkdir(parents=True)
    free = os.statvfs(tmp_path)
    (saved / "weights").touch()
    os.truncate(
        saved / "weights", free.f_bavail * free.f_frsize * 3 // 4
    )  # with nothing but a size
    saved.with_name("global_step5.replaced").mkdir()
    check = check_run_folder(found, counts_replaced=True)
    assert f"{num_kept} more must fit ({kept_by})" in check.problems[0].reason
    assert "in 1 that a resume has set aside" in check.outcome


def test_what_was_set_aside_is_counted_for_a_person_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files may be a terabyte in ten thousand files on a store that is slow to list them, and
    every start would wait for that.
    """
    for name in (
        "global_step10",
        "global_step5.replaced",
        "global_step5.replaced-1",
        "global_step5.replaced.tar",
    ):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "weights").write_bytes(bytes(1000))
    counted: list[str] = []
    monkeypatch.setattr(
        storage, "size_of", lambda folder: counted.append(folder.name) or size_of(folder)
    )
    assert "set aside" not in check_run_folder(need(tmp_path)).outcome
    assert counted == ["global_step10"]
    assert (
        ", 2.0 KiB in 2 that a resume has set aside"
        in check_run_folder(need(tmp_path), counts_replaced=True).outcome
    )
    assert "2 that a resume has set aside" in _said_of(
        "run folder", examine(need(tmp_path), {}, counts_replaced=True)
    )
    assert "set aside" not in _said_of("run folder", examine(need(tmp_path), {}))


def _said_of(name: str, node: Node) -> str:
    return next(check.outcome for check in node.checks if check.name == name)


def test_doctor_lists_what_was_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quickstart" / "checkpoints" / "global_step5.replaced").mkdir(parents=True)
    doctor([QUICKSTART, f"run.output_dir={tmp_path}"])
    assert "in 1 that a resume has set aside (*.replaced)" in capsys.readouterr().out


@pytest.mark.slow
@needs_mounts
def test_a_small_disk_for_the_first_checkpoint(tmp_path: Path) -> None:
    found = findings(
        QUICKSTART, f"run.output_dir={tmp_path}", mounts=[f"-t tmpfs -o size=100m tmpfs {tmp_path}"]
    )
    assert found["disk-full"]["severity"] == "warning"


@pytest.mark.slow
@needs_mounts
def test_a_home_that_cannot_be_written_to(tmp_path: Path) -> None:
    found = findings(
        "--num_gpus",
        "2",
        mounts=[f"-t tmpfs -o ro tmpfs {tmp_path}"],
        HOME=str(tmp_path),
        TORCH_EXTENSIONS_DIR="",
    )
    assert found["cache-unwritable"]["node"]
    assert (
        "HOME" in found["cache-unwritable"]["fix"]
        or "TORCH_EXTENSIONS_DIR" in found["cache-unwritable"]["fix"]
    )


def test_no_home() -> None:
    (problem,) = check_home(need(Path("runs")), {}).problems
    assert problem.kind == "home-missing"


@pytest.mark.slow
def test_nothing_stays_behind(tmp_path: Path) -> None:
    offload = f"zero={{stage: 3, offload_optimizer: {{device: nvme, nvme_path: '{tmp_path}'}}}}"
    found = findings(
        QUICKSTART, f"run.output_dir={tmp_path}", offload, HOME=str(tmp_path), TMPDIR=str(tmp_path)
    )
    assert not {name for name in found if name.endswith("-unwritable")}
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_the_run_reads_is_on_this_node(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    data = f"data={{kind: image_folder, root: '{tmp_path}/images', image_size: 28}}"
    words = (QUICKSTART, data, "model.in_channels=3", f"checkpoint.init_weights={tmp_path}/weights")
    found = findings(*words)
    assert found["input-not-found"]["found"].startswith(f"data.root = {tmp_path}"[:60])
    (tmp_path / "images").mkdir()
    assert "input-not-found" not in findings(*words)


def test_a_folder_that_will_be_made(tmp_path: Path) -> None:
    assert not check_run_folder(need(tmp_path / "not" / "yet")).problems


def test_an_offload_folder_is_written_to(tmp_path: Path) -> None:
    assert not check_offload(need(tmp_path, nvme_folders=(tmp_path,))).problems
    (problem,) = check_offload(need(tmp_path, nvme_folders=(Path("/proc/nvme"),))).problems
    assert (problem.kind, problem.severity) == ("nvme-path-unwritable", "error")


def test_types_of_file_systems(tmp_path: Path) -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert not is_remote(Path("/proc"))
    assert file_system(tmp_path) != "unknown"


@pytest.mark.slow
@needs_mounts
def test_the_innermost_mount_counts(tmp_path: Path) -> None:
    inner = tmp_path / "with a space"
    inner.mkdir()
    found = findings(
        QUICKSTART, f"run.output_dir={inner}", mounts=[f"-t tmpfs -o size=4m tmpfs '{inner}'"]
    )
    assert "4 MiB free" in found["disk-full"]["found"]
