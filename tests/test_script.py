"""How train.py ends where something of the installation is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.places import ROOT

WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from framework.script import exit_code; sys.exit(exit_code())"


def test_a_missing_package_is_one_line_and_no_reason_to_try_again(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("batch: {global_size: 60}\n")
    command = [sys.executable, "-c", WITHOUT, "torch", "--config", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 78
    assert done.stderr == (
        f"training needs the package torch, which {sys.executable} does not have; "
        "pip install 'dsframework[train]', or in a checkout ./launch.sh setup [package-missing]\n"
    )
