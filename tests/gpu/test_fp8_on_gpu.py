"""On a GPU with fp8: products of its tensor cores against fp8's own definition, as written and
compiled, and a run that learns.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.config.precision import FP8
from framework.config.training import Compile
from framework.models.compilation import CompiledModules
from framework.models.fp8 import compute_in_fp8
from framework.recipes.language_models.gpt import GPT
from tests.launched import series, train_cases_on_gpu
from tests.models.fp8_definition import define


def _missing() -> str:
    if importlib.util.find_spec("torchao") is None:
        return "torchao comes with the fp8 extra"
    if not torch.cuda.is_available():
        return "no CUDA device on this machine"
    if torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 9):
        return f"{torch.cuda.get_device_name()} has no products in fp8"
    return ""


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_missing()), reason=_missing() or "it has them"),
]

SIZES = {"vocab_size": 512, "max_positions": 128, "hidden_size": 256, "num_layers": 2}
SIZES |= {"num_heads": 4, "num_kv_heads": 2, "mlp_size": 512}
LLAMA = {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT.of(**SIZES, **LLAMA).cuda().bfloat16()


def gradients(model: nn.Module, rows: int) -> Tensor:
    model.zero_grad(set_to_none=True)
    ids = torch.randint(0, 512, (rows, 129), generator=torch.Generator().manual_seed(0)).cuda()
    logits = model(ids[:, :-1]).flatten(0, 1)
    nn.functional.cross_entropy(logits.float(), ids[:, 1:].flatten()).backward()
    return torch.cat([weight.grad.float().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiled", [False, True], ids=["as written", "compiled"])
def test_tensor_cores_compute_what_fp8_is_defined_as(scaling: Any, compiled: bool) -> None:
    plain = gradients(gpt(), 8)
    defined = gpt()
    define((each for each in defined.blocks.modules() if isinstance(each, nn.Linear)), scaling)
    expected = gradients(defined, 8)
    model = gpt()
    compute_in_fp8(model, FP8(scaling=scaling))
    modules = CompiledModules(model, Compile(per="block"))
    if compiled:
        modules.start()
    try:
        found = gradients(model, 8)
    finally:
        modules.stop()
    # Sums of the tensor cores have fewer digits, and a difference in bf16 flips roundings.
    without = float((plain - expected).norm() / expected.norm())
    distance = float((found - expected).norm() / expected.norm())
    print(f"{scaling}: {distance:.4f} from the definition, bf16 {without:.4f}")
    assert distance < max(without, 0.02)


def test_rows_that_are_no_multiple_of_16() -> None:
    model = gpt()
    compute_in_fp8(model, FP8())
    layer: Any = model.get_submodule("blocks.0.mlp.down")
    rows = torch.randn(37, 512, device="cuda", dtype=torch.bfloat16)
    layer(rows).float().square().mean().backward()
    assert bool(layer.weight.grad.isfinite().all())


def test_a_run_learns_compiled_at_each_stage(tmp_path: Path) -> None:
    def config(stage: int) -> dict[str, Any]:
        return {
            "run": {"name": f"z{stage}", "output_dir": str(tmp_path)},
            "model": {"kind": "gpt", "hidden_size": 256, "num_layers": 4, "num_heads": 4},
            "data": {"kind": "text", "sequence_length": 128},
            "task": {"kind": "causal_lm"},
            "batch": {"global_size": 32},
            "precision": {"dtype": "bf16", "fp8": True},
            "zero": {"stage": stage},
            "training": {"max_steps": 60, "compile": {"per": "block"} if stage < 3 else False},
            "evaluation": {"at_end": False},
            "checkpoint": {"at_end": False},
        }

    train_cases_on_gpu([config(stage) for stage in (0, 2, 3)], folder=tmp_path)
    for stage in (0, 2, 3):
        losses = [*series(tmp_path / f"z{stage}", "train/loss").values()]
        assert losses[-1] < losses[0] - 1
