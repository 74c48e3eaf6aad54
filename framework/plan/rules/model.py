"""Rules about the model by itself, and about what `training` asks of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from framework.config.base import ModelKind
from framework.config.model import BERT, GPT
from framework.config.run_config import RunConfig
from framework.errors import Problem
from framework.plan.cluster import Cluster


def heads_divide(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Attention splits the hidden units evenly over its heads, and shares key heads evenly; a rotation turns pairs."""
    model = config.model
    if not isinstance(model, (GPT, BERT)):
        return
    if model.hidden_size % model.num_heads:
        yield Problem(
            kind="heads-not-divisible",
            key="model.num_heads",
            value=model.num_heads,
            reason=f"{model.hidden_size} hidden units cannot be split evenly over the heads",
            fix=f"set model.num_heads: {_divisor(model.hidden_size, near=model.num_heads)}",
        )
    elif isinstance(model, GPT) and model.num_heads % model.num_kv_heads:
        yield Problem(
            kind="heads-not-divisible",
            key="model.num_kv_heads",
            value=model.num_kv_heads,
            reason=f"{model.num_heads} heads cannot share them evenly",
            fix=f"set model.num_kv_heads: {_divisor(model.num_heads, near=model.num_kv_heads)}",
        )
    elif isinstance(model, GPT) and model.positions == "rotary" and model.hidden_size // model.num_heads % 2:
        yield Problem(
            kind="odd-rotary-heads",
            key="model.num_heads",
            value=model.num_heads,
            reason=f"a head has {model.hidden_size // model.num_heads} units, and rotary positions turn pairs of them",
            fix="set model.hidden_size to an even multiple of model.num_heads",
        )


def _divisor(number: int, *, near: int) -> int:
    """The divisor that is nearest."""
    near = min(near, number)
    return next(d for step in range(number) for d in (near - step, near + step) if d > 0 and number % d == 0)


def recompute_in_parts(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """One group of everything runs everything again and holds, while it does, as much as without."""
    every = config.training.recompute_every
    if isinstance(config.model, ModelKind) and every >= config.model.num_layers_in_list():
        count = config.model.num_layers_in_list()
        yield Problem(
            kind="recompute-whole-model",
            key="training.recompute_every",
            value=every,
            severity="warning",
            reason=f"all {count} layers are one group, which computes them twice and saves next to no memory",
            fix="set training.recompute_every: 1 or a few",
        )


def inert_model_options(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """An option for layers that the model does not have."""
    model, training = config.model, config.training
    if not isinstance(model, ModelKind):
        return
    for key, asked, has, words in (
        ("sync_batch_norm", training.sync_batch_norm, model.has_batch_norm, "batch norm"),
        ("channels_last", training.channels_last, model.has_convolutions, "convolution"),
    ):
        if asked and not has:
            yield Problem(
                kind="inert-for-model",
                key=f"training.{key}",
                value=True,
                severity="warning",
                reason=f"the {model.kind} model has no {words}",
                fix="remove it",
            )


def channels_last_with_pipeline(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Activations between stages would have their channels last: gloo says "input tensor has to be contiguous"."""
    if config.training.channels_last and config.parallel.pipe > 1:
        yield Problem(
            kind="channels-last-with-pipeline",
            key="training.channels_last",
            value=True,
            reason="stages can send only tensors in the usual order",
            fix="set training.channels_last: false or parallel.pipe: 1",
        )


def freeze_patterns(config: RunConfig, cluster: Cluster) -> Iterator[Problem]:
    """Text that is no regular expression, such as ``*.bias``."""
    for number, pattern in enumerate(config.training.freeze):
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            yield Problem(
                kind="bad-pattern",
                key=f"training.freeze.{number}",
                value=pattern,
                reason=f"it is no regular expression: {error}",
                fix="write for example .*bias for all that ends so",
            )
