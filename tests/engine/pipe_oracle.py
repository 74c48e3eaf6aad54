"""Plain PyTorch in one process, for any config: what a pipeline is held against. No DeepSpeed, no
layer list, no Trainer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from framework.config.base import Target
from framework.config.load import config_from_values
from framework.config.optimizer import Muon
from framework.data.batches import SeededBatches, SeededSamples, WholeBatch
from framework.data.order import epoch_order
from framework.data.splits import as_splits
from framework.setup.user_code import call_factory, load_target
from framework.tasks.from_callable import as_task
from tests.engine.oracle import Average, MuonWithAdam, ScheduleFree
from tests.gpu.oracles import lamb, lion
from tests.tasks.value import value_of_step

_OPTIMIZERS: dict[str, Callable[[Any, Any], torch.optim.Optimizer]] = {
    # In half precision as well the least squares of gradients are those of fp32.
    "adafactor": lambda parameters, section: torch.optim.Adafactor(
        parameters,
        section.lr,
        eps=(torch.finfo(torch.float32).eps, 1e-3),
        weight_decay=section.weight_decay,
    ),
    "adamw": lambda parameters, section: torch.optim.AdamW(
        parameters, section.lr, section.betas, weight_decay=section.weight_decay
    ),
    "lamb": lambda parameters, section: lamb(
        parameters[0]["params"], lr=section.lr, weight_decay=section.weight_decay
    ),
    "lion": lambda parameters, section: lion(parameters[0]["params"], lr=section.lr),
    "sgd": lambda parameters, section: torch.optim.SGD(
        parameters, section.lr, momentum=section.momentum
    ),
}


def plain_run(
    values: Mapping[str, Any],
    *,
    micro_size: int,
    num_steps: int,
    together: int = 1,
    ranks: int = 1,
    norms: list[float] | None = None,
    dtype: torch.dtype = torch.float32,
    rates: Sequence[float] = (),
) -> tuple[list[float], dict[str, float], nn.Module]:
    """Losses of all steps, metrics over the evaluation data, and the trained model.

    `together`: as many data-parallel ranks whose micro-batches batch norm sees as one. `ranks`: as
    many that see their own, and of which the first one's running statistics are those of the model.
    `norms` gets those of the gradients. `dtype`: of the weights, and all that is kept of them. `rates`: of each step.
    """
    config = config_from_values(values)
    splits = as_splits(call_factory(config.data.factory(), key="data"))
    task = as_task(call_factory(config.task.factory(), key="task"))
    torch.manual_seed(config.run.seed)
    made = call_factory(config.model.factory(), key="model")
    model: nn.Module = nn.Sequential(*made) if isinstance(made, list) else made
    model.to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            not any(re.fullmatch(pattern, name) for pattern in config.training.freeze)
        )
    optimizer, losses = _optimizer(model, config.optimizer, config.scheduler), list[float]()
    average = Average(model, config.training.ema.decay) if config.training.ema else None
    for step in range(num_steps):
        micro_batches = _micro_batches(config, splits.train, step, micro_size, together)
        optimizer.zero_grad()
        if rates:
            for group in optimizer.param_groups:  # type: ignore[union-attr]
                group["lr"] = rates[step]
        results = []
        for number, batch in enumerate(micro_batches):
            _keep_statistics(model, changing=number < len(micro_batches) // ranks)
            inputs, targets = task.split(batch)
            results.append(task.loss(task.forward(model, inputs), targets))
        loss = value_of_step(results)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.training.clip_grad_norm)
        optimizer.step()
        if average is not None:
            average.step()
        if norms is not None:
            norms.append(norm.item())
        losses.append(loss.item())
    if isinstance(optimizer, ScheduleFree):
        optimizer.end()
    if average is not None and config.evaluation.weights == "ema":
        model.load_state_dict(average.weights, strict=False)
    return losses, _evaluate(model, task, splits.evaluation), model


def _keep_statistics(model: nn.Module, *, changing: bool) -> None:
    """Let running statistics follow the batches that come now, or stay as they are."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1 if changing else 0.0


def _optimizer(
    model: nn.Module, section: Any, schedule: Any
) -> torch.optim.Optimizer | MuonWithAdam | ScheduleFree:
    if getattr(section, "kind", "") == "schedule_free":
        return ScheduleFree(
            model,
            lr=section.lr,
            decay=section.weight_decay,
            warmup_steps=schedule.warmup_steps,
        )
    if isinstance(section, Muon):
        return MuonWithAdam.for_blocks(model, lr=section.lr, adam_lr=section.adam_lr)
    if isinstance(section, Target):
        made: torch.optim.Optimizer = load_target(section.target, key="optimizer")(
            list(model.parameters()), **section.args
        )
        return made
    return _OPTIMIZERS[section.kind](_groups(model, section), section)


def _groups(model: nn.Module, section: Any) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if section.layer_decay != 1.0:
        return [_layer_group(name, weight, section) for name, weight in model.named_parameters()]
    if section.weight_decay_on == "all":
        return [{"params": trained}]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    return [
        {"params": [p for p in trained if p.ndim >= 2]},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _layer_group(name: str, weight: nn.Parameter, section: Any) -> dict[str, Any]:
    """A group for each weight: of three blocks the last one has the rate times one share, the
    embeddings four.
    """
    block = re.match(r"blocks\.(\d)", name)
    below = 3 - int(block.group(1)) if block else 0 if name.startswith("norm") else 4
    return {"params": [weight], "lr": section.lr * section.layer_decay**below}


def _micro_batches(
    config: Any, dataset: Any, step: int, micro_size: int, together: int
) -> list[Any]:
    """The step's samples in order, an equal slice for each rank, cut into micro-batches."""
    size = config.batch.global_size
    epoch, position = divmod(step, len(dataset) // size)
    order = epoch_order(len(dataset), seed=config.run.seed, epoch=epoch, shuffle=True)
    slices = order[position * size : (position + 1) * size].view(together, -1, micro_size)
    return [
        _read(config, dataset, epoch, slices[:, number].flatten().tolist())
        for number in range(slices.shape[1])
    ]


def _read(config: Any, dataset: Any, epoch: int, indices: list[int]) -> Any:
    if config.data.has_random_samples():
        samples = SeededSamples(dataset, seed=config.run.seed).__getitems__(
            [(epoch, index) for index in indices]
        )
        return _collated(samples, dataset)
    return _collated([dataset[index] for index in indices], dataset)


def _collated(samples: Any, dataset: Any = None) -> Any:
    if hasattr(dataset, "collate_fn"):
        return dataset.collate_fn(samples)
    return samples.fields if isinstance(samples, WholeBatch) else default_collate(samples)


def _evaluate(model: nn.Module, task: Any, dataset: Any) -> dict[str, float]:
    """Every sample once, in one batch."""
    model.eval()
    with torch.no_grad():
        inputs, targets = task.split(
            _collated(SeededBatches(dataset).__getitems__(list(range(len(dataset)))), dataset)
        )
        ratios = task.measure(task.forward(model, inputs), targets)
    sums = {name: float(ratio.total) / float(ratio.count) for name, ratio in ratios.items()}
    return {**sums, **task.derive(sums)}


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a result."""
    return (
        [value]
        if isinstance(value, Tensor)
        else [tensor for part in value for tensor in tensors_of(part)]
    )
