"""Trains cases as run_cases.py does, and writes down the config that each call of
`deepspeed.initialize` gets on rank 0: given_configs.py CASES.json.

The folder of the run gets ``given.json`` beside its ``ds_config.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed

from tests.jobs import run_cases


def main() -> None:
    """Train the cases, each under its own name."""
    initialize = deepspeed.initialize
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    runs = iter([case["config"]["run"] for case in cases])

    def recorded(**arguments: Any) -> Any:
        given = json.dumps(arguments["config"])
        run = next(runs)
        if os.environ["RANK"] == "0":
            folder = Path(run["output_dir"], run["name"])
            (folder / "given.json").write_text(given, encoding="utf-8")
        return initialize(**arguments)

    deepspeed.initialize = recorded
    run_cases.main()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as train.py ends, and for its reason
