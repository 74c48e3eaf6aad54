"""What tests/conftest.py does for every test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT

TEST = """
import threading

import pytest


@pytest.fixture
def released_by_the_test():
    released = threading.Event()
    yield released
    released.wait()


def test_that_fails_first(released_by_the_test):
    assert False
    released_by_the_test.set()
"""


@pytest.mark.slow
def test_what_follows_a_failure_has_a_limit_too(tmp_path: Path) -> None:
    (tmp_path / "test_here.py").write_text(TEST, encoding="utf-8")
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-o", "timeout=1"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 error" in done.stdout
    assert "Timeout (>1.0s)" in done.stdout
