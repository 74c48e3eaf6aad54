"""The weights and adapters that a run starts from: `checkpoint.init_weights` and
`training.lora.init_adapter`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from framework.checkpoint.adapter_files import WEIGHTS, adapter_problems
from framework.checkpoint.huggingface import published_problems
from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.state.weight_files import LazyWeights, read_exported
from framework.config.load import Source
from framework.config.run_config import RunConfig
from framework.engine.weights import find_weights, refuse_other_layers
from framework.errors import Problem
from framework.plan.plan import accepted
from framework.plan.work import trained_shapes

if TYPE_CHECKING:
    from framework.setup.pipeline_stages import CutModel


def starting_weights(
    config: RunConfig, cut: CutModel | None, source: Source, *, is_resumed: bool
) -> tuple[LazyWeights | SavedCheckpoint | None, LazyWeights | None, list[Problem]]:
    """Return the weights, or the checkpoint to read them from, the adapters, and the warnings about
    both.

    Args:
        config: of the run.
        cut: the model as layers, for a pipeline.
        source: where the config's values came from.
        is_resumed: whether a checkpoint is resumed: it holds adapters, but not the weights that
            they were trained on.

    Raises:
        ConfigError: they do not fit the run.
    """
    findings: list[Problem] = []
    weights = None
    adapter = None
    if not is_resumed or config.training.lora is not None:
        findings += accepted(published_problems(config), source)
        weights = _first_weights(config, cut)
    if not is_resumed:
        problems = adapter_problems(config.training.lora, partial(trained_shapes, config))
        findings += accepted(problems, source)
        adapter = _first_adapter(config)
    return weights, adapter, findings


def _first_weights(config: RunConfig, cut: CutModel | None) -> LazyWeights | SavedCheckpoint | None:
    """Return the weights, or the checkpoint, that `checkpoint.init_weights` names."""
    path = config.checkpoint.init_weights
    if path is None:
        return None
    unverified = config.checkpoint.allow_unverified
    weights = find_weights(path, allow_unverified=unverified, model=config.model)
    if cut is not None and not isinstance(weights, SavedCheckpoint):
        refuse_other_layers(weights, cut.surveyed, source=path)
    return weights


def _first_adapter(config: RunConfig) -> LazyWeights | None:
    """Return the adapters that training starts from, under the names in peft's files."""
    folder = config.training.first_adapter
    if folder is None:
        return None
    return read_exported(Path(folder) / WEIGHTS)
