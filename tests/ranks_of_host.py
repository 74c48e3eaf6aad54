"""Ranks of one host that do something before any process group exists: forked, with a launcher's
variables.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PATIENCE_SECONDS = 60


def on_ranks(
    work: Callable[[], object], *, num_ranks: int, of: int | None = None, port: int = 29500
) -> list[Any]:
    """What `work` returned or raised on each rank, None for one that died; all live until the last
    one has ended.

    `of`: ranks that their launcher started on this host.
    """
    ranks = multiprocessing.get_context("fork")
    all_have_it, pipes, processes = (
        ranks.Event(),
        [ranks.Pipe(duplex=False) for _ in range(num_ranks)],
        [],
    )
    for number, (_, sender) in enumerate(pipes):
        local = {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(of or num_ranks),
        }
        start = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(of or num_ranks),
        }
        processes.append(
            ranks.Process(target=_rank, args=(work, local | start, sender, all_have_it))
        )
        processes[-1].start()
        sender.close()
    try:
        found = [_received(reader) for reader, _ in pipes]
    finally:
        all_have_it.set()
        for process in processes:
            process.join(_PATIENCE_SECONDS)
            process.kill()
    return found


def _rank(
    work: Callable[[], object], environment: dict[str, str], sender: Connection, all_have_it: Any
) -> None:
    os.environ.update(environment)
    try:
        found = work()
    except Exception as error:
        found = error
    sender.send_bytes(pickle.dumps(found))
    sender.close()
    all_have_it.wait(_PATIENCE_SECONDS)
    os._exit(0)


def _received(reader: Connection) -> Any:
    assert reader.poll(_PATIENCE_SECONDS), "a rank waits"
    try:
        return pickle.loads(reader.recv_bytes())
    except EOFError:
        return None
