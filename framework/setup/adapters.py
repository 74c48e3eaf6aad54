"""Exports a checkpoint with adapters: as files for peft, or as the plain model with the adapters
merged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint.adapter_files import DESCRIPTION, WEIGHTS
from framework.checkpoint.manifest import SavedCheckpoint
from framework.checkpoint.state.reader import MergedWeights
from framework.checkpoint.state.weight_files import entries, write_one
from framework.config.groups import is_inside_saved, peft_name
from framework.config.run_config import RunConfig
from framework.config.training import LoRA
from framework.engine.adapter_weights import quantize_adapted
from framework.engine.random_state import seed_everything
from framework.engine.step_batches import HALF
from framework.engine.weights import (
    checkpoint_weights,
    describe_base,
    find_weights,
    put_weights,
    refuse_other_base,
)
from framework.errors import ConfigError, StorageError
from framework.models.adapters import (
    add_adapters,
    is_adapter,
    merge_adapters,
    put_trained,
    untrained_adapters,
)
from framework.models.prepare_model import as_fp32
from framework.models.quantized import put_plain
from framework.system.files import replace_text
from framework.system.log import print_line, warn


def write_adapter(folder: Path, weights: MergedWeights, *, dtype: torch.dtype) -> dict[str, int]:
    """Write files that `peft.PeftModel.from_pretrained` loads onto the same base.

    Returns:
        File -> bytes.

    Raises:
        StorageError: kind ``adapter-untrained``: no adapter has changed in training;
            ``adapter-tied``: two adapters are one weight.
    """
    checkpoint = weights.checkpoint
    if weights.ties:
        one, other = next(iter(weights.ties.items()))
        reason = (
            f"{one} and {other} are one weight, of which peft would make two; export it "
            "without --adapter"
        )
        raise StorageError(f"{checkpoint.path}: {reason} [adapter-tied]")
    _report_untrained(weights)
    lora = checkpoint.manifest["config"]["training"]["lora"]
    section = LoRA.model_validate(lora)
    # As peft does, without the buffers of modules that are not trained.
    names = {}
    for name in weights:
        if is_adapter(name) or is_inside_saved(name, section):
            names[name] = peft_name(name)
    all_entries = entries(weights.stored, dtype=dtype, names=names)
    adapter_entries = [entry for entry in all_entries if entry.name in names]
    base = checkpoint.manifest.get("base") or {}
    description: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": base.get("init_weights"),
        "inference_mode": True,
        "bias": "none",
        **section.of_peft(),
        "modules_to_save": section.modules_to_save or None,
    }
    text = json.dumps(description, indent=2) + "\n"
    replace_text(folder / DESCRIPTION, text)
    metadata = _metadata(base, section, checkpoint.manifest["config"]["precision"]["dtype"])
    num_bytes = write_one(folder / WEIGHTS, weights, adapter_entries, metadata=metadata)
    return {WEIGHTS: num_bytes, DESCRIPTION: len(text.encode())}


def _metadata(base: Mapping[str, Any], section: LoRA, dtype: str) -> dict[str, str]:
    """Return what the file of adapters has about the base that they were trained on."""
    metadata = {"format": "pt"}
    if base:
        metadata["base"] = base["sha256"]
        if section.quantization is not None:
            metadata["base_quantization"] = section.quantization
        metadata["base_dtype"] = dtype
    return metadata


def _report_untrained(weights: MergedWeights) -> None:
    """Warn of adapters that add nothing; raises StorageError if all are so after training."""
    checkpoint = weights.checkpoint
    untrained = list(untrained_adapters(weights))
    if not untrained:
        return
    num_adapters = 0
    for name in weights:
        if ".lora_B." in name or ".lora_embedding_B." in name:
            num_adapters += 1
    places = (
        f"{len(untrained)} of {num_adapters} adapters have a B of zeros and add nothing, "
        f"{untrained[0]} first"
    )
    if checkpoint.step and len(untrained) == num_adapters:
        raise StorageError(
            f"{checkpoint.path}: {places}, after {checkpoint.step} steps: what the model "
            "computes does not go through these modules; name others [adapter-untrained]"
        )
    warn(f"{places} (step {checkpoint.step}) [adapter-untrained]")


def _weights_of_base(source: str, config: RunConfig) -> Any:
    """Return the weights at `source`, on which adapters were trained."""
    try:
        weights = find_weights(
            source, allow_unverified=config.checkpoint.allow_unverified, model=config.model
        )
    except ConfigError as error:
        reason = f"{error.problems[0].reason}, and the adapters were trained on the weights there"
        raise ConfigError.of(
            "weights-not-found", reason, "give --base PATH: where they are", "--base", source
        ) from error
    if isinstance(weights, SavedCheckpoint):
        return checkpoint_weights(weights)
    return weights


def _round_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def merged_model(
    weights: MergedWeights,
    config: RunConfig,
    build: Callable[[], torch.nn.Module],
    *,
    base: str | None = None,
) -> torch.nn.Module:
    """Return the model that `build` returns, with the adapters of a checkpoint added to its
    weights, on the CPU in fp32.

    The frozen weights are the run's own: read from `base` or else from the run's own
    `checkpoint.init_weights`, or drawn under its seed; and rounded as the run rounded them.

    Raises:
        ConfigError: the frozen weights cannot be found, or the adapters were trained on others.
    """
    lora = config.training.lora
    source = base or config.checkpoint.init_weights
    assert lora is not None
    seed_everything(config.run.seed)
    model = as_fp32(build())
    if source is not None:
        put_weights(model, _weights_of_base(source, config), source=source)
    model = add_adapters(model, lora, seed=config.run.seed)
    half = HALF.get(config.precision.dtype)
    if half is not None:
        _round_weights(model, half)
    dtype = half or torch.float32
    if lora.quantization is not None:
        done = quantize_adapted(model, lora.quantization, dtype=dtype)
        print_line(f"the adapters are merged into the weights that they were trained on: {done}")
    refuse_other_base(weights.checkpoint, describe_base(model, source))
    put_trained(as_fp32(model), weights)
    put_plain(model, dtype)
    return merge_adapters(model)
