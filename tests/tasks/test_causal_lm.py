from __future__ import annotations

import math

import pytest
import torch

from framework.errors import ConfigError
from framework.tasks.causal_lm import CausalLM
from framework.tasks.task import Positions

TASK = CausalLM()


def batch(
    *, ignored: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 5, 7, generator=generator).to(dtype)
    targets = torch.randint(7, (3, 5), generator=generator)
    targets.view(-1)[:ignored] = -100
    return logits, targets


def naive_nats(logits: torch.Tensor, targets: torch.Tensor) -> list[float]:
    return [
        -float(row.double().log_softmax(-1)[target])
        for row, target in zip(logits.reshape(-1, 7), targets.reshape(-1).tolist(), strict=True)
        if target != -100
    ]


@pytest.mark.parametrize("ignored", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_the_mean_over_positions_with_a_target(
    ignored: int, dtype: torch.dtype
) -> None:
    logits, targets = batch(ignored=ignored, dtype=dtype)
    nats = naive_nats(logits, targets)
    loss = TASK.loss(logits, targets).value
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert float(loss) == pytest.approx(sum(nats) / len(nats), rel=1e-6)
    assert len(nats) == 15 - ignored


def test_measures_are_sums_over_tokens() -> None:
    logits, targets = batch(ignored=4)
    measured = TASK.measure(logits, targets)
    right = sum(
        int(row.argmax()) == target
        for row, target in zip(logits.view(-1, 7), targets.view(-1).tolist(), strict=True)
        if target != -100
    )
    assert set(measured) == {"loss", "accuracy"}
    assert {int(ratio.count) for ratio in measured.values()} == {11}
    assert float(measured["loss"].total) == pytest.approx(
        sum(naive_nats(logits, targets)), rel=1e-6
    )
    assert measured["loss"].total.dtype == torch.float64
    assert float(measured["accuracy"].total) == right > 0


def test_uneven_batches_add_up_to_the_whole() -> None:
    """Parts with unequally many targets: sums are exact where a mean of means is not."""
    logits, targets = batch(ignored=4)
    parts = [
        TASK.measure(logits[part], targets[part])["loss"] for part in (slice(0, 1), slice(1, 3))
    ]
    total = sum(float(part.total) for part in parts) / sum(float(part.count) for part in parts)
    assert total == pytest.approx(float(TASK.loss(logits, targets).value), rel=1e-6)


def test_perplexity_follows_from_the_loss() -> None:
    assert TASK.derive({"loss": math.log(50.0), "accuracy": 0.1})["perplexity"] == pytest.approx(
        50.0
    )
    assert TASK.derive({"loss": 1e4}) == {"perplexity": math.inf}
    assert math.isnan(TASK.derive({"loss": math.nan})["perplexity"])
    assert TASK.derive({}) == {}


def test_a_batch_counts_its_sequences() -> None:
    logits, targets = batch()
    assert TASK.num_samples(targets) == 3
    assert TASK.split((logits, targets)) == (logits, targets)


def test_shared_positions_are_all_of_them_once() -> None:
    """Seven positions over two ranks: the eighth counts nowhere."""
    ids, targets = torch.arange(14).view(2, 7), torch.arange(14).view(2, 7) + 1
    parts = [CausalLM().share(ids, targets, Positions(rank, 2)) for rank in (0, 1)]
    torch.testing.assert_close(torch.cat([part for part, _ in parts], dim=1)[:, :7], ids)
    joined = torch.cat([part for _, part in parts], dim=1)
    torch.testing.assert_close(joined[:, :7], targets)
    assert joined[:, 7].tolist() == [-100, -100]
    with pytest.raises(
        ConfigError, match=r"of 7 positions cannot be shared evenly.*\[sequence-not-divisible\]"
    ):
        Positions(0, 2).of(ids)
