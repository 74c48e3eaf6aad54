"""Trains cases and evaluates each of their checkpoints at once, on the same ranks: evaluate_runs.py CASES.json.

What `evaluate --json` prints is left in ``<output_dir>/<name>.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import torch.distributed

import framework
from framework.commands import evaluate
from framework.engine.distributed import process_group


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with process_group(None):
        for case in cases:
            folder = Path(case["run"]["output_dir"], case["run"]["name"])
            framework.fit(case)
            before = sorted(folder.rglob("*"))
            name = f"{folder.name}.json" if torch.distributed.get_rank() == 0 else os.devnull
            with (folder.parent / name).open("w") as out, contextlib.redirect_stdout(out):
                evaluate.main([str(folder), "--json"])
            assert sorted(folder.rglob("*")) == before


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as train.py ends, and for its reason
