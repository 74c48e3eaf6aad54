"""Several evaluation sets: metrics by name, the best by any of them, on two ranks at ZeRO stages 0
and 3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import framework
from framework.config.load import config_from_values
from framework.data.splits import Splits
from framework.errors import ConfigError
from framework.report.page import write_page
from framework.report.records import read_run
from framework.report.run_charts import charts_of
from framework.setup.watched_metrics import refuse_unmeasured
from tests.commands.test_after_training import run_jobs
from tests.jobs.parts import sets_of_digits
from tests.launched import read_metrics

SETS = TensorDataset(torch.zeros(4, 2), torch.zeros(4))


def refused(metric: str, evaluation: Any, **sections: Any) -> str:
    values = {
        "data": {"target": "tests.jobs.parts:sets_of_digits"},
        "checkpoint": {"keep_best": metric},
        **sections,
    }
    try:
        refuse_unmeasured(config_from_values(values), Splits(SETS, evaluation))
    except ConfigError as error:
        return str(error)
    return ""


class TestAMetricThatNoSetGives:
    def test_is_refused_with_those_there_are(self) -> None:
        sets = {"clean": SETS, "noisy": SETS}
        known = "write one of eval/clean/loss, eval/clean/accuracy, eval/noisy/loss, eval/noisy/accuracy"
        for metric in ("eval/loss", "eval/dirty/loss", "eval/clean/acc"):
            line = f"checkpoint.keep_best = {metric}: no evaluation set gives it; {known} [unknown-metric]"
            assert refused(metric, sets) == line
        assert "eval/loss, eval/accuracy [" in refused("eval/clean/loss", SETS)
        watch = {"kind": "early_stopping", "metric": "eval/loss"}
        assert "callbacks.0.metric = eval/loss: no" in refused(
            "eval/clean/loss", sets, callbacks=[watch]
        )

    def test_is_any_other(self) -> None:
        assert refused("eval/clean/loss", {"clean": SETS}) == refused("eval/loss", SETS) == ""
        assert refused("train/loss", {"clean": SETS}) == refused("eval/loss", None) == ""

    def test_of_a_task_of_ones_own_is_known_by_its_set_alone(self) -> None:
        own = {"task": {"target": "tests.jobs.parts:steep_cross_entropy"}}
        assert refused("eval/clean/f1", {"clean": SETS}, **own) == ""
        assert "write one of eval/clean/ [" in refused("eval/f1", {"clean": SETS}, **own)


@pytest.mark.slow
def test_sets_of_unlike_length_on_two_ranks(tmp_path: Path) -> None:
    def case(stage: int) -> dict[str, Any]:
        return {
            "run": {"name": f"z{stage}", "output_dir": str(tmp_path)},
            "data": {"target": "tests.jobs.parts:sets_of_digits", "random_samples": False},
            "batch": {"global_size": 32},
            "zero": {"stage": stage},
            "optimizer": {"kind": "adamw", "lr": 3e-3},
            "training": {"max_steps": 6, "log_every": 2},
            "evaluation": {"every_steps": 2, "batch_size": 8},
            "checkpoint": {
                "every_steps": 2,
                "keep_last": 1,
                "keep_best": "eval/noisy.50/loss",
                "best_is": "min",
            },
            "monitors": {"progress": "off", "report": False, "tensorboard": {"samples": 2}},
        }

    words = [["evaluate", name, "--trust", name] for name in ("z0", "z3")]
    run_jobs(tmp_path, "sets", [case(0), case(3), *([f"{each[1]}.json", each] for each in words)])
    _, sets = sets_of_digits()
    for name in ("z0", "z3"):
        rows = [row for row in read_metrics(tmp_path / name) if "eval/clean/loss" in row]
        assert [row["step"] for row in rows] == [2, 4, 6]
        last = {key: value for key, value in rows[-1].items() if key.startswith("eval/")}
        assert set(last) == {
            f"eval/{each}/{metric}" for each in sets for metric in ("loss", "accuracy")
        }
        assert json.loads((tmp_path / f"{name}.json").read_text())["metrics"] == last
        module = framework.load(tmp_path / name, trust=True)
        for each, data in sets.items():
            images, labels = (
                torch.stack([torch.as_tensor(pair[part]) for pair in data]) for part in (0, 1)
            )
            with torch.no_grad():
                loss = torch.nn.functional.cross_entropy(module(images), labels).item()
            assert last[f"eval/{each}/loss"] == pytest.approx(loss, rel=1e-5)
        best = min(rows, key=lambda row: row["eval/noisy.50/loss"])["step"]
        assert (tmp_path / name / f"checkpoints/global_step{best:.0f}").is_dir()
        assert "eval/noisy.50/loss" in (tmp_path / name / "metrics.csv").read_text().splitlines()[0]
        run = read_run(tmp_path / name)
        (losses,) = (
            chart for group in charts_of([run]).values() for chart in group if chart.title == "Loss"
        )
        assert all(f"eval/{each}/loss" in str(losses) for each in sets)
        write_page(tmp_path / name, tmp_path / "page.html")
        assert "Evaluation: one/accuracy" in (tmp_path / "page.html").read_text()
