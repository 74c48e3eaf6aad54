"""Commands of installed packages stand beside the built-in ones: listed, called, and refused in one
line where the package is at fault.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from framework import registry
from framework.commands.table import BUILT_IN, find_command
from framework.errors import UsageError
from tests.places import ROOT

TALLY = """
from framework.commands.command import Command
from framework.errors import StorageError


def add_arguments(parser):
    parser.add_argument("words", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--twice", action="store_true")


def run(arguments):
    if "lost=1" in arguments.words:
        raise StorageError("tally: it is lost")
    print(len(arguments.words) * (1 + arguments.twice))
    return 3


COMMAND = Command("tally", "count the settings", add_arguments, run)
"""


def install(site: Path, package: str, *, command: str, code: str = TALLY, place: str = "") -> None:
    """Write a package as it is installed: its module, and the metadata with its entry point."""
    site.mkdir(exist_ok=True)
    (site / f"{package}.py").write_text(code, encoding="utf-8")
    metadata = site / f"{package}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    entry = f"[dsf.commands]\n{command} = {place or package + ':COMMAND'}\n"
    (metadata / "entry_points.txt").write_text(entry)


def call(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
    command = [sys.executable, "-m", "framework", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_command_of_another_package_is_called_and_listed(tmp_path: Path) -> None:
    install(tmp_path, "tally", command="tally")
    done = call(tmp_path, "tally", "a=1", "--twice", "b=2")
    assert (done.returncode, done.stdout, done.stderr) == (3, "4\n", "")
    listed = call(tmp_path, "--help")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "  tally         count the settings\n" in listed.stdout
    assert call(tmp_path, "tally", "--help").stdout.startswith("usage: dsf tally ")


def test_its_errors_end_it_as_ours_do(tmp_path: Path) -> None:
    install(tmp_path, "tally", command="tally")
    done = call(tmp_path, "tally", "lost=1")
    assert (done.returncode, done.stdout, done.stderr) == (74, "", "tally: it is lost\n")
    done = call(tmp_path, "tally", "--thrice")
    assert done.returncode == 64
    assert done.stderr.startswith(
        "tally: unrecognized arguments: --thrice (did you mean --twice?); see "
    )


def test_a_slip_finds_it(tmp_path: Path) -> None:
    install(tmp_path, "tally", command="tally")
    done = call(tmp_path, "taly")
    assert done.returncode == 64
    assert "invalid choice: 'taly' (did you mean tally?)" in done.stderr


@pytest.mark.parametrize(
    ("code", "place", "reason"),
    [
        ("import nowhere_at_all\n", "", "No module named 'nowhere_at_all'"),
        ("COMMAND = print\n", "", "is no framework.commands.command.Command"),
        (TALLY, "tally:ORDER", "AttributeError"),
        (TALLY.replace('"tally",', '"count",'), "", "of this name"),
    ],
    ids=["import", "kind", "place", "name"],
)
def test_a_broken_package_is_one_line(tmp_path: Path, code: str, place: str, reason: str) -> None:
    install(tmp_path, "tally", command="tally", code=code, place=place)
    done = call(tmp_path, "tally")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
    assert "the package tally 1.5 registers tally in dsf.commands as tally:" in done.stderr
    assert reason in done.stderr
    assert done.stderr.endswith("or uninstall it: pip uninstall tally [plug-in-broken]\n")
    listed = call(tmp_path, "--help")
    assert listed.returncode == 0
    assert "count the settings" not in listed.stdout
    assert listed.stderr == f"warning: {done.stderr}"


def test_two_packages_with_one_name_are_refused(tmp_path: Path) -> None:
    install(tmp_path, "tally", command="tally")
    install(tmp_path, "other", command="tally")
    done = call(tmp_path, "tally")
    assert done.returncode == 78
    assert "two packages register tally in dsf.commands: " in done.stderr
    assert done.stderr.endswith("or give its entry point another name [plug-ins-clash]\n")


def test_a_built_in_command_stays_what_it_is(tmp_path: Path) -> None:
    install(tmp_path, "tally", command="schema")
    done = call(tmp_path, "schema")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("{")
    assert "the framework has a command of this name" in call(tmp_path, "--help").stderr


def test_a_built_in_command_lists_no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed", pytest.fail)
    for command in BUILT_IN:
        found, rest = find_command([*command.name.split(), "x.yaml"])
        assert (found, rest) == (command, ["x.yaml"])


def test_a_word_unlike_all_commands_lists_them() -> None:
    with pytest.raises(UsageError, match=r"'xyzzy' \(choose from check, plan, .*launch slurm\)"):
        find_command(["xyzzy"])
