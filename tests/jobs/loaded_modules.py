"""Runs train.py, and writes down what each rank has loaded before its first step, and how often it
has planned: loaded_modules.py --config FILE [key=value ...], as train.py.

The callback `Loaded` writes ``loaded-rank<N>.json`` into the working folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import framework
from framework.plan import plan

calls: list[str] = []


class Loaded:
    """Callback that writes down our modules, their bytes of source and the plans made."""

    def on_start(self, state: framework.State) -> None:
        sources = {
            name: module.__file__
            for name, module in sys.modules.items()
            if name.split(".")[0] in ("framework", "deepspeed_lint")
            and getattr(module, "__file__", None)
        }
        loaded = {
            "modules": sorted(sources),
            "bytes": sum(Path(file).stat().st_size for file in sources.values() if file),
            "plans": len(calls),
        }
        Path(f"loaded-rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(loaded))


def main() -> None:
    """Count calls of `make_plan`, which other modules import by name, and train."""
    make_plan = plan.make_plan

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append("")
        return make_plan(*arguments, **named)

    plan.make_plan = counted  # type: ignore[assignment]
    sys.modules["loaded_modules"] = sys.modules["__main__"]  # for the callback's import path
    from framework import script

    script.main()


if __name__ == "__main__":
    main()
