"""The metric that decides which checkpoint is kept: one that is never measured keeps none."""

from __future__ import annotations

from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.rules import apply_rules
from framework.plan.rules.devices import missing_metrics_package
from framework.setup.handed_over import config_with_objects
from framework.setup.user_code import Objects
from framework.system.metric_names import BY_NAME

EPOCHS = {"every_epochs": 1}
GPT = {"model": {"kind": "gpt"}, "data": {"kind": "text"}, "task": {"kind": "causal_lm"}}


def found(
    metric: str | None, *, best_is: str | None = None, saves: Any = EPOCHS, **sections: Any
) -> list[tuple[str, str, str]]:
    checkpoint = {"keep_best": metric, **saves} | ({"best_is": best_is} if best_is else {})
    values = {"checkpoint": checkpoint, "evaluation": EPOCHS} | sections
    return [
        (each.kind, each.severity, each.fix)
        for each in apply_rules(config_from_values(values), Cluster())
    ]


@pytest.mark.parametrize(
    ("metric", "sections"),
    [
        (None, {}),
        ("eval/accuracy", {}),
        (
            "eval/perplexity",
            GPT | {"checkpoint": {"keep_best": "eval/perplexity", "best_is": "min"}},
        ),
        # what a task of one's own measures is not known
        ("eval/whatever", {"task": {"target": "a:b"}}),
        *[(name, {}) for name in BY_NAME if not name.endswith("loss")],
    ],
)
def test_what_is_measured_is_fine(metric: str | None, sections: dict[str, Any]) -> None:
    assert found(metric, **sections) == []


@pytest.mark.parametrize(
    ("metric", "severity", "guess"),
    [
        ("eval/acc", "error", "eval/accuracy"),
        ("eval/f1", "error", None),
        ("los", "error", "eval/loss"),
        ("accuracy", "error", "eval/accuracy"),
        ("evl/accuracy", "error", "eval/accuracy"),
        ("train/los", "warning", "train/loss"),
    ],
)
def test_a_name_that_nothing_bears_is_reported_with_those_that_are_there(
    metric: str, severity: str, guess: str | None
) -> None:
    ((kind, found_severity, fix),) = found(metric)
    assert (kind, found_severity) == ("unknown-metric", severity)
    assert fix == (f"did you mean {guess}?" if guess else "write one of eval/loss, eval/accuracy")


ADDED = {"metrics": {"auroc": {"target": "torchmetrics:AUROC"}}, **EPOCHS}


def test_metrics_of_torchmetrics_are_known_by_their_names() -> None:
    assert found("eval/auroc", evaluation=ADDED) == []
    assert found("eval/auroc_3", evaluation=ADDED) == []  # of several results
    ((kind, severity, fix),) = found("eval/auc", evaluation=ADDED)
    assert (kind, severity, fix) == ("unknown-metric", "error", "did you mean eval/auroc?")


def test_torchmetrics_that_is_missing_is_refused_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = missing_metrics_package(config_from_values({"evaluation": ADDED}))
    assert (problem.kind, problem.key) == ("package-missing", "evaluation.metrics")
    assert "./launch.sh setup metrics" in problem.fix
    assert list(missing_metrics_package(config_from_values({}))) == []


def test_metrics_that_are_handed_over_are_known_by_their_names() -> None:
    class Several:
        def keys(self) -> list[str]:
            return ["f1"]

    values = {"checkpoint": {"keep_best": "eval/f1", **EPOCHS}, "evaluation": EPOCHS}
    for metrics, kinds in ((Several(), []), ({"f1": 1}, []), (1, ["unknown-metric"])):
        config = config_with_objects(values, Objects(metrics=metrics))
        assert [problem.kind for problem in apply_rules(config, Cluster())] == kinds


def test_evaluation_that_is_off_measures_nothing() -> None:
    ((kind, severity, _),) = found("eval/accuracy", evaluation={"at_end": False})
    assert (kind, severity) == ("metric-never-measured", "error")
    assert found("train/lr", evaluation={"at_end": False}) == []


@pytest.mark.parametrize(("saves", "kinds"), [(EPOCHS, ["metric-measured-once"]), ({}, [])])
def test_evaluation_at_the_end_is_too_late_for_a_choice(
    saves: dict[str, int], kinds: list[str]
) -> None:
    assert [kind for kind, *_ in found("eval/accuracy", saves=saves, evaluation={})] == kinds


@pytest.mark.parametrize(
    ("best_is", "kinds"), [(None, ["largest-is-best"]), ("min", []), ("max", [])]
)
def test_the_largest_loss_is_kept_where_asked_for(best_is: str | None, kinds: list[str]) -> None:
    assert [kind for kind, *_ in found("eval/loss", best_is=best_is)] == kinds
