"""Trains runs and runs commands on the same ranks, one after the other: run_commands.py JOBS.json.

A job is the config of a run, or [file, words]: what a command prints on rank 0 is left in the file.
None writes into a run folder.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed

import framework
from framework.engine.distributed import barrier, process_group


def main() -> None:
    with process_group(None):
        for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
            if isinstance(job, dict):
                framework.fit(job)
                continue
            out, (command, *words) = job
            barrier()  # rank 0 writes the report of a run after the others have done with it
            before = sorted(Path(words[0]).rglob("*"))
            name = out if torch.distributed.get_rank() == 0 else os.devnull
            with Path(name).open("w") as file, contextlib.redirect_stdout(file):
                importlib.import_module(f"framework.commands.{command}").main(words)
            assert sorted(Path(words[0]).rglob("*")) == before


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as train.py ends, and for its reason
