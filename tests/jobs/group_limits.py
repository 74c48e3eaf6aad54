"""Time limits of all groups of a rank when runs have ended in one of ten minutes: group_limits.py
FOLDER CONFIG...

Writes ``limits<rank>.json``: seconds of each group. ``unlimited`` instead of a config leaves
DeepSpeed as it is.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed

import framework
from framework.engine import distributed
from framework.engine.distributed import process_group
from framework.engine.rank_groups import make_groups
from framework.plan.layout import Layout


def main() -> None:
    folder, *configs = sys.argv[1:]
    if "unlimited" in configs:
        configs.remove("unlimited")
        distributed.limiting_groups = nullcontext
    with process_group(None):
        for number, words in enumerate(configs):
            sections = {
                "run": {"name": f"{number}", "output_dir": folder},
                "model": {"kind": "mlp"},
            }
            framework.fit(
                sections
                | {"training": {"max_steps": 1}, "evaluation": {"at_end": False}}
                | json.loads(words)
            )
        make_groups(Layout(2, 1, global_size=1, micro_size=1, accumulation_steps=1, tensor_size=2))
        limits = [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in torch.distributed.distributed_c10d._world.pg_map
        ]
        Path(folder, f"limits{torch.distributed.get_rank()}.json").write_text(
            json.dumps(limits), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
