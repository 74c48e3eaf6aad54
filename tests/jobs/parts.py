"""What a user might bring along: named by import path in test configs."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from framework.data.order import epoch_order
from framework.data.splits import Splits
from framework.errors import TrainingError
from framework.tasks.causal_lm import CausalLM
from framework.tasks.classification import Classification
from framework.tasks.task import Ratio


def build(image_size: int) -> Splits:
    """Digits. What reads them imports scikit-learn, a second of every process that needs another
    part.
    """
    from framework.recipes.image_sets import digits

    return digits.build(image_size)


class NoisyDigits(Dataset[tuple[torch.Tensor, int]]):
    """Digits with random noise, drawn anew whenever a sample is read, from torch's global
    generator.
    """

    def __init__(self, strength: float, *, train: bool) -> None:
        splits = build(28)
        self._strength = strength
        self._samples = splits.train if train else splits.evaluation

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self._samples[index]  # type: ignore[index]
        return image + self._strength * torch.randn_like(image), int(label)


def noisy_digits(strength: float = 0.5) -> tuple[NoisyDigits, NoisyDigits]:
    return NoisyDigits(strength, train=True), NoisyDigits(strength, train=False)


class SlowImages(Dataset[tuple[torch.Tensor, int]]):
    """As many as there are digits, in ten classes, with random noise; each takes its time to
    read.
    """

    def __init__(self, seconds: float, *, count: int) -> None:
        self._seconds, self._count = seconds, count
        self._images = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self._seconds)
        image = self._images[index % 10]
        return image + 0.5 * torch.randn_like(image), index % 10


def slow_images(seconds: float, eval_seconds: float = 0.0) -> tuple[SlowImages, SlowImages]:
    return SlowImages(seconds, count=1437), SlowImages(eval_seconds, count=360)


def digits_that_differ_between_ranks() -> Dataset[tuple[torch.Tensor, int]]:
    return torch.utils.data.Subset(
        build(28).train, range(1000 + 100 * torch.distributed.get_rank())
    )  # type: ignore[arg-type]


def steep_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients overflow in fp16 at the first loss scale that torch tries."""
    return 300.0 * torch.nn.functional.cross_entropy(outputs, targets)


# Takes `MaskedPrompts`.
PROMPTED_GPT: Final[dict[str, Any]] = {
    "kind": "gpt",
    "vocab_size": 50,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "max_positions": 16,
    "dropout": 0.0,
}


