"""Two ranks that wait half a second for each other, and one that writes for longer."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed

from framework.engine.collective_timeout import collective_timeout, gather_from_disks

LIMIT, LONGER, AT_MOST = timedelta(seconds=0.5), 1.0, timedelta(seconds=60)


def main() -> None:
    torch.distributed.init_process_group("gloo")  # to find each other they may take longer
    torch.distributed.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(LIMIT)
    with collective_timeout():
        if torch.distributed.get_rank() == 0:
            time.sleep(LONGER)
        torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        time.sleep(LONGER)
    assert gather_from_disks(torch.distributed.get_rank()) == [0, 1]
    store = torch.distributed.distributed_c10d._get_default_store()
    if torch.distributed.get_rank() == 1:
        with pytest.raises(RuntimeError, match="Timed out"):  # as long as ever outside of a save
            torch.distributed.barrier()
        store.set("has waited", "")
    else:
        store.wait(["has waited"], AT_MOST)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
