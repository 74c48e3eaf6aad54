"""The text of ``run.schema.json``, which ships with the package: building it anew takes ten times as long as printing
it.

python -m framework.config.schema_text        builds it anew and writes the file
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

PACKAGED: Final = Path(__file__).with_name("run.schema.json")


def schema_text() -> str:
    """The JSON Schema of run configs as packaged, a test keeps it current; built anew where the file is missing or
    empty.
    """
    try:
        text = PACKAGED.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    return text if text.strip() else new_schema_text()


def new_schema_text() -> str:
    """The same, built from the models."""
    from framework.config.schema import run_schema  # the models take half a second

    return json.dumps(run_schema(), indent=2) + "\n"


if __name__ == "__main__":
    PACKAGED.write_text(new_schema_text(), encoding="utf-8")
