"""On a GPU: joined products, rotation and logits with filled rows, in half precision, against the
same model in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from framework.models import filled_rows, products
from framework.recipes.language_models.gpt import GPT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"num_kv_heads": 4},
    "llama": {
        "num_kv_heads": 2,
        "positions": "rotary",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "bias": False,
    },
}


def loss_of(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits.double(), ids[:, 1:].flatten())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_half_precision_is_as_near_to_float64_as_plain_layers(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 1001, "max_positions": 128, "hidden_size": 256, "num_layers": 2}
    sizes |= {"num_heads": 4, "mlp_size": 512}
    torch.manual_seed(0)
    model = GPT.of(**sizes | shape).cuda()
    ids = torch.randint(0, 1001, (8, 129), device="cuda")

    def gradients(*, is_half: bool) -> torch.Tensor:
        model.to(torch.bfloat16 if is_half else torch.float64)
        model.zero_grad(set_to_none=True)
        loss_of(model, ids).backward()
        return torch.cat([weight.grad.double().flatten() for weight in model.parameters()])

    gradients(is_half=True)  # the weights have the digits of bf16 from here on
    exact = gradients(is_half=False)
    fast = gradients(is_half=True)
    monkeypatch.setattr(products, "_may_join", lambda *_: False)
    monkeypatch.setattr(filled_rows, "is_filled", lambda *_: False)
    plain = gradients(is_half=True)
    assert (fast - exact).norm() <= 1.2 * (plain - exact).norm()
    assert not torch.equal(fast, plain)  # they are two ways
