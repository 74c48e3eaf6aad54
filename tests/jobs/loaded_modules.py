"""Runs train.py, and writes down what each rank has loaded before its first step, and how often it
has planned: loaded_modules.py --config FILE [key=value ...], as train.py.

Writes ``loaded-rank<N>.json`` into the working folder, at the first forward pass with gradients.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

OUR_PACKAGES = ("framework", "deepspeed_lint")
calls: list[str] = []


def note_loaded(module: torch.nn.Module, inputs: Any) -> None:
    """Write down our modules, their bytes of source and the plans made, before the first step."""
    file = Path(f"loaded-rank{os.environ.get('RANK', '0')}.json")
    if not torch.is_grad_enabled() or file.exists():
        return
    sources = {
        name: loaded.__file__
        for name, loaded in sys.modules.items()
        if name.split(".")[0] in OUR_PACKAGES and getattr(loaded, "__file__", None)
    }
    record = {
        "modules": sorted(sources),
        "bytes": sum(Path(source).stat().st_size for source in sources.values() if source),
        "plans": len(calls),
    }
    file.write_text(json.dumps(record))


def main() -> None:
    """Count calls of `make_plan`, which other modules import by name, and train.

    The process that ranks are forked from has imported everything of ours: it is imported anew.
    """
    for name in [*sys.modules]:
        if name.split(".")[0] in OUR_PACKAGES:
            del sys.modules[name]
    from framework.plan import plan

    make_plan = plan.make_plan

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append("")
        return make_plan(*arguments, **named)

    plan.make_plan = counted  # type: ignore[assignment]
    register_module_forward_pre_hook(note_loaded)
    from framework import script

    script.main()


if __name__ == "__main__":
    main()
