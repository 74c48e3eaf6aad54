"""Sinks broken on purpose, all in one real run: it ends as if they were whole, with one warning for
each.
"""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.errors import ConfigError
from framework.report.figures import headline, state
from framework.report.records import read_run
from framework.setup.assemble import make_monitors
from framework.setup.prepare_run import prepare
from framework.train.monitors.base import Point
from tests.launched import run_ranks
from tests.places import ROOT

WAIT_SECONDS = 2.0
OWN = "tests.train.monitors.test_broken_sinks"


class Failing:
    """A sink of one's own that fails at its second point."""

    def __init__(self, *, at: int) -> None:
        self._at = at

    def write(self, point: Point) -> None:
        if point.step >= self._at:
            raise ConnectionError(f"no step {point.step}")

    def close(self) -> None:
        pass


def not_there() -> None:
    raise ModuleNotFoundError("No module named 'service'", name="service")


def config(name: str, folder: Path, monitors: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "batch": {"global_size": 120},
        "training": {"max_steps": 60, "log_every": 1},
        "checkpoint": {"at_end": False},
        "evaluation": {"at_end": False},
        "monitors": {"progress": "off", "wait_seconds": WAIT_SECONDS} | monitors,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Folder of the two runs, and what was printed before and after the first one's end.

    The first has a server that takes connections and never answers, code that fails and code that
    cannot be called.
    """
    folder, silent = tmp_path_factory.mktemp("broken"), socket.create_server(("127.0.0.1", 0))
    others = [{"target": f"{OWN}:Failing", "args": {"at": 2}}, {"target": f"{OWN}:not_there"}]
    monitors: dict[str, Any] = {"tensorboard": False, "others": others}
    if importlib.util.find_spec("mlflow") is not None:
        monitors["mlflow"] = {"tracking_uri": f"http://127.0.0.1:{silent.getsockname()[1]}"}
    configs = [config("sinks", folder, monitors), config("disk", folder, {"progress": "lines"})]
    (folder / "configs.json").write_text(json.dumps(configs), encoding="utf-8")
    script = ROOT / "tests/jobs/broken_sinks.py"
    printed = run_ranks(script, str(folder), str(folder / "configs.json"), num_ranks=1, cwd=folder)
    silent.close()
    return folder, printed.split("=====")


def warned(printed: str) -> list[str]:
    """Sinks that a warning names, as often as one does."""
    lines = [
        line for line in printed.splitlines() if "warning: " in line and "[monitor-failed]" in line
    ]
    return sorted(line.partition("warning: ")[2].split(": ")[0] for line in lines)


@pytest.mark.slow
def test_broken_sinks_cost_a_warning_each_and_nothing_else(runs: tuple[Path, list[str]]) -> None:
    folder, printed = runs
    has_mlflow = importlib.util.find_spec("mlflow") is not None
    assert warned(printed[0]) == sorted(
        [f"{OWN}:Failing", f"{OWN}:not_there", *(["mlflow"] if has_mlflow else [])]
    )
    rows = [
        json.loads(line)
        for line in (folder / "sinks/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["step"] for row in rows] == [*range(1, 61)]
    assert (folder / "sinks/metrics.csv").read_text(encoding="utf-8").count("\n") == 61
    assert (
        float((folder / "ended").read_text(encoding="utf-8")) - rows[-1]["time"] < WAIT_SECONDS + 10
    )


@pytest.mark.slow
def test_files_that_may_grow_no_more_cost_their_lines(runs: tuple[Path, list[str]]) -> None:
    """As a quota and a full disk do: what is missing is named at the end, and the run has come as
    far as it has.
    """
    folder, printed = runs
    failed = warned(printed[1])
    assert failed.count("metrics.jsonl") == 1
    text = (folder / "disk/metrics.jsonl").read_text(encoding="utf-8")
    there = [json.loads(line)["step"] for line in text.splitlines()]
    assert there == [*range(1, len(there) + 1)]
    assert (
        f"metrics.jsonl lacks steps {len(there) + 1} to 60: File too large [monitor-failed]"
        in printed[1]
    )
    assert "disk: finished after 60 steps" in printed[1]
    run = read_run(folder / "disk")
    assert (state(run), dict(headline(run)["Time"])["steps"]) == ("finished after 60 steps", "60")


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_costs_its_sink(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tensorboard").write_text("in its place", encoding="utf-8")
    found = make_monitors(config_from_values({}), tmp_path, total_steps=1, from_step=0)
    for monitor in found:
        monitor.close()
    assert [monitor.name for monitor in found] == ["metrics.jsonl", "metrics.csv", "terminal"]
    assert warned(capsys.readouterr().err) == ["tensorboard"]


def test_a_package_that_is_missing_is_named_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = config_from_values(
        {
            "run": {"output_dir": str(tmp_path)},
            "monitors": {"tensorboard": False, "wandb": True, "comet": True},
        }
    )
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    assert [str(problem) for problem in caught.value.problems] == [
        "monitors.wandb: wandb is not installed; pip install wandb, or set monitors.wandb: false [package-missing]",
        "monitors.comet: comet_ml is not installed; pip install comet_ml, or set monitors.comet: false "
        "[package-missing]",
    ]


def test_a_sink_of_ones_own_that_does_not_import_is_named_before_the_start(tmp_path: Path) -> None:
    others = [
        {"target": "nowhere.at_all:Sink"},
        {"target": "tests.train.monitors.test_broken_sinks:Failing"},
    ]
    for other, kind in zip(others, ("target-not-found", "target-args"), strict=True):
        config = config_from_values(
            {"run": {"output_dir": str(tmp_path)}, "monitors": {"others": [other]}}
        )
        with pytest.raises(ConfigError, match=rf"monitors\.others\.0.*\[{kind}\]"):
            prepare(config)
