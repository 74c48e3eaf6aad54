"""Rows that are streamed from files by Hugging Face's `datasets`; a run that is started again goes
on at the next row.

    python examples/streaming.py rows 20
    deepspeed --num_gpus 2 examples/streaming.py rows 40        # from step 20, on two devices

Eight files are eight lanes: every step takes as many rows of each, whatever the number of ranks and
workers.
"""

import json
import random
import sys
from pathlib import Path

import framework


def write_rows(folder: Path) -> None:
    """Make eight files: eight numbers, and whether their sum is positive."""
    folder.mkdir()
    for number in range(8):
        draw = random.Random(number)
        rows = [[round(draw.gauss(0, 1), 3) for _ in range(8)] for _ in range(100 + number)]
        lines = [
            json.dumps({"x": row, "y": int(sum(row) > 0), "id": index})
            for index, row in enumerate(rows)
        ]
        (folder / f"part{number}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def main(folder: Path, steps: int) -> None:
    """Train to this step, from wherever the run was left."""
    framework.fit(
        {
            "run": {"name": "streaming"},
            "model": {"target": "torch.nn:Linear", "args": {"in_features": 8, "out_features": 2}},
            "data": {
                "kind": "huggingface",
                "path": str(folder / "part{0..7}.jsonl"),
                "columns": ["x", "y"],
                "streaming": True,
            },
            "batch": {"global_size": 32},
            "optimizer": {"kind": "sgd", "lr": 0.1},
            "scheduler": {"kind": "constant"},
            "training": {"max_steps": steps, "log_every": 1},
            "checkpoint": {"resume": "auto"},
        }
    )


if __name__ == "__main__":
    rows = Path(sys.argv[1])
    if not rows.exists():
        write_rows(rows)
    main(rows, int(sys.argv[2]))
