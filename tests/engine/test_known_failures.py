"""torch's own words for memory that is not there and workers that are gone, and what becomes of
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.config.load import config_from_values
from framework.engine.failures import explaining_failures
from framework.engine.known_failures import known_failure
from framework.errors import TrainingError
from framework.plan.alternatives import size_text
from framework.plan.cluster import Cluster
from framework.plan.memory import estimate
from framework.plan.plan import make_plan
from tests.jobs.failing_parts import NO_MEMORY

STEP = (
    "set a smaller batch.micro_size (batch.global_size may stay), training.recompute_every, a higher zero.stage or "
    "zero.offload_optimizer"
)
DEAD = "DataLoader worker (pid 17) is killed by signal: "
SHARED = (
    f"{DEAD}Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your "
    "shared memory limit."
)


@pytest.mark.parametrize(
    ("error", "stated"),
    [
        (
            torch.OutOfMemoryError(NO_MEMORY),
            f"left (2.00 GiB were asked for, 1.06 GiB of 79.15 GiB are free); {STEP} ",
        ),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."),
            f"has no memory left; {STEP} [out-of-memory]",
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            "[out-of-memory]",
        ),
        (
            MemoryError(),
            "the host has no memory left for this process; set a smaller batch.micro_size",
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate 8000 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "[out-of-host-memory]",
        ),
        # torch 2.15, as DeepSpeed meets it at stages 1 and 2, and at stage 3
        (
            NotImplementedError(
                "Could not run 'aten::view' with arguments from the 'SparseCPU' backend. This could"
            ),
            "with sparse=False (the numbers are the same) [sparse-gradient]",
        ),
        (
            RuntimeError("copy_() between dense and sparse Tensors is not implemented! Found self"),
            "[sparse-gradient]",
        ),
        (OSError(12, "Cannot allocate memory"), "[out-of-host-memory]"),
        (RuntimeError(SHARED), "is killed by signal: Bus error: /dev/shm is full: "),
        (
            RuntimeError(f"{DEAD}Killed. "),
            "is killed by signal: Killed: the host, or the memory limit of this job",
        ),
        (
            RuntimeError(f"{DEAD}Segmentation fault. "),
            "data.num_workers=0 shows where [data-worker-ended]",
        ),
        (
            RuntimeError("DataLoader worker (pid(s) 17, 18) exited unexpectedly"),
            "data exited unexpectedly: the code that reads",
        ),
    ],
)
def test_what_is_known_has_a_way_out(error: Exception, stated: str) -> None:
    with pytest.raises(TrainingError) as reported, explaining_failures(Path("logs")):
        raise error
    assert stated in str(reported.value)
    assert str(reported.value).startswith("rank 0: ")
    assert str(reported.value).count("\n") == 0
    assert reported.value.exit_code == 70
    assert reported.value.__cause__ is error


def test_the_signal_is_named_also_where_torch_has_forgotten_it() -> None:
    error = RuntimeError("DataLoader worker (pid(s) 17) exited unexpectedly")
    error.__cause__ = RuntimeError(f"{DEAD}Killed. ")
    assert "killed by signal: Killed" in str(known_failure(error))


def test_a_weight_that_zero_does_not_know_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for weight in model[0].parameters():
        vars(weight)["ds_id"] = 0
    scope: dict[str, Any] = {}
    exec(
        "def fetch_sub_module(current_submodule): current_submodule[1].weight.ds_active_sub_modules",
        scope,
    )
    with pytest.raises(TrainingError) as reported, explaining_failures(Path("logs")):
        scope["fetch_sub_module"](model)
    assert "the model made a weight (1.weight of its Sequential) " in str(reported.value)
    assert str(reported.value).endswith("[weight-made-late]")


def test_an_evaluation_has_a_batch_size_of_its_own() -> None:
    scope = {"__name__": "framework.engine.some_engine", "torch": torch}
    exec("def evaluate(): raise torch.OutOfMemoryError('CUDA out of memory.')", scope)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        scope["evaluate"]()  # type: ignore[operator]
    assert (
        str(known_failure(raised.value))
        == "the device has no memory left; set a smaller evaluation.batch_size [out-of-memory]"
    )


def test_a_plan_adds_moment_components_and_settings() -> None:
    gpt = {
        "model": {"kind": "gpt", "size": "gpt2-xl"},
        "data": {"kind": "text"},
        "task": {"kind": "causal_lm"},
    }
    config = config_from_values({**gpt, "zero": {"stage": 1}, "training": {"max_steps": 9}})
    plan = make_plan(config, Cluster(devices_per_host=8, device="cuda"))
    step = compile("def step(error): raise error", "/lib/deepspeed/runtime/engine.py", "exec")
    scope: dict[str, Any] = {}
    exec(step, scope)
    with pytest.raises(TrainingError) as reported, explaining_failures(Path("logs"), plan):
        scope["step"](torch.OutOfMemoryError(NO_MEMORY))
    at_step = estimate(plan).moments["step"]
    name, size = max(at_step.items(), key=lambda item: item[1])
    assert (
        f"are free) in the optimizer's step; by estimate {size_text(sum(at_step.values()))} then: "
        f"{name} {size_text(size)}, "
    ) in str(reported.value)
    assert "; set zero.stage: 3" in str(reported.value)
    assert str(reported.value).endswith(f" less); {STEP} [out-of-memory]")
    host = "the host has no memory left for this process; set a smaller"
    with pytest.raises(TrainingError, match=host), explaining_failures(Path("logs"), plan):
        raise MemoryError


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes"), RuntimeError("server: out of memory"), KeyError(), OSError(2, "No")],
)
def test_what_is_not_known_stays_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as same, explaining_failures(Path("logs")):
        raise error
    assert same.value is error
