"""Two ranks, of which the first ends at once: the store goes with it while the other one asks
it.
"""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

from framework.engine.distributed import process_group


def main() -> None:
    with process_group("gloo"):
        dist.barrier()
        if dist.get_rank() == 0:
            os._exit(70)
        store = dist.distributed_c10d._get_default_store()
        deadline, num_failures = time.monotonic() + 60, 0
        while num_failures < 3 and time.monotonic() < deadline:
            try:
                store.add("asked", 1)
                time.sleep(0.01)
            except RuntimeError as error:
                num_failures += 1
                print(f"asked: {type(error).__name__}", file=sys.stderr, flush=True)
        os.write(2, b"a line of a library in C\n")
        os._exit(76)


if __name__ == "__main__":
    main()
