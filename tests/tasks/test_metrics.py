"""What a config's task says it measures is what the task measures: the plan judges
`checkpoint.keep_best` by it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from framework.config.base import Kind
from framework.config.training import CausalLM, Classification, MaskedLM
from framework.tasks import causal_lm, classification, masked_lm
from framework.tasks.task import Task

TOKENS = torch.tensor([[0, 1, 2], [2, 1, 0]])
CASES: list[tuple[type[Kind], Task, Any, Any]] = [
    (Classification, classification.Classification(), torch.zeros(2, 3), torch.tensor([0, 1])),
    (CausalLM, causal_lm.CausalLM(), torch.zeros(2, 3, 5), TOKENS),
    (
        MaskedLM,
        masked_lm.MaskedLM(),
        (torch.zeros(2, 3, 5), torch.zeros(2, 2)),
        (TOKENS, torch.tensor([0, 1])),
    ),
]


@pytest.mark.parametrize(
    ("section", "task", "outputs", "targets"),
    CASES,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_names_are_those_that_are_measured(
    section: Any, task: Task, outputs: Any, targets: Any
) -> None:
    measured = {
        name: float(ratio.total / ratio.count)
        for name, ratio in task.measure(outputs, targets).items()
    }
    assert sorted(section.metrics) == sorted({**measured, **task.derive(measured)})
