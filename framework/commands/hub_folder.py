"""Files that make a folder of weights ready for the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from framework.checkpoint.huggingface import CONFIG
from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.data import Conversations, LabelledText, Text, TextPairs
from framework.config.run_config import RunConfig
from framework.config.training import CausalLM, Classification, MaskedLM
from framework.data.chat import open_tokenizer, pad_of
from framework.data.token_files import KEPT_TOKENIZER, TOKENIZER_FILE
from framework.errors import ConfigError, counted
from framework.system.files import replace_text
from framework.system.log import warn

_GENERATION: Final = "generation_config.json"
_PIPELINES: Final = {
    CausalLM: "text-generation",
    MaskedLM: "fill-mask",
    Classification: "image-classification",
}
_ON_THE_HUB: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SECTIONS: Final = ("optimizer", "scheduler", "batch", "precision", "zero", "parallel", "training")
_ALWAYS: Final = ("kind", "lr", "dtype", "stage")


def write_hub_files(
    folder: Path,
    checkpoint: SavedCheckpoint,
    config: RunConfig,
    described: Mapping[str, Any],
    *,
    dtype: torch.dtype,
) -> dict[str, int]:
    """Write all but the weights: config.json, `described`, where there is one, tokenizer,
    generation_config.json and a model card; returns file -> bytes.
    """
    base = config.checkpoint.init_weights or getattr(config.model, "args", {}).get(
        "pretrained_model_name_or_path"
    )
    numbers = dict[str, Any]()
    tokenizer = _tokenizer_of_run(checkpoint, config)
    if tokenizer is not None:
        names = tokenizer.init_kwargs.pop("classes", None)
        described = dict(described) | (
            {"id2label": dict(enumerate(names))} if names and described else {}
        )
        tokenizer.save_pretrained(folder)
        numbers = {
            f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos")
        }
        numbers["pad_token_id"] = pad_of(tokenizer)
    if described:
        values = {**described, "dtype": str(dtype).removeprefix("torch.")}
        values |= {key: number for key, number in numbers.items() if described.get(key) is None}
        replace_text(folder / CONFIG, json.dumps(values, indent=2) + "\n")
    if numbers and isinstance(config.task, CausalLM):
        of_base = Path(str(base), _GENERATION)
        values = numbers | (
            json.loads(of_base.read_text(encoding="utf-8")) if of_base.is_file() else {}
        )
        if isinstance(values["eos_token_id"], list):
            ends = values["eos_token_id"]
        else:
            ends = [values["eos_token_id"]]
        values["eos_token_id"] = [
            *dict.fromkeys(end for end in (numbers["eos_token_id"], *ends) if end is not None)
        ]
        replace_text(folder / _GENERATION, json.dumps(values, indent=2) + "\n")
    replace_text(
        folder / "README.md", _card(checkpoint, config, described, str(base) if base else None)
    )
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def _tokenizer_of_run(checkpoint: SavedCheckpoint, config: RunConfig) -> Any:
    """The tokenizer of transformers of a run on text; where it cannot be read, None and a
    warning.
    """
    if not isinstance(config.data, (Text, TextPairs, Conversations, LabelledText)):
        return None
    kept = checkpoint.folder.absolute().parent / KEPT_TOKENIZER
    try:
        found = open_tokenizer(str(kept) if (kept / TOKENIZER_FILE).is_file() else None)
    except ConfigError as error:
        warn(f"the tokenizer is left out: {error}")
        return None
    found.model_max_length = getattr(config.model, "max_positions", found.model_max_length)
    return found


def _card(
    checkpoint: SavedCheckpoint, config: RunConfig, described: Mapping[str, Any], base: str | None
) -> str:
    """Metadata as YAML, then what was trained, on what, how, and what came of it."""
    manifest = checkpoint.manifest
    data = config.data
    kind = str(
        next(getattr(data, key) for key in ("kind", "target", "object") if hasattr(data, key))
    )
    metrics = {
        key: value for key, value in sorted(manifest["metrics"].items()) if key.startswith("eval/")
    }
    pipeline = next(
        (tag for task, tag in _PIPELINES.items() if isinstance(config.task, task)), None
    )
    if isinstance(data, LabelledText):
        pipeline = "text-classification"
    else:
        pipeline = pipeline
    head: dict[str, Any] = {"library_name": "transformers" if described else "pytorch"}
    head |= {"tags": ["dsf-trainer", "deepspeed"]} | (
        {"pipeline_tag": pipeline} if pipeline else {}
    )
    is_here = base is not None and Path(base).exists()
    if base is not None and not is_here and _ON_THE_HUB.fullmatch(base):
        head["base_model"] = base
    found = [
        {"type": key.partition("/")[2], "name": key, "value": value}
        for key, value in metrics.items()
    ]
    if found and pipeline:
        result = {
            "task": {"type": pipeline},
            "dataset": {"name": kind, "type": kind},
            "metrics": found,
        }
        head["model-index"] = [{"name": config.run.name, "results": [result]}]
    if base is None:
        origin = "random weights"
    else:
        origin = f"`{Path(base).name if is_here else base}`"
    if checkpoint.has_adapters:
        adapters = " by low-rank adapters, which are merged into its weights"
    else:
        adapters = ""
    layout = manifest["layout"]
    samples = manifest["num_train_samples"]
    path = getattr(data, "path", None)
    about = [
        f"# {config.run.name}",
        f"{described.get('architectures', ['A model'])[0]}, trained from {origin}{adapters} with "
        "dsf-trainer.",
        f"- data: {kind}{f' ({Path(path).name})' if path else ''}, {counted(samples, 'sample')} "
        f"of training\n- steps: {manifest['step']:,} of "
        f"{counted(layout['global_size'], 'sample')} ({manifest['samples'] / samples:.2f} epochs) "
        f"on {counted(layout['world_size'], 'rank')}",
        _table("metric", {key: f"{value:.6g}" for key, value in metrics.items()}),
        "## Hyperparameters",
        _table("key", _settings(config)),
        "## Versions",
        _table("package", manifest["versions"]),
    ]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + "\n\n".join(about) + "\n"


def _settings(config: RunConfig) -> dict[str, str]:
    """Everything that is not as a section has it by default, and what is always asked."""
    values = config.to_dict()
    return {
        f"{name}.{key}": json.dumps(values[name][key])
        for name in _SECTIONS
        for key, field in type(getattr(config, name)).model_fields.items()
        if key in _ALWAYS
        or getattr(getattr(config, name), key) != field.get_default(call_default_factory=True)
    }


def _table(first: str, rows: Mapping[str, str]) -> str:
    return "\n".join(
        f"| {one} | {other} |" for one, other in ((first, "value"), ("---", "---"), *rows.items())
    )
