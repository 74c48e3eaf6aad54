"""Types of messages: a value is one that an agent sends, or the message is no agent's."""

from __future__ import annotations

from typing import Any

import pytest

from framework.launch.rendezvous.channel import NoAgent
from framework.launch.rendezvous.messages import (
    Challenge,
    Done,
    Hello,
    Introduction,
    News,
    Reached,
    Report,
    read_message,
    read_problems,
)
from tests.launch.rendezvous.ends import hello, looked


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Challenge, {"type": "hello", "nonce": "n"}),
        (Challenge, {"type": "challenge", "nonce": 1}),
        (Introduction, {"type": "hello", "hello": {}}),
        (Hello, looked(1) | {"look": None}),
        (Hello, looked(1) | {"echo": None}),
        (Hello, hello(1) | {"host": "a\x1b[2J"}),
        (Hello, hello(1) | {"facts": {str(number): "" for number in range(101)}}),
        (Reached, {"token": "t", "failed": [[-1, "", "no answer"]]}),
        (Reached, {"token": "t", "failed": [[0, "a-name", "no answer"]]}),
        (Reached, {"token": "t", "failed": [[0, "", "no answer", "more"]]}),
        (Done, {"type": "done", "code": 256}),
        (Done, {"type": "done", "code": True}),
        (Report, {"type": "stop", "why": ["SIGTERM"]}),
        (News, {"type": "news", "epoch": 1, "kill": "yes"}),
    ],
)
def test_a_message_that_no_agent_sends_is_refused(model: Any, message: dict[str, Any]) -> None:
    with pytest.raises(NoAgent, match="does not speak"):
        read_message(model, message)


def test_keys_that_a_message_does_not_name_are_ignored() -> None:
    assert read_message(Done, {"type": "done", "code": 75, "later": 1}).code == 75
    assert read_message(Hello, looked(1) | {"state": {}, "later": 1}).node_rank == 1


def test_half_a_surrogate_is_a_text() -> None:
    """Python's JSON writes it for a byte that is no UTF-8, such as one of a variable's value."""
    look = looked(1)["look"] | {"variables": {"NCCL_NAME": "\udcff"}}
    assert read_message(Hello, looked(1) | {"look": look}).look is not None


@pytest.mark.parametrize("problems", [None, {}, "text", [], [1, None, "text"]])
def test_a_refusal_without_problems_has_none(problems: object) -> None:
    assert read_problems({"type": "nogo", "problems": problems}) == []


def test_problems_of_a_refusal_are_shortened_texts() -> None:
    problems = [{"kind": 3, "reason": "x" * 999, "value": [1], "more": 1}, {"value": "4"}]
    short, valued = read_problems({"type": "nogo", "problems": problems})
    assert short == {"kind": "3", "reason": "x" * 300}
    assert valued == {"value": "4"}