class MaskedPrompts(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Token numbers and the next ones, of which a prompt of 0 to 15 counts nothing; in two of three
    samples none.
    """

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(50, (17,), generator=torch.Generator().manual_seed(index))
        labels = text[1:].clone()
        labels[: 16 if index % 3 else (5 * index) % 16] = -100
        return text[:-1], labels


def prompts_of_step(step: int, *, global_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the samples that a run with seed 0 trains in a step, in their order."""
    dataset = MaskedPrompts()
    epoch, position = divmod(step, len(dataset) // global_size)
    order = epoch_order(len(dataset), seed=0, epoch=epoch, shuffle=True)
    indices = order[position * global_size : (position + 1) * global_size]
    return [dataset[int(index)] for index in indices]


def masked_prompts() -> MaskedPrompts:
    return MaskedPrompts()


class RaggedPrompts(MaskedPrompts):
    """Texts of 3 to 16 tokens, each batch as long as its longest one."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        text, labels = super().__getitem__(index)
        return text[: 3 + 5 * index % 14], labels[: 3 + 5 * index % 14]

    def collate_fn(
        self, samples: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        pad = torch.nn.utils.rnn.pad_sequence
        ids, labels = zip(*samples, strict=True)
        return pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


def ragged_prompts() -> RaggedPrompts:
    return RaggedPrompts()


def masked_prompts_and_seven_more() -> tuple[Dataset[tuple[torch.Tensor, torch.Tensor]], ...]:
    return MaskedPrompts(), torch.utils.data.Subset(MaskedPrompts(), range(7))


def sets_of_digits() -> tuple[Dataset[Any], dict[str, Dataset[Any]]]:
    """Evaluation sets of unlike length: on two ranks one needs no padding, one much, and one leaves
    a rank without.
    """
    train, all_clean = build(28).train, build(28).evaluation
    noisy = [(image + 0.5, label) for image, label in (all_clean[number] for number in range(33))]  # type: ignore[index]
    clean = torch.utils.data.Subset(all_clean, range(64))  # type: ignore[arg-type]
    return train, {"clean": clean, "noisy.50": noisy, "one": noisy[:1]}  # type: ignore[dict-item, return-value]


def steep_samples(count: int = 1024) -> TensorDataset:
    """Vectors whose mean is five times their deviation, with a target that their loss does not
    read.
    """
    inputs = 5.0 + torch.randn(count, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, torch.zeros(count))


class Shift(torch.nn.Module):
    """Adds a weight, whose gradient is one."""

    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.by


def weighted_sum() -> torch.nn.Sequential:
    """One layer whose gradient is the mean of its inputs, and one for a second stage."""
    return torch.nn.Sequential(torch.nn.Linear(16, 1, bias=False), Shift())


def mean_output(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


class StaysInEvaluation(torch.nn.Linear):
    """A frozen part that a user keeps in evaluation mode; it ends the run that puts it into
    training mode.
    """

    def __init__(self) -> None:
        super().__init__(16, 1)
        self.eval()

    def train(self, mode: bool = True) -> StaysInEvaluation:
        return super().train(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert not self.training, "put into training mode"
        return super().forward(inputs)


def partly_in_evaluation() -> torch.nn.Sequential:
    return torch.nn.Sequential(StaysInEvaluation(), Shift())


class HalvesRate:
    """Halves the learning rate after a step."""

    def __init__(self, at: int) -> None:
        self._at = at

    def on_step(self, state: Any) -> None:
        if state.step == self._at:
            state.scale_lr(0.5)


class TriesEvaluation:
    """Switches the trial of evaluation before the first step, for the runs of this process."""

    def __init__(self, *, tries: bool) -> None:
        from framework.engine.base_engine import BaseEngine

        BaseEngine.can_try_evaluation = tries  # type: ignore[assignment,method-assign]

    def on_end(self, state: Any) -> None:
        """A callback has some method."""


class DrawsInMeasure(Classification):
    """Draws a number of every generator wherever it measures."""

    def measure(self, outputs: Any, targets: Any) -> Any:
        torch.rand(3)
        np.random.rand(3)
        random.random()
        return super().measure(outputs, targets)


class CountsItsCalls(Classification):
    """A task with a state: its loss grows with every micro-batch."""

    calls = 0

    def loss(self, outputs: Any, targets: Any) -> Ratio:
        self.calls += 1
        mean = super().loss(outputs, targets)
        return Ratio(self.calls * mean.total, mean.count)


class FailsInMeasure(Classification):
    def measure(self, outputs: Any, targets: Any) -> Any:
        raise TrainingError("no such output")


class CountsGraphs:
    """Writes at the end of a run what torch has compiled in it, to ``<folder>/graphs.json`` of its
    run; with `cache`, torch.compile begins without kernels of earlier runs.
    """

    def __init__(self, path: str, cache: str | None = None) -> None:
        self._path = path
        if cache is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache

    def on_start(self, state: Any) -> None:
        torch._dynamo.utils.counters.clear()

    def on_end(self, state: Any) -> None:
        counters = torch._dynamo.utils.counters
        found = {
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": len(counters["graph_break"]),
        }
        if state.is_main:
            Path(self._path).write_text(json.dumps(found), encoding="utf-8")


def steep_pairs() -> tuple[TensorDataset, TensorDataset]:
    return steep_samples(64), steep_samples(16)


def sparse_words() -> torch.nn.Sequential:
    """Next-token logits from an embedding whose gradients are sparse."""
    return torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 50))


class StopsItself(Classification):
    """Asks its rank to stop in the forward pass of a step, one micro-batch each."""

    def __init__(self, in_step: int, seconds: float = 0.0) -> None:
        super().__init__()
        self._left, self._seconds = in_step, seconds

    def forward(self, model: Any, inputs: Any) -> Any:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._seconds)
        return super().forward(model, inputs)


def tiny_mixtral() -> torch.nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=50, num_key_value_heads=1, **sizes, **experts)
    )


# Of transformers: what each kind of mixture calls its experts.
_CHOSEN: dict[str, Any] = {"num_experts_per_tok": 2}
_LOW_RANK = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _CHOSEN | {"num_local_experts": 4, "output_router_logits": True},
    "qwen2_moe": _CHOSEN
    | {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "output_router_logits": True,
    },
    "qwen3_moe": _CHOSEN | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16},
    "olmoe": _CHOSEN | {"num_experts": 4},
    "gpt_oss": _CHOSEN | {"num_local_experts": 4, "head_dim": 16},
    # Its first layer has no experts; of two groups of experts a token takes one.
    "deepseek_v3": _CHOSEN
    | _LOW_RANK
    | {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "v_head_dim": 16,
        "n_shared_experts": 1,
    },
}


def tiny_mixture(
    kind: str, implementation: str = "grouped_mm", *, returns_routers: bool = True
) -> torch.nn.Module:
    """A mixture of transformers whose experts are computed in this way; some return the logits of
    their routers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = AutoConfig.for_model(kind, **sizes, **MIXTURES[kind])
    config._experts_implementation = implementation
    if not returns_routers:
        config.output_router_logits = False
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


class WithRouterLoss(CausalLM):
    """The loss of transformers' routers, a mean over a micro-batch, beside that of tokens."""

    def loss(self, outputs: Any, targets: torch.Tensor) -> Any:
        return super().loss(outputs.logits, targets), Ratio(0.05 * outputs.aux_loss.float(), 1)

    def count(self, targets: torch.Tensor) -> Any:
        return super().count(targets), 1


class SleepyNet(torch.nn.Module):
    """A layer whose forward pass takes one rank longer."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__()
        self.layer, self._rank, self._seconds = torch.nn.Linear(28 * 28, 10), rank, seconds

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and torch.distributed.get_rank() == self._rank:
            time.sleep(self._seconds)
        outputs: torch.Tensor = self.layer(images.flatten(1))
        return outputs


class NoRoomOnRank1(torch.nn.Module):
    """A layer that draws, and whose rank 1 has no memory for more than `most` samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer, self._most = torch.nn.Linear(28 * 28, 10), most

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > self._most and torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        outputs: torch.Tensor = self.layer(torch.nn.functional.dropout(images.flatten(1)))
        return outputs


class DigitsOfASlowDisk(NoisyDigits):
    """Samples that one rank waits for."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__(0.0, train=True)
        self._rank, self._seconds = rank, seconds

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if torch.distributed.get_rank() == self._rank:
            time.sleep(self._seconds)
        return super().__getitem__(index)
