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
from framework.config.run_config import RunConfig
from framework.config.training import CausalLM, Classification, MaskedLM
from framework.data.token_files import KEPT_TOKENIZER, TOKENIZER_FILE
from framework.errors import ConfigError, counted
from framework.recipes.text.chat import open_tokenizer, pad_of
from framework.recipes.text.kinds import Conversations, LabelledText, Text, TextPairs
from framework.system.files import replace_text
from framework.system.log import warn

_GENERATION: Final = "generation_config.json"
_PIPELINES: Final[Mapping[type, str]] = {
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
    """Write every file of the folder but the weights; returns file -> bytes.

    These are config.json with `described`, unless that is empty, the tokenizer,
    generation_config.json, and a model card.
    """
    base = _base_of(config)
    token_ids = dict[str, Any]()
    tokenizer = _tokenizer_of_run(checkpoint, config)
    if tokenizer is not None:
        # recipes/text/labelled_text.py keeps them there; transformers has them in config.json
        class_names = tokenizer.init_kwargs.pop("classes", None)
        if class_names and described:
            described = dict(described) | {"id2label": dict(enumerate(class_names))}
        tokenizer.save_pretrained(folder)
        token_ids = _token_ids(tokenizer)
    if described:
        values = _config_values(described, token_ids, dtype)
        replace_text(folder / CONFIG, json.dumps(values, indent=2) + "\n")
    if token_ids and isinstance(config.task, CausalLM):
        values = _generation_config(token_ids, Path(str(base), _GENERATION))
        replace_text(folder / _GENERATION, json.dumps(values, indent=2) + "\n")
    replace_text(folder / "README.md", _card(checkpoint, config, described, base))
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def _base_of(config: RunConfig) -> str | None:
    """Return the weights that the run began with, a path or a name of the Hub, or None."""
    model_args = getattr(config.model, "args", {})
    base = config.checkpoint.init_weights or model_args.get("pretrained_model_name_or_path")
    if base:
        return str(base)
    return None


def _token_ids(tokenizer: Any) -> dict[str, Any]:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": pad_of(tokenizer),
    }


