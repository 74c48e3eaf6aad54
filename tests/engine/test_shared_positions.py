"""A look at a model before the first step leaves no trace; ranks are held by
tests/engine/test_sequence.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.engine import random_state
from framework.engine.shared_positions import _cut, _looking
from framework.models import sequence
from framework.models.sequence import Numbering, SequenceGroup


class Counting(nn.Module):
    """Batch norm, dropout, a part that stays in evaluation mode, and a counter that moves in any
    mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.kept = nn.BatchNorm1d(4), nn.Dropout(), nn.Dropout().eval()
        self.register_buffer("calls", torch.zeros(()))
        self.modes: list[list[bool]] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        self.modes.append([module.training for module in self.modules()])
        output: Tensor = self.drop(self.norm(rows)) + torch.rand(4)
        return output


class Engine(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_look_leaves_no_trace() -> None:
    model = Counting()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, state = [module.training for module in model.modules()], random_state.capture()
    with _looking(Engine(model)):
        output = model(torch.ones(3, 4))
    assert not output.requires_grad
    assert not any(model.modes[0])
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(random_state.capture(), state)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_the_first_rows_and_positions_of_all_that_has_them() -> None:
    ids, mask, table = torch.zeros(8, 64), torch.zeros(8, 1, 64, 64), torch.zeros(5, 7)
    inputs: Any = {
        "ids": ids,
        "mask": mask,
        "places": torch.arange(64)[None],
        "table": table,
        "name": "x",
    }
    (cut, targets) = _cut((inputs, (torch.zeros(8, 64), torch.zeros(8))), most=32)
    shapes = {name: tuple(value.shape) for name, value in cut.items() if isinstance(value, Tensor)}
    assert shapes == {"ids": (3, 32), "mask": (3, 1, 32, 32), "places": (1, 32), "table": (5, 7)}
    assert [tuple(one.shape) for one in targets] == [(3, 32), (3,)]
    assert cut["name"] == "x"


def test_positions_of_each_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' RoBERTa and OPT number them; the second of two ranks, of which the first has
    three tokens.
    """
    monkeypatch.setattr(
        SequenceGroup, "counts_before", lambda group, counts: torch.full_like(counts, 3)
    )
    numbering = Numbering(SimpleNamespace(config=SimpleNamespace(pad_token_id=1)))
    group = SequenceGroup(1, 2)
    ids, mask = torch.tensor([[5, 1, 6, 1]]), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]])
    with group.shared():
        assert numbering.positions(ids, mask).tolist() == [[4, 5, 6, 7]]
        numbering.rule = Numbering.OF_TOKENS
        assert numbering.positions(ids, mask).tolist() == [[5, 1, 6, 1]]
        assert numbering.positions(torch.zeros(1, 4, 2), mask).tolist() == [[6, 7, 8, 9]]
        numbering.rule = Numbering.OF_MASK
        assert numbering.positions(ids, mask).tolist() == [[2, 3, 4, 4]]
    assert sequence.first_position(4) == 0
