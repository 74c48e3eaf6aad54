"""Where the project lies: tests move, it does not."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def data_root() -> Path:
    """Return the folder of real data, which may not be there: DSF_TEST_DATA, or one beside the
    repository.
    """
    return Path(os.environ.get("DSF_TEST_DATA", ROOT.parent / "shared" / "data"))
