"""What the loops of a comparison share: the run, its model and optimizer, batches, and moments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.loops.recorded import Recorded
from framework.config.optimizer import AdamW
from framework.engine import random_state
from framework.engine.distributed import device, device_name, rank
from framework.setup.prepare_run import Prepared
from framework.system.stopping import GO_ON, Decision

LOG_EVERY: Final = 10
CLIP: Final = 1.0


@dataclass(frozen=True)
class Setting:
    """What the loops of a comparison share.

    Attributes:
        prepared: the run that ours would be.
        folder: for what they write.
        log_every: steps between two logged points, of the loops that log.
        recorded: the batches that ours reads, for the loops with torch's loader; None: these
            shuffle the dataset by themselves.
        half: loops without DeepSpeed compute in bf16: plain PyTorch with weights in bf16,
            Accelerate and Hugging Face under autocast.
        compiles: the plain loop compiles its model.
        stop: asks ours before each step whether to go on.
    """

    prepared: Prepared
    folder: Path
    log_every: int = LOG_EVERY
    recorded: Recorded | None = None
    half: bool = False
    compiles: bool = False
    stop: Callable[[int], Decision] = lambda step: GO_ON

    @property
    def micro_size(self) -> int:
        """Samples of a micro-batch."""
        return self.prepared.plan.layout.micro_size

    def build_model(self, place: torch.device | None = None) -> nn.Module:
        """Build the model of the run from its seed, on the host or another place, with its
        adapters.
        """
        prepared = self.prepared
        config = prepared.plan.config
        random_state.seed_everything(config.run.seed)
        with place or torch.device("cpu"):
            model = prepared.parts.build_model()
            if config.training.lora is not None:
                from framework.models.adapters import add_adapters

                model = add_adapters(model, config.training.lora, seed=config.run.seed)
        return model

    def adamw(self, model: nn.Module) -> torch.optim.AdamW:
        """Return torch's AdamW with the values of the run, on a GPU in its fused form, as Hugging
        Face's Trainer takes it.
        """
        section = self.prepared.plan.config.optimizer
        assert isinstance(section, AdamW)
        return torch.optim.AdamW(
            [weight for weight in model.parameters() if weight.requires_grad],
            lr=section.lr,
            betas=(section.betas[0], section.betas[1]),
            eps=section.eps,
            weight_decay=section.weight_decay,
            fused=device_name() != "cpu",
        )


def place_of_models() -> torch.device | None:
    """Return the device, for models whose first weights nothing compares: a GPU draws billions of
    them in a second. None on a processor.
    """
    if device_name() == "cpu":
        return None
    return device()


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in fp32, mean of all targets, of logits (..., classes)."""
    return cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


class Pace:
    """Moments at which the steps of a block begin: of the clock, and of the processor time of the
    thread that trains, which other work on the machine does not lengthen.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._processor: list[float] = []

    def step(self) -> None:
        """Note that a step begins."""
        self._seconds.append(time.perf_counter())
        self._processor.append(time.thread_time())

    def take(self) -> tuple[float, float]:
        """Return the mean seconds and processor seconds of a step since the last call, of all
        steps but the last one.
        """
        num_steps = len(self._seconds) - 1
        seconds = (self._seconds[-1] - self._seconds[0]) / num_steps
        processor = (self._processor[-1] - self._processor[0]) / num_steps
        self._seconds.clear()
        self._processor.clear()
        return seconds, processor


class Paced:
    """The trainer's batches, of which the first of each step is noted."""

    def __init__(self, loader: Any, pace: Pace, per_step: int) -> None:
        self._loader = loader
        self._pace = pace
        self._per_step = per_step

    def stream(self, start_step: int) -> Iterator[Any]:
        """Yield the loader's micro-batches."""
        for number, batch in enumerate(self._loader.stream(start_step)):
            if number % self._per_step == 0:
                self._pace.step()
            yield batch


def dataset_from(setting: Setting, start: int) -> Dataset[Any]:
    """Return the samples from a step on, in the order of ours, or all of them."""
    if setting.recorded is None:
        whole: Dataset[Any] = setting.prepared.parts.splits.train
        return whole
    return setting.recorded.from_step(start)


def batches_from(setting: Setting, start: int) -> Iterator[Any]:
    """Yield this rank's batches, from a step on, by torch's loader."""
    dataset = dataset_from(setting, start)
    options: dict[str, Any] = {
        "batch_size": setting.micro_size,
        "drop_last": True,
        "pin_memory": device_name() != "cpu",
    }
    if setting.recorded is not None:
        sampler = setting.recorded.indices_of_rank(rank())
        yield from DataLoader(dataset, sampler=sampler, **options)
        return
    shuffled: DistributedSampler[Any] = DistributedSampler(dataset, drop_last=True)
    loader: Any = DataLoader(dataset, sampler=shuffled, **options)
    epoch = 0
    while True:
        shuffled.set_epoch(epoch)
        epoch += 1
        yield from loader


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def moved(batch: Any, to: torch.device) -> list[Tensor]:
    """Copy a batch to a device, its inputs as a list and its targets last."""
    return [tensor.to(to, non_blocking=True) for tensor in batch]


def halved(tensor: Tensor) -> Tensor:
    """Return images in bf16, as weights in bf16 need them; tokens stay."""
    if tensor.is_floating_point():
        return tensor.to(torch.bfloat16)
    return tensor
