"""The page "DeepSpeed, key by key" has every key of the newest release, with what a run does with it."""

from __future__ import annotations

from fnmatch import fnmatchcase

from deepspeed_lint.key_files import without_variant
from deepspeed_lint.keys import load_table
from tests.plan.rules.test_passed_keys import EFFECTS, NOT_SHOWN_HERE
from tools.docs_site.deepspeed_keys import deepspeed_keys_page, rows


def test_every_key_has_a_row() -> None:
    found = {row.path for row in rows()}
    leaves = {path for path in load_table() if not any(_is_in(other, path) for other in found)}
    assert leaves - found == set()


def _is_in(path: str, section: str) -> bool:
    return path.startswith((f"{section}.", f"{section}["))


def test_a_key_that_passes_is_one_that_a_run_was_trained_with() -> None:
    passed = {without_variant(row.path) for row in rows() if row.state == "passes"}
    known = {
        name
        for name in passed
        if any(fnmatchcase(name, pattern) for pattern in (*EFFECTS, *NOT_SHOWN_HERE))
    }
    assert passed - known == set()
    assert set(EFFECTS) - passed == set()


def test_each_state_has_its_reason() -> None:
    answers = {row.path: (row.state, row.answer) for row in rows()}
    assert answers["zero_optimization.stage"] == ("typed", "`zero.stage`")
    assert answers["log_level"] == ("passes", "`deepspeed.log_level`")
    assert answers["optimizer.params[Muon].lr"][0] == "refused"
    assert answers["elasticity"] == ("gone", "0.19.8: use batch")
    assert answers["hybrid_engine.max_out_tokens"][0] == "no effect"
    assert all(answer or state == "Python" for state, answer in answers.values())


def test_the_page_has_a_table_for_each_section() -> None:
    page = deepspeed_keys_page()
    assert page.count("| key | state | here |") == page.count("\n## ")
    assert "| `zero_optimization.zero_hpz_partition_size` | passes |" in page
