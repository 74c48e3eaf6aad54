"""The loss and the gradient of a step follow from its samples alone, not from how they are
divided.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from framework.checkpoint.names import STATE_KEY
from framework.config.load import config_from_values
from framework.engine.step_batches import StepLoss
from framework.errors import ConfigError
from framework.setup.user_code import call_factory
from framework.tasks.causal_lm import CausalLM
from framework.tasks.classification import Classification
from framework.tasks.task import Ratio, Task
from tests.jobs import parts
from tests.jobs.parts import PROMPTED_GPT, prompts_of_step
from tests.launched import fewer, furthest, series, train_cases

NUM_STEPS, GLOBAL_SIZE = fewer(5, of=20), 8


def config(name: str, folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": str(folder)},
        "model": PROMPTED_GPT,
        "data": {"target": "tests.jobs.parts:masked_prompts"},
        "task": {"kind": "causal_lm"},
        "training": {"max_steps": NUM_STEPS, "log_every": 1},
        "checkpoint": {"at_end": False},
        "evaluation": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        **sections,
        "batch": {"global_size": GLOBAL_SIZE, **sections.get("batch", {})},
    }


SPARSE = {
    "model": {"target": "tests.jobs.parts:sparse_words"},
    "optimizer": {"kind": "sgd", "lr": 1.0, "momentum": 0.0},
}


def evaluated(name: str, folder: Path, **sections: Any) -> dict[str, Any]:
    """Three steps with evaluations between them, of a model that a user keeps partly in evaluation
    mode.
    """
    own = "tests.jobs.parts"
    changes = {
        "model": {"target": f"{own}:partly_in_evaluation"},
        "data": {"target": f"{own}:steep_pairs"},
        "task": {"target": f"{own}:mean_output"},
        "training": {"max_steps": 3, "log_every": 1},
        "evaluation": {"every_steps": 1},
        # A value of its own on each rank, of which all ranks save one.
        "checkpoint": {"at_end": True, "keep_best": "memory/host_peak_bytes", "keep_last": 1},
    }
    return config(name, folder, **{**changes, **sections})


FP16 = {"dtype": "fp16", "initial_scale_power": 8}  # at which no step is skipped
# What changes how a step is computed, and by how much it may change losses.
VARIED: dict[str, tuple[int, dict[str, Any], float]] = {
    "recompute": (
        3,
        {"training": {"max_steps": NUM_STEPS, "log_every": 1, "recompute_every": 1}},
        1e-5,
    ),
    "recompute-selective": (
        3,
        {"training": {"max_steps": NUM_STEPS, "log_every": 1, "recompute": "selective"}},
        1e-5,
    ),
    **{
        f"offloaded-z{stage}": (
            stage,
            {
                "training": {
                    "max_steps": NUM_STEPS,
                    "log_every": 1,
                    "offload_activations": True,
                    "recompute_every": int(stage > 0),
                },
                "zero": {"stage": stage, "stage3_param_persistence_threshold": 0},
            },
            1e-5,
        )
        for stage in (0, 3)
    },
    **{
        f"mlp-tiles-z{stage}": (
            stage,
            {
                "training": {
                    "max_steps": NUM_STEPS,
                    "log_every": 1,
                    "mlp_tile": 24,
                    "recompute_every": int(stage == 3),
                },
                "batch": {"accumulation_steps": 2},
            },
            1e-5,
        )
        for stage in (0, 2, 3)
    },
    **{
        f"autocast-z{stage}": (stage, {"precision": {"dtype": "autocast"}}, 0.02)
        for stage in (0, 2)
    },
    **{f"bf16-z{stage}": (stage, {"precision": {"dtype": "bf16"}}, 0.05) for stage in (0, 2)},
    **{f"fp16-z{stage}": (stage, {"precision": FP16}, 0.02) for stage in (1, 3)},
}
PLAIN = [(0, 1), (0, 4), (1, 4), (2, 4), (3, 1), (3, 4)]
PIPELINES = [("pipe", {"pipe": 2}, 4), ("pipe-micro2", {"pipe": 2}, 2)]


def step_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches = []
    for step in range(NUM_STEPS):
        samples = prompts_of_step(step, global_size=GLOBAL_SIZE)
        batches.append(
            (
                torch.stack([ids for ids, _ in samples]),
                torch.stack([labels for _, labels in samples]),
            )
        )
    return batches


@pytest.fixture(scope="module")
def oracle() -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = call_factory(
        config_from_values(config("oracle", Path("runs"))).model.factory(), key="model"
    )
    return one_batch(model, torch.optim.AdamW(model.parameters()))


def one_batch(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """One process, one batch, one mean: plain PyTorch."""
    losses = []
    for ids, labels in step_batches():
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain_cases(folder: Path) -> list[dict[str, Any]]:
    return [
        config(
            f"z{stage}-acc{steps}",
            folder,
            zero={"stage": stage},
            batch={"accumulation_steps": steps},
        )
        for stage, steps in PLAIN
    ] + [
        config(name, folder, **{"zero": {"stage": stage}, **sections})
        for name, (stage, sections, _) in VARIED.items()
    ]


def pipe_cases(folder: Path) -> list[dict[str, Any]]:
    return [
        config(name, folder, parallel=parallel, batch={"accumulation_steps": steps})
        for name, parallel, steps in PIPELINES
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    cases = plain_cases(folder)
    cases += [config("sparse", folder, **SPARSE), evaluated("evaluated", folder, zero={"stage": 3})]
    train_cases(cases, num_ranks=2, folder=folder, allow_fp16=True)
    return folder


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    cases = pipe_cases(folder)
    cases += [evaluated("evaluated", folder, parallel={"pipe": 2, "stages": [0, 1]})]
    train_cases(cases, num_ranks=2, folder=folder)
    return folder


def test_the_oracle_has_every_kind_of_step() -> None:
    counts = [(labels != -100).sum(dim=1) for _, labels in step_batches()]
    by_rank = [(int(count[:4].sum()), int(count[4:].sum())) for count in counts]
    assert any(0 in count.tolist() and count.sum() for count in counts), (
        "no micro-batch without a target"
    )
    assert any(0 in pair and sum(pair) for pair in by_rank), (
        "no rank that has none where the other has some"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "steps"), PLAIN)
def test_ragged_targets_train_like_one_batch(
    plain: Path, oracle: list[float], stage: int, steps: int
) -> None:
    assert furthest(plain / f"z{stage}-acc{steps}", oracle) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIED)
def test_other_arithmetic_stays_close(plain: Path, oracle: list[float], name: str) -> None:
    assert furthest(plain / name, oracle) < VARIED[name][2]


@pytest.mark.slow
def test_sparse_gradients_train_like_dense_ones(plain: Path) -> None:
    torch.manual_seed(0)
    dense = parts.sparse_words()
    dense[0].sparse = False
    assert (
        furthest(plain / "sparse", one_batch(dense, torch.optim.SGD(dense.parameters(), lr=1.0)))
        < 1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "pipelines"])
def test_modules_in_evaluation_mode_stay_there(request: pytest.FixtureRequest, engine: str) -> None:
    folder: Path = request.getfixturevalue(engine) / "evaluated"
    assert list(series(folder, "eval/loss")) == [1, 2, 3]
    files = list(folder.glob("checkpoints/*/*mp_rank_*_model_states.pt"))
    saved = [
        torch.load(file, weights_only=False)[STATE_KEY]["state"]["best"]["value"] for file in files
    ]
    assert saved == [max(series(folder, "memory/host_peak_bytes").values())] * 2, (
        "not the value of rank 0"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _, _ in PIPELINES])
def test_ragged_targets_in_a_pipeline_train_like_one_batch(
    pipelines: Path, oracle: list[float], name: str
) -> None:
    assert furthest(pipelines / name, oracle) < 1e-5


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def losses(task: Task, pairs: list[tuple[Any, Any]]) -> list[torch.Tensor]:
    of_step = StepLoss(task, micro_batches=len(pairs))
    take = partial(next, iter(pairs))
    return [of_step(outputs, targets) for outputs, targets in of_step.weighted(take)]


def test_a_step_without_any_target_has_no_loss_and_no_gradient(one_rank: None) -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    total = sum(losses(CausalLM(), [(logits, torch.full((2, 3), -100))] * 2))
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert total.item() == 0.0
    assert not logits.grad.any()  # type: ignore[union-attr]


def test_a_mean_is_read_one_micro_batch_at_a_time(one_rank: None) -> None:
    class Mean(Task):
        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            return (outputs - targets).mean()

    read: list[int] = []

    def stream() -> Any:
        for number in range(3):
            read.append(number)
            yield torch.ones(2) * number, torch.zeros(2)

    of_step = StepLoss(Mean(), micro_batches=2)
    outputs, targets = next(of_step.weighted(partial(next, stream())))
    assert (read, of_step(outputs, targets).item()) == ([0], 0.0)


def test_one_target_for_each_sample_is_counted_once(one_rank: None) -> None:
    class Asked(Classification):
        times = 0

        def count(self, targets: torch.Tensor) -> torch.Tensor:
            self.times += 1
            return super().count(targets)

    counted: list[torch.Tensor] = []
    sums: Any = SimpleNamespace(ranks=2, divisor=8.0, device=None, count=counted.append)
    of_step = StepLoss(task := Asked(), micro_batches=2, sums=sums)
    pairs = [
        (torch.zeros(3, 4), torch.tensor([0, -100, 1])),
        (torch.zeros(3, 4), torch.full((3,), -100)),
    ]
    for _ in range(3):
        take = partial(next, iter(pairs))
        losses = [of_step(outputs, targets).item() for outputs, targets in of_step.weighted(take)]
        assert losses == [pytest.approx(2 * math.log(4) * 2 * 2 / 8), 0.0]
    assert ([float(number) for number in counted], task.times) == ([2.0, 0.0] * 3, 1)


class _CountOnly(CausalLM):
    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:  # type: ignore[override]
        return outputs.mean()


class _SumOnly(CausalLM):
    def count(self, targets: Any) -> None:  # type: ignore[override]
        return None


class _TwoSums(CausalLM):
    def loss(self, outputs: Any, targets: Any) -> tuple[Ratio, ...]:  # type: ignore[override]
        return (super().loss(outputs, targets),) * 2


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (_CountOnly(), "no framework.Ratio"),
        (_SumOnly(), "no count()"),
        (_TwoSums(), "for each number"),
    ],
)
def test_a_sum_and_its_count_belong_together(one_rank: None, task: Task, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        losses(task, [(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64))])
    assert text in str(caught.value)
    assert str(caught.value).endswith("[task-loss-result]")
