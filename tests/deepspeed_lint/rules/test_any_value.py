"""No value in any place makes a rule raise, or take long."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_lint import rules
from deepspeed_lint.facts import Facts
from deepspeed_lint.rules import apply_rules
from deepspeed_lint.topology import Topology, gpu_kinds
from tests.deepspeed_lint.rules.cases import BASE, CASES, merged

_WORDS = [
    "auto",
    "none",
    "cpu",
    "nvme",
    "AdamW",
    "muon",
    "sum",
    "bf16",
    "true",
    "1e3",
    "WarmupDecayLR",
    "",
    "\udcff",
    "9" * 30,
]
_SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2, 3, 10**40]),
    st.floats(),
    st.sampled_from(_WORDS),
    st.text(max_size=5),
)
VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def _paths(section: Any, path: str = "") -> set[str]:
    if not isinstance(section, dict):
        return {path}
    return {path} | {
        found
        for name, value in section.items()
        for found in _paths(value, f"{path}.{name}".lstrip("."))
    }


# Every key of a case, and every dotted name in the source of a rule.
SOURCE = "\n".join(
    file.read_text(encoding="utf-8") for file in Path(rules.__file__).parent.glob("*.py")
)
KEYS = sorted(
    {
        path
        for breaks, fine in CASES.values()
        for case in breaks + fine
        for path in _paths(case.config)
    }
    - {""}
    | set(re.findall(r"\"([a-z_0-9]+(?:\.[a-z_0-9]+)+)\"", SOURCE))
)
TOPOLOGIES = st.builds(
    Topology,
    world_size=st.none() | st.integers(1, 10**6),
    device=st.sampled_from(["cuda", "cpu", "unknown"]),
    gpu=st.none() | st.sampled_from(list(gpu_kinds().values())),
)
RELEASES = st.sampled_from(
    ["0.16.9", "0.17.6", "0.18.9", "0.19.2", "0.19.6", "0.19.8", "0.19.8+cu130", "0.20", "", "x.y"]
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4),
    st.sampled_from([case for breaks, fine in CASES.values() for case in breaks + fine]),
    TOPOLOGIES,
    RELEASES,
)
def test_rules_never_raise(
    changes: dict[str, Any], case: Any, topology: Topology, release: str
) -> None:
    config = case.config
    for path, value in changes.items():
        change = value
        for name in reversed(path.split(".")):
            change = {name: change}
        config = merged(config, change)
    for problem in apply_rules(Facts(config, release=release, topology=topology)):
        assert str(problem)
        assert problem.to_dict()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from([key for key in KEYS if "." not in key]), VALUES, max_size=5)
)
def test_rules_never_raise_on_sections_of_any_type(config: dict[str, Any]) -> None:
    apply_rules(Facts(config))


@pytest.mark.parametrize(
    "value", [None, [], {}, "x", -1, 10**40, 1.5, float("nan"), True, {"enabled": [1]}], ids=str
)
def test_one_odd_value_in_every_place(value: Any) -> None:
    for key in KEYS:
        change = value
        for name in reversed(key.split(".")):
            change = {name: change}
        apply_rules(Facts(merged(BASE, change), topology=Topology(world_size=96)))


def test_a_deep_file_ends() -> None:
    deep: Any = "auto"
    for _ in range(5000):
        deep = {"zero_optimization": deep}
    apply_rules(Facts(deep))
