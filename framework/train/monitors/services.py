"""Sinks that talk, or may talk, to a server: Weights & Biases, MLflow, Comet, trackio. Each takes
its package's own options.

A resumed run adds to its run at the service: `monitors.json` in the run folder keeps the number of
that. Steps that are taken again after a resume are logged a second time, with the later time. No
key or token passes through here: the packages find theirs in the environment.

Each sink has its own process: its package runs Python in threads, and in this process any such
thread would take time from the training.
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
from framework.system.child import Child
from framework.system.files import open_own, replace_text
from framework.system.json_lines import MessageSocket
from framework.train.monitors.aside import HURRIED_SECONDS, Aside
from framework.train.monitors.base import Monitor, Point, flat, reason_of

_NUMBERS: Final = "monitors.json"
_NICENESS: Final = 19
_ANSWER_SECONDS: Final = 5.0
# Longest wait of W&B's start, for its own process and for its server. No step waits for it; and
# this process has the lowest priority, so that on a busy host it takes minutes instead of seconds.
_WANDB_SECONDS: Final = 300
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
        """Return the number of the run at a sink: the one that an earlier process of this run has
        kept, or a new one by `make`, which is kept. It waits for other sinks that do the same.
        """
        path = self.folder / _NUMBERS
        numbers = dict[str, str]()
        with _locked(self.folder):
            if os.path.lexists(path):
                with open_own(path, "r") as stream, suppress(ValueError):
                    numbers = json.load(stream)
            if sink not in numbers:
                numbers[sink] = make()
                replace_text(path, json.dumps(numbers, indent=2) + "\n")
        return numbers[sink]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, so that sinks change a file in it one after the other; some file systems have
    no such locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class WandBRun:
    """A run of Weights & Biases; the x-axis is the metric ``step``, because W&B's own can never go
    back.
    """

    name = "wandb"

    def __init__(self, run: Described, *, offline: bool, **where: Any) -> None:
        wandb: Any = import_module("wandb")

        settings = wandb.Settings(
            console="off",
            silent=True,  # without a key it would wait for one on a terminal
            quiet=True,
            init_timeout=_WANDB_SECONDS,
            x_service_wait=_WANDB_SECONDS,
            # It shows processor time and memory of the process that trains.
            x_stats_pid=os.getppid(),
        )
        options = {name: value for name, value in where.items() if value}
        self._run = wandb.init(
            id=run.number_of(self.name, lambda: uuid.uuid4().hex[:8]),
            resume="allow",
            dir=str(run.folder),
            mode="offline" if offline else None,
            settings=settings,
            name=run.name,
            config=dict(run.config),
            **options,
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
            # MLflow 3.x refuses a folder without this; the config names one.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow: Any = import_module("mlflow")
        entities: Any = import_module("mlflow.entities")

        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._metric = entities.Metric
        experiment_name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")

        def start() -> str:
            known = self._client.get_experiment_by_name(experiment_name)
            if known is None:
                experiment_id = self._client.create_experiment(experiment_name)
            else:
                experiment_id = known.experiment_id
            return str(self._client.create_run(experiment_id, run_name=run.name).info.run_id)

        self._number = run.number_of(self.name, start)
        if run.from_step:  # parameters of a run never change in MLflow
            self._client.update_run(self._number, status="RUNNING")
            return
        params = [
            entities.Param(key, str(value)[:_MLFLOW_LONGEST]) for key, value in flat(run.config)
        ]
        for first in range(0, len(params), _MLFLOW_BATCH):
            batch = params[first : first + _MLFLOW_BATCH]
            self._client.log_batch(self._number, params=batch)

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

        # Comet gets the config and the metrics alone: no patched libraries, no console, no
        # environment.
        experiment_config = comet_ml.ExperimentConfig(
            name=run.name,
            auto_output_logging=False,
            display_summary_level=0,
            offline_directory=str(run.folder / "comet"),
            log_code=False,
            log_graph=False,
            parse_args=False,
            log_git_metadata=False,
            log_git_patch=False,
            auto_param_logging=False,
            auto_metric_logging=False,
            log_env_details=False,
        )
        # Offline there is no experiment to go on with: each process makes a part, which the upload
        # joins by the key.
        number = run.number_of(self.name, lambda: uuid.uuid4().hex)
        mode: str | None = None
        if run.from_step:
            mode = "get"
        elif not offline:
            mode = "create"
        self._experiment = comet_ml.start(
            mode=mode,
            online=not offline,
            experiment_config=experiment_config,
            project_name=project,
            workspace=workspace,
            experiment_key=number,
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
    """A service in its own process: it gets each point, and answers at its end."""

    def __init__(
        self, name: str, run: Described, where: Mapping[str, Any], *, wait_seconds: float
    ) -> None:
        """Start its process; raises OSError if that fails. A later call raises its errors.

        Args:
            name: of the service.
            run: the run that it shows.
            where: arguments of the service.
            wait_seconds: longest wait of `close`.
        """
        super().__init__(f"{__name__}:serve", path=sys.path)
        # A step waits no longer than this for a process that is stopped.
        self._end.settimeout(_ANSWER_SECONDS)
        self.name = name
        self._is_over = False
        self._is_hurried = False
        self._wait_seconds = wait_seconds
        run_fields = vars(run) | {"folder": str(run.folder)}
        self.send(name=name, run=run_fields, where=where, wait_seconds=wait_seconds, argv=sys.argv)

    def write(self, point: Point) -> None:
        """Hand a point over; raises TrainingError if the service has failed or is far behind."""
        point_fields = vars(point) | {"metrics": dict(point.metrics)}
        try:
            self.send(**point_fields)
        except OSError:
            self._receive_answer()

    def hurry(self) -> None:
        """Wait less in `close`: a run that was asked to stop, or has failed, may have no more
        time.
        """
        self._is_hurried = True
        self._wait_seconds = min(self._wait_seconds, HURRIED_SECONDS)

    def close(self) -> None:
        """Wait until all is written; raises TrainingError if that fails or takes too long.

        After a failure it does not wait.
        """
        if not self._is_over:
            with suppress(OSError):
                self.send(is_hurried=self._is_hurried)
            self._receive_answer()

    def _receive_answer(self) -> None:
        """Wait for the service's last answer, and end its process.

        Raises:
            TrainingError: the service has failed, or does not answer in time.
        """
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
    """Run a service: make it, hand it every point, close it, and answer with the reason of a
    failure.
    """
    os.nice(_NICENESS)  # ranks get the processor first
    request = channel.receive()
    failure = ""
    if request is None:
        return
    sys.argv[:] = request["argv"]
    run_fields = request["run"] | {"folder": Path(request["run"]["folder"])}
    make = partial(SERVICES[request["name"]], Described(**run_fields), **request["where"])
    aside = Aside(request["name"], make, wait_seconds=request["wait_seconds"])
    try:
        message = channel.receive() or {}
        while "step" in message:
            aside.write(Point(**message))
            message = channel.receive() or {}
        if message.get("is_hurried", True):
            aside.hurry()
        aside.close()
    except Exception as error:
        failure = reason_of(error)
    channel.send(failure=failure)
