"""Hosts and links that are slower than the others are named."""

from __future__ import annotations

import pytest

from framework.doctor.node.bandwidth import judge


def row(a: str, b: str, speed: float) -> dict[str, object]:
    return {"a": a, "b": b, "bytes_per_second": speed}


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([row("a", "b", 10e9), row("a", "c", 9e9), row("b", "c", 11e9)], []),
        ([row("a", "b", 10e9), row("a", "c", 2e9), row("b", "c", 2e9)], [("slow-node", "node c")]),
        ([row("a", "b", 2e9), row("a", "c", 10e9), row("b", "c", 10e9)], [("slow-link", "node a")]),
        ([row("a", "b", 1e9)], []),
    ],
)
def test_who_is_slow(pairs: list[dict[str, object]], expected: list[tuple[str, str]]) -> None:
    (check,) = judge({"all_reduce": [], "pairs": pairs, "storage": []})
    assert [(each.kind, each.file) for each in check.problems] == expected
