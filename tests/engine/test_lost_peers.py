"""Whose failure it is that a collective fails: another rank's, NCCL's on this one, or nobody's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from framework.engine.process_group_errors import explain_not_met, is_lost_peer, lost_peer
from framework.errors import PeerLostError, TrainingError, explaining
from tests.launched import ROOT
from tests.warm_ranks import WarmRanks

DUPLICATE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
    "details), NCCL "
    "version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000\n"
    "Exception raised from create at NCCLUtils.cpp:94 (most recent call first):\nframe #0: c10::Error::Error"
)
REMOTE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/NCCLUtils.cpp:94, remote process exited or there was a network "
    "error, NCCL "
    "version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\n"
    "Last error:\nsocketProgress: Connection closed by remote peer host<40123>"
)
STORE = (
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: Connection reset by peer"
)
WAITED = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) "
    "ran for 600012 milliseconds before timing out."
)
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:29822"
OF_WORKER = (
    "Caught ClientError in DataLoader worker process 3.\nOriginal Traceback (most recent call last):\n"
    '  File "/venv/botocore/httpsession.py", line 508, in send\nConnectionResetError: [Errno 104] Connection reset by '
    "peer"
)


@pytest.mark.parametrize(
    "error",
    [
        DistBackendError(REMOTE),
        DistBackendError(STORE),
        DistBackendError(WAITED),
        RuntimeError(GLOO),
        DistNetworkError("Broken pipe"),
        DistStoreError(""),
    ],
    ids=["nccl", "nccl-store", "nccl-waited", "gloo", "network", "store"],
)
def test_another_rank_is_gone(error: RuntimeError) -> None:
    assert is_lost_peer(error)
    with (
        pytest.raises(PeerLostError, match=r"another rank has ended .*\[peer-lost\]$") as reported,
        explaining(lost_peer),
    ):
        raise error
    assert reported.value.is_of_one_rank
    assert reported.value.exit_code == 76


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(OF_WORKER),
        RuntimeError(
            "Caught E in DataLoader worker process 0.\nOriginal Traceback: gloo/transport/tcp/pair.cc:1"
        ),
        RuntimeError("upload failed: Broken pipe"),
        ValueError(GLOO),
    ],
    ids=["worker", "worker-about-gloo", "upload", "no-collective"],
)
def test_connections_of_others_are_no_ranks(error: Exception) -> None:
    """What a data set reads over a network ends with such words as well; its traceback is the only
    trace of it.
    """
    assert not is_lost_peer(error)
    with pytest.raises(type(error)) as same, explaining(lost_peer):
        raise error
    assert same.value is error


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    "telling",
    [partial(explaining, lost_peer), partial(explaining, explain_not_met)],
    ids=["later", "at-first"],
)
def test_what_nccl_refuses_here_is_reported_in_its_last_words(
    monkeypatch: pytest.MonkeyPatch, rank: str, telling: object
) -> None:
    """It would be the same at the next start: no 76, after which schedulers try again."""
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(TrainingError) as reported, telling():  # type: ignore[operator]
        raise DistBackendError(DUPLICATE)
    assert str(reported.value) == (
        f"rank {rank}: NCCL fails: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000; "
        "NCCL_DEBUG=WARN tells more [nccl-failed]"
    )
    assert reported.value.exit_code == 70
    assert reported.value.is_of_one_rank
    assert isinstance(reported.value.__cause__, DistBackendError)


@pytest.mark.slow
def test_stacks_of_torch_s_warnings_do_not_reach_the_terminal(
    tmp_path: Path, warm: WarmRanks
) -> None:
    """Each of them is 30 lines of C++; what other code writes there stays."""
    script = ROOT / "tests/jobs/store_gone.py"
    job = warm.start([], num_ranks=2, folder=tmp_path / "said", script=script)
    codes = job.wait(120, alone_seconds=60)
    stated = job.stated()
    assert sorted(codes) == [70, 76], stated
    assert stated.count("asked: ") == 3
    assert "a line of a library in C" in stated
    assert "frame #" not in stated
    assert "TCPStore" not in stated


def test_nccl_without_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(TrainingError, match=r"NCCL fails: no backend for it; NCCL_DEBUG"),
        explaining(lost_peer),
    ):
        raise DistBackendError("no backend\nfor it")


def test_a_rank_that_nccl_lost_while_they_met_is_no_missing_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "there",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    line = r"met at there:29500 cannot connect .*\[rendezvous-failed\]$"
    with pytest.raises(PeerLostError, match=line), explaining(explain_not_met):
        raise DistBackendError(REMOTE)
