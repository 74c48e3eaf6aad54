"""A rank for the tests of agents: rank.py --local_rank=N FOLDER [RANK:]ACTION ...; without an
action of its own it waits.

wait | ignore (requests to stop) | deaf (as before it listens) | exit=CODE | explain (itself, and
end with 70) | kill (itself) | look=PATH. It writes its process id and environment to
FOLDER/<RANK>.json once it is ready, and the name of each signal to FOLDER/<RANK>.signals.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from framework.system.parent_watch import report_end, watch_parent


def main() -> None:
    rank, folder = os.environ["RANK"], Path(sys.argv[2])
    actions = [word.rpartition(":") for word in sys.argv[3:]]
    action = next((action for who, _, action in actions if who in ("", rank)), "wait")

    def stop(number: int, _frame: object) -> None:
        with (folder / f"{rank}.signals").open("a") as log:
            log.write(f"{signal.Signals(number).name}\n")
        if action != "ignore":
            time.sleep(0.3)  # saves a checkpoint
            sys.exit(75)

    if action.startswith("look="):  # it may look before it is asked to stop, or after that
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif action != "deaf":
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
    watch_parent(os.environ, is_stopping=lambda: False, is_over=lambda: False)
    worker = os.fork()
    if worker == 0:  # a data loader's worker: it outlives a rank that is killed
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        time.sleep(60)
        os._exit(0)
    seen = {"pid": os.getpid(), "worker": worker, "argv": sys.argv, "environment": dict(os.environ)}
    seen["processors"] = sorted(os.sched_getaffinity(0))
    seen["processors of worker"] = sorted(os.sched_getaffinity(worker))
    temporary = folder / f"{rank}.tmp"
    temporary.write_text(json.dumps(seen))
    temporary.rename(folder / f"{rank}.json")
    # None ends before all have started, so that a test can read what each was given.
    while action != "wait" and len(list(folder.glob("*.json"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    if action.startswith("exit="):
        sys.exit(int(action.partition("=")[2]))
    if action.startswith("look="):
        Path(action.partition("=")[2]).exists()
    if action == "explain":
        report_end("net.py:7: a line\n of two [training-failed]")
        sys.exit(70)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


if __name__ == "__main__":
    main()
