"""Modules and weights that DeepSpeed would train as another model, or fail on with an error that
does not name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from framework.config.run_config import RunConfig
from framework.errors import ConfigError, Problem
from framework.system.log import warn

_IN_HALF: Final = ("bf16", "fp16")


def refuse_unsupported(model: nn.Module, config: RunConfig, *, prefix: str = "") -> None:
    """Refuse a model by the names of its modules and weights that would not be trained as they are.

    Args:
        model: as its factory returns it, before any weight is partitioned.
        config: of the run.
        prefix: of the names in `model`, where it is a layer of a pipeline's stage.

    Raises:
        ConfigError: kinds ``lazy-weight``, ``deepspeed-moe``, ``weights-share-memory``; all
            problems at once.
    """
    problems = list(_lazy_weights(model, prefix))
    problems.extend(_deepspeed_experts(model, prefix))
    problems.extend(_weights_in_the_same_memory(model, config, prefix))
    if problems:
        raise ConfigError(problems)


def _lazy_weights(model: nn.Module, prefix: str) -> Iterator[Problem]:
    names = []
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            names.append(name)
    if names:
        yield Problem(
            "lazy-weight",
            f"{len(names)} of its weights have no shape yet, the first is {prefix}{names[0]}",
            "run one batch through the model in its factory, then return it",
            "model",
            type(model).__name__,
        )


def _deepspeed_experts(model: nn.Module, prefix: str) -> Iterator[Problem]:
    for name, module in model.named_modules():
        if _is_deepspeed_moe(module):
            yield Problem(
                "deepspeed-moe",
                f"its module {prefix}{name or '(root)'} is DeepSpeed's own mixture of experts "
                f"({type(module).__module__}), whose weights are saved in files that export, load "
                "and resume on other ranks do not read",
                "write the experts as plain PyTorch modules, or set model.moe of the kind gpt",
                "model",
                type(model).__name__,
            )
            return


def _is_deepspeed_moe(module: nn.Module) -> bool:
    bases = type(module).__mro__
    return any(base.__module__.startswith("deepspeed.moe.") for base in bases)


def refuse_sparse_gradients(model: nn.Module, config: RunConfig, *, prefix: str = "") -> None:
    """Refuse trained embeddings with sparse gradients at ZeRO 1 to 3, which make flat copies of
    gradients.

    DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py.

    Args:
        model: with the weights frozen that the config freezes.
        config: of the run.
        prefix: of the names in `model`, where it is a layer of a pipeline's stage.

    Raises:
        ConfigError: kind ``sparse-gradient``.
    """
    if config.zero.stage == 0:
        return
    for name, module in model.named_modules():
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if is_embedding and module.sparse and module.weight.requires_grad:
            raise ConfigError.of(
                "sparse-gradient",
                f"its embedding {prefix}{name or '(root)'} has sparse gradients, and DeepSpeed "
                f"takes dense ones alone at zero.stage {config.zero.stage}",
                "build it with sparse=False (the numbers are the same), or set zero.stage: 0",
                "model",
                type(model).__name__,
            )


def _makes_flat_copies(config: RunConfig) -> bool:
    return config.zero.stage > 0 or config.precision.dtype in _IN_HALF


def _weights_in_the_same_memory(
    model: nn.Module, config: RunConfig, prefix: str
) -> Iterator[Problem]:
    """Yield a problem for the first two parameters over the same memory, if DeepSpeed would give
    each a memory of its own.
    """
    spans = []
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or parameter.is_meta or parameter.numel() == 0:
            continue
        storage = parameter.untyped_storage()
        if storage.nbytes() == 0:  # ZeRO has partitioned it
            continue
        start = parameter.storage_offset()
        stop = start + _extent(parameter)
        # Not by addresses: tensors of a FakeTensorMode have none.
        spans.append((storage._cdata, start, stop, name, parameter))
    spans.sort(key=lambda span: span[:3])
    for span, next_span in pairwise(spans):
        memory, _, stop, name, parameter = span
        next_memory, next_start, _, next_name, next_parameter = next_span
        # Columns of one tensor lie between each other, and share no number.
        is_shared = memory == next_memory and next_start < stop
        is_shared = is_shared and _is_dense(parameter) and _is_dense(next_parameter)
        stays_shared = parameter.is_contiguous() and next_parameter.is_contiguous()
        if is_shared and (_makes_flat_copies(config) or not stays_shared):
            yield Problem(
                "weights-share-memory",
                f"its weights {prefix}{name} and {prefix}{next_name} are two parameters over the "
                "same memory, and DeepSpeed would train them apart",
                "tie them by one nn.Parameter under both names (head.weight = embedding.weight), "
                "transposed in forward where needed, or copy the second: .detach().clone()",
                "model",
                type(model).__name__,
            )
            return


def _extent(parameter: torch.Tensor) -> int:
    """Return the number of elements from the first to the last one in memory."""
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _is_dense(parameter: torch.Tensor) -> bool:
    return _extent(parameter) == parameter.numel()


def in_rows(build: Callable[[], nn.Module], config: RunConfig) -> Callable[[], nn.Module]:
    """Return a function that builds the same model with all weights stored row by row.

    It warns once of weights that were stored otherwise, as in `channels_last`.
    """
    has_warned = False

    def build_in_rows() -> nn.Module:
        nonlocal has_warned
        model = build()
        names = store_in_rows(model)
        if names and not has_warned and not config.training.channels_last:
            has_warned = True
            warn(
                f"{len(names)} weights are not stored row by row, as in channels_last (the first "
                f"is {names[0]}), and DeepSpeed takes no others: they are stored row by row, with "
                "the same numbers; for convolutions in channels_last set training.channels_last: "
                "true [weights-stored-in-rows]",
                is_of_all_ranks=True,
            )
        return model

    return build_in_rows


def store_in_rows(model: nn.Module) -> list[str]:
    """Store weights with other strides (`channels_last`, a transposed view) row by row, in place.

    DeepSpeed sends every weight as bytes, which takes a last dimension without gaps (0.19.8,
    runtime/engine.py, `_broadcast_model`; at stage 3 runtime/zero/partition_parameters.py). The
    numbers stay the same.

    Returns:
        Names of the weights that were stored otherwise.
    """
    names = []
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
            names.append(name)
    return names
