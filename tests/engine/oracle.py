"""Plain PyTorch, one process, no DeepSpeed, nothing of ours but the model class and the data: what
engines are held against.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from framework.data.order import epoch_order
from framework.recipes.image_models.small_nets import LeNet
from framework.recipes.image_sets.digits import build

Batch = tuple[torch.Tensor, torch.Tensor]


class MuonWithAdam:
    """torch's Muon for some weights, its AdamW for the others: two optimizers by hand."""

    def __init__(self, muon: torch.optim.Muon, adam: torch.optim.AdamW) -> None:
        self.both = (muon, adam)
        self.experts: list[tuple[nn.Parameter, list[nn.Parameter]]] = []  # whole, and each one's
        self.param_groups = [*muon.param_groups, *adam.param_groups]

    @staticmethod
    def for_blocks(model: nn.Module, *, lr: float, adam_lr: float) -> MuonWithAdam:
        """Muon for the matrices of what is called blocks, with the values that a config has by
        default.
        """
        parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for name, weight in model.named_parameters():
            parts[not (name.startswith("blocks.") and weight.ndim == 2)].append(weight)
        adam = torch.optim.AdamW(parts[1], lr=adam_lr, weight_decay=0.1, betas=(0.9, 0.95))
        return MuonWithAdam(torch.optim.Muon(parts[0], lr=lr, weight_decay=0.1), adam)

    @staticmethod
    def for_layers(model: nn.Module, *, lr: float, adam_lr: float) -> MuonWithAdam:
        """Muon for the matrices of what is called layers, and for each expert's of a packed
        weight.
        """
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        experts: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        for name, weight in model.named_parameters():
            if ".layers." not in name or weight.ndim == 1 or name.endswith("bias"):
                others.append(weight)
            elif weight.ndim == 2:
                matrices.append(weight)
            else:
                parts = [nn.Parameter(part) for part in weight.data]  # views of the same numbers
                experts.append((weight, parts))
                matrices += parts
        adam = torch.optim.AdamW(others, lr=adam_lr, weight_decay=0.1, betas=(0.9, 0.95))
        both = MuonWithAdam(torch.optim.Muon(matrices, lr=lr, weight_decay=0.1), adam)
        both.experts = experts
        return both

    def zero_grad(self) -> None:
        for one in self.both:
            one.zero_grad()
        for weight, _ in self.experts:
            weight.grad = None

    def step(self) -> None:
        for weight, parts in self.experts:
            assert weight.grad is not None
            for part, gradient in zip(parts, weight.grad, strict=True):
                part.grad = gradient
        for one in self.both:
            one.step()


class ScheduleFree:
    """Schedule-free AdamW as the paper writes it (Defazio et al. 2024, algorithm 1): x, y and z are
    three tensors, and the sum of squared rates is counted.
    """

    def __init__(self, model: nn.Module, *, lr: float, decay: float, warmup_steps: int) -> None:
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._lr, self._decay, self._warmup_steps = lr, decay, warmup_steps
        self._ahead = [weight.detach().clone() for weight in self._weights]
        self._averages = [weight.detach().clone() for weight in self._weights]
        self._squares = [torch.zeros_like(weight) for weight in self._weights]
        self._steps, self._sum = 0, 0.0

    def zero_grad(self) -> None:
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take a step of z at y, move x towards z, and put y between them."""
        self._steps += 1
        rate = self._lr * min(1.0, self._steps / max(self._warmup_steps, 1))
        self._sum += rate**2
        share = rate**2 / self._sum
        rows = zip(self._weights, self._ahead, self._averages, self._squares, strict=True)
        for weight, ahead, average, square in rows:
            assert weight.grad is not None
            square.copy_(0.999 * square + 0.001 * weight.grad**2)
            root = (square / (1 - 0.999**self._steps)).sqrt() + 1e-8
            ahead -= rate * (weight.grad / root + self._decay * weight)
            average.copy_((1 - share) * average + share * ahead)
            weight.copy_(0.1 * ahead + 0.9 * average)

    @torch.no_grad()
    def end(self) -> None:
        """Let the model compute with x."""
        for weight, average in zip(self._weights, self._averages, strict=True):
            weight.copy_(average)


class Average:
    """Moving average of a model's trained weights since it was made."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.weights = {
            name: one.detach().clone()
            for name, one in model.named_parameters()
            if one.requires_grad
        }

    def step(self) -> None:
        """Follow the weights."""
        for name, weight in self._model.named_parameters():
            if name in self.weights:
                mean = self.weights[name]
                self.weights[name] = self._decay * mean + (1 - self._decay) * weight.detach()


def digit_batches(*, global_size: int, num_steps: int, seed: int = 0) -> list[Batch]:
    """Whole global batches of the digits in the order of the first epochs."""
    train = build(28).train
    steps_per_epoch = len(train) // global_size
    batches = []
    for step in range(num_steps):
        epoch, position = divmod(step, steps_per_epoch)
        order = epoch_order(len(train), seed=seed, epoch=epoch, shuffle=True)
        samples = [
            train[int(index)]
            for index in order[position * global_size : (position + 1) * global_size]
        ]
        batches.append(
            (
                torch.stack([image for image, _ in samples]),
                torch.tensor([int(label) for _, label in samples]),
            )
        )
    return batches


def plain_losses(
    batches: list[Batch],
    *,
    make_optimizer: Callable[[Any], Any] = torch.optim.AdamW,
    clip: float = 1.0,
    lr_of_step: Callable[[int], float] | None = None,
    seed: int = 0,
    num_parts: int = 1,
) -> list[float]:
    """Loss of every step: the dozen lines that anyone would write.

    `num_parts`: gradients are added up from this many parts of a batch, as ranks do.
    """
    torch.manual_seed(seed)
    model = LeNet(num_classes=10, in_channels=1, image_size=28)
    optimizer = make_optimizer(model.parameters())
    losses, rates = [], [group["lr"] for group in optimizer.param_groups]
    for step, (images, labels) in enumerate(batches):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if lr_of_step is not None:
                group["lr"] = lr_of_step(step) * rate / rates[0]
        optimizer.zero_grad()
        loss = torch.zeros(())
        for part, expected in zip(images.chunk(num_parts), labels.chunk(num_parts), strict=True):
            own = nn.functional.cross_entropy(model(part), expected) / num_parts
            own.backward()
            loss += own.detach()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses
