"""A rank that keeps the others waiting is named, with what it takes longer for; by figures, and by
three real ranks.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from framework.engine.stragglers import Stragglers, find
from framework.system.log import listen_to_events
from tests.launched import train_cases


def parts(
    data: Sequence[float],
    forward: Sequence[float],
    backward: Sequence[float],
    sums: Sequence[float],
) -> dict[str, Sequence[float]]:
    return {
        "data": data,
        "copy": [-1.0] * len(data),
        "forward": forward,
        "backward": backward,
        "communication": sums,
    }


# Rank 3 is as the issue has it: 1.8 times as slow in both passes; the others wait for its sums
# after their own pass.
SLOW_DEVICE = parts([12, 12, 12, 12], [39, 40, 39, 70], [79, 78, 79, 140], [92, 92, 93, 0])
# The same, where sums are made during the pass: the others' is as long as they wait in it.
HIDDEN = parts([12, 12, 12, 12], [39, 40, 39, 70], [171, 170, 171, 140], [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("table", "sees_forward", "expected"),
    [
        (
            SLOW_DEVICE,
            True,
            "rank 3 (host d) computes 1.8 x slower than the others: data 12 ms, forward+backward 210 ms",
        ),
        (
            HIDDEN,
            True,
            "rank 3 (host d) computes 1.8 x slower than the others: data 12 ms, forward 70 ms against 39 ms",
        ),
        (SLOW_DEVICE, False, ""),
        (
            parts([2, 52], [20, 20], [90, 40], [0, 0]),
            False,
            "rank 1 (host b) keeps the others waiting, as it waits for its data: data 52 ms against 2 ms, "
            "in a step of 112 ms, 1.8 x as long by it",
        ),
        (
            parts([2, 2], [20, 20], [90, 40], [0, 50]),
            True,
            "rank 0 (host a) computes 2.2 x slower than the others: data 2 ms, backward 90 ms against 40 ms",
        ),
        (parts([2, 5], [20, 21], [40, 44], [10, 2]), True, ""),
        (parts([0, 0], [0, 0], [0, 0], [0, 0]), True, ""),
    ],
)
def test_figures(table: dict[str, Sequence[float]], sees_forward: bool, expected: str) -> None:
    found = find(table, sees_forward=sees_forward)
    assert ("" if found is None else found.sentence("abcd"[found.rank])).startswith(expected)
    assert bool(found) is bool(expected)


@pytest.fixture
def heard() -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    listen_to_events(lambda kind, **details: found.append({"kind": kind} | details))
    yield found
    listen_to_events(None)


def test_it_is_reported_once_and_again_where_it_has_changed(
    heard: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    looks, even = Stragglers("abcd", sees_forward=True), parts([1] * 4, [10] * 4, [20] * 4, [1] * 4)
    steps = iter(range(0, 10_000, 10))
    looks.note(next(steps), SLOW_DEVICE)  # which pays for compiling
    for _ in range(2):
        looks.note(next(steps), SLOW_DEVICE)
    looks.note(next(steps), even)
    for _ in range(2):
        looks.note(next(steps), SLOW_DEVICE)
    assert heard == [], "three points in a row, and two seconds"
    for _ in range(5):
        looks.note(next(steps), SLOW_DEVICE)
    slower = SLOW_DEVICE | {"forward": [39, 40, 39, 140], "backward": [79, 78, 79, 280]}
    for _ in range(5):
        looks.note(next(steps), slower)
    assert [(event["kind"], event["rank"], event["host"], event["factor"]) for event in heard] == [
        ("straggler", 3, "d", 1.78),
        ("straggler", 3, "d", 3.56),
    ]
    for table in (*[even] * 10, *[slower] * 3):
        looks.note(next(steps), table)
    assert len(heard) == 3, "it was gone, and is back"
    assert capsys.readouterr().err.count("warning: rank 3 (host d) computes") == 3
    quick = Stragglers("abcd", sees_forward=True)
    for step in range(20):  # 92 ms in each: machines vary
        quick.note(step, SLOW_DEVICE)
    assert len(heard) == 3


@pytest.mark.slow
@pytest.mark.timing
def test_three_ranks_of_which_one_sleeps(tmp_path: Path) -> None:
    common = {
        "data": {"kind": "digits", "image_size": 28},
        "batch": {"micro_size": 2},
        "training": {"max_steps": 40, "log_every": 4},
        "evaluation": {"at_end": False},
        "checkpoint": {"at_end": False},
    }
    cases: dict[str, dict[str, Any]] = {
        "forward": {
            "model": {"target": "tests.jobs.parts:SleepyNet", "args": {"rank": 1, "seconds": 0.12}},
            "zero": {"stage": 2},
        },
        "data": {
            "model": {"kind": "mlp", "hidden_sizes": [8]},
            "data": {
                "target": "tests.jobs.parts:DigitsOfASlowDisk",
                "args": {"rank": 2, "seconds": 0.06},
            },
            "zero": {"stage": 3},
        },
    }
    configs = [
        common | case | {"run": {"name": name, "output_dir": str(tmp_path)}}
        for name, case in cases.items()
    ]
    train_cases(configs, num_ranks=3, folder=tmp_path)
    found = {}
    for name in cases:
        lines = (tmp_path / name / "events.jsonl").read_text(encoding="utf-8").splitlines()
        # A rank may sleep for another reason too, on a machine that is busy.
        *_, found[name] = [e for e in map(json.loads, lines) if e["kind"] == "straggler"]
        assert found[name]["host"] == socket.gethostname()
        assert found[name]["own_ms"] >= 120
        assert found[name]["others_ms"] < found[name]["own_ms"] / 2
    assert (found["forward"]["rank"], found["forward"]["part"]) == (1, "forward")
    assert (found["data"]["rank"], found["data"]["part"]) == (2, "data")
    stated = "".join(path.read_text() for path in tmp_path.glob("said-*/*") if path.is_file())
    assert re.search(
        r"rank 1 \(host \S+\) computes [\d.]+ x slower than the others: data [\d.]+ ms, forward 1",
        stated,
    )
