"""Code that a checkpoint names is called where this user trained the run below the present folder, or
lists a folder around it: and not where another could have written any of it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from framework.checkpoint import trust
from framework.checkpoint.manifest import SavedCheckpoint, list_checkpoints
from framework.checkpoint.trust import note_trained, trusted_file, why_not_trusted
from framework.cli import main
from framework.config.base import targets_in
from framework.config.load import config_from_values
from framework.errors import ConfigError
from framework.setup.trained import saved_config
from tests.commands.test_trust import forged

CODE = {"model": {"target": "tests.commands.test_trust:Net", "args": {"sizes": [1, 2]}}}
OTHER_UID = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The present folder, of a user without notes and lists."""
    for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    mask = os.umask(0o022)
    yield folder
    os.umask(mask)


def trained(run: Path) -> SavedCheckpoint:
    """A run whose training was noted."""
    checkpoint = forged(run, CODE)
    note_trained(run, checkpoint.manifest["config"])
    assert why_not_trusted(checkpoint) == ""
    return checkpoint


def test_what_this_user_trained_below_the_present_folder_is_trusted(here: Path) -> None:
    trained(here / "runs/x")
    note = trust.trained_file()
    assert note.stat().st_mode & 0o777 == 0o600
    assert note.parent.stat().st_mode & 0o777 == 0o700
    before = note.read_text(encoding="utf-8")
    trained_again = forged(here / "runs/y", CODE)
    note_trained(here / "runs/x", trained_again.manifest["config"])
    assert note.read_text(encoding="utf-8") == before


def test_what_was_unpacked_by_this_user_is_not_trusted(here: Path) -> None:
    assert "this user has not trained it" in why_not_trusted(forged(here / "runs/x", CODE))


def test_a_copy_is_not_trusted(here: Path) -> None:
    checkpoint = trained(here / "runs/x")
    shutil.copytree(here / "runs/x", here / "runs/copy")
    copy = SavedCheckpoint(here / "runs/copy/checkpoints", checkpoint.tag, checkpoint.manifest)
    assert "this user has not trained it at this place" in why_not_trusted(copy)


@pytest.mark.parametrize("section", ["model", "data", "task", "evaluation"])
def test_other_code_in_the_place_of_a_trained_run_is_not_trusted(here: Path, section: str) -> None:
    trained(here / "runs/x")
    shutil.rmtree(here / "runs/x")
    target = {"target": "os:system", "args": {"command": "touch called"}}
    if section == "evaluation":
        target = {"metrics": {"f1": target}}
    other = {**CODE, section: target}
    assert "has not trained it" in why_not_trusted(forged(here / "runs/x", other))


def test_not_below_the_present_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = trained(here / "runs/x")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert "not below the present folder" in why_not_trusted(checkpoint)
    (here / "elsewhere/link").symlink_to(here / "runs")
    linked = SavedCheckpoint(
        here / "elsewhere/link/x/checkpoints", checkpoint.tag, checkpoint.manifest
    )
    assert "not below the present folder" in why_not_trusted(linked)


def test_a_link_to_the_present_folder_is_that_folder(here: Path, tmp_path: Path) -> None:
    checkpoint = trained(here / "runs/x")
    (tmp_path / "link").symlink_to(here)
    linked = SavedCheckpoint(
        tmp_path / "link/runs/x/checkpoints", checkpoint.tag, checkpoint.manifest
    )
    assert why_not_trusted(linked) == ""


PLACES: dict[str, Callable[[Path, SavedCheckpoint], Path]] = {
    "the present folder": lambda here, _: here,
    "runs": lambda here, _: here / "runs",
    "the run": lambda here, _: here / "runs/x",
    "its checkpoints": lambda here, _: here / "runs/x/checkpoints",
    "the checkpoint": lambda _, checkpoint: checkpoint.path,
    "the manifest": lambda _, checkpoint: checkpoint.path / "manifest.json",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("mode", "who"), [(0o002, "everybody"), (0o020, "its group")])
def test_what_others_can_write_is_not_trusted(here: Path, place: str, mode: int, who: str) -> None:
    checkpoint = trained(here / "runs/x")
    path = PLACES[place](here, checkpoint)
    path.chmod(path.stat().st_mode | mode)
    assert why_not_trusted(checkpoint) == (
        f"it was trained by this user, but {path} can be written by {who}"
    )


@as_root
@pytest.mark.parametrize("place", PLACES)
def test_what_belongs_to_another_user_is_not_trusted(here: Path, place: str) -> None:
    checkpoint = trained(here / "runs/x")
    path = PLACES[place](here, checkpoint)
    os.chown(path, OTHER_UID, -1)
    assert why_not_trusted(checkpoint) == (
        f"it was trained by this user, but {path} belongs to another user"
    )


@pytest.mark.parametrize("which", ["trained", "trusted"])
@pytest.mark.parametrize("change", ["group", "everybody", "folder", "owner", "link"])
def test_notes_that_others_can_write_are_not_read(here: Path, which: str, change: str) -> None:
    if change == "owner" and os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    checkpoint = forged(here / "runs/x", CODE)
    if which == "trained":
        note_trained(here / "runs/x", checkpoint.manifest["config"])
        path = trust.trained_file()
    else:
        trust.trust_folder(str(here / "runs"))
        path = trusted_file()
    assert why_not_trusted(checkpoint) == ""
    if change == "owner":
        os.chown(path, OTHER_UID, -1)
    elif change == "link":
        path.rename(path.with_name("other"))
        path.symlink_to(path.with_name("other"))
    elif change == "folder":
        path.parent.chmod(0o777)
    else:
        path.chmod({"group": 0o620, "everybody": 0o602}[change])
    assert why_not_trusted(checkpoint) != ""


