"""One name of the project everywhere: the former one belongs to somebody else on the package
index.
"""

from __future__ import annotations

import re
from functools import cache

from tests.places import ROOT

_FOLDERS = (
    ".ci",
    "benchmarks",
    "deepspeed_lint",
    "deploy",
    "docs",
    "ds_configs",
    "framework",
    "hostfiles",
    "tests",
    "tools",
)
FORMER = "ds" + "framework"
# Marks in files that were written under the former name, which stay readable, and what tests that.
READ_STILL = {
    "framework/checkpoint/names.py",
    "framework/checkpoint/state/weight_files.py",
    "framework/data/token_files.py",
    "framework/checkpoint/manifest.py",
    "tests/commands/test_export.py",
    "tests/data/test_token_folder.py",
    "tests/checkpoint/test_resume_rules.py",
}


@cache
def texts() -> dict[str, str]:
    """Every text of the project but the changelog, whose entries stay as they were written."""
    files = [file for folder in _FOLDERS for file in (ROOT / folder).rglob("*")] + list(
        ROOT.iterdir()
    )
    found = (
        file
        for file in files
        if file.is_file() and "__pycache__" not in file.parts and file.name != "CHANGELOG.md"
    )
    return {
        str(file.relative_to(ROOT)): file.read_bytes().decode("utf-8", "replace") for file in found
    }


def test_the_former_name_is_read_in_old_files_and_written_nowhere() -> None:
    assert {name for name, text in texts().items() if FORMER in text.lower()} == READ_STILL


def test_what_is_installed_is_this_checkout() -> None:
    """By its path: by name, pip would fetch what somebody else has published."""
    by_name = re.compile(
        r"pip install .*?(?<![./\w-])(dsf[-_]trainer|dsf\b|framework\b|(?<=[ '\"])[a-z][\w-]*\[)"
    )
    found = [(name, match[0]) for name, text in texts().items() for match in by_name.finditer(text)]
    assert [each for each in found if each[0] != "tests/test_name.py"] == []
