"""The page "where is what I know": arguments of other tools and our keys, from `other_words.yaml`;
keys of DeepSpeed's JSON from the tables of the framework.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from framework.config.deepspeed_words import OWNED, PASSED_THROUGH
from framework.config.other_words import REASON, SEVERAL_TOOLS, rows_by_tool, value_rows
from framework.plan.rules.passthrough import REMOVED, not_in_a_run
from tools.docs_site.kinds import ROOT

_TITLES: Final = {
    "Hugging Face TrainingArguments": "Every field of `transformers.TrainingArguments`.",
    "Lightning Trainer": "Every argument of `lightning.Trainer`.",
    "accelerate Accelerator": "Every argument of `accelerate.Accelerator`.",
    "Lightning ModelCheckpoint": "Every argument of `lightning.pytorch.callbacks.ModelCheckpoint`.",
    "Lightning EarlyStopping": "Every argument of `lightning.pytorch.callbacks.EarlyStopping`.",
    "deepspeed.initialize": "Every argument of `deepspeed.initialize`; its JSON is below.",
    "PipelineModule": "Every argument of `deepspeed.pipe.PipelineModule` ([page](pipeline.md)).",
    "The DeepSpeed engine": "What a script calls; line by line: [from raw DeepSpeed](tutorials/from-deepspeed.md).",
    "torchtitan": "Keys of its `JobConfig` that have another name here.",
    SEVERAL_TOOLS: "Names that are typed often, in scripts and configs of any tool.",
}
_JSON: Final = (
    "Every top-level key of its JSON; what is inside of them: [config keys](reference/config.md)."
)


def keys_of(answer: str) -> list[str]:
    """Our keys in an answer; none where it is a reason."""
    return (
        [] if REASON.match(answer) else [key.strip() for key in answer.partition("|")[0].split(",")]
    )


def json_keys() -> Iterator[tuple[str, str]]:
    """Each top-level key of DeepSpeed's JSON with its answer."""
    schema = json.loads((ROOT / "deepspeed_lint/deepspeed.schema.json").read_text(encoding="utf-8"))
    for name in sorted(set(schema["properties"]) - {"$schema"}):
        if name in OWNED:
            yield name, OWNED[name]
        elif name in PASSED_THROUGH:
            yield name, f"deepspeed.{name}"
        elif name in REMOVED:
            yield name, f"cannot: DeepSpeed removed it in {REMOVED[name][0]}"
        else:
            reason = not_in_a_run(name, True)
            assert reason is not None, name
            yield name, f"cannot: {reason[0]}"


def coming_from_page() -> str:
    """Markdown: a table for each tool."""
    lines = [
        "# Where is what I know\n",
        "Arguments of other tools, and the [config keys](reference/config.md) that do the same. *Not",
        "needed* and *cannot*",
        "have the reason. Whole examples: [Hugging Face](tutorials/from-huggingface.md),",
        "[Lightning](tutorials/from-lightning.md), [raw DeepSpeed](tutorials/from-deepspeed.md).\n",
        "`dsf import FILE` takes these arguments over from a file: `TrainingArguments` as JSON or YAML",
        "(`to_json_string()`, or what `HfArgumentParser` reads), the file of `accelerate config`,",
        "Lightning's CLI config, DeepSpeed's JSON. What is not taken over is named at the top of the result, with its",
        "reason. In a run config, `check` answers each of these words with its key, `check --fix` writes",
        "the key where it means the same, and `dsf keys WORD` finds it.\n",
    ]
    tables = rows_by_tool() | {"Raw DeepSpeed": dict(json_keys())}
    for tool, rows in tables.items():
        about = _TITLES.get(tool, _JSON)
        lines += [f"## {tool}\n", f"{about}\n", "| there | here |", "|---|---|"]
        for names, answer in rows.items():
            there = ", ".join(f"`{name.strip()}`" for name in names.split(","))
            lines.append(f"| {there} | {_shown(answer)} |")
        lines.append("")
    lines += [
        "## Values\n",
        "Of keys that have the same name.\n",
        "| key | there | here |",
        "|---|---|---|",
    ]
    for key, rows in value_rows().items():
        for names, answer in rows.items():
            there = ", ".join(f"`{name}`" for name in names.split(", "))
            lines.append(f"| `{key}` | {there} | {_shown(answer)} |")
    lines.append("")
    return "\n".join(lines)


def _shown(answer: str) -> str:
    if found := REASON.match(answer):
        return f"*{found[1]}*: {answer[found.end() :]}"
    keys, _, remark = answer.partition("|")
    shown = ", ".join(f"`{key.strip()}`" for key in keys.split(","))
    return f"{shown} ({remark.strip()})" if remark else shown
