"""Warnings while a run goes on: one line on stderr, beside the progress on stdout, and in the rank's log."""

from __future__ import annotations

import os
import sys

from framework.system.log import note_warning
from framework.system.output import write


def warn(text: str, *, is_of_all_ranks: bool = False) -> None:
    """Say it where somebody may still be listening; a closed terminal is no reason to end a run.

    Args:
        text: the warning, with its kind in brackets.
        is_of_all_ranks: every rank meets it at the same time: rank 0 says it, the others only note it in their logs.
    """
    line = " ".join(text.split())
    note_warning(line)
    if not is_of_all_ranks or os.environ.get("RANK", "0") == "0":
        write(sys.stderr, f"warning: {line}\n")
