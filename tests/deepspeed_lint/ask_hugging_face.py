"""Answers of transformers' Trainer configuration and of Accelerate to files:
ask_hugging_face.py FILES.json.

Writes answers.json: for each file and reader the refusal, or "" where it comes as far as
deepspeed.initialize.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "DS_ACCELERATOR": "cpu",
    "ACCELERATE_USE_DEEPSPEED": "true",
}

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from framework.engine.extensions import use_own_cache


class AskedError(Exception):
    """Error for a config that came as far as DeepSpeed."""


class Model(torch.nn.Linear):
    """A model with the one number of its config that the readers use."""

    class config:  # noqa: N801
        hidden_size = 8


def reach(**arguments: Any) -> None:
    raise AskedError(arguments["config_params"])


def prepare(plugin: DeepSpeedPlugin, values: dict[str, Any]) -> dict[str, Any]:
    """Return what Accelerate hands to deepspeed.initialize."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model, rows = Model(8, 8), torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=8)
    # An optimizer and a schedule of one's own where the file has none.
    optimizer = (
        DummyOptim(model.parameters())
        if "optimizer" in values
        else torch.optim.AdamW(model.parameters())
    )
    further = [DummyScheduler(optimizer, total_num_steps=10)] if "scheduler" in values else []
    try:
        accelerator.prepare(model, optimizer, rows, *further)
    except AskedError as reached:
        return dict(reached.args[0])
    raise RuntimeError("deepspeed.initialize was not called")


def trainers(path: str, values: dict[str, Any]) -> dict[str, Any]:
    """Read a file as `TrainingArguments.__post_init__` and `Trainer` do."""
    config = HfTrainerDeepSpeedConfig(path)
    config.trainer_config_process(ARGUMENTS)
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    config.trainer_config_finalize(ARGUMENTS, Model(8, 8), 10)
    return prepare(plugin, values)


def accelerates(path: str, values: dict[str, Any]) -> dict[str, Any]:
    return prepare(DeepSpeedPlugin(hf_ds_config=path), values)


def main() -> None:
    answers = []
    for text in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        Path("asked.json").write_text(text, encoding="utf-8")
        answer: dict[str, Any] = {}
        for name, asked in (("huggingface", trainers), ("accelerate", accelerates)):
            try:
                config = asked("asked.json", text_values(text))
                answer |= {
                    name: "",
                    f"{name}-config": {
                        key: str(value) if value == float("inf") else value
                        for key, value in config.items()
                    },
                }
            except Exception as error:
                answer[name] = f"{type(error).__name__}: {error}"[:300]
        answers.append(answer)
    Path("answers.json").write_text(json.dumps(answers), encoding="utf-8")


def text_values(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError:
        return {}


if __name__ == "__main__":
    use_own_cache()  # where ops are compiled already
    ARGUMENTS = TrainingArguments(output_dir="out", report_to=[], warmup_steps=2)
    deepspeed.initialize = reach
    main()
    sys.stdout.flush()
    os._exit(0)
