"""Hold `check` against DeepSpeed over thousands of drawn configs, and keep the counts.

    DS_ACCELERATOR=cpu python -m tools.differential --count 2000 --out
    benchmarks/results/differential.json

Exit 1 where DeepSpeed refuses what `check` accepts, or where `check` alone refuses something that
is on no list.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.deepspeed_lint.differential.compare import Comparison, compare
from tests.deepspeed_lint.differential.generate import questions


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000, help="configs")
    parser.add_argument(
        "--start-most", type=int, default=120, help="configs that are started and stepped as well"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the counts")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(
            list(questions(options.seed, options.count)),
            Path(folder),
            start_most=options.start_most,
        )
    report = report_of(result, seed=options.seed, seconds=time.monotonic() - began)
    text = json.dumps(report, indent=2)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0 if result.is_clean() else 1


def report_of(result: Comparison, *, seed: int, seconds: float) -> dict[str, Any]:
    """The counts, and the versions they hold for."""
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("deepspeed", "torch", "pydantic")},
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "accelerator": "cpu",
        },
        "seed": seed,
        "seconds": round(seconds, 1),
        "parsed": result.parsed,
        "started": result.started,
        "outcomes": dict(sorted(result.counts.items())),
        "mutations": {
            name: dict(sorted(counts.items())) for name, counts in sorted(result.mutations.items())
        },
        "silent_harms": dict(result.harms.most_common()),
        "not_started": dict(result.not_started.most_common()),
        "accepted_by_check_alone": result.accepted_by_us_alone,
        "unexplained": result.unexplained,
    }


def _processor() -> str:
    """Its name, where the system tells."""
    reported = Path("/proc/cpuinfo")
    lines = reported.read_text(encoding="utf-8").splitlines() if reported.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
