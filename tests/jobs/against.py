"""Holds loops against each other with small shapes: against.py OUT.json. BERT without
Accelerate, and at last all of them with loops that would fail if a row were measured again.
"""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

from benchmarks import one_gpu
from benchmarks.loops import sides
from framework.engine import garbage


def missing(setting: Any) -> Any:
    raise ImportError("No module named 'accelerate'")


def refused(setting: Any) -> Any:
    raise AssertionError("a row that is there is measured again")


def main() -> None:
    out = sys.argv[1]
    garbage._FIRST_STEPS = 2  # of the few that there are
    # What the process was forked with stays frozen: what ours would do to it is noted.
    calls: list[str] = []
    noted = {
        "freeze": lambda: calls.append("freeze"),
        "unfreeze": lambda: calls.append("unfreeze"),
    }
    garbage.gc = SimpleNamespace(**vars(gc) | noted)  # type: ignore[assignment]

    def call(*models: str) -> None:
        sys.argv[1:] = ["--against", "--tiny", "--out", out, "--models", *models]
        one_gpu.main()
        assert gc.isenabled(), "ours has left Python's collections off"
        assert calls[-1] == "unfreeze", f"what ours has frozen is never freed: {calls}"

    call("gpt2", "8b-slice-lora")
    assert "freeze" in calls
    sides.SIDES["accelerate"] = missing
    call("bert-large")
    sides.SIDES.update(dict.fromkeys(sides.SIDES, refused))
    call("gpt2", "8b-slice-lora", "bert-large")


if __name__ == "__main__":
    main()
