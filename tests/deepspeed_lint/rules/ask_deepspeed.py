"""Answers of DeepSpeed to many configs, in one process on CPU: ask_deepspeed.py QUESTIONS.json
ANSWERS.json.

A question is {"config", "asked", "world"}: how far is it taken? An answer is {"refused": step or
"", "error", "saw"}; `saw` holds what the engine reports of itself, for the silent rules.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpuinfo
import deepspeed
import torch
from deepspeed.module_inject.auto_ep_config import parse_autoep_config, validate_autoep_config
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import config as ds_config
from deepspeed.utils import groups

from framework.engine.extensions import use_own_cache

STEPS = 2
LATER = {
    "parse": ["parse"],
    "autoep": ["parse", "autoep"],
    "init": ["parse", "init"],
    "configure": ["parse", "configure"],
    "step": ["parse", "init", "step"],
    "compile": ["parse", "init", "compile"],
}


def spare_time() -> None:
    """Keep what DeepSpeed looks up for every engine and never changes: the processor, for which
    `cpuinfo` starts a Python of a second. Do not compile three ops that only have to exist, which
    takes minutes: Adagrad's step, pinned memory, and `async_io`, at which a question about a drive
    ends. Nor compile Muon's step.
    """
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    torch._dynamo.config.disable = True
    names = ("create_adagrad", "adagrad_update", "destroy_adagrad")
    OpBuilder._loaded_ops["cpu_adagrad"] = SimpleNamespace(**dict.fromkeys(names, lambda *_: None))
    sys._deepspeed_pin_memory_op_module = SimpleNamespace()  # type: ignore[attr-defined]
    OpBuilder._loaded_ops["async_io"] = SimpleNamespace()  # without `aio_handle`


def main() -> None:
    questions = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answers = []
    for question in questions:
        gc.freeze()  # stage 3 looks for garbage among the objects of this question alone
        answers.append(ask(**question))
        Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


def ask(
    config: dict[str, Any], asked: str, world: int | None, steps: int = STEPS
) -> dict[str, Any]:
    """Return where DeepSpeed stops."""
    steps_of = {
        "parse": lambda: parse(config, world or 1),
        "autoep": lambda: experts(config, world or 1),
        "configure": lambda: deepspeed.checkpointing.configure(
            None, deepspeed_config=copy.deepcopy(config)
        ),
    }
    saw: dict[str, Any] = {}
    for step in LATER[asked]:
        try:
            if step in steps_of:
                steps_of[step]()
            elif step == "init":
                engine = start(config)
                saw |= describe(engine)
            elif step == "compile":
                engine.compile()
            else:
                saw |= train(engine, steps)
        except Exception as error:
            return {"refused": step, "error": f"{type(error).__name__}: {error}"[:300], "saw": saw}
        finally:
            if step == asked and step not in steps_of and "engine" in locals():
                forget(engine)
    return {"refused": "", "error": "", "saw": saw}


def parse(config: dict[str, Any], world: int) -> None:
    real = ds_config.dist.get_world_size
    ds_config.dist.get_world_size = lambda *_: world
    try:
        ds_config.DeepSpeedConfig(copy.deepcopy(config))
    finally:
        ds_config.dist.get_world_size = real


def experts(config: dict[str, Any], world: int) -> None:
    """Do what the engine does in `_configure_expert_parallel`, for a world that is not there."""
    parsed = ds_config.DeepSpeedConfig({**copy.deepcopy(config), "train_batch_size": None})
    zero, tensor = parsed.zero_config, parsed.tensor_parallel_config
    validate_autoep_config(
        parse_autoep_config(config["expert_parallel"]),
        world,
        1,
        tensor.autotp_size,
        1,
        zero_stage=zero.stage,
        deepcompile_enabled=parsed.compile_config.deepcompile,
        tp_preset_model=tensor.preset_model,
        use_data_before_expert_parallel=parsed.use_data_before_expert_parallel_,
        zero_offload_optimizer=zero.offload_optimizer is not None,
        zero_offload_param=zero.offload_param is not None,
    )


def start(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    return deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=copy.deepcopy(config)
    )[0]


def train(engine: Any, steps: int) -> dict[str, Any]:
    rates = []
    for _ in range(steps * max(1, engine.gradient_accumulation_steps())):  # ZenFlow makes it 0
        inputs = torch.ones(2, 8, dtype=next(engine.module.parameters()).dtype)
        loss = engine(inputs).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        rates.append(engine.get_lr()[0])
    state = sorted({name for state in engine.basic_optimizer.state.values() for name in state})
    return {
        "rates": rates,
        "steps": engine.global_steps,
        "finite": bool(torch.isfinite(loss)),
        "state": state,
    }


def describe(engine: Any) -> dict[str, Any]:
    optimizer = engine.basic_optimizer
    return {
        "clipping": engine.gradient_clipping(),
        "stage": int(engine.zero_optimization_stage()),
        "dtype": str(next(engine.module.parameters()).dtype),
        "fp16": engine.fp16_enabled(),
        "autocast": engine.torch_autocast_enabled(),
        "autocast_dtype": str(engine.torch_autocast_dtype()),
        "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__name__}",
        "adam_w_mode": getattr(optimizer, "adam_w_mode", None),
        "amsgrad": optimizer.param_groups[0].get("amsgrad"),
        "wrapper": type(engine.optimizer).__name__,
        "offloaded": bool(
            getattr(
                engine.optimizer,
                "cpu_offload",
                getattr(engine.optimizer, "offload_optimizer", False),
            )
        ),
        "contiguous": getattr(engine.optimizer, "contiguous_gradients", None),
        "accumulation": engine.gradient_accumulation_steps(),
        "curriculum": bool(engine.curriculum_learning_enabled()),
        "samples": engine.train_batch_size(),
        "hpz": engine.zero_hpz_partition_size(),
        "monitors": engine.monitor.enabled,
        "counts_collectives": deepspeed.comm.comm.comms_logger.enabled,
    }


def forget(engine: Any) -> None:
    """Reset the state of modules, so that the next engine starts as in a new process."""
    engine.destroy()
    for name in (
        "mpu",
        "mesh_device",
        "_TENSOR_MODEL_PARALLEL_GROUP",
        "_MODEL_PARALLEL_GROUP",
        "_DATA_PARALLEL_GROUP",
        "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    ):
        if hasattr(groups, name):
            setattr(groups, name, None)


if __name__ == "__main__":
    use_own_cache()  # where ops are compiled already
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    deepspeed.init_distributed("gloo")
    spare_time()
    main()
    sys.stdout.flush()
    os._exit(0)
