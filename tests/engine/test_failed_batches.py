"""What torch raises about a batch becomes one line that shows the batch and a way out; real models
and losses raise it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.engine.failures import explaining_failures
from framework.engine.known_failures import explain_failed_batch, known_failure
from framework.errors import TrainingError
from framework.tasks.classification import Classification
from framework.tasks.from_callable import as_task
from framework.tasks.task import Task
from tests.warm_ranks import WarmRanks

X, Y = torch.ones(4, 3), torch.tensor([0, 1, 1, 0])
_SCOPE: dict[str, Any] = {"__name__": "framework.engine.plain_engine"}
exec(
    "def train_step(task, model, inputs, targets): task.loss(task.forward(model, inputs), targets)",
    _SCOPE,
)
exec("def count_batch(task, targets): task.count(targets)", _SCOPE)


class Added(nn.Linear):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(a + b)


class Named(nn.Linear):
    def forward(self, a: torch.Tensor) -> Any:
        return {"logits": super().forward(a)}


class Routed(nn.Module):
    """Tokens in half precision, with one part in fp32 as routers have it."""

    def __init__(self, dtype: torch.dtype, part: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 4, dtype=dtype)
        self.part = part.to(dtype)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.part(self.embed(tokens).float())


class Wrong(nn.Linear):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return super().forward(a) @ torch.ones(9, 9)


@pytest.mark.parametrize(
    ("model", "inputs", "targets", "stated"),
    [
        (
            Added(3, 2),
            [X, X],
            Y,
            "list of (float32 [4, 3], float32 [4, 3]); samples ((a, b), target) hand it one list",
        ),
        (nn.Linear(3, 2), X, Y.double(), "targets float64 [4]; class numbers are int64"),
        (nn.Linear(3, 2), X, Y + 1, "labels go from 1 to 2, and 2 classes have the numbers 0 to 1"),
        (nn.Linear(3, 2), X, Y[:, None], "target.squeeze(-1)"),
        (nn.Linear(3, 2), X, ("cat",) * 4, "targets a tuple of 4 x str; number the classes from 0"),
        (Named(3, 2), X, Y, "outputs {logits: float32 [4, 2]}"),
        (nn.Linear(3, 2), X.byte(), Y, "given uint8 [4, 3]; return floating-point inputs"),
        (nn.Linear(3, 2), X.double(), Y, "given float64 [4, 3]; return float32 inputs"),
        (nn.Linear(7, 2), X, Y, "it was given float32 [4, 3] (traceback"),
        (Wrong(3, 2), X, Y, f"the model fails on a batch at {__file__}:"),
        (nn.Embedding(3, 2), Y + 2, Y, "its whole numbers go from 2 to 3"),
        *(
            (
                Routed(dtype, part),
                Y,
                Y,
                "given int64 [4]; this line computes with fp32 and with weights in half",
            )
            for dtype in (torch.bfloat16, torch.float16)
            for part in (
                nn.Linear(4, 2),
                nn.Linear(4, 2, bias=False),
                nn.LayerNorm(4),
                nn.LSTM(4, 2),
            )
        ),
    ],
)
@pytest.mark.parametrize(
    "task", [Classification(), as_task(nn.CrossEntropyLoss())], ids=["kind", "callable"]
)
def test_the_batch_is_shown(
    task: Task, model: nn.Module, inputs: Any, targets: Any, stated: str
) -> None:
    with pytest.raises(TrainingError) as caught, explaining_failures(Path("logs")):
        _SCOPE["train_step"](task, model, inputs, targets)
    line = str(caught.value)
    assert stated in line
    assert line.startswith("rank 0: ")
    assert line.endswith("(traceback: logs/rank0.log) [batch-failed]")
    assert line.count("\n") == 0


def test_classes_that_are_names_are_explained_before_the_loss() -> None:
    with pytest.raises(TrainingError) as caught, explaining_failures(Path("logs")):
        _SCOPE["count_batch"](as_task(nn.CrossEntropyLoss()), ("cat",) * 4)
    assert "targets a tuple of 4 x str; number the classes from 0" in str(caught.value)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError) as caught, explaining_failures(Path("logs")):
        raise RuntimeError("elsewhere")
    assert type(caught.value) is RuntimeError
    assert explain_failed_batch(caught.value) == ""


def test_torch_states_that_the_host_is_full_as_it_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**52, dtype=torch.uint8)
    assert str(known_failure(caught.value)).endswith("[out-of-host-memory]")


@pytest.mark.slow
def test_ranks_of_a_real_job_report_it_once(tmp_path: Path, warm: WarmRanks) -> None:
    (tmp_path / "fails.yaml").write_text("""
run: {name: fails}
model: {target: "torch.nn:Linear", args: {in_features: 5, out_features: 2}}
data: {target: "tests.jobs.failing_parts:rows"}
batch: {global_size: 8, micro_size: 4}
training: {max_steps: 4}
monitors: {tensorboard: false}
""")
    job = warm.start(["--config", "fails.yaml"], num_ranks=2, folder=tmp_path)
    codes = job.wait(120, alone_seconds=60)
    assert codes[0] == 70, job.stated()
    assert (
        job.stated(0)
        .splitlines()[-1]
        .endswith(
            "it was given float32 [4, 3] (traceback: runs/fails/logs/rank0.log) [batch-failed]"
        )
    )
    # a rank that fails after rank 0 has ended cannot ask it any more
    assert job.stated(1).count("[batch-failed]") <= 1
    assert "Traceback" not in job.stated()
    assert "Traceback" in (tmp_path / "runs/fails/logs/rank0.log").read_text(encoding="utf-8")
