"""Trains many cases in one launched job: run_cases.py CASES.json [--allow-fp16]. A case is
{"config"}; starting DeepSpeed is dear.

Each case may name `model`, `optimizer` or data through import paths of `tests.jobs.parts`. A case
that fails writes its error to ``<output_dir>/<name>.error`` and the next one starts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed

import framework
from framework.engine.distributed import process_group
from framework.errors import FrameworkError
from tests.jobs.half_on_cpu import allow_fp16


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "--allow-fp16" in sys.argv:
        allow_fp16()
    if "zero_quantized" in json.dumps(cases):
        from tests.jobs.quantizer_on_cpu import allow_quantized

        allow_quantized()
    with process_group(None):
        for case in cases:
            try:
                framework.fit(case["config"])
            except FrameworkError as error:
                if torch.distributed.get_rank() == 0:
                    run = case["config"]["run"]
                    Path(run["output_dir"], run["name"] + ".error").write_text(
                        str(error), encoding="utf-8"
                    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as train.py ends, and for its reason
