"""Compiles a function in folders with a blank in their names: blank_folders.py FILE.json. First as
torch does it, then with quoted paths. The file gets both results, or errors.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch._dynamo
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


def compiled(folder: Path, quoting: AbstractContextManager[None]) -> str:
    """Return the result of the compiled function, or its error."""
    use(folder)
    torch._dynamo.reset()
    try:
        with quoting:
            return str(float(torch.compile(doubled_sum)(torch.ones(300))))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def doubled_sum(rows: torch.Tensor) -> torch.Tensor:
    """Return a number that takes a loop."""
    return (2 * rows).relu().sum()


def main() -> None:
    file = Path(sys.argv[1])
    config.compile_threads = 1
    # Less to compile: no vectors, and a small header instead of all of torch's.
    config.cpp.vec_isa_ok = False
    codecache._get_cpp_prefix_header = lambda device: "cstddef"
    found = [
        compiled(file.parent / "a b", nullcontext()),
        compiled(file.parent / "c d", quoting_paths()),
    ]
    file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
