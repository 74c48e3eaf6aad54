"""Sinks that talk to a server, or may: Weights & Biases, MLflow, Comet, trackio. Each with the
package's own words.

A run that goes on adds to the run there: `monitors.json` in the run folder keeps its number. Points
that were taken again after a resume come a second time, with the later time. No key or token passes
through here: the packages find theirs in the environment.

Each is in a process of its own: its package runs Python in threads, and in this process they would
take time from the training, whichever thread they are.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from framework.errors import TrainingError
from framework.system.child import Child, MessageSocket
from framework.system.files import open_own, replace_text
from framework.train.monitors.base import HURRIED_SECONDS, Aside, Monitor, Point, flat, reason_of

_NUMBERS: Final = "monitors.json"
_NICENESS: Final = 19
_ANSWER_SECONDS: Final = 5.0
# for its server to answer at the start; a script of one's own ends no earlier
_WANDB_SECONDS: Final = 30
_MLFLOW_BATCH: Final = 100  # parameters that its server takes at once
_MLFLOW_LONGEST: Final = 6000  # characters of a parameter


@dataclass(frozen=True)
class Described:
    """A run as a sink shows it.

    Attributes:
        folder: the run folder.
        name: of the run.
        config: resolved, as plain values.
        from_step: the step that this process starts from; 0 for a fresh run.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    from_step: int = 0

    def number_of(self, sink: str, make: Callable[[], str]) -> str:
        """The number of the run at a sink: the one that an earlier process of this run has kept, or
        a new one.
        """
        path = self.folder / _NUMBERS
        known = dict[str, str]()
        with _locked(self.folder):
            if os.path.lexists(path):
                with open_own(path, "r") as stream, suppress(ValueError):
                    known = json.load(stream)
            if sink not in known:
                known[sink] = make()
                replace_text(path, json.dumps(known, indent=2) + "\n")
        return known[sink]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Have sinks change a file of the folder one after the other, where the file system locks
    folders.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


class WandBRun:
    """A run of Weights & Biases; the x-axis is the metric ``step``, because W&B's own can never go
    back.
    """

    name = "wandb"

    def __init__(self, run: Described, *, offline: bool, **where: Any) -> None:
        wandb: Any = import_module("wandb")

        # silent: without a key it would ask for one on a terminal, where nobody may sit. The
        # processor time and memory that it shows are those of the process that trains.
        quiet = {"console": "off", "silent": True, "quiet": True, "init_timeout": _WANDB_SECONDS}
        settings = wandb.Settings(**quiet, x_stats_pid=os.getppid())
        asked = {name: value for name, value in where.items() if value}
        number = run.number_of(self.name, lambda: uuid.uuid4().hex[:8])
        mode = "offline" if offline else None
        about = {"name": run.name, "config": dict(run.config)}
        self._run = wandb.init(
            id=number,
            resume="allow",
            dir=str(run.folder),
            mode=mode,
            settings=settings,
            **about,
            **asked,
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, point: Point) -> None:
        self._run.log({"step": point.step, "epoch": point.epoch, **point.metrics})

    def close(self) -> None:
        self._run.finish()


class MLflowRun:
    """A run of MLflow, through its client: nothing of the process's own active run is touched."""

    name = "mlflow"

    def __init__(self, run: Described, *, experiment: str | None, tracking_uri: str | None) -> None:
        if tracking_uri is not None and (
            tracking_uri.startswith("file:") or "://" not in tracking_uri
        ):
            # asked for by name; else 3.x refuses a folder
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow: Any = import_module("mlflow")
        entities: Any = import_module("mlflow.entities")

        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._metric = entities.Metric
        wanted = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")

        def start() -> str:
            found = self._client.get_experiment_by_name(wanted)
            if found is None:
                number = self._client.create_experiment(wanted)
            else:
                number = found.experiment_id
            return str(self._client.create_run(number, run_name=run.name).info.run_id)

        self._number = run.number_of(self.name, start)
        if run.from_step:  # parameters of a run never change there
            self._client.update_run(self._number, status="RUNNING")
            return
        texts = [(key, str(value)[:_MLFLOW_LONGEST]) for key, value in flat(run.config)]
        for first in range(0, len(texts), _MLFLOW_BATCH):
            params = [
                entities.Param(key, text) for key, text in texts[first : first + _MLFLOW_BATCH]
            ]
            self._client.log_batch(self._number, params=params)

    def write(self, point: Point) -> None:
        now = int(1000 * point.time_seconds)
        metrics = [
            self._metric(name, value, now, point.step) for name, value in point.metrics.items()
        ]
        self._client.log_batch(self._number, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._number)


