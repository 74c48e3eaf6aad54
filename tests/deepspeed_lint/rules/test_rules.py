"""Every rule: configs that break only it, near misses, and fixes that work."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deepspeed_lint import rules
from deepspeed_lint.facts import Facts
from deepspeed_lint.key_files import TABLES
from deepspeed_lint.keys import known_releases, load_table
from deepspeed_lint.rules import ALL, apply_rules
from tests.deepspeed_lint.rules.cases import CASES, GONE, Case
from tests.deepspeed_lint.rules.fixes import alternatives, mended
from tests.places import ROOT

STATES = (
    "given",
    "left out",
    "written",
    "not written",
    "true",
    "not true",
    "on",
    "off",
    "not on",
    "not off",
)
BREAKING = [(kind, case) for kind, (breaks, _) in CASES.items() for case in breaks]
FINE = [(kind, case) for kind, (_, fine) in CASES.items() for case in fine]
DEEPSPEED = Path(getattr(find_spec("deepspeed"), "origin", None) or "/nowhere").parent


@pytest.mark.parametrize(
    ("kind", "case"), BREAKING, ids=lambda value: str(getattr(value, "change", value))
)
def test_a_config_breaks_its_rule_and_no_other(kind: str, case: Case) -> None:
    found = apply_rules(case.facts())
    assert {problem.kind for problem in found} == {kind, *case.beside}, [
        str(problem) for problem in found
    ]
    for problem in found:
        assert problem.key, problem
        assert problem.reason, problem
        assert problem.fix, problem
        assert len(str(problem)) < 330, problem


@pytest.mark.parametrize(
    ("kind", "case"), FINE, ids=lambda value: str(getattr(value, "change", value))
)
def test_a_near_miss_does_not_and_is_no_error_of_another_rule(kind: str, case: Case) -> None:
    problems = apply_rules(case.facts())
    assert kind not in {problem.kind for problem in problems}
    assert [str(problem) for problem in problems if problem.severity == "error"] == []


def functions() -> dict[str, Any]:
    """List every function of the package that is a rule."""
    found = {}
    for module in vars(rules).values():
        if inspect.ismodule(module) and module.__name__.startswith(f"{rules.__name__}."):
            for name, function in inspect.getmembers(module, inspect.isfunction):
                is_rule = list(inspect.signature(function).parameters) == [
                    "facts"
                ] and not name.startswith("_")
                if is_rule and function.__module__ == module.__name__:
                    found[f"{module.__name__}.{name}"] = function
    return found


def rows() -> dict[str, Any]:
    """Return every row of the table of rules, by its kind."""
    found: dict[str, Any] = json.loads((TABLES / "rules.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("row", rows().values(), ids=rows())
def test_a_row_speaks_of_facts_and_of_keys_that_some_release_reads(row: Any) -> None:
    shared = {name: row[name] for name in row if name not in ("source", "since", "before", "cases")}
    for case in row.get("cases", [{}]):
        whole = shared | case | {"when": row.get("when", {}) | case.get("when", {})}
        assert (
            {"when", "key", "reason", "fix"}
            <= whole.keys()
            <= {"severity", "when", "unless", "key", "reason", "fix"}
        )
        for name, wanted in (whole["when"] | whole.get("unless", {})).items():
            if isinstance(wanted, str):
                assert wanted in STATES
                assert is_key(name)
            else:
                assert isinstance(wanted, list) or wanted.keys() <= {"above", "below"}, wanted
                assert is_known(name)
        assert is_key(whole["key"])
        named = re.findall(r"\{([\w.]+)\}", whole["reason"] + whole["fix"])
        assert [name for name in named if not is_known(name)] == []


def is_key(name: str) -> bool:
    return any(load_table(release).get(name) is not None for release in known_releases())


def is_known(name: str) -> bool:
    return is_key(name) or isinstance(inspect.getattr_static(Facts, name, None), cached_property)


def test_every_rule_is_listed_and_has_one_kind_of_its_own() -> None:
    listed = {rule for rule in ALL if rule.__name__.replace("_", "-") in rows()}
    assert len(listed) == len(rows())
    assert set(functions().values()) | listed == set(ALL)
    assert len(ALL) == len(set(ALL))
    kinds = [rule.__name__.replace("_", "-") for rule in ALL]
    assert [kind for kind, count in Counter(kinds).items() if count > 1] == []
    assert set(kinds) == set(CASES)
    assert [kind for kind, (breaks, fine) in CASES.items() if not breaks or not fine] == []


@pytest.mark.skipif(not DEEPSPEED.exists(), reason="needs an installed DeepSpeed")
@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.__name__)
def test_every_docstring_cites_a_file_of_deepspeed_and_a_name_or_text_in_it(rule: Any) -> None:
    text = " ".join((rule.__doc__ or "").split())
    files = re.findall(r"(?:\w+/)*\w+\.py", text)
    assert files, "no file"
    assert files[0].startswith("deepspeed/"), "the first file is written from the package on"
    sources = []
    for name in files:
        inside = DEEPSPEED / name.removeprefix("deepspeed/")
        paths = [inside] if inside.exists() else list(DEEPSPEED.rglob(f"*/{name}"))
        assert paths, f"no file {name}"
        sources.append("\n".join(path.read_text(encoding="utf-8") for path in paths[:3]))
    symbols = re.findall(r"`([^`]+)`", text)
    assert symbols, "no symbol"
    everything = "\n".join(sources)
    # strings that continue on the next line
    joined = re.sub(r"[\"']\s*\n\s*f?[\"']", "", everything)
    for symbol in symbols:
        if re.fullmatch(r"[\w]+", symbol):
            assert re.search(rf"\b{symbol}\b", everything), f"{symbol} is not in {files}"
    for words in re.findall(r"\"([^\"]{12,})\"", text):
        pieces = [piece.strip(" .") for piece in words.split("...")]
        assert all(piece in joined for piece in pieces if piece), f"{words!r} is not in {files}"


def test_every_setting_that_a_fix_names_fixes_the_config() -> None:
    tried = set()
    for kind, case in BREAKING:
        for problem in apply_rules(case.facts()):
            for changes in alternatives(problem.fix):
                if any(case.facts().written(key) != key for key, value in changes if value == GONE):
                    continue  # the file spells it otherwise
                left = apply_rules(case.facts(mended(case, changes)))
                still = [
                    str(other) for other in left if (other.kind, other.key) == (kind, problem.key)
                ]
                assert still == [], f"{problem} is still there after {changes}"
                tried.add((kind, str(changes)))
    assert len(tried) > 100


def test_the_readme_counts_them() -> None:
    assert f"the keys together against {len(ALL)} rules" in (ROOT / "docs/check.md").read_text(
        encoding="utf-8"
    )


def test_a_plain_config_has_no_problem() -> None:
    assert apply_rules(Case({}).facts()) == []
