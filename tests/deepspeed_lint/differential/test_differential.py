"""`check` and DeepSpeed judge the same configs: a slice here, thousands with `python -m
tools.differential`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deepspeed_lint.lint import lint
from deepspeed_lint.text.document import Document
from tests.deepspeed_lint.differential.compare import ask_deepspeed, compare
from tests.deepspeed_lint.differential.generate import RELEASE, questions
from tests.deepspeed_lint.differential.harms import HARMS, NOT_ON_ONE_CPU_RANK, Harm
from tests.deepspeed_lint.differential.mutate import MUTATIONS
from tests.deepspeed_lint.differential.sweep import ODD, sweep
from tests.deepspeed_lint.rules.cases import Case
from tests.places import ROOT

asks_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None or version("deepspeed") != RELEASE,
    reason=f"asks DeepSpeed {RELEASE}",
)
HARMS_PAGE = ROOT / "docs/silent-harms.md"


@pytest.mark.slow
@asks_deepspeed
def test_nothing_is_accepted_that_deepspeed_refuses_and_every_refusal_is_on_a_list(
    tmp_path: Path,
) -> None:
    asked = list(questions(seed=3, count=160))
    result = compare(asked, tmp_path, start_most=20)
    assert result.accepted_by_us_alone == []
    assert result.unexplained == []
    assert result.parsed >= 150
    assert result.started >= 10
    assert set(result.mutations) == {"none", *MUTATIONS}


@pytest.mark.slow
@asks_deepspeed
def test_every_key_with_every_odd_value(tmp_path: Path, exhaustive: bool) -> None:
    """Without --exhaustive a third of the values is tried, at each key another third than at the
    one before.
    """
    assert len(ODD) % 3
    result = compare([*sweep()][:: 1 if exhaustive else 3], tmp_path, start_most=0)
    assert result.accepted_by_us_alone == []
    assert result.unexplained == []
    assert result.parsed > (9000 if exhaustive else 3000)


def config_of(harm: Harm) -> Mapping[str, Any]:
    return Case(harm.witness).config


@pytest.mark.slow
@asks_deepspeed
def test_every_silent_harm_is_shown(tmp_path: Path) -> None:
    asked = [{"config": config_of(harm), "worlds": [1], "depth": "step"} for harm in HARMS]
    for harm, answer in zip(HARMS, ask_deepspeed(asked, tmp_path), strict=True):
        assert answer["refused"] == "", (harm.name, answer)
        assert harm.shown(answer["saw"]), (harm.name, answer["saw"])


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.name)
def test_the_witness_of_a_harm_is_refused_for_it_alone(harm: Harm) -> None:
    found = lint(Document(name="ds.json", value=dict(config_of(harm))), release=RELEASE)
    errors = [problem for problem in found if problem.severity == "error"]
    assert errors
    assert [
        str(problem) for problem in errors if not harm.explains(problem.kind, problem.key)
    ] == []


def test_the_page_of_harms_lists_them_all() -> None:
    page = HARMS_PAGE.read_text(encoding="utf-8")
    for harm in HARMS:
        assert f"## {harm.name}" in page
        assert f"`{harm.kind}`" in page
        assert harm.effect in page
    for kind, where in NOT_ON_ONE_CPU_RANK.items():
        assert f"| `{kind}` | {where} |" in page


@pytest.mark.slow
def test_a_seed_gives_the_same_configs_again() -> None:
    first, second = (
        [(q.config, q.world, q.mutation) for q in questions(seed=1, count=20)] for _ in range(2)
    )
    assert first == second
    assert first != [(q.config, q.world, q.mutation) for q in questions(seed=2, count=20)]
