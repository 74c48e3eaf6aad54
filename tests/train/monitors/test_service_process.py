"""Services in processes of their own: what goes wrong there is a warning here."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.errors import TrainingError
from framework.setup.assemble import make_monitors
from framework.system.child import Child
from framework.train.monitors.base import Monitor
from framework.train.monitors.services import Described, ServiceProcess
from tests.places import ROOT
from tests.train.monitors.points import point

SINK = "tests.train.monitors.sink_process"
# a process of lowest priority, which others may keep from starting for long
pytestmark = pytest.mark.timing

SECONDS = 30.0


@pytest.fixture(autouse=True)
def _serves_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Child, target: str, **where: Any) -> None:
        original(self, f"{SINK}:serve", path=[str(ROOT), *where["path"]])

    original = Child.__init__
    monkeypatch.setattr(Child, "__init__", start)


def sink(folder: Path, fails: str = "") -> Monitor:
    return ServiceProcess(
        "wandb", Described(folder, "night", {}), {"fails": fails}, wait_seconds=SECONDS
    )


def write(monitor: Monitor, *steps: int) -> None:
    for step in steps:
        monitor.write(point(step, train_loss=step / 8))


def test_points_arrive_in_order_and_it_is_closed(tmp_path: Path) -> None:
    monitor = sink(tmp_path)
    write(monitor, *range(1, 5))
    monitor.close()
    assert (tmp_path / "told").read_text(encoding="utf-8").splitlines() == [
        *(f"{step} {step / 8}" for step in range(1, 5)),
        "closed",
    ]


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("make", "ConnectionError: no such host"),
        ("exit", r"RuntimeError: it ended its thread \(3\)"),
        ("write", "ConnectionError: refused"),
        ("dies", "its process was killed by signal 9"),
    ],
)
def test_what_goes_wrong_is_raised_once(tmp_path: Path, fails: str, reason: str) -> None:
    monitor, deadline = sink(tmp_path, fails), time.monotonic() + SECONDS

    def write_on() -> None:
        step = 0
        while time.monotonic() < deadline:
            write(monitor, step := step + 1)
            time.sleep(0.01)

    with pytest.raises(TrainingError, match=f"^{reason}$"):
        write_on()
    monitor.close()


@pytest.mark.parametrize("fails", ["make", "write", "dies"])
def test_a_failure_at_the_last_point_is_raised_at_the_end(tmp_path: Path, fails: str) -> None:
    monitor = sink(tmp_path, fails)
    write(monitor, 2)
    with pytest.raises(TrainingError):
        monitor.close()


def test_what_asks_the_group_to_stop_does_not_end_it(tmp_path: Path) -> None:
    monitor, deadline = sink(tmp_path), time.monotonic() + SECONDS
    write(monitor, 1)
    while not (tmp_path / "told").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(monitor.pid, number)  # type: ignore[attr-defined]
    write(monitor, 2)
    monitor.close()
    assert (tmp_path / "told").read_text(encoding="utf-8").splitlines()[1:] == ["2 0.25", "closed"]


@pytest.mark.slow
def test_several_keep_their_numbers_in_one_file(tmp_path: Path) -> None:
    names = [f"sink-{number}" for number in range(6)]
    monitors = [sink(tmp_path, name) for name in names]
    for monitor in monitors:
        monitor.close()
    assert sorted(json.loads((tmp_path / "monitors.json").read_text(encoding="utf-8"))) == names


def test_one_that_cannot_be_started_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(Child, "__init__", fail)
    config = config_from_values(
        {"monitors": {"tensorboard": False, "wandb": {"offline": True}, "progress": "off"}}
    )
    found = make_monitors(config, tmp_path, total_steps=1, from_step=0)
    for monitor in found:
        monitor.close()
    assert "wandb" not in [monitor.name for monitor in found]
    assert (
        "wandb: no more processes; training goes on without it [monitor-failed]"
        in capsys.readouterr().err
    )