class CometExperiment:
    """An experiment at Comet."""

    name = "comet"

    def __init__(
        self, run: Described, *, project: str | None, workspace: str | None, offline: bool
    ) -> None:
        comet_ml: Any = import_module("comet_ml")
        # it would print advice between the steps
        logging.getLogger("comet_ml").setLevel(logging.ERROR)

        # Nothing but what it is given: no patched libraries, no console, no environment.
        quiet = dict.fromkeys(
            ("log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch"), False
        )
        quiet |= dict.fromkeys(
            ("auto_param_logging", "auto_metric_logging", "log_env_details"), False
        )
        about = comet_ml.ExperimentConfig(
            name=run.name,
            auto_output_logging=False,
            display_summary_level=0,
            offline_directory=str(run.folder / "comet"),
            **quiet,
        )
        # Offline nothing is there to be gone on with: each process makes a part, which the upload
        # joins by the key.
        number = run.number_of(self.name, lambda: uuid.uuid4().hex)
        if offline and not run.from_step:
            mode = None
        elif run.from_step:
            mode = "get"
        else:
            mode = "create"
        where = {"project_name": project, "workspace": workspace, "experiment_key": number}
        self._experiment = comet_ml.start(
            mode=mode, online=not offline, experiment_config=about, **where
        )
        self._experiment.log_parameters(dict(flat(run.config)))

    def write(self, point: Point) -> None:
        self._experiment.log_metrics(dict(point.metrics), step=point.step, epoch=int(point.epoch))

    def close(self) -> None:
        self._experiment.end()


class TrackioRun:
    """A run of trackio, found again by its name."""

    name = "trackio"

    def __init__(self, run: Described, *, project: str, space_id: str | None) -> None:
        trackio: Any = import_module("trackio")

        number = run.number_of(self.name, lambda: f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        self._run = trackio.init(
            project=project,
            name=number,
            space_id=space_id,
            config=dict(flat(run.config)),
            resume="allow",
        )

    def write(self, point: Point) -> None:
        self._run.log({**point.metrics, "epoch": point.epoch}, step=point.step)

    def close(self) -> None:
        self._run.finish()


SERVICES: Final[Mapping[str, Callable[..., Monitor]]] = {
    "wandb": WandBRun,
    "mlflow": MLflowRun,
    "comet": CometExperiment,
    "trackio": TrackioRun,
}


class ServiceProcess(Child):
    """A service as the run sees it: told of each point, and heard at its end."""

    def __init__(
        self, name: str, run: Described, where: Mapping[str, Any], *, wait_seconds: float
    ) -> None:
        """Start its process; raises OSError if that fails. What goes wrong there is raised by a
        later call.

        Args:
            name: of the service.
            run: what it shows.
            where: its arguments.
            wait_seconds: longest wait of `close`.
        """
        super().__init__(f"{__name__}:serve", path=sys.path)
        # no step waits longer for a process that somebody has stopped
        self._end.settimeout(_ANSWER_SECONDS)
        self.name = name
        self._is_over = False
        self._is_hurried = False
        self._wait_seconds = wait_seconds
        run_there = {**vars(run), "folder": str(run.folder)}
        self.send(name=name, run=run_there, where=where, wait_seconds=wait_seconds, argv=sys.argv)

    def write(self, point: Point) -> None:
        """Hand a point over; raises TrainingError where the service has failed, or is far
        behind.
        """
        try:
            self.send(**{**vars(point), "metrics": dict(point.metrics)})
        except OSError:
            self._hear()

    def hurry(self) -> None:
        """Wait less in `close`: a run that was asked to stop, or has failed, may have no more
        time.
        """
        self._is_hurried, self._wait_seconds = True, min(self._wait_seconds, HURRIED_SECONDS)

    def close(self) -> None:
        """Wait until all is written; raises TrainingError where that fails or takes too long. After
        a failure it does not wait.
        """
        if not self._is_over:
            with suppress(OSError):
                self.send(is_hurried=self._is_hurried)
            self._hear()

    def _hear(self) -> None:
        self._is_over = True
        try:
            answer = self.receive(self._wait_seconds + _ANSWER_SECONDS)
            if answer is None:
                failure = f"its process {self.exit_reason()}"
            else:
                failure = answer["failure"]
        except TimeoutError:
            failure = "its process does not answer"
        super().close()
        if failure:
            raise TrainingError(failure)


def serve(channel: MessageSocket) -> None:
    """Make the service that is asked for, tell it every point, close it, and answer why it failed,
    if it did.
    """
    os.nice(_NICENESS)  # so that a processor that a rank waits for is the rank's
    asked = channel.receive()
    failure = ""
    if asked is None:
        return
    sys.argv[:] = asked["argv"]
    run = Described(**{**asked["run"], "folder": Path(asked["run"]["folder"])})
    make = partial(SERVICES[asked["name"]], run, **asked["where"])
    aside = Aside(asked["name"], make, wait_seconds=asked["wait_seconds"])
    try:
        while "step" in (message := channel.receive() or {}):
            aside.write(Point(**message))
        if message.get("is_hurried", True):
            aside.hurry()
        aside.close()
    except Exception as error:
        failure = reason_of(error)
    channel.send(failure=failure)
