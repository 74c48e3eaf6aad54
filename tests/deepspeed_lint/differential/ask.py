"""DeepSpeed's side, in one process on CPU: ask.py QUESTIONS.json ANSWERS.json.

A question is {"config", "worlds", "depth"}: "parse" makes a `DeepSpeedConfig` for each of the
worlds until one is taken, "step" goes on to `deepspeed.initialize` of a small model and two steps.
An answer is {"refused": "", "parse", "init", "step" or "time"; "error": exception and its text;
"saw": what the engine reports of itself; "started": whether it came to initialize}.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import logger

from framework.engine.extensions import use_own_cache
from tests.deepspeed_lint.rules.ask_deepspeed import forget, parse, spare_time, start
from tests.ops_ahead import load_ops

SECONDS = 300
MOST_MICRO_BATCHES = 24


class TooLong(BaseException):
    """A case that took longer than it may."""


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    signal.signal(signal.SIGALRM, _stop)
    if any(question["depth"] == "step" for question in asked["questions"]):
        # they are compiled where they have not been: that may take longer than a question
        load_ops()
    answers: list[dict[str, Any]] = []
    left = asked["start_most"]
    for question in asked["questions"]:
        answers.append(
            ask(question["config"], question["worlds"], question["depth"] if left > 0 else "parse")
        )
        left -= answers[-1]["started"]
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


def ask(config: dict[str, Any], worlds: list[int], depth: str) -> dict[str, Any]:
    """Return where DeepSpeed stops."""
    at, refused, error = "parse", "", ""
    engine: Any = None
    rates: dict[str, Any] = {}
    first_beta = None  # a schedule moves it from step to step
    signal.alarm(SECONDS)
    try:
        _parse_for_one(config, worlds)
        if depth == "step":
            at = "init"
            engine = start(config)
            at = "step"
            first_beta = (engine.basic_optimizer.param_groups[0].get("betas") or [None])[0]
            rates = _train(engine)
    except TooLong:
        refused, error = "time", f"more than {SECONDS} s"
    except (Exception, SystemExit) as reason:
        refused, error = at, f"{type(reason).__name__}: {reason}"[:300]
    finally:
        signal.alarm(0)
    # Outside of the try: what fails here is this file's own mistake and no refusal.
    saw = (
        {} if refused or engine is None else _describe(engine) | rates | {"first_beta": first_beta}
    )
    if depth == "step":
        _clean(engine)
    return {"refused": refused, "error": error, "saw": saw, "started": at != "parse"}


def _parse_for_one(config: dict[str, Any], worlds: list[int]) -> None:
    for world in worlds:
        try:
            parse(config, world)
            return
        except AssertionError:
            if world == worlds[-1]:
                raise


def _train(engine: Any) -> dict[str, Any]:
    """Take two optimizer steps; accumulation over thousands of micro-batches is left off early."""
    rates = []
    for _ in range(max(2, min(MOST_MICRO_BATCHES, int(2 * engine.gradient_accumulation_steps())))):
        inputs = torch.ones(2, 8, dtype=next(engine.module.parameters()).dtype)
        output = engine(inputs)
        engine.backward(output.float().pow(2).mean())
        engine.step()
        rates.append(engine.get_lr()[0])
    return {"rates": rates, "steps": engine.global_steps, "output": str(output.dtype)}


def _describe(engine: Any) -> dict[str, Any]:
    """Return the values of the engine that show the silent harms."""
    read = engine._config
    return {
        "clipping": engine.gradient_clipping(),
        "stage": int(engine.zero_optimization_stage()),
        "autocast": bool(engine.torch_autocast_enabled()),
        "accumulation": engine.gradient_accumulation_steps(),
        "optimizer": type(engine.basic_optimizer).__name__,
        "schedule": type(engine.lr_scheduler).__name__,
        "load_universal": bool(read.load_universal_checkpoint),
        "prescale": bool(read.prescale_gradients),
        "warmup_type": getattr(engine.lr_scheduler, "warmup_type", None),
        "tuning": read.autotuning_config.metric,
        "tp_group": str(read.tensor_parallel_config.tensor_parallel.tp_group),
    }


def _clean(engine: Any) -> None:
    try:
        if engine is not None:
            forget(engine)
    except Exception:
        logging.getLogger(__name__).exception("an engine did not go quietly")


def _stop(*_: object) -> None:
    raise TooLong


if __name__ == "__main__":
    use_own_cache()  # where ops are compiled already
    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True  # type: ignore[attr-defined]
    os.environ |= {"CROSS_SIZE": "1", "CROSS_RANK": "0", "LOCAL_SIZE": "1"}
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    deepspeed.init_distributed("gloo")
    spare_time()
    main()
    sys.stdout.flush()
    os._exit(0)
