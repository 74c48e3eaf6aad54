"""LAMB by the framework: the formula of DeepSpeed's kernel, whose source is compiled for a processor
here, on whole weights, on experts that are packed into one, and on weights of any order in memory.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import deepspeed
import pytest
import torch
from torch import Tensor

from framework.checkpoint.state.tensor_split import RankPart, Split
from framework.engine.lamb import Lamb, _scaled_parts
from framework.engine.shared_weights import Share, SharedWeight
from tests.gpu.oracles import lamb

KERNEL: Final = Path(deepspeed.__file__).parent / "ops/csrc/lamb/fused_lamb_cuda_kernel.cu"
OPTIONS: Final[dict[str, Any]] = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
BOUNDS: Final = {"max_coeff": 10.0, "min_coeff": 0.01}
# One block of one thread in the place of CUDA.
BEGIN: Final = """
#include <cmath>
#include <cstddef>
#define __global__
#define __device__
#define __restrict__
struct { unsigned x = 1, y = 1; } gridDim, blockDim;
struct { unsigned x = 0, y = 0; } blockIdx;
namespace cg {
struct thread_block {
  unsigned thread_rank() const { return 0; }
  unsigned size() const { return 1; }
};
inline thread_block this_thread_block() { return {}; }
inline void sync(thread_block) {}
}
float shared_memory[2];
template <typename T> struct SharedMemory { operator T*() { return shared_memory; } };
"""
END: Final = """
extern "C" void lamb(
    float* p, float* m, float* v, float* g, size_t n, float lr, float beta1, float beta2,
    float max_coeff, float min_coeff, float eps, int step, int bias_correction, float decay) {
  float w = 0, u = 0, coeff = 0;
  RATE
  lamb_cuda_kernel_part1<float, float, 1>(
      p, NULL, m, v, g, beta1, beta2, eps, 1.0f, step_size, n, ADAM_MODE_1, decay, &w, &u);
  lamb_cuda_kernel_part3<float, float>(
      p, NULL, m, v, g, beta1, beta2, max_coeff, min_coeff, eps, 1.0f, step_size, n, ADAM_MODE_1,
      decay, &w, &u, &coeff);
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """DeepSpeed's own kernels, and its lines that compute the rate."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")
    text = KERNEL.read_text(encoding="utf-8")
    kernels = text[text.index("typedef enum") : text.index("void fused_lamb_cuda(")]
    rate = re.search(r"float step_size = 0;\n.*?(?=    cudaStream_t)", text, re.DOTALL)
    assert rate is not None
    source = BEGIN + kernels + END.replace("RATE", rate[0])
    (folder / "lamb.cpp").write_text(source, encoding="utf-8")
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", "lamb.so", "lamb.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    function: Callable[..., None] = ctypes.CDLL(str(folder / "lamb.so")).lamb
    return function


def by_kernel(
    call: Callable[..., None], weight: Tensor, gradients: list[Tensor], *, corrects: bool
) -> Tensor:
    """Step a weight by the kernel."""
    means = [torch.zeros_like(weight), torch.zeros_like(weight)]
    first_beta, second_beta = OPTIONS["betas"]
    for step, gradient in enumerate(gradients, 1):
        tensors = [weight, *means, gradient]
        bounds = (BOUNDS["max_coeff"], BOUNDS["min_coeff"])
        rates = (0.05, first_beta, second_beta, *bounds, OPTIONS["eps"])
        call(
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
            ctypes.c_size_t(weight.numel()),
            *map(ctypes.c_float, rates),
            ctypes.c_int(step),
            ctypes.c_int(corrects),
            ctypes.c_float(OPTIONS["weight_decay"]),
        )
    return weight


def stepped(optimizer: Any, weight: torch.nn.Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-6, 30.0, 0.0])
def test_steps_are_those_of_deepspeeds_kernel(
    kernel: Callable[..., None], size: float, corrects: bool
) -> None:
    """With ratios between the bounds, below and above them, and of weights that are zero."""
    torch.manual_seed(5)
    first = size * torch.randn(12, 7)
    gradients = [torch.randn(12, 7) for _ in range(20)]
    expected = by_kernel(kernel, first.clone(), gradients, corrects=corrects)
    own = torch.nn.Parameter(first.clone())
    made = Lamb([own], lr=0.05, **OPTIONS, **BOUNDS, bias_correction=corrects)
    found = stepped(made, own, gradients)
    plain = torch.nn.Parameter(first.clone())
    oracle = lamb([plain], lr=0.05, **OPTIONS, bias_correction=corrects)
    by_oracle = stepped(oracle, plain, gradients)
    moved = (expected - first).norm()
    assert (found - expected).norm() < 1e-4 * moved
    assert (by_oracle - expected).norm() < 1e-4 * moved


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_weights_of_any_order_in_memory_are_stepped(order: torch.memory_format) -> None:
    torch.manual_seed(5)
    first = torch.randn(4, 3, 5, 5)
    gradients = [torch.randn(4, 3, 5, 5) for _ in range(3)]
    weight = torch.nn.Parameter(first.clone(memory_format=order))
    found = stepped(
        Lamb([weight], lr=0.05, **OPTIONS, **BOUNDS, bias_correction=True), weight, gradients
    )
    plain = torch.nn.Parameter(first.clone())
    expected = stepped(lamb([plain], lr=0.05, **OPTIONS), plain, gradients)
    assert weight.is_contiguous(memory_format=order)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_run_that_deepspeeds_kernel_began_goes_on() -> None:
    """Its wrapper (ops/lamb/fused_lamb.py) counts steps as a plain number, and keeps a key more."""
    torch.manual_seed(5)
    gradients = [torch.randn(12, 7) for _ in range(6)]
    weight = torch.nn.Parameter(torch.randn(12, 7))
    made = Lamb([weight], lr=0.05, **OPTIONS, **BOUNDS, bias_correction=True)
    stepped(made, weight, gradients[:3])
    saved = deepcopy(made.state_dict())
    saved["state"][0]["step"] = 3
    saved["param_groups"][0]["max_grad_norm"] = 0.0
    resumed = torch.nn.Parameter(weight.detach().clone())
    other = Lamb([resumed], lr=0.01, **OPTIONS, **BOUNDS, bias_correction=False)
    other.load_state_dict(saved)
    assert torch.equal(stepped(other, resumed, gradients[3:]), stepped(made, weight, gradients[3:]))


def test_shares_of_packed_experts_are_those_of_each_expert() -> None:
    """Three experts of 10 numbers, of which a rank has numbers 7 to 24, from its fifth on."""
    part = RankPart(Split(0, (6,)), 1, 2)
    replicas = ("ranks with the same experts",)
    others = ("ranks with other experts",)
    shape = torch.Size((3, 2, 5))
    weight = SharedWeight(torch.empty(0), shape, Share(7, 5, 17), part, replicas, others)
    parts = _scaled_parts(weight, 3)
    assert [(one.offset, one.num) for one in parts] == [(5, 3), (8, 10), (18, 4)]
    assert all(one.groups == replicas for one in parts)
    (whole,) = _scaled_parts(weight, None)
    assert (whole.offset, whole.num, whole.groups) == (5, 17, (*replicas, *others))
    elsewhere = SharedWeight(torch.empty(0), shape, Share(0, 0, 0), part, replicas, others)
    assert [one.num for one in _scaled_parts(elsewhere, 3)] == [0, 0, 0]
