"""Environment variables that a manifest should not set."""

from __future__ import annotations

import re
from typing import Final

# What says who a process is. Only the launcher knows it.
OF_THE_LAUNCHER: Final = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "NODE_RANK",
        "NNODES",
        "NPROC_PER_NODE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "JOB_COMPLETION_INDEX",
    )
)
_SECRET: Final = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE|SECRET|AUTH)_?KEY)(_|$)"
)


def looks_like_a_secret(name: str) -> bool:
    """Whether the value of a variable of this name should not be read by everybody who may read the job."""
    return _SECRET.search(name.upper()) is not None
