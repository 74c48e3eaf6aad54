"""Where a section cannot be read, rules speak of the others: all that these decide, and nothing of
what they do not.
"""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_lint.text.document import Document
from framework.cli import main
from framework.config.load import config_from_values, load_known
from framework.errors import Problem
from framework.plan.cluster import Cluster
from framework.plan.known_sections import errors_of_known
from framework.plan.layout import make_layout
from framework.plan.rules import apply_rules
from tests.plan.rules.cases import CASES

UNREADABLE = {"there_is_no_such_key": 1}
Told = set[tuple[str, str]]


def told_of(values: dict[str, Any], cluster: Cluster | None) -> Told:
    config, unknown, source = load_known(Document("run.json", values), ())
    return {
        (found.kind, found.key)
        for found in errors_of_known(config, unknown, cluster, source=source)
    }


def told_of_all(values: dict[str, Any], cluster: Cluster) -> Told:
    config = config_from_values(values)
    layout = make_layout(config.batch, world_size=cluster.world_size, **config.parallel.sizes())
    found = [*apply_rules(config, cluster), *([layout] if isinstance(layout, Problem) else [])]
    return {(problem.kind, problem.key) for problem in found if problem.severity == "error"}


EVERY_CASE = [
    (values, Cluster(devices_per_host=2, device=device))
    for cases in CASES.values()
    for values, device, _ in cases
]


@pytest.mark.slow
def test_a_section_that_no_rule_reads_hides_nothing() -> None:
    reported = 0
    for values, cluster in EVERY_CASE:
        if "monitors" in values:  # one rule does read it: no password belongs there
            continue
        found = told_of(values | {"monitors": UNREADABLE}, cluster)
        assert found == told_of_all(values, cluster), values
        reported += len(found)
    assert reported > 40


@pytest.mark.slow
def test_a_section_that_cannot_be_read_causes_no_other_problem() -> None:
    """Whatever may have been meant in it: what is told without it is told with it."""
    for values, cluster in EVERY_CASE:
        with_all = told_of_all(values, cluster)
        for name, section in values.items():
            # Under deepspeed any key may stand, and callbacks are a list.
            broken = (
                section | UNREADABLE if isinstance(section, dict) and name != "deepspeed" else 1
            )
            assert told_of(values | {name: broken}, cluster) <= with_all, (name, values)


@pytest.mark.parametrize(
    "values",
    [
        {"modell": {"kind": "gpt"}, "data": {"kind": "text"}},  # the model is not the default one
        {"run": {"momentum": 0.9}, "optimizer": {"kind": "sgd", "nesterov": True}},
        # on how many devices is not known
        {"run": {"world_size": 3}, "batch": {"global": 6, "micro_size": 2}},
        # indented too deep
        {"model": {"kind": "gpt"}, "training": {"max_steps": 5, "data": {"kind": "text"}}},
        {
            "zero": {"offload_param": {"device": "cpu"}},
            "training": {"zero_optimization": {"stage": 3}},
        },
        {"zerro": {"stage": 1}, "parallel": {"pipe": 2}, "precision": {"dtype": "bf16"}},
    ],
    ids=str,
)
def test_what_may_have_been_meant_otherwise_is_not_judged(values: dict[str, Any]) -> None:
    assert told_of(values, None) == set()


def test_check_reports_both_with_their_places(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "monitors: {csv: maybe}\noptimizer: {kind: sgd, nesterov: true}\nzero: {sub_group_size: 5}\n"
    )
    assert main(["check", str(path), "batch.global_size=7", "--num_gpus", "2"]) == 2
    assert [
        line.partition(" = ")[0] + line[line.rindex(" ") :]
        for line in capsys.readouterr().err.splitlines()
    ] == [
        f"{path}:1:12: monitors.csv [wrong-type]",
        f"{path}:2:24: optimizer.nesterov [nesterov-needs-momentum]",
        "command line: batch.global_size [batch-not-divisible]",
    ]