def _generation_config(token_ids: Mapping[str, Any], base_file: Path) -> dict[str, Any]:
    """Add the base model's generation_config.json, if there is one, to the tokenizer's ids; a
    sample ends at the tokenizer's end or at one of the base model's.
    """
    values = dict(token_ids)
    if base_file.is_file():
        values |= json.loads(base_file.read_text(encoding="utf-8"))
    ends = [token_ids["eos_token_id"]]
    if isinstance(values["eos_token_id"], list):
        ends += values["eos_token_id"]
    else:
        ends.append(values["eos_token_id"])
    values["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return values


def _tokenizer_of_run(checkpoint: SavedCheckpoint, config: RunConfig) -> Any:
    """Return the tokenizer of transformers of a run on text, or None; warns if it cannot be
    read.
    """
    if not isinstance(config.data, (Text, TextPairs, Conversations, LabelledText)):
        return None
    kept = checkpoint.folder.absolute().parent / KEPT_TOKENIZER
    path = None
    if (kept / TOKENIZER_FILE).is_file():
        path = str(kept)
    try:
        tokenizer = open_tokenizer(path)
    except ConfigError as error:
        warn(f"the tokenizer is left out: {error}")
        return None
    tokenizer.model_max_length = getattr(config.model, "max_positions", tokenizer.model_max_length)
    return tokenizer


def _pipeline_tag(config: RunConfig) -> str | None:
    """Return the Hub's name of the task, or None."""
    if isinstance(config.data, LabelledText):
        return "text-classification"
    for task, tag in _PIPELINES.items():
        if isinstance(config.task, task):
            return tag
    return None


def _config_values(
    described: Mapping[str, Any], token_ids: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Return config.json: what describes the model, and the tokens that it leaves open."""
    values = {**described, "dtype": str(dtype).removeprefix("torch.")}
    for key, token_id in token_ids.items():
        if described.get(key) is None:
            values[key] = token_id
    return values


def _card(
    checkpoint: SavedCheckpoint, config: RunConfig, described: Mapping[str, Any], base: str | None
) -> str:
    """Return a model card: metadata as YAML, then model, data, steps, metrics, settings."""
    manifest = checkpoint.manifest
    metrics = _eval_metrics(manifest)
    head = _card_metadata(config, metrics, base, is_transformers=bool(described))
    origin = _origin_of(base)
    if checkpoint.has_adapters:
        origin += " by low-rank adapters, which are merged into its weights"
    data_name = _name_of_data(config)
    layout = manifest["layout"]
    samples = manifest["num_train_samples"]
    paragraphs = [
        f"# {config.run.name}",
        f"{described.get('architectures', ['A model'])[0]}, trained from {origin} with "
        "dsf-trainer.",
        f"- data: {data_name}, {counted(samples, 'sample')} "
        f"of training\n- steps: {manifest['step']:,} of "
        f"{counted(layout['global_size'], 'sample')} ({manifest['samples'] / samples:.2f} epochs) "
        f"on {counted(layout['world_size'], 'rank')}",
        _table("metric", {key: f"{value:.6g}" for key, value in metrics.items()}),
        "## Hyperparameters",
        _table("key", _settings(config)),
        "## Versions",
        _table("package", manifest["versions"]),
    ]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + "\n\n".join(paragraphs) + "\n"


def _eval_metrics(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in sorted(manifest["metrics"].items()) if key.startswith("eval/")
    }


def _name_of_data(config: RunConfig) -> str:
    name = _kind_of_data(config)
    path = getattr(config.data, "path", None)
    if path:
        name += f" ({Path(path).name})"
    return name


def _card_metadata(
    config: RunConfig, metrics: Mapping[str, Any], base: str | None, *, is_transformers: bool
) -> dict[str, Any]:
    """Return the metadata of a model card, as the Hub reads it."""
    head: dict[str, Any] = {"library_name": "pytorch", "tags": ["dsf-trainer", "deepspeed"]}
    if is_transformers:
        head["library_name"] = "transformers"
    pipeline = _pipeline_tag(config)
    if pipeline:
        head["pipeline_tag"] = pipeline
    if base is not None and _is_on_the_hub(base):
        head["base_model"] = base
    if metrics and pipeline:
        result = _result(config, metrics, pipeline)
        head["model-index"] = [{"name": config.run.name, "results": [result]}]
    return head


def _is_on_the_hub(base: str) -> bool:
    return not Path(base).exists() and _ON_THE_HUB.fullmatch(base) is not None


def _result(config: RunConfig, metrics: Mapping[str, Any], pipeline: str) -> dict[str, Any]:
    """Return the metrics of a run, as the Hub reads them."""
    kind = _kind_of_data(config)
    rows = []
    for name, value in metrics.items():
        rows.append({"type": name.partition("/")[2], "name": name, "value": value})
    return {
        "task": {"type": pipeline},
        "dataset": {"name": kind, "type": kind},
        "metrics": rows,
    }


def _origin_of(base: str | None) -> str:
    """Describe the weights that training began with: random ones, or a model's."""
    if base is None:
        return "random weights"
    if Path(base).exists():
        return f"`{Path(base).name}`"
    return f"`{base}`"


def _kind_of_data(config: RunConfig) -> str:
    keys = [key for key in ("kind", "target", "object") if hasattr(config.data, key)]
    return str(getattr(config.data, keys[0]))


def _settings(config: RunConfig) -> dict[str, str]:
    """Return the settings that are not a section's defaults, and a few that are always shown."""
    values = config.to_dict()
    settings = {}
    for name in _SECTIONS:
        section = getattr(config, name)
        for key, field in type(section).model_fields.items():
            default = field.get_default(call_default_factory=True)
            if key in _ALWAYS or getattr(section, key) != default:
                settings[f"{name}.{key}"] = json.dumps(values[name][key])
    return settings


def _table(first: str, rows: Mapping[str, str]) -> str:
    """Return a table of Markdown with the columns `first` and "value"."""
    lines = [f"| {first} | value |", "| --- | --- |"]
    for name, value in rows.items():
        lines.append(f"| {name} | {value} |")
    return "\n".join(lines)
