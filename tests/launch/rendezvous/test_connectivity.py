"""Whether nodes reach each other: which node calls which, what is tried again, and how failures are
reported.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from framework.doctor.node.links import CallResult, Echo
from framework.launch.rendezvous.channel import NoAgent
from framework.launch.rendezvous.connectivity import (
    Endpoint,
    Round,
    call_others,
    in_background,
    targets_of,
)
from framework.launch.rendezvous.messages import Reach, read_message
from tests.ports import free_ports
from tests.until import until

ROUND = "a" * 32
UNKNOWN = "no-such-host.invalid"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try no failed call again."""
    monkeypatch.setattr("framework.launch.rendezvous.connectivity._AGAIN_FOR_SECONDS", 0.0)


def round_of(count: int, *, master: tuple[str, int] = (UNKNOWN, 1)) -> Round:
    places = {
        node: Endpoint(f"{node} (h{node})", f"10.0.{node // 250}.{node % 250}", 5000 + node)
        for node in range(count)
    }
    return Round(places, master=master)


@pytest.fixture
def reaches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call succeed; the nodes of these tests exist as entries only."""
    monkeypatch.setattr(
        "framework.launch.rendezvous.connectivity.call_all",
        lambda targets, **terms: [CallResult(host) for host, _ in targets],
    )


@pytest.mark.usefixtures("reaches_all")
@pytest.mark.parametrize("count", [2, 64, 65, 1000])
def test_all_call_each_other_or_their_neighbours(count: int) -> None:
    job = round_of(count, master=("node-0", 29500))
    for node in (0, 1, count - 1):
        targets = job.order(node)["targets"]
        ports = [port - 5000 for _, port in targets]
        expected = (
            [other for other in range(count) if other != node]
            if count <= 64
            else [(node + n) % count for n in range(1, 9)]
        )
        assert sorted(ports) == sorted(expected)


@pytest.mark.slow
def test_calls_that_are_answered_later_are_no_failures() -> None:
    port = free_ports(1)
    calls = in_background(call_others, [("127.0.0.1", port)], "t")
    echo: list[Echo] = []
    start = threading.Timer(0.5, lambda: echo.append(Echo(port, address="127.0.0.1")))
    start.start()
    assert calls.result(60) == {}
    start.join()  # a call may be answered before the list has it
    echo[0].close()


@pytest.mark.usefixtures("at_once")
def test_failures_are_reported() -> None:
    ((number, reached),) = call_others([(UNKNOWN, 1)], "t").items()
    assert (number, reached.address) == (0, "")
    assert "name is not known" in reached.reason


@pytest.mark.usefixtures("reaches_all")
def test_a_node_behind_a_firewall_is_one_line() -> None:
    """The firewall may block either direction: calls to the node, or calls of the node."""
    job = round_of(9)
    token = job.order(1)["token"]
    for node in range(1, 9):
        place = [port - 5000 for _, port in job.order(node)["targets"]]
        job.hear(
            node,
            {
                "token": token,
                "failed": [[place.index(5), "10.0.0.5", "no answer"]] if node != 5 else [],
            },
        )
    until(lambda: job.is_over)
    (problem,) = job.problems()
    assert (problem.kind, problem.key) == ("port-not-reached", "node 5 (h5)")
    assert problem.file == "nodes 1 (h1), 2 (h2), 3 (h3) and 4 more"
    assert problem.reason == "not reached from there at 10.0.0.5: no answer"

    job = round_of(9)
    token = job.order(1)["token"]
    for node in range(1, 9):
        job.hear(
            node,
            {
                "token": token,
                "failed": [[number, "", "no answer"] for number in range(8)] if node == 5 else [],
            },
        )
    until(lambda: job.is_over)
    (problem,) = job.problems()
    assert problem.file == "node 5 (h5)"
    assert problem.key == "node 6 (h6), node 7 (h7), node 8 (h8) and 5 more"


@pytest.mark.usefixtures("reaches_all")
def test_a_name_that_leads_back() -> None:
    job = round_of(2, master=("node-0", 29500))
    job.hear(
        1, {"token": job.order(1)["token"], "failed": [[1, "127.0.1.1", "connection refused"]]}
    )
    until(lambda: job.is_over)
    (problem,) = job.problems()
    assert (problem.kind, problem.file, problem.key) == (
        "name-loopback",
        "node 1 (h1)",
        "node-0:29500",
    )


@pytest.mark.usefixtures("reaches_all")
@pytest.mark.parametrize(
    "answer",
    [
        {"token": "other", "failed": []},
        {"failed": None},
        {"failed": [[2, "", "x"]]},
        {"failed": [[-1, "", "x"]]},
        {"failed": [[0, "not an address", "x"]]},
        {"failed": [[0, "", 1]]},
        {"failed": [[True, "", "x"]]},
        {"failed": [0]},
    ],
)
def test_an_answer_of_another_shape_is_none(
    answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("framework.launch.rendezvous.connectivity._ROUND_SECONDS", 0.05)
    job = round_of(2)
    job.hear(1, {"token": job.order(1)["token"]} | answer)
    until(job._own_calls.done)  # node 0 itself may take longer than 50 ms
    until(lambda: job.is_over)
    (problem,) = job.problems()
    assert problem.file == "node 1 (h1)"
    assert "has not ended" in problem.reason


@pytest.mark.parametrize(
    "place",
    [
        *(
            None,
            [],
            ["10.0.0.2"],
            ["10.0.0.2", 0],
            ["10.0.0.2", 65536],
            ["10.0.0.2", True],
            ["", 5000],
            [1, 5000],
        ),
        *(["node-1", 5000], ["10.0.0.2", 22], ["0.0.0.0", 5000], ["::", 5000], ["224.0.0.1", 5000]),
        *(["10.0.0.2\r\n", 5000], ["10.0.0.2", 5000, "more"]),
    ],
    ids=str,
)
def test_what_is_no_place(place: object) -> None:
    with pytest.raises(NoAgent):
        read_message(Reach, {"targets": [place], "token": ROUND})


def test_no_more_places_are_called_than_there_are_nodes() -> None:
    place = ["10.0.0.2", 5000]
    two = read_message(Reach, {"targets": [place, ["fd00::2", 5001]], "token": ROUND})
    assert targets_of(two, most=3) == [
        ("10.0.0.2", 5000),
        ("fd00::2", 5001),
    ]
    for count, most in ((100, 1000), (3, 3)):
        many = read_message(Reach, {"targets": [place] * count, "token": ROUND})
        with pytest.raises(NoAgent):
            targets_of(many, most=most)
