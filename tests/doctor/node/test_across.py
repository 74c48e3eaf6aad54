"""Problems that show only in a comparison of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from framework.doctor.node.start import compare, compare_clocks

FACTS: dict[str, Any] = {
    "versions": {"python": "3.11.7", "torch": "2.15.0", "deepspeed": "0.19.8", "numpy": "2.3.0"},
    "config": "c0",
    "device": "cuda",
    "code": {"framework": "f0", "my_nets": "m0"},
    "slots": 2,
    "gpus": ["GPU-1", "GPU-2"],
    "gpu_names": ["H100"],
    "variables": {},
}


def nodes(**changes: Any) -> dict[str, Any]:
    """Return three equal nodes with GPUs of their own; the last one differs."""
    equal = {name: FACTS | {"gpus": [f"{name}-1", f"{name}-2"]} for name in ("a", "b", "c")}
    return equal | {"c": equal["c"] | changes}


def found(facts: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    return [
        (each.kind, each.file, each.key, each.severity)
        for check in compare(facts)
        for each in check.problems
    ]


def test_equal_nodes() -> None:
    assert found(nodes()) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"versions": FACTS["versions"] | {"torch": "2.14.0"}},
            ("versions-differ", "node c", "torch", "error"),
        ),
        (
            {"versions": FACTS["versions"] | {"numpy": "2.2.0"}},
            ("versions-differ", "node c", "numpy", "warning"),
        ),
        (
            {"versions": FACTS["versions"] | {"python": "3.11.9"}},
            ("versions-differ", "node c", "python", "warning"),
        ),
        (
            {"versions": FACTS["versions"] | {"python": "3.12.7"}},
            ("versions-differ", "node c", "python", "error"),
        ),
        ({"config": "c1"}, ("config-differs", "node c", "run config", "error")),
        (
            {"code": {"framework": "f1", "my_nets": "m0"}},
            ("code-differs", "node c", "framework", "error"),
        ),
        ({"code": {"framework": "f0"}}, ("code-differs", "node c", "my_nets", "error")),
        ({"device": "cpu"}, ("devices-differ", "node c", "device", "error")),
        ({"slots": 4}, ("slots-differ", "node c", "slots", "error")),
        ({"gpu_names": ["A100"]}, ("gpus-differ", "node c", "GPU", "warning")),
        ({"gpus": ["a-1", "c-2"]}, ("gpu-shared", "node c", "GPU", "error")),
        (
            {"variables": {"NCCL_PROTO": "LL"}},
            ("variables-differ", "node c", "NCCL_PROTO", "warning"),
        ),
    ],
)
def test_the_one_that_differs_is_named(
    changes: dict[str, Any], expected: tuple[str, str, str, str]
) -> None:
    assert found(nodes(**changes)) == [expected]


def test_node_0_is_named_where_it_differs_from_all_others() -> None:
    facts = nodes()
    facts["a"] = facts["a"] | {"config": "c1"}
    assert found(facts) == [("config-differs", "node a", "run config", "error")]


def test_between_two_node_0_is_right() -> None:
    first, second = FACTS, FACTS | {"config": "c1", "gpus": []}
    assert found({"a": first, "b": second}) == [("config-differs", "node b", "run config", "error")]


@pytest.mark.parametrize(
    ("offset", "severity"), [(1.0, None), (-2.5, "warning"), (59.0, "warning"), (61.0, "error")]
)
def test_clocks(offset: float, severity: str | None) -> None:
    problems = compare_clocks({"a": 0.0, "b": 0.1, "c": offset}).problems
    assert [(each.file, each.severity) for each in problems] == (
        [("node c", severity)] if severity else []
    )


@pytest.mark.parametrize("offset", [-100.0, 100.0])
def test_between_two_clocks_that_of_node_0_is_right(offset: float) -> None:
    assert [each.file for each in compare_clocks({"a": 0.0, "b": offset}).problems] == ["node b"]
