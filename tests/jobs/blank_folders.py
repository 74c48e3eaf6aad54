"""Compiles a function in folders with a blank in their names: blank_folders.py FOLDER. Rank 0 does
it as torch does, rank 1 with quoted paths. Each writes its result, or the name of its error, into
``FOLDER/<rank>``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch._inductor import codecache, config

from framework.engine.workarounds.blanks_in_inductor import quoting_paths


def use(folder: Path) -> None:
    """Let inductor keep in `folder` all that it writes."""
    for name in ("tmp", "cache", "headers"):
        (folder / name).mkdir(parents=True)
    tempfile.tempdir = str(folder / "tmp")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    codecache._HEADER_DIR = str(folder / "headers")
    codecache._HEADER_LOCK_DIR = str(folder / "headers/locks")


def main() -> None:
    folder = Path(sys.argv[1])
    rank = os.environ["RANK"]
    use(folder / f"a {rank}")
    config.cpp.vec_isa_ok = False  # a header without vectors is compiled in a third of the time
    quoting: AbstractContextManager[None] = nullcontext()
    if rank == "1":
        quoting = quoting_paths()
    rows = torch.ones(300)
    try:
        with quoting:
            found = str(float(torch.compile(lambda rows: (2 * rows).relu().sum())(rows)))
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    (folder / rank).write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()
