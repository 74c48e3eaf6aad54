"""The rotation of queries and keys against its definition, and the table of its angles: made once
for all blocks of a forward pass.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from framework.models.sequence import SequenceGroup
from framework.recipes.language_models import rotary
from framework.recipes.language_models.gpt import GPT, Past
from framework.recipes.language_models.rotary import turn, turns_for
from tests.models.operator_calls import Calls

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 11,
    "max_positions": 9,
    "hidden_size": 16,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 20,
    "positions": "rotary",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "_made", None)


def table(length: int, size: int, theta: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return turns_for(torch.zeros(1, length, 1, dtype=dtype), head_size=size, theta=theta)


def tokens(*size: int) -> Tensor:
    return torch.randint(0, 11, size, generator=torch.Generator().manual_seed(2))


def llama() -> GPT:
    torch.manual_seed(1)
    return GPT.of(**LLAMA_LIKE)


def test_it_keeps_lengths_and_scores_depend_on_the_distance_only() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turns = table(32, 8, 50.0)
    queries, keys = (turn(x.expand(1, 1, 32, 8), turns)[0, 0] for x in (query, key))
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(32))
    scores = queries @ keys.T
    for distance in range(-6, 7):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert (scores[0, 1] - scores[0, 3]).abs() > 1e-3


def test_half_precision_has_the_angles_of_float32() -> None:
    """Position 300 is not a bf16 number: angles in bf16 would be off by up to a radian."""
    x = torch.randn(1, 1, 301, 8).bfloat16()
    turned = turn(x, table(301, 8, 1e4, torch.bfloat16))
    exact = turn(x.float(), table(301, 8, 1e4, torch.float32))
    torch.testing.assert_close(turned, exact.bfloat16())
    assert turned.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_its_kernels_compute_what_plain_operations_do(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    turns = table(5, 8, 1e4, dtype)
    # in memory as the heads of a projection: (batch, sequence, heads, size)
    rows = torch.randn(2, 5, 3, 8, dtype=dtype)
    direction = torch.randn(2, 3, 5, 8, dtype=dtype)
    results = []
    for turned_by in (turn, rotary._turned_in_steps):
        x = rows.clone().requires_grad_()
        y = turned_by(x.transpose(1, 2), turns)
        (y * direction).sum().backward()
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_its_result_lies_in_memory_as_the_vectors_do() -> None:
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)
    assert turn(x, table(5, 8, 1e4, torch.float32)).stride() == x.stride()


def test_a_rotation_takes_four_kernels_and_makes_no_copy_in_float32() -> None:
    x = torch.randn(2, 3, 5, 8).bfloat16().requires_grad_()
    turns = table(5, 8, 1e4, torch.bfloat16)
    with Calls() as forward:
        y = turn(x, turns)
    assert forward.of["mul"] == 2
    assert forward.of["addcmul"] == 2
    with Calls() as backward:
        y.backward(torch.ones_like(y))
    assert backward.of["mul"] == 2
    assert backward.of["addcmul"] == 2
    assert not {"_to_copy", "cat"} & (forward.of.keys() | backward.of.keys())


@pytest.mark.parametrize("recompute_every", [0, 1, 2])
def test_a_pass_makes_one_table_for_all_blocks(recompute_every: int) -> None:
    model = llama()
    model.recompute_every = recompute_every
    with Calls() as calls:
        model(tokens(2, 7)).sum().backward()
        model(tokens(3, 7)).sum().backward()
    assert calls.of["cos"] == calls.of["sin"] == 1  # it depends on the length alone


def test_packed_rows_make_one_table_for_each_batch() -> None:
    model = llama()
    places = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    with Calls() as calls:
        first = model(tokens(2, 5), places)
        again = model(tokens(2, 5), places)
        other = model(tokens(2, 5), places.flip(0))
    assert calls.of["cos"] == 2
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    places.copy_(torch.arange(5).expand(2, 5))  # the same tensor with other numbers
    whole = model(tokens(2, 5), places)
    torch.testing.assert_close(whole, model(tokens(2, 5)))


def test_ranks_that_share_sequences_have_their_own_positions() -> None:
    whole = turns_for(torch.zeros(1, 6, 4), head_size=4, theta=100.0)
    with SequenceGroup(rank=1, size=2).shared():
        part = turns_for(torch.zeros(1, 3, 4), head_size=4, theta=100.0)
    assert torch.equal(part, whole[:, :, :, 3:])


def test_tokens_that_are_read_one_by_one_have_their_positions() -> None:
    model, ids = llama().eval(), tokens(1, 6)
    with torch.inference_mode():
        past = Past(6)
        with past.read():
            model(ids[:, :4])
        for place in (4, 5):
            with past.read(torch.tensor([[place]])):
                last = model(ids[:, place : place + 1])
        torch.testing.assert_close(last[:, -1], model(ids)[:, -1])
    # a table of inference is none that autograd may keep
    model(ids).sum().backward()


def test_no_table_of_a_trace_is_kept() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept = table(5, 8, 1e4, torch.float32)
    with FakeTensorMode():
        made = table(5, 8, 1e4, torch.float32)
    assert made is not kept
    assert table(5, 8, 1e4, torch.float32) is kept


def test_blocks_are_given_one_table_and_checkpoints_hold_none() -> None:
    model = llama()
    names = set(model.state_dict())
    given = []
    for block in model.get_submodule("blocks").children():
        block.register_forward_pre_hook(lambda _, inputs: given.append(inputs[1]))
    model(tokens(2, 7))
    assert len(given) == 3
    assert len(set(map(id, given))) == 1
    assert isinstance(given[0], Tensor)
    assert set(model.state_dict()) == names
