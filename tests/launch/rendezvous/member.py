"""A real node agent for the tests, with any script for its ranks: member.py JSON, see `main`."""

from __future__ import annotations

import json
import os
import sys

from framework.errors import FrameworkError
from framework.hosts.devices import LocalDevices
from framework.hosts.topology import HostTopology
from framework.launch.node import run_node
from framework.launch.rendezvous import coordinator, member
from framework.launch.stop_requests import StopRequests


def main() -> int:
    """``{"topology": {...}, "terms": {...}, "facts": {...}, "script": PATH, "arguments":
    [...]}``
    """
    given = json.loads(sys.argv[1])
    terms = given["terms"]
    requests = StopRequests()
    if "silence_seconds" in terms:
        seconds = terms.pop("silence_seconds")
        coordinator.SILENCE_SECONDS = member.SILENCE_SECONDS = seconds
        member.RUNNING_BEAT_SECONDS = seconds / 3
    if "life_line" in terms:
        requests.hold(terms.pop("life_line"))
    if "job_id" in terms:
        os.environ["DSF_JOB_ID"] = terms.pop("job_id")
    try:
        with requests.handling_signals():
            return run_node(
                HostTopology(**given["topology"]),
                [given["script"], *given["arguments"]],
                devices=LocalDevices("cpu", 0),
                environment=os.environ,
                facts=given["facts"],
                requests=requests,
                **terms,
            ).code
    except FrameworkError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
