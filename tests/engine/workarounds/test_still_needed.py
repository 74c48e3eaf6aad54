"""Workarounds die on time: each names DeepSpeed's release, and a test fails here when that defect
is mended upstream.

Then the workaround goes, and its test with it, as soon as `pyproject.toml` asks for a release
without the defect.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
from deepspeed.runtime import lr_schedules, torch_autocast, utils
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import (
    parameter_offload,
    partition_parameters,
    partitioned_param_coordinator,
)
from deepspeed.utils import nvtx

from framework.engine.workarounds.compute_capabilities import naming_them_by_numbers
from tests.launched import run_ranks
from tests.places import ROOT

WORKAROUNDS = sorted((ROOT / "framework/engine/workarounds").glob("[!_]*.py"))


def source_of(method: str) -> str:
    """Of DeepSpeedEngine, in the file: decorators of theirs hide it from `inspect`."""
    (found,) = re.findall(
        rf"\n    def {method}\(.*?(?=\n    def |\n    @)",
        inspect.getsource(DeepSpeedEngine),
        re.DOTALL,
    )
    return str(found)


@pytest.mark.parametrize("path", WORKAROUNDS, ids=lambda path: path.stem)
def test_each_names_a_release(path: Path) -> None:
    stated = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert re.search(r"(DeepSpeed|torch) (up to )?\d+\.\d+\.\d+", " ".join(stated.split()))


def test_architectures_with_letters_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = FusedAdamBuilder()
    builder.jit_mode = True
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a 10.0f+PTX")
    with pytest.raises(ValueError, match="invalid literal"):
        builder.compute_capability_args()
    with naming_them_by_numbers():
        assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0 10.0+PTX"
        builder.compute_capability_args()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0a 10.0f+PTX"


def test_grad_norm_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.runtime.engine.clip_grad_norm_", lambda **_: torch.ones(()))
    engine: Any = SimpleNamespace(
        module=torch.nn.Linear(1, 1), gradient_clipping=lambda: 1.0, mpu=None
    )
    before = dict(vars(engine))
    assert DeepSpeedEngine.clip_fp32_gradients(engine) is None
    assert vars(engine) == before


def test_grad_norm_of_a_pipeline_is_that_of_its_first_stage() -> None:
    assert "get_model_parallel_rank() == 0" in inspect.getsource(utils.clip_grad_norm_)


def test_fp32_sums_at_stage_1_are_another_optimizer_s() -> None:
    assert "ZeRO Stage 1 with" in source_of("_do_optimizer_sanity_check")


@pytest.mark.slow
def test_grad_scaler_of_autocast_is_not_saved() -> None:
    methods = (
        "_save_checkpoint",
        "_save_zero_checkpoint",
        "_load_checkpoint",
        "_load_zero_checkpoint",
    )
    assert [method for method in methods if "gradscaler" in source_of(method)] == []


def test_grad_scaler_of_fp16_weights_at_stage_0_is_not_used() -> None:
    assert not any(
        issubclass(kind, ZeROOptimizer) for kind in (FP16_Optimizer, FP16_UnfusedOptimizer)
    )
    scaled = [line for line in source_of("backward").splitlines() if "scale_if_loss" in line]
    assert scaled == ["                loss = self.optimizer.scale_if_loss(loss)"], (
        "of ZeRO's optimizers alone"
    )


def test_half_precision_begins_with_an_empty_step_and_its_norm_is_scaled() -> None:
    for kind in (FP16_Optimizer, FP16_UnfusedOptimizer):
        assert "self.optimizer.step()" in inspect.getsource(kind.initialize_optimizer_states)
    source = inspect.getsource(FP16_UnfusedOptimizer.step)
    assert "self._global_grad_norm = get_global_norm(norm_list=norm_groups)\n" in source
    assert "split_params_grads_into_shared_and_expert_params(group)" in source


@pytest.mark.slow
def test_measurements_are_begun_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_of("step").count("self._start_timers(") == 1
    assert "enabled" not in source_of("_start_timers")
    begun: list[str] = []
    monkeypatch.setattr(nvtx, "enable_nvtx", True)
    monkeypatch.setattr(nvtx, "_range_push", lambda accelerator, name: begun.append(name))
    nvtx.instrument_w_nvtx(lambda: None)()
    assert len(begun) == 1, "a CPU has no such profiler"


def test_torch_looks_for_nvidia_s_library_in_every_step() -> None:
    assert 'setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")' in inspect.getsource(deepspeed)


def test_autocast_is_noted_for_ever() -> None:
    source = inspect.getsource(torch_autocast)
    assert "TORCH_AUTOCAST_INITIALIZED = True" in source
    assert source.count("TORCH_AUTOCAST_INITIALIZED = False") == 1, "where the module begins"


@pytest.mark.slow
def test_gradient_order_is_each_ranks_own(tmp_path: Path) -> None:
    run_ranks(ROOT / "tests/jobs/routed_models.py", "out.json", "unkept", num_ranks=2, cwd=tmp_path)
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) > 1e-3


def test_module_buffers_are_not_broadcast_and_scalar_weights_cannot_be() -> None:
    source = source_of("_broadcast_model")
    assert "buffers" not in source
    assert "p.data.view(torch.uint8)" in source
    with pytest.raises(RuntimeError, match=r"dim\(\) cannot be 0 to view"):
        torch.tensor(1.0).view(torch.uint8)


def test_nvme_state_is_not_loaded() -> None:
    assert "if load_zero_checkpoint and not self.zero_nvme_offload_optimizer():" in source_of(
        "load_checkpoint"
    )


def test_moments_are_loaded_in_the_type_of_their_weight() -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([weight])
    moments = {name: torch.zeros(1) for name in ("step", "exp_avg", "exp_avg_sq")}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: moments}})
    assert optimizer.state[weight]["exp_avg"].dtype == torch.bfloat16


def test_shared_buffers_are_not_closed() -> None:
    (file,) = Path(deepspeed.__file__).parent.rglob("cpu/comm/shm.cpp")
    assert file.read_text(encoding="utf-8").count("shared_close(") == 1, "its definition"


def test_a_pipelines_buffers_serve_several_types() -> None:
    engine: Any = SimpleNamespace(_grad_layer_buf=[torch.zeros(4, dtype=torch.int64)])
    assert (
        PipelineEngine._allocate_or_extend_buffers(engine, 0, [2], torch.float32).dtype
        == torch.int64
    )


def test_apply_returns_nothing_in_zero_init() -> None:
    assert "return orig_module_apply_fn" not in inspect.getsource(partition_parameters)


def test_the_comm_module_keeps_a_destroyed_group() -> None:
    assert "cdb = None" not in inspect.getsource(deepspeed.comm.destroy_process_group)


def test_a_loaded_schedule_does_not_set_its_rate() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = lr_schedules.WarmupLR(optimizer, warmup_max_lr=1.0, warmup_num_steps=10)
    before = optimizer.param_groups[0]["lr"]
    schedule.load_state_dict({"last_batch_iteration": 9})
    assert optimizer.param_groups[0]["lr"] == before


def test_stage_3_leaves_linear_layers_and_engines_behind() -> None:
    replaces = (
        partition_parameters.InsertPostInitMethodToModuleSubClasses._enable_mem_efficient_linear
    )
    assert "torch.nn.functional.linear = zero3_linear_wrap" in inspect.getsource(replaces)
    assert "FWD_MODULE_STACK.append(self.module)" in inspect.getsource(parameter_offload)
    cached = "@functools.lru_cache(maxsize=None)\n    def __params_to_release("
    assert cached in inspect.getsource(partitioned_param_coordinator)
