"""A loop of one's own that is killed: own_loop_saves.py NAME STEPS KILLED_AT ASKS; one rank.

ASKS is how many steps there are to a call of `should_stop`, 0 for none. What the loop draws depends
on the random state alone.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import torch
from torch import nn

import framework


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))


def main(name: str, steps: int, killed_at: int, asks: int) -> None:
    config = {
        "run": {"name": name},
        "training": {"max_steps": steps},
        "batch": {"micro_size": 4},
        "zero": {"stage": 2},
        "checkpoint": {
            "every_steps": 4,
            "resume": "auto",
            "keep_best": "train/loss",
            "best_is": "min",
        },
        "monitors": {"report": False, "tensorboard": False, "progress": "off"},
    }
    adam = partial(torch.optim.Adam, lr=1e-2)
    with framework.open_engine(config, model=model, optimizer=adam) as engine:
        while engine.steps_taken < engine.max_steps:
            if asks and engine.steps_taken % asks == 0 and engine.should_stop():
                break
            if engine.steps_taken == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = engine(torch.randn(4, 8)).square().mean()
            engine.backward(loss)
            engine.step()
            engine.log({"train/loss": loss})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # as train.py ends, and for its reason
