"""Two runs of one rank whose sinks are broken: broken_sinks.py FOLDER CONFIG.json. The second
writes no long file.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import framework

LARGEST_FILE_BYTES = 12_000  # less than metrics.jsonl and TensorBoard's events


def main() -> None:
    folder, configs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    framework.fit(configs[0])
    (folder / "ended").write_text(str(time.time()), encoding="utf-8")
    print("=====", file=sys.stderr, flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, LARGEST_FILE_BYTES))
    framework.fit(configs[1])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as train.py ends, and for its reason