def test_where_nothing_can_be_noted_the_run_goes_on(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "file"))
    checkpoint = forged(here / "runs/x", CODE)
    note_trained(here / "runs/x", checkpoint.manifest["config"])
    assert "has not trained it" in why_not_trusted(checkpoint)


def test_notes_do_not_grow_without_end(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_MOST_BYTES", 2000)
    for number in range(40):
        note_trained(here / f"run{number}", CODE)
    lines = trust.trained_file().read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1])[0] == str(here / "run39")
    assert 5 < len(lines) < 20


def test_the_list_of_the_user(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = forged(here / "shared/x", CODE)
    assert why_not_trusted(checkpoint) != ""
    assert main(["trust"]) == 0
    assert capsys.readouterr().out == f"no folder is listed in {trusted_file()}\n"
    assert main(["trust", "shared"]) == 0
    assert main(["trust", str(here / "shared")]) == 0
    assert capsys.readouterr().out == f"trusted: {here}/shared\n" * 2
    assert trusted_file().stat().st_mode & 0o777 == 0o600
    assert why_not_trusted(checkpoint) == ""
    assert main(["trust"]) == 0
    assert capsys.readouterr().out == f"{here}/shared\n"
    assert "not trained it" in why_not_trusted(forged(here / "shared2/x", CODE))
    (here / "shared/x").chmod(0o757)
    assert why_not_trusted(checkpoint) != ""
    (here / "shared/x").chmod(0o755)
    assert main(["trust", "--remove", "shared"]) == 0
    assert why_not_trusted(checkpoint) != ""
    assert main(["trust", "--remove", "shared"]) == 78
    assert main(["trust", "--remove"]) == 64
    assert main(["trust", "nowhere"]) == 78
    (here / "open").mkdir()
    (here / "open").chmod(0o777)
    assert main(["trust", "open"]) == 78
    assert "[trust-folder]" in capsys.readouterr().err


def test_in_a_listed_folder_nothing_that_is_read_may_be_open(here: Path) -> None:
    checkpoint = forged(here / "shared/x", CODE)
    trust.trust_folder("shared")
    manifest = checkpoint.path / "manifest.json"
    manifest.chmod(0o666)
    assert why_not_trusted(checkpoint) != ""
    manifest.chmod(0o644)
    assert why_not_trusted(checkpoint) == ""
    here.chmod(0o777)  # another folder could be put in the place of `shared`
    assert why_not_trusted(checkpoint) != ""
    assert main(["trust", "shared"]) == 78
    here.chmod(0o1777)
    assert why_not_trusted(checkpoint) == ""


def test_a_link_that_turns_after_the_manifest_was_read_is_seen(here: Path) -> None:
    forged(here / "stranger/x", CODE)
    forged(here / "listed/x", {"model": {"target": "tests.commands.test_trust:build"}})
    trust.trust_folder("listed")
    link = here / "link"
    link.symlink_to(here / "stranger/x")
    (checkpoint,) = list_checkpoints(link / "checkpoints")
    link.unlink()
    link.symlink_to(here / "listed/x")
    assert "has changed since it was read" in why_not_trusted(checkpoint)


@pytest.mark.parametrize("name", ["a\n/tmp", "blank ", "a\u2028b"])
def test_a_name_that_no_line_can_hold_is_not_listed(here: Path, name: str) -> None:
    folder = here / name
    folder.mkdir(parents=True)
    assert main(["trust", str(folder)]) == 78
    assert trust.trusted_folders() == []


def test_names_of_metrics_may_have_dots(here: Path) -> None:
    """The target of one is not hidden by the arguments of another."""
    evil = {"target": "tests.commands.test_trust:build"}
    metrics = {"f1": {"target": "torchmetrics:AUROC"}, "f1.args": evil}
    checkpoint = forged(here / "x", {"evaluation": {"metrics": metrics}})
    for name in metrics:
        with pytest.raises(ConfigError, match=r"\[target-not-trusted\]"):
            saved_config(checkpoint, f"evaluation.metrics.{name}")


@as_root
def test_a_listed_folder_may_be_of_another_user(here: Path) -> None:
    checkpoint = forged(here / "shared/x", CODE)
    os.chown(here / "shared/x", OTHER_UID, -1)
    trust.trust_folder("shared")
    assert why_not_trusted(checkpoint) == ""


def test_targets_inside_of_sections_are_found() -> None:
    config = config_from_values(
        {
            "data": {
                "kind": "mixture",
                "parts": [
                    {"weight": 1, "data": {"target": "a:b"}},
                    {"weight": 1, "data": {"kind": "text", "path": "a"}},
                ],
            },
            "task": {"target": "c:d", "args": {"target": "e:f"}},
        }
    )
    assert list(targets_in(config.data)) == ["a:b"]
    assert list(targets_in(config.task)) == ["c:d"]
    assert list(targets_in(config.model)) == []
