"""The budget of a step: work and least times against formulas, kernels of traces in their parts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.budget.least import (
    ATTENTION,
    ELEMENTWISE,
    HOST,
    INPUT,
    LOSS,
    LOSS_PASSES,
    OPTIMIZER,
    PARTS,
    PASSES,
    PRODUCTS,
)
from benchmarks.budget.trace import Piece, profile_of, read_trace
from benchmarks.step_budget import budget_of, table
from framework.plan.devices import Machine
from tests.places import ROOT

H200 = Machine.from_measured(
    {"flops_per_second": {"bf16": 8e14}, "memory_bytes_per_second": 4e12},
    Machine.listed("h200-141gb", devices_per_host=1),
)


def parts_of(name: str, zero_stage: int = 1) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in budget_of(name, H200, zero_stage=zero_stage)["parts"]}


def test_gpt2_has_the_work_of_its_formulas() -> None:
    tokens = 32 * 1024
    parts = parts_of("gpt2")
    assert parts[PRODUCTS]["flops"] == 6 * tokens * 12 * 12 * 768**2
    assert parts[LOSS]["flops"] == pytest.approx(6 * tokens * 768 * 50257, rel=0.01)
    # two products of the forward pass, five of the backward pass, a half of them masked
    scores = 12 * (2 + 5) * 2 * 32 * 12 * 1024**2 * 64 / 2
    assert parts[ATTENTION]["flops"] == pytest.approx(scores, rel=0.002)
    assert parts[LOSS]["num_bytes"] == pytest.approx(4 * tokens * 50257, rel=0.04)  # and the norm
    # fp32 weight and moments both ways, gradients for norm and step, the weight in bf16
    num_params = budget_of("gpt2", H200, zero_stage=1)["num_params"]
    assert parts[OPTIMIZER]["num_bytes"] == num_params * (2 * 12 + 2 * 2 + 2)
    seconds = parts[PRODUCTS]["flops"] / 8e14
    assert parts[PRODUCTS]["seconds"] == pytest.approx(seconds)


def test_what_no_step_needs_is_not_in_the_least_time() -> None:
    budget = budget_of("gpt2", H200, zero_stage=1)
    besides = {part["name"] for part in budget["parts"] if not part["is_needed"]}
    assert besides == {LOSS_PASSES, PASSES}
    needed = sum(part["seconds"] for part in budget["parts"] if part["is_needed"])
    assert budget["least_seconds"] == pytest.approx(needed)
    assert PASSES not in parts_of("gpt2", zero_stage=0)


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    whole = parts_of("8b-slice")
    adapted = parts_of("8b-slice-lora")
    assert 2 / 3 < adapted[PRODUCTS]["flops"] / whole[PRODUCTS]["flops"] < 0.69
    assert adapted[OPTIMIZER]["num_bytes"] < whole[OPTIMIZER]["num_bytes"] / 100
    assert adapted[ATTENTION]["flops"] == pytest.approx(whole[ATTENTION]["flops"])


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": ts,
        "dur": dur,
        "tid": tid,
        "pid": 1,
        "args": args,
    }


def launched(number: int, kernel: str, ts: float, dur: float, *, at: float, tid: int = 1) -> Any:
    """The call of the host at `at` in a thread, and the kernel that it starts."""
    return [
        event("cudaLaunchKernel", "cuda_runtime", at, 1, tid, correlation=number),
        event(kernel, "kernel", ts, dur, 7, correlation=number),
    ]


# Two steps of 100 us on the device. The backward pass is launched by another thread than the one
# that has the ranges.
DEVICE_TRACE = [
    event("ProfilerStep#3", "user_annotation", 0, 50),
    event("ProfilerStep#4", "user_annotation", 50, 50),
    event("forward", "user_annotation", 5, 20),
    event("backward", "user_annotation", 25, 15),
    event("optimizer", "user_annotation", 40, 8),
    event("aten::linear", "cpu_op", 6, 4),
    event("aten::addmm", "cpu_op", 7, 2),
    *launched(1, "nvjet_tst_128x256", 100, 30, at=8),
    event("aten::native_layer_norm", "cpu_op", 11, 2),
    *launched(2, "vectorized_layer_norm_kernel", 130, 10, at=12),
    event("_SumOfTiles", "cpu_op", 14, 6),
    event("aten::mm", "cpu_op", 15, 2),
    *launched(3, "nvjet_tst_64x8", 140, 20, at=16),
    event("FlashAttentionBackward", "cpu_op", 28, 4, 2),
    *launched(4, "flash_bwd_kernel", 160, 15, at=29, tid=2),
    event("torch::autograd::AccumulateGrad", "cpu_op", 34, 3, 2),
    *launched(5, "elementwise_copy", 180, 5, at=35, tid=2),
    event("aten::cat", "cpu_op", 41, 1),
    *launched(6, "CatArrayBatchedCopy", 185, 5, at=41),
    event("Optimizer.step#AdamW.step", "user_annotation", 43, 4),
    event("aten::_fused_adamw_", "cpu_op", 44, 2),
    *launched(7, "multi_tensor_apply_kernel<FusedAdam>", 190, 10, at=45),
    event("copy", "user_annotation", 51, 3),
    *launched(8, "Memcpy HtoD (Pinned -> Device)", 200, 20, at=52),
    event("forward", "user_annotation", 55, 10),
    *launched(9, "triton_red_fused_native_layer_norm", 280, 20, at=60),
    *launched(10, "nvjet_of_no_step", 400, 50, at=300),
]


def test_kernels_of_a_device_by_what_started_them(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    path = tmp_path / "profile/rank0.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": DEVICE_TRACE}).encode()))
    found = profile_of(read_trace(tmp_path))
    assert found.is_device
    assert found.num_steps == 2
    microseconds = {part: round(2e6 * seconds) for part, seconds in found.seconds.items()}
    assert microseconds == {
        PRODUCTS: 30,
        ELEMENTWISE: 30,
        LOSS: 20,
        ATTENTION: 15,
        PASSES: 10,
        OPTIMIZER: 10,
        INPUT: 20,
        HOST: 65,
    }
    # every microsecond from the first kernel to the last one has a name
    assert sum(microseconds.values()) == round(2e6 * found.step_seconds) == 200
    (longest,) = found.longest(PRODUCTS)
    assert longest[:2] == ("nvjet_tst_128x256", 0.5)
    assert longest[2] == pytest.approx(0.015)


def test_two_profiles_stand_beside_each_other() -> None:
    before = profile_of(DEVICE_TRACE)
    after = profile_of([piece for piece in DEVICE_TRACE if "Cat" not in piece["name"]])
    lines = table("gpt2", budget_of("gpt2", H200, zero_stage=1), [before, after])
    widths = {line.count(" | ") for line in lines if line.startswith("|")}
    assert len(widths) == 1
    assert [line for line in lines if line.startswith(f"| {PASSES}")]
    named = [line.split(" | ")[0].strip("| ") for line in lines if line.startswith("|")][2:-1]
    assert named == [part for part in PARTS if part in named]


@pytest.mark.parametrize(
    ("name", "path", "part"),
    [
        ("ampere_bf16_s16816gemm", ("aten::mm",), PRODUCTS),
        ("triton_poi_fused__log_softmax_nll_loss", (), LOSS),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", (), ATTENTION),
        ("ncclDevKernel_AllReduce", (), "communication"),
        ("sm90_xmma_fprop_implicit_gemm", ("aten::cudnn_convolution",), PRODUCTS),
    ],
)
def test_names_of_kernels(name: str, path: tuple[str, ...], part: str) -> None:
    assert Piece(name, 0, 1, 0, path).part() == part


def test_operations_of_a_processor(tmp_path: Path) -> None:
    """A real trace: each operation counts without those within it, and Python is the rest."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(16, 50))
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in range(2):
            with record_function(f"ProfilerStep#{step}"):
                with record_function("forward"):
                    logits = model(torch.randn(4, 8, 16)).flatten(0, 1)
                    loss = nn.functional.cross_entropy(logits, torch.zeros(32, dtype=torch.int64))
                with record_function("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
                with record_function("optimizer"):
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    found = profile_of(read_trace(path))
    assert not found.is_device
    expected = {PRODUCTS, ATTENTION, ELEMENTWISE, LOSS, OPTIMIZER, PASSES, HOST}
    assert expected <= {part for part, seconds in found.seconds.items() if seconds > 0}
    # five linear layers, forward and twice backward; the first one has no gradient of its input
    products = sum(of.count for of in found.kernels[PRODUCTS].values()) / found.num_steps
    assert products == 14
    assert sum(found.seconds.values()) == pytest.approx(found.step_seconds, rel=0.05)


def test_a_trace_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no trace"):
        read_trace(tmp_path)
    with pytest.raises(ValueError, match="number of its steps"):
        profile_of(DEVICE_TRACE[5:])


def test_the_page_has_the_figures() -> None:
    results = json.loads((ROOT / "benchmarks/results/step_budget.json").read_text("utf-8"))
    page = (ROOT / "docs/step-budget.md").read_text("utf-8")
    for name, budget in results["models"].items():
        shown = [line for line in table(name, budget, []) if line.startswith("| ")]
        for line in shown[2:]:
            assert line in page, (name, line)
