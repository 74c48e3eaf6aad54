"""Starts this host's ranks of the measuring job, and ends them with whoever asked for them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from framework.launch.deepspeed_command import added_environment
from framework.plan.cluster import Cluster

_MODULE: Final = "framework.engine.link_bench"
# As the module prints it; it stands beyond the torch line, and this half does not import it.
RESULT: Final = "@link_bench "


def run_ranks(order: Mapping[str, Any], cluster: Cluster, *, reported: IO[str]) -> dict[str, Any]:
    """The result where rank 0 is here, and the reason where it did not go well.

    Args:
        order: number of this node, master (address and port), folder of checkpoints or None, and seconds.
        cluster: hosts, ranks on each, and the kind of device here.
        told: where orders come from; when it closes, nobody waits for the result any more.
    """
    address, port = order["master"]
    ranks = range(cluster.devices_per_host)
    common = {
        **os.environ,
        **added_environment(os.environ, device=cluster.device, num_ranks=len(ranks)),
        "WORLD_SIZE": str(cluster.world_size),
        "MASTER_ADDR": str(address),
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-m", _MODULE, *(["--folder", order["folder"]] if order["folder"] else [])]
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        outputs = [Path(folder, str(local)) for local in ranks]
        started = []
        try:
            for local, output in zip(ranks, outputs, strict=True):
                rank = order["node"] * len(ranks) + local
                with output.open("wb") as stream:
                    started.append(
                        subprocess.Popen(
                            command,
                            env=common | {"RANK": str(rank), "LOCAL_RANK": str(local)},
                            stdin=subprocess.DEVNULL,
                            stdout=stream,
                            stderr=stream,
                        )
                    )
            reason = _wait(started, seconds=float(order["seconds"]), reported=reported)
        finally:
            for process in started:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                process.wait()
        texts = [output.read_text(encoding="utf-8", errors="replace") for output in outputs]
    if reason.isdecimal():
        last = texts[int(reason)].strip().rpartition("\n")[2]
        reason = f"rank {reason} of this host ended with {started[int(reason)].returncode}: {last[:300]}"
    lines = [line.removeprefix(RESULT) for text in texts for line in text.splitlines() if line.startswith(RESULT)]
    return {"reason": reason, "result": lines[0] if lines else None}


def _wait(started: list[subprocess.Popen[bytes]], *, seconds: float, reported: IO[str]) -> str:
    """Empty when all ended well; the number of the first that did not; or why nobody waits any longer."""
    deadline = time.monotonic() + seconds
    while None in [process.poll() for process in started]:
        failed = [number for number, process in enumerate(started) if process.returncode]
        if failed:
            return str(failed[0])
        if time.monotonic() > deadline:
            return f"not finished after {seconds:.0f} s"
        if select.select([reported], [], [], 0.1)[0]:  # no order comes in between, so it is the end
            return "nobody waits for the result"
    return next((str(number) for number, process in enumerate(started) if process.returncode), "")
