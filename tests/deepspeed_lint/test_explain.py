"""Every key and every kind of problem is explained."""

from __future__ import annotations

import json

import pytest

from deepspeed_lint.cli import main
from deepspeed_lint.explain import explain
from deepspeed_lint.key_files import TABLES, known_releases
from deepspeed_lint.keys import load_table
from tools.docs_site.kinds import find_kinds

# Put together from the status of a key, or reported by one command alone.
NOT_IN_THE_SOURCE = {"deprecated-key", "inert-key", "needs-cuda"}


@pytest.mark.slow
def test_every_kind_is_explained_and_no_other() -> None:
    rows = set(json.loads((TABLES / "rules.json").read_text(encoding="utf-8")))
    by_hand = json.loads((TABLES / "kinds.json").read_text(encoding="utf-8"))
    assert not rows & by_hand.keys()
    reported = {
        kind.name: kind for kind in find_kinds().values() if kind.room in ("deepspeed_lint", "text")
    }
    assert reported.keys() - rows - by_hand.keys() == set()
    assert by_hand.keys() - reported.keys() == NOT_IN_THE_SOURCE
    for name, explained in by_hand.items():
        assert list(explained) == ["severity", "meaning", "fix"]
        assert explained["severity"] in ("error", "warning", "note")
        if name in reported and reported[name].severity:
            assert explained["severity"] == reported[name].severity, name
    for name in rows | by_hand.keys():
        (explanation,) = explain(name)
        assert explanation.subject == name
        assert explanation.rows["meaning"]
        assert explanation.rows["fix"]
        assert "{" not in explanation.rows["meaning"].replace('{"stage"', ""), name


@pytest.mark.parametrize("release", [known_releases()[0], known_releases()[-1]])
def test_every_key_is_explained(release: str) -> None:
    for path in load_table(release):
        explanations = explain(path, release=release)
        assert explanations[0].rows["meaning"], path
        assert explanations[0].rows["type"], path


def test_a_key_has_its_type_default_sentence_release_and_successor() -> None:
    (stage,) = explain("zero_optimization.stage")
    assert stage.rows["type"] == "0 or 1 or 2 or 3"
    assert stage.rows["default"] == "0"
    (bucket,) = explain("stage3_prefetch_bucket_size")
    assert bucket.subject == "zero_optimization.stage3_prefetch_bucket_size"
    assert (bucket.rows["type"], bucket.rows["default"]) == ("integer, >= 0", "50000000")
    (old,) = explain("zero_optimization.cpu_offload")
    assert old.rows["status"].startswith("deprecated")
    assert old.rows["instead"] == "zero_optimization.offload_optimizer"
    (rate,) = explain("optimizer.params.lr")
    assert rate.rows["default"] == "0.01 (Adagrad)\n0.001 (AdamW, Adam, Lamb, Lion)"
    (section,) = explain("bf16")
    assert "enabled" in section.rows["keys"]
    assert len(explain("enabled")) > 10


def test_a_key_that_went_is_explained_as_the_last_release_read_it() -> None:
    newest = load_table()
    gone = [
        path
        for path in load_table(known_releases()[0])
        if newest.get(path) is None and "[" not in path and "*" not in path
    ]
    assert gone
    for path in gone:
        (explanation,) = explain(path)
        assert "until" in explanation.rows, path


def test_json_has_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "zero_optimization.stage", "batch-arithmetic", "--json"]) == 0
    key, kind = json.loads(capsys.readouterr().out)
    assert key == {
        "subject": "zero_optimization.stage",
        **explain("zero_optimization.stage")[0].rows,
    }
    assert kind["severity"] == "error"
