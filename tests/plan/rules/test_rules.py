"""Every rule says what it has to say of the configs in `cases.py`, and nothing else."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_lint.text.document import parse_scalar
from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.plan import rules
from framework.plan.cluster import Cluster, Device
from tests.plan.rules.cases import CASES, ON_TWO_HOSTS

ALL = rules.all_rules()
RULES = {rule.__name__: rule for rule in ALL}
ROWS = json.loads(Path(rules.__file__).with_name("rules.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("hosts", "rule", "values", "device", "kind"),
    [
        (hosts, rule, *case)
        for hosts, table in ((1, CASES), (2, ON_TWO_HOSTS))
        for rule, cases in table.items()
        for case in cases
    ],
    ids=str,
)
def test_a_rule_sees_its_own_problem_and_nothing_else(
    hosts: int, rule: str, values: dict[str, Any], device: Device, kind: str | None
) -> None:
    config = config_from_values(values)
    cluster = Cluster(num_hosts=hosts, devices_per_host=2, device=device)
    found = list(RULES[rule](config, cluster))
    assert [problem.kind for problem in found] == ([kind] if kind else [])
    assert [problem.kind for problem in rules.apply_rules(config, cluster)] == (
        [kind] if kind else []
    )


def written_rules() -> Iterator[rules.Rule]:
    """Find every function of the package's modules that takes a config and a cluster."""
    for module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
        for _, function in inspect.getmembers(
            importlib.import_module(module.name), inspect.isfunction
        ):
            if list(inspect.signature(function).parameters) == ["config", "cluster"]:
                yield function


def test_every_rule_is_listed_has_a_docstring_and_a_case() -> None:
    of_rows = {rule for rule in ALL if rule.__name__.replace("_", "-") in ROWS}
    assert len(of_rows) == len(ROWS)
    assert set(written_rules()) | of_rows == set(ALL)
    assert len(ALL) == len(set(ALL))
    assert [rule.__name__ for rule in ALL if not rule.__doc__] == []
    assert {rule.__name__ for rule in ALL} == set(CASES)
    for rule, cases in CASES.items():
        assert {kind is None for _, _, kind in cases} == {True, False}, (
            f"{rule} needs a case on each side"
        )


def test_every_problem_states_what_to_do() -> None:
    for cases in CASES.values():
        for values, device, _ in cases:
            for problem in rules.apply_rules(
                config_from_values(values), Cluster(devices_per_host=2, device=device)
            ):
                assert problem.key, problem
                assert problem.reason, problem
                assert problem.fix, problem


@pytest.mark.slow
def test_every_setting_that_a_fix_names_mends_the_run() -> None:
    """`set a.b: value or c.d: value`: each of them alone is taken by the config, silences the rule,
    and brings no other error.
    """
    tried = 0
    wrong = []
    for cases in CASES.values():
        for values, device, kind in cases:
            cluster = Cluster(devices_per_host=2, device=device)
            for problem in rules.apply_rules(config_from_values(values), cluster):
                for key, value in re.findall(r"(?<![\w.])((?:\w+\.)+\w+): ([\w.]+)", problem.fix):
                    mended = config_from_values(
                        _with_setting(values, key, parse_scalar(value, name="fix"))
                    )
                    assert kind not in [left.kind for left in rules.apply_rules(mended, cluster)], (
                        str(problem)
                    )
                    for left in rules.apply_rules(mended, replace(cluster, devices_per_host=8)):
                        if left.severity == "error" and left.kind != kind:
                            wrong.append(f"{problem} -> {key}: {value} -> {left}")
                    tried += 1
    assert not wrong, "\n".join(wrong)
    assert tried > 10


def _with_setting(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return values of a config with a dotted key set; a section that is not among them keeps its
    default kind.
    """
    changed = copy.deepcopy(values)
    first, *inner, last = key.split(".")
    if first not in changed:
        default = getattr(RunConfig(), first).model_dump()
        changed[first] = {tag: default[tag] for tag in ("kind", "dtype") if tag in default}
    section = changed[first]
    for name in inner:
        section = section[name]
    section[last] = value
    return changed


def test_the_default_run_has_no_problem() -> None:
    assert (
        rules.apply_rules(config_from_values({}), Cluster(devices_per_host=8, device="cuda")) == []
    )
