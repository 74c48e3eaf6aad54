"""Errors of ranks that do not meet, or lose each other: a collective that fails is explained in one
line.
"""

from __future__ import annotations

import os
import re
import socket
from typing import Final

import torch.distributed

from framework.errors import (
    FrameworkError,
    PeerLostError,
    TrainingError,
    printable,
)

# gloo's errors are plain RuntimeErrors, each with a place in gloo's sources. Without it, other code
# has lost a connection, data sets above all.
_GLOO: Final = re.compile(r"gloo/transport/\S+")
_WHAT_HAPPENED: Final = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Broken pipe|Timed out waiting"
)
# NCCL's messages for a failure of another rank. Its other messages are about this machine, where
# the failure would come again.
_REMOTE: Final = re.compile(
    r"remote process exited|ncclRemoteError|communicator was aborted|key-value store|store->get"
    r"|Watchdog caught|timed? ?out|Connection (reset|closed) by",
    re.IGNORECASE,
)
_LONGEST: Final = 300  # characters of a reason from NCCL
_IN_USE: Final = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_JOINED: Final = re.compile(r"(\d+)/(\d+) clients joined")
_WAITED: Final = re.compile(r"after (\d+) ?(ms|milliseconds|s|seconds)")


def is_lost_peer(error: BaseException) -> bool:
    """Check whether an error is of a collective that failed as another rank has ended, or cannot be
    reached.
    """
    message = str(error)
    if isinstance(error, torch.distributed.DistBackendError):
        return _REMOTE.search(message) is not None
    if isinstance(error, torch.distributed.DistError):
        return True
    if not isinstance(error, RuntimeError) or message.startswith("Caught "):
        # The error of a data worker is raised again as a RuntimeError, with the whole traceback of
        # the worker, which may have any text in it.
        return False
    return bool(_GLOO.search(message))


def failure_of_nccl(error: BaseException) -> TrainingError | None:
    """Return the error of a collective that NCCL refuses on this rank; None for other errors."""
    if not isinstance(error, torch.distributed.DistBackendError) or is_lost_peer(error):
        return None
    # Before NCCL's last error the message has a place in the sources, the release and advice.
    message = str(error).split("Exception raised from", 1)[0]
    last_error = " ".join(message.rpartition("Last error:")[2].split())
    reason = last_error or " ".join(message.split())
    return TrainingError(
        f"{_this_rank()}: NCCL fails: {printable(reason[:_LONGEST])}; NCCL_DEBUG=WARN tells more "
        "[nccl-failed]",
        is_of_one_rank=True,
    )


def lost_peer(error: BaseException) -> FrameworkError | None:
    """Return the error to raise for a collective that failed: of a lost rank, the log of which has
    the reason, or of NCCL on this rank; None for other errors.
    """
    if not is_lost_peer(error):
        return failure_of_nccl(error)
    event = type(error).__name__
    known_event = _WHAT_HAPPENED.search(str(error))
    if known_event:
        event = known_event[0]
    return PeerLostError(
        f"{_this_rank()}: another rank has ended or cannot be reached any more ({event}); the "
        "last line of that rank names the cause [peer-lost]",
        is_of_one_rank=True,
    )


def explain_not_met(error: BaseException) -> FrameworkError | None:
    """Return the error of joining the process group, with the address or NCCL's reason; None for
    other errors.
    """
    nccl_failure = failure_of_nccl(error)
    if nccl_failure is not None or not isinstance(error, RuntimeError):
        return nccl_failure
    reason = _reason_not_met(error)
    if reason:
        return PeerLostError(reason, is_of_one_rank=True)
    return None


def _reason_not_met(error: RuntimeError) -> str:
    """Return why ranks did not meet, by the message of torch; empty for other messages."""
    message = str(error)
    is_of_backend = isinstance(error, torch.distributed.DistBackendError)
    is_network = isinstance(error, torch.distributed.DistError) and not is_of_backend
    rank = os.environ.get("RANK", "0")
    world_size = os.environ.get("WORLD_SIZE", "1")
    host = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    place = f"rank {rank} of {world_size}"
    within = _time_waited(message)
    if _IN_USE.search(message):
        return (
            f"{place}: port {port} on {socket.gethostname()} is in use, by another job, one that "
            "is still ending or a second rank 0; choose another with --master_port "
            "[rendezvous-port-in-use]"
        )
    joined = _JOINED.search(message)
    if joined:
        return (
            f"{place}: only {joined[1]} of {joined[2]} ranks came to {host}:{port}{within}; look "
            "at the messages of the others, and whether every node was started with its own "
            "--node_rank [rendezvous-incomplete]"
        )
    if is_network and rank != "0":
        return (
            f"{place}: no rank 0 answers at {host}:{port}{within}; check that MASTER_ADDR is its "
            "host, that it was started and that no firewall is between [rendezvous-unreachable]"
        )
    if is_network or "gloo" in message.lower() or "nccl" in message.lower():
        reason = " ".join(message.split("Exception raised from", 1)[0].split())[:160]
        return (
            f"{place}: the ranks that met at {host}:{port} cannot connect to each other "
            f"({reason}); check the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) "
            "[rendezvous-failed]"
        )
    return ""


def _time_waited(message: str) -> str:
    """Return `` within N s`` from torch's message of a timeout; empty for other messages."""
    waited = _WAITED.search(message)
    if not waited:
        return ""
    seconds = float(waited[1])
    if waited[2].startswith("m"):  # milliseconds
        seconds /= 1000
    return f" within {seconds:.0f} s"


def _this_rank() -> str:
    return f"rank {os.environ.get('RANK', '0')}"
