"""Loops of one's own on two ranks: own_loops.py OUT.json. What each has seen on rank 0 is left
there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import framework
from framework.config.run_config import RunConfig
from framework.engine.distributed import process_group
from framework.errors import FrameworkError, RunStopped
from tests.places import ROOT

sys.path.insert(0, str(ROOT / "examples"))
QUIET = {"report": False, "tensorboard": False, "csv": False, "progress": "off"}


def settings(name: str, steps: int, stage: int, **sections: Any) -> dict[str, Any]:
    """Sections of a run in a folder of its own."""
    values = {
        "run": {"output_dir": name},
        "training": {"max_steps": steps},
        "zero": {"stage": stage},
    }
    return {**values, "monitors": QUIET, **sections}


def digits(stage: int, steps: int = 6, **sections: Any) -> dict[str, Any]:
    """A run of the digits, as a file would have it."""
    return {
        "run": {"name": f"own{stage}"},
        "data": {"kind": "digits"},
        "batch": {"global_size": 32, "accumulation_steps": 2},
        "training": {"max_steps": steps, "log_every": 1},
        "zero": {"stage": stage},
        "monitors": QUIET,
        **sections,
    }


def as_fit_takes_it(values: dict[str, Any]) -> RunConfig | dict[str, Any] | Path:
    """A config as classes at stage 0, as a file at stage 2, as nested dicts at stage 3."""
    stage = values["zero"]["stage"]
    if stage == 0:
        return framework.RunConfig(
            run=framework.Run(**values["run"]),
            data=framework.Digits(),
            batch=framework.Batch(**values["batch"]),
            training=framework.Training(**values["training"]),
            zero=framework.Zero(stage=0),
            monitors=framework.Monitors(**values["monitors"]),
        )
    if stage == 2:
        path = Path(f"asked-by-{os.environ['RANK']}.json")
        path.write_text(json.dumps(values), encoding="utf-8")
        return path
    return values


def loop(
    config: dict[str, Any], *, apart: bool = False, asks_at: int = -1, evaluates: bool = True
) -> list[float]:
    """A loop over the run's own batches, whole steps or their parts; asks itself to stop where it
    is to.
    """
    losses, loss_of = [], torch.nn.functional.cross_entropy
    with framework.open_engine(config) as engine:
        stream = engine.batches()
        while engine.steps_taken < engine.max_steps and not engine.should_stop():
            if engine.steps_taken == asks_at and engine.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            pair = [next(stream), next(stream)]
            if apart:
                for batch in pair:
                    images, labels = engine.move(batch)
                    engine.backward(loss_of(engine(images), labels))
                    engine.step()
            else:
                losses.append(engine.train_step(*pair).read()["train/loss"])
                engine.log({"train/loss": losses[-1]})
            if asks_at >= 0:
                torch.distributed.barrier()
        if evaluates:
            engine.evaluate()
    return losses


def slow_evaluation() -> dict[str, float]:
    """An evaluation that takes longer than a run may be without a sign of life, by its batches, of
    which none does.
    """

    def batches() -> Iterator[Any]:
        for _ in range(13):
            time.sleep(0.5)
            yield torch.rand(4, 1, 28, 28), torch.zeros(4, dtype=torch.long)

    with framework.open_engine(
        digits(0, run={"name": "slow"}, supervision={"hang_seconds": 6})
    ) as engine:
        stream = engine.batches()
        while engine.steps_taken < 3 and not engine.should_stop():
            engine.train_step(next(stream), next(stream))
        return engine.evaluate(batches())


def main() -> None:
    import gan
    import gradient_penalty

    found: dict[str, Any] = {}
    with process_group(None):
        for stage in (0, 1):
            found[f"gan{stage}"] = gan.main(**settings(f"gan{stage}", 4, stage))
        for stage in (1, 2):
            found[f"penalty{stage}"] = gradient_penalty.main(
                **settings(f"penalty{stage}", 4, stage)
            )
        gan.main(**settings("halves", 2, 1))
        found["halves"] = gan.main(**settings("halves", 4, 1, checkpoint={"resume": "auto"}))
        for stage in (0, 2, 3):
            found[f"own{stage}"] = loop(digits(stage))
            loop(digits(stage, run={"name": f"apart{stage}"}), apart=True)
            result = framework.fit(as_fit_takes_it(digits(stage, run={"name": f"fit{stage}"})))
            found[f"fit{stage}"] = result.metrics["eval/loss"]
            found[f"history{stage}"] = {
                name: (result.history[name].steps, result.history[name].values)
                for name in ("train/loss", "eval/loss")
            }
        try:
            loop(digits(2, 500, run={"name": "stopped"}), asks_at=3)
        except RunStopped as error:
            found["stopped"] = str(error)
        found["rest"] = len(
            loop(digits(2, 40, run={"name": "stopped"}, checkpoint={"resume": "auto"}))
        )
        try:
            with framework.open_engine(digits(0, run={"name": "broken"})) as engine:
                engine.train_step(1)
        except FrameworkError as error:
            found["batches"] = str(error)
        try:
            gradient_penalty.main(**settings("penalty3", 2, 3))
        except FrameworkError as error:
            found["penalty3"] = str(error)
        found["slow"] = slow_evaluation()
        often = {"every_steps": 2, "start_step": 3, "at_start": True, "at_end": True}
        loop(
            digits(0, run={"name": "often"}, evaluation=often, checkpoint={"every_epochs": 1}),
            evaluates=False,
        )
        if torch.distributed.get_rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as train.py ends, and for its reason
