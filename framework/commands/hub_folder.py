"""Files that make a folder of weights ready for the Hugging Face Hub: tokenizer, generation_config.json, model card."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.data import Conversations, LabelledText, Text, TextPairs
from framework.config.run_config import RunConfig
from framework.config.training import CausalLM, Classification, MaskedLM
from framework.data.chat import open_tokenizer, pad_of
from framework.data.token_files import KEPT_TOKENIZER, TOKENIZER_FILE
from framework.errors import ConfigError, counted
from framework.system.files import replace_text
from framework.system.log import warn

CARD: Final = "README.md"
_GENERATION: Final = "generation_config.json"
# The Hub's names of what a task is for.
_PIPELINES: Final = {CausalLM: "text-generation", MaskedLM: "fill-mask", Classification: "image-classification"}
_ON_THE_HUB: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SECTIONS: Final = ("optimizer", "scheduler", "batch", "precision", "zero", "parallel", "training")
_ALWAYS: Final = ("kind", "lr", "dtype", "stage")


def tokenizer_of_run(checkpoint: SavedCheckpoint, config: RunConfig) -> Any:
    """The tokenizer of a run on text, of transformers; None of others, or with a warning where it cannot be read."""
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


def special_numbers(tokenizer: Any) -> dict[str, int | None]:
    """What config.json says of special tokens."""
    numbers = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos")}
    return numbers | {"pad_token_id": pad_of(tokenizer)}


def write_hub_files(
    folder: Path, checkpoint: SavedCheckpoint, config: RunConfig, tokenizer: Any, described: Mapping[str, Any]
) -> dict[str, int]:
    """Write everything but the weights and config.json, which is `described`; returns file -> bytes."""
    base = config.checkpoint.init_weights or getattr(config.model, "args", {}).get("pretrained_model_name_or_path")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        if isinstance(config.task, CausalLM):
            file, values = Path(str(base), _GENERATION), dict[str, Any](special_numbers(tokenizer))
            values |= json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            ends = values["eos_token_id"] if isinstance(values["eos_token_id"], list) else [values["eos_token_id"]]
            ends = [*dict.fromkeys(one for one in (tokenizer.eos_token_id, *ends) if one is not None)]
            values["eos_token_id"] = ends if len(ends) != 1 else ends[0]
            replace_text(folder / _GENERATION, json.dumps(values, indent=2) + "\n")
    replace_text(folder / CARD, model_card(checkpoint, config, described, base=str(base) if base else None))
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def model_card(
    checkpoint: SavedCheckpoint, config: RunConfig, described: Mapping[str, Any], *, base: str | None
) -> str:
    """The card of a checkpoint's model: metadata as YAML, then what was trained, on what, how, and what came of it."""
    manifest, section = checkpoint.manifest, config.data
    data = str(next(getattr(section, key) for key in ("kind", "target", "object") if hasattr(section, key)))
    metrics = {key: value for key, value in sorted(manifest["metrics"].items()) if key.startswith("eval/")}
    pipeline = next((tag for kind, tag in _PIPELINES.items() if isinstance(config.task, kind)), None)
    pipeline = "text-classification" if isinstance(section, LabelledText) else pipeline
    head: dict[str, Any] = {"library_name": "transformers" if described else "pytorch"}
    head |= {"tags": ["dsf-trainer", "deepspeed"]} | ({"pipeline_tag": pipeline} if pipeline else {})
    is_here = base is not None and Path(base).exists()
    if base is not None and not is_here and _ON_THE_HUB.fullmatch(base):
        head["base_model"] = base
    if pipeline and metrics:
        found = [{"type": key.partition("/")[2], "name": key, "value": value} for key, value in metrics.items()]
        result = {"task": {"type": pipeline}, "dataset": {"name": data, "type": data}, "metrics": found}
        head["model-index"] = [{"name": config.run.name, "results": [result]}]
    origin = "random weights" if base is None else f"`{Path(base).name if is_here else base}`"
    adapters = " by low-rank adapters, which are merged into its weights" if checkpoint.has_adapters else ""
    architecture, samples = described.get("architectures", ["A model"])[0], manifest["num_train_samples"]
    layout = manifest["layout"]
    path = f" ({Path(section.path).name})" if getattr(section, "path", None) else ""  # type: ignore[union-attr, arg-type]
    learnt = ", the assistant's answers alone" if isinstance(section, Conversations) else ""
    loss = {key: value for key, value in manifest["metrics"].items() if key == "train/loss"}
    about = [
        f"# {config.run.name}",
        f"{architecture}, trained from {origin}{adapters} with dsf-trainer (DeepSpeed).",
        f"- data: {data}{path}, {counted(samples, 'sample')} of training{learnt}\n"
        f"- steps: {manifest['step']:,} of {counted(layout['global_size'], 'sample')} "
        f"({manifest['samples'] / samples:.2f} epochs) on {counted(layout['world_size'], 'rank')}",
        _table("metric", {key: f"{value:.6g}" for key, value in (metrics | loss).items()}),
        "## Hyperparameters",
        _table("key", dict(_settings(config))),
        "## Versions",
        _table("package", manifest["versions"]),
    ]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + "\n\n".join(about) + "\n"


def _settings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Everything that is not as a section has it by default, and what is always asked."""
    values = config.to_dict()
    for name in _SECTIONS:
        section = getattr(config, name)
        for key, field in type(section).model_fields.items():
            if key in _ALWAYS or getattr(section, key) != field.get_default(call_default_factory=True):
                yield f"{name}.{key}", json.dumps(values[name][key])


def _table(first: str, rows: Mapping[str, str]) -> str:
    return "\n".join(f"| {one} | {other} |" for one, other in ((first, "value"), ("---", "---"), *rows.items()))
