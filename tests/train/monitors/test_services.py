"""Services, for real and without a network: their files hold the numbers, and a resumed run goes on
with its run.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.train.monitors.base import flat
from framework.train.monitors.services import SERVICES, Described
from tests.train.monitors.points import point
from tests.train.monitors.sinks import of_wandb, wandb_records

CONFIG = {"run": {"name": "night"}, "optimizer": {"betas": [0.9, 0.95], "lr": 0.1}, "deepspeed": {}}
NAMES = {"wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml", "trackio": "trackio"}


def write(
    sink: str, folder: Path, where: dict[str, Any], *, steps: tuple[int, ...], from_step: int = 0
) -> None:
    if importlib.util.find_spec(NAMES[sink]) is None:
        pytest.skip(f"{NAMES[sink]} is not installed")
    monitor = SERVICES[sink](Described(folder, "night", CONFIG, from_step), **where)
    for step in steps:
        monitor.write(
            point(step, train_loss=step / 8, eval_loss=float("nan") if step == 3 else 0.5)
        )
    monitor.close()


def number(folder: Path, sink: str) -> str:
    found: dict[str, str] = json.loads((folder / "monitors.json").read_text(encoding="utf-8"))
    return found[sink]


def test_a_config_is_flat_under_dotted_keys() -> None:
    flattened = {
        "run.name": "night",
        "optimizer.betas": "[0.9, 0.95]",
        "optimizer.lr": 0.1,
        "deepspeed": "{}",
    }
    assert dict(flat(CONFIG)) == flattened


def test_every_service_has_a_section_with_its_arguments() -> None:
    asked = config_from_values({"monitors": dict.fromkeys(SERVICES, True)}).monitors
    assert set(asked.sinks()) == {*SERVICES, "tensorboard"}
    for name in SERVICES:
        assert asked.sinks()[name].package == NAMES[name]


@pytest.mark.slow
def test_wandb_offline_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SERVICE", "")  # so that where its own process listens is forgotten
    monkeypatch.delenv("WANDB_SERVICE")
    where = {"project": None, "entity": None, "group": None, "tags": ["a"], "offline": True}
    write("wandb", tmp_path, where, steps=(1, 2))
    first = number(tmp_path, "wandb")
    time.sleep(1.1)  # W&B names a process's folder by the second
    write("wandb", tmp_path, where, steps=(2, 4), from_step=1)
    assert number(tmp_path, "wandb") == first
    assert of_wandb(tmp_path)["train/loss"] == [(1, 0.125), (2, 0.25), (2, 0.25), (4, 0.5)]
    runs = [
        record.run
        for record in wandb_records(tmp_path)
        if record.WhichOneof("record_type") == "run"
    ]
    assert {run.run_id for run in runs} == {first}
    assert {run.display_name for run in runs} == {"night"}
    assert {item.key: json.loads(item.value_json) for item in runs[0].config.update}["optimizer"][
        "lr"
    ] == 0.1


@pytest.mark.slow
def test_mlflow_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that what the sink and its package set is taken back.
    for name in (
        "MLFLOW_ALLOW_FILE_STORE",
        "MLFLOW_DISABLE_TELEMETRY",
        "_MLFLOW_TELEMETRY_SESSION_ID",
    ):
        monkeypatch.setenv(name, "true")
    where = {"experiment": "nights", "tracking_uri": f"file:{tmp_path}/store"}
    write("mlflow", tmp_path, where, steps=(1, 2))
    first = number(tmp_path, "mlflow")
    write("mlflow", tmp_path, where, steps=(3,), from_step=2)
    assert number(tmp_path, "mlflow") == first
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=where["tracking_uri"])
    run = client.get_run(first)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "night")
    assert run.data.params["optimizer.lr"] == "0.1"
    history = client.get_metric_history(first, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert client.get_experiment(run.info.experiment_id).name == "nights"


@pytest.mark.slow
def test_comet_offline_writes_one_archive_for_each_process(tmp_path: Path) -> None:
    where = {"project": None, "workspace": None, "offline": True}
    write("comet", tmp_path, where, steps=(1, 2))
    write("comet", tmp_path, where, steps=(3,), from_step=2)
    archives = [path.name for path in (tmp_path / "comet").glob("*.zip")]
    assert len(archives) == 2
    assert all(name.startswith(number(tmp_path, "comet")) for name in archives)


@pytest.mark.slow
def test_trackio_on_this_machine_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    where = {"project": "p", "space_id": None}
    write("trackio", tmp_path, where, steps=(1, 2))
    write("trackio", tmp_path, where, steps=(3,), from_step=2)
    assert (tmp_path / "trackio/p.db").exists()
