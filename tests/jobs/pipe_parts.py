"""Models, data and tasks that try a pipeline: named by import path in test configs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

import framework

NUM_CLASSES = 3
_WIDTH = 8


def points(num_eval: int = 5, num_train: int = 32) -> tuple[TensorDataset, TensorDataset]:
    """Points on a plane, labelled by their sector."""
    generator = torch.Generator().manual_seed(5)
    both = torch.randn(num_train + num_eval, _WIDTH, generator=generator)
    labels = both[:, :NUM_CLASSES].argmax(dim=1)
    return TensorDataset(both[:num_train], labels[:num_train]), TensorDataset(
        both[num_train:], labels[num_train:]
    )


class PaddedText(Dataset[tuple[Tensor, int]]):
    """Texts of unequal length; a batch is as wide as its longest one, padded with 0."""

    def __init__(self, num_texts: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 30, (num_texts,), generator=generator).tolist()
        self._texts = [torch.randint(1, 11, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        text = self._texts[index]
        return text, int(text[0]) % NUM_CLASSES

    @staticmethod
    def collate_fn(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        texts, labels = zip(*samples, strict=True)
        return pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


def padded_text() -> tuple[PaddedText, PaddedText]:
    return PaddedText(40, 1), PaddedText(11, 2)


class Ragged(PaddedText):
    """The same without a way to put texts together."""

    collate_fn = None  # type: ignore[assignment]


def ragged() -> Ragged:
    return Ragged(40, 1)


class Total(nn.Module):
    """Sum over the positions: padding, which is embedded as zeros, adds nothing."""

    def forward(self, value: Tensor) -> Tensor:
        return value.sum(dim=1)


def reader() -> nn.Sequential:
    """A bag of words; what crosses the cut behind the tanh is as wide as the batch's longest
    text.
    """
    return nn.Sequential(
        nn.Embedding(11, _WIDTH, padding_idx=0), nn.Tanh(), Total(), nn.Linear(_WIDTH, NUM_CLASSES)
    )


class Apart(nn.Module):
    """Hands on (integers, floats): numbers of the samples' sectors before their values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value.detach().argmax(dim=1, keepdim=True).expand(-1, _WIDTH), self.linear(value)


class Between(nn.Module):
    """Takes (integers, floats), hands on the same; under autocast it gets and gives other
    floats.
    """

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH) if normed else None

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        numbers, floats = value
        floats = self.linear(floats) + numbers.float().sin()
        return numbers, floats if self.norm is None else self.norm(floats)


class Together(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, NUM_CLASSES)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(value[1]) + value[0][:, :NUM_CLASSES].float().cos()


def in_pairs() -> list[nn.Module]:
    """Four layers with (integers, floats) between them."""
    return [Apart(), Between(normed=True), Between(normed=False), Together()]


class Halves(nn.Linear):
    """float32 in, bfloat16 out, as layers under autocast may have it."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.float()).bfloat16()


class Whole(nn.Linear):
    """float32 out for any input."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.float())


def of_two_types() -> list[nn.Module]:
    """A middle stage receives float32 and sends bfloat16."""
    return [Whole(_WIDTH, _WIDTH), Halves(_WIDTH, _WIDTH), Whole(_WIDTH, NUM_CLASSES)]


class Turned(nn.Module):
    """Hands on a transposed view, which is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, 6)

    def forward(self, value: Tensor) -> Tensor:
        return self.linear(value).unflatten(1, (2, 3)).transpose(1, 2)


def turned() -> list[nn.Module]:
    return [Turned(), nn.Flatten(), nn.Linear(6, NUM_CLASSES)]


def rows() -> list[nn.Module]:
    return [nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, NUM_CLASSES)]


class Counts(nn.Linear):
    """Counts how often it runs while training, in a buffer that checkpoints hold."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, value: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(value)


def counting() -> list[nn.Module]:
    return [Counts(_WIDTH, _WIDTH), nn.Tanh(), Counts(_WIDTH, _WIDTH), Counts(_WIDTH, NUM_CLASSES)]


class InLists(framework.Task):
    """Targets as a list, and as a mapping: what a loss may look at is its own business."""

    def split(self, batch: Any) -> Any:
        return batch[0], [{"label": batch[1]}, "as it was"]

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        assert isinstance(targets, list)
        assert targets[1] == "as it was"
        return cross_entropy(outputs.float(), targets[0]["label"])

    def num_samples(self, targets: Any) -> int:
        return len(targets[0]["label"])


def unmeaned_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


class Fails(nn.Module):
    """Does its harm in one call on the stage that runs it, and notes when."""

    def __init__(self, how: str, call: int) -> None:
        super().__init__()
        self.linear, self._how, self._call, self._calls = (
            nn.Linear(_WIDTH, NUM_CLASSES),
            how,
            call,
            0,
        )

    def forward(self, value: Tensor) -> Tensor:
        harmful = self.training if self._how != "eval" else not self.training
        self._calls += harmful and value.device.type != "meta"
        if harmful and self._calls == self._call:
            Path(f"harmed-{os.environ['RANK']}").write_text(str(time.time()))
            if self._how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the layer has had enough")
        return self.linear(value)


def failing(how: str, call: int) -> list[nn.Module]:
    """Two micro-batches are two calls; the layer that fails is the last stage's."""
    return [nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), Fails(how, call)]


class Breaks(Dataset[tuple[Tensor, Tensor]]):
    """A sample that cannot be read, or that ends the data, far behind the first micro-batch."""

    def __init__(self, how: str) -> None:
        self._samples, self._how = points()[0], how

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 25:
            Path(f"harmed-{os.environ['RANK']}").write_text(str(time.time()))
            raise (StopIteration if self._how == "end" else OSError)("sample 25 is gone")
        found: tuple[Tensor, Tensor] = self._samples[index]
        return found


def breaking(how: str) -> Breaks:
    return Breaks(how)


_VOCABULARY, _HIDDEN = 261, 16


def _logits(words: nn.Module, value: Tensor) -> Tensor:
    return nn.functional.linear(value, words.weight)


def specs() -> Any:
    """A language model as a script for DeepSpeed builds it."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("words", nn.Embedding, _VOCABULARY, _HIDDEN),
        LayerSpec(nn.Linear, _HIDDEN, 2 * _HIDDEN),
        lambda value: value.relu(),
        LayerSpec(nn.Linear, 2 * _HIDDEN, _HIDDEN),
        LayerSpec(nn.LayerNorm, _HIDDEN),
        TiedLayerSpec("words", nn.Embedding, _VOCABULARY, _HIDDEN, forward_fn=_logits),
    ]
    return PipelineModule(layers, num_stages=2)


class SpecsByHand(nn.Module):
    """The same in plain PyTorch, with the same first weights."""

    def __init__(self) -> None:
        super().__init__()
        import deepspeed.pipe  # noqa: F401, the function below would import it too late

        from framework.models.layer_lists import as_layers
        from framework.models.layer_specs import pipelines_unbuilt
        from framework.models.layers import LayeredModel

        with pipelines_unbuilt():
            weights = list(LayeredModel(as_layers(specs())).state_dict().values())
        self.words = nn.Embedding(_VOCABULARY, _HIDDEN)
        self.up = nn.Linear(_HIDDEN, 2 * _HIDDEN)
        self.down = nn.Linear(2 * _HIDDEN, _HIDDEN)
        self.norm = nn.LayerNorm(_HIDDEN)
        self.load_state_dict(dict(zip(self.state_dict(), weights, strict=True)))

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.norm(self.down(self.up(self.words(tokens)).relu()))
        return value @ self.words.weight.T
