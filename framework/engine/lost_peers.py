"""Collectives that fail: because another rank is gone, or because NCCL refuses what is asked of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch.distributed

from framework.errors import PeerLostError, TrainingError, printable

# gloo's errors are plain RuntimeErrors, each with a place in its sources: others lose connections as well, data sets
# above all.
_GLOO: Final = re.compile(r"gloo/transport/\S+")
_WHAT_HAPPENED: Final = re.compile(r"Connection (closed|reset) by (remote )?peer|Broken pipe|Timed out waiting")
# What NCCL says where the failure is another rank's; whatever else it says is of this machine, and would be so again.
_REMOTE: Final = re.compile(
    r"remote process exited|ncclRemoteError|communicator was aborted|key-value store|store->get|Watchdog "
    r"caught|timed? ?out|"
    r"Connection (reset|closed) by",
    re.IGNORECASE,
)
_LAST_WORDS: Final = "Last error:"
_CPP_TRACE: Final = "Exception raised from"
_LONGEST: Final = 300


def is_lost_peer(error: BaseException) -> bool:
    """Check whether this is a collective that another rank did not live to take part in."""
    stated = str(error)
    if isinstance(error, torch.distributed.DistBackendError):
        return _REMOTE.search(stated) is not None
    # A worker's error is told by the rank as a RuntimeError with the worker's whole traceback, whatever is in it.
    is_glooey = (
        isinstance(error, RuntimeError) and _GLOO.search(stated) is not None and not stated.startswith("Caught ")
    )
    return is_glooey or isinstance(error, torch.distributed.DistError)


def failure_of_nccl(error: BaseException) -> TrainingError | None:
    """Return the error report for a collective that NCCL itself refuses on this rank; None for other errors."""
    if not isinstance(error, torch.distributed.DistBackendError) or is_lost_peer(error):
        return None
    reported = TrainingError(
        f"{_this_rank()}: NCCL fails: {_reason(str(error))}; NCCL_DEBUG=WARN tells more [nccl-failed]"
    )
    reported.is_of_one_rank = True
    return reported


@contextmanager
def explaining_lost_peers() -> Iterator[None]:
    """A rank that waits in vain for one that has failed says so in one line: the reason is what that other rank
    said.
    """
    try:
        yield
    except RuntimeError as error:
        if (of_nccl := failure_of_nccl(error)) is not None:
            raise of_nccl from error
        if not is_lost_peer(error):
            raise
        happened = _WHAT_HAPPENED.search(str(error))
        reported = PeerLostError(
            f"{_this_rank()}: another rank has ended or cannot be reached any more "
            f"({happened[0] if happened else type(error).__name__}); what that one said last tells why [peer-lost]"
        )
        reported.is_of_one_rank = True
        raise reported from error


def _reason(stated: str) -> str:
    """NCCL's last words, which come last; before them are a place in its sources, its release, and advice to read
    them.
    """
    stated = stated.split(_CPP_TRACE, 1)[0]
    words = " ".join(stated.rpartition(_LAST_WORDS)[2].split()) or " ".join(stated.split())
    return printable(words[:_LONGEST])


def _this_rank() -> str:
    return f"rank {os.environ.get('RANK', '0')}"
