"""`fit` in a notebook: a real kernel, several runs in it, errors as one line, and a Stop button
that saves.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.launched import job_environment

nbformat = pytest.importorskip("nbformat", reason="it comes with nbclient, of the dev extra")
nbclient = pytest.importorskip("nbclient", reason="it comes with the dev extra")
pytest.importorskip("ipykernel", reason="it comes with the dev extra")
pytestmark = pytest.mark.slow

CELLS = {
    "first": """
import framework
config = {"run": {"name": "first"}, "data": {"kind": "digits"}, "batch": {"global_size": 32}}
config["training"] = {"max_steps": 20, "log_every": 10}
result = framework.fit(config)
""",
    "again": """
again = framework.fit({**config, "run": {"name": "again"}})
print("same", again.metrics["eval/loss"] == result.metrics["eval/loss"])
""",
    "mistake": """framework.fit({**config, "optimiser": {}})""",
    "devices": """framework.fit({**config, "parallel": {"pipe": 2}})""",
    "world": """framework.fit({**config, "run": {"name": "two", "world_size": 2}})""",
    "failure": """
def broken(outputs, targets):
    raise ValueError("no such loss")
framework.fit({**config, "run": {"name": "broken"}}, task=broken)
""",
    # What the Stop button sends.
    "stopped": """
import os, signal, threading, time
def press_stop():
    points = "runs/stopped/metrics.jsonl"
    while not (os.path.exists(points) and os.path.getsize(points)):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press_stop).start()
framework.fit({**config, "run": {"name": "stopped"}, "training": {"max_steps": 5000, "log_every": 5}})
""",
    "alive": """
from pathlib import Path
reached = max(int(path.name[11:]) for path in Path("runs/stopped/checkpoints").glob("global_step*"))
rest = framework.fit({**config, "run": {"name": "stopped"}, "checkpoint": {"resume": "auto"},
                      "training": {"max_steps": reached + 10, "log_every": 5}})
print("went on from", rest.start_step)
""",
    "own": """
with framework.open_engine({**config, "run": {"name": "own"}}) as engine:
    batches = engine.batches()
    while engine.steps_taken < engine.max_steps:
        loss = engine.train_step(next(batches)).read()["train/loss"]
print("own", loss == result.metrics["train/loss"])
""",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All that each cell has shown."""
    folder: Path = tmp_path_factory.mktemp("notebook")
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS.values()]
    )
    client = nbclient.NotebookClient(
        book, timeout=300, allow_errors=True, resources={"metadata": {"path": folder}}
    )
    client.execute(env=job_environment())
    return {
        name: "".join(map(shown, cell.outputs))
        for name, cell in zip(CELLS, book.cells, strict=True)
    }


def shown(output: Any) -> str:
    if output.output_type == "error":
        return "\n".join(["ERROR", *output.traceback])
    return str(output.get("text", output.get("data", {}).get("text/plain", "")))


def test_runs_follow_each_other_in_one_kernel_and_their_progress_is_lines(
    said: dict[str, str],
) -> None:
    assert re.search(r"^step 10/20  epoch 0\.\d\d  loss \S+", said["first"], re.MULTILINE), said[
        "first"
    ]
    assert "first: finished after 20 steps" in said["first"]
    assert "\x1b" not in said["first"], "no escape codes"
    assert "same True" in said["again"]
    assert "own True" in said["own"]


def test_errors_are_one_line_and_the_kernel_lives(said: dict[str, str]) -> None:
    for name, line in {
        "mistake": r"ConfigError: optimiser = \{\}: .*\[unknown-key\]",
        "devices": r"ConfigError: parallel = 2: .*; start a script: deepspeed --num_gpus 2 train\.py \[devices-.*",
        "world": r"ConfigError: run\.world_size = 2: a notebook is one process with one device; .*",
        "failure": r"TrainingError: .*no such loss.*",
    }.items():
        _, _, error = said[name].partition("ERROR\n")
        assert re.fullmatch(line, error.strip()), said[name]


def test_the_stop_button_saves_and_the_run_goes_on(said: dict[str, str]) -> None:
    found = re.search(
        r"ERROR\nRunStopped: SIGINT: stopped after step (\d+) of 5000; .*complete", said["stopped"]
    )
    assert found, said["stopped"]
    assert f"went on from {found[1]}" in said["alive"]
