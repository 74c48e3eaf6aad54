"""Runs of two steps in many layouts, whose engines wrote what they hold beside their checkpoints
(tests/jobs/save_truth.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint.manifest import SavedCheckpoint, list_checkpoints
from framework.checkpoint.state.tensor_split import Split
from framework.checkpoint.state.weight_files import LazyWeights
from framework.engine.weights import checkpoint_weights, find_weights
from framework.recipes.text.prepare import prepare
from tests.engine.test_pipeline import BERT, GPT, LLAMA, RESNET
from tests.launched import ROOT, run_ranks

BF16 = {"precision": {"dtype": "bf16"}}
# Two parameter groups, and weights that are trained by no optimizer.
GROUPS = {
    "optimizer": {"kind": "adamw", "lr": 1e-3, "weight_decay": 0.5, "weight_decay_on": "matrices"}
}
FROZEN = {"training": {"max_steps": 2, "freeze": ["positions.*", r"blocks\.1\..*bias"]}}
TIED = {
    "model": {"target": "tests.jobs.tied_net:TiedNet"},
    "data": {"kind": "digits", "image_size": 28},
}
# Three ranks: nothing of these models can be divided by three, so every partition is padded.
Cases = dict[str, tuple[dict[str, Any], int, dict[str, Any]]]
PLAIN: Cases = {
    **{f"gpt-fp32-z{stage}": (GPT, stage, GROUPS) for stage in (0, 1, 2, 3)},
    **{f"gpt-bf16-z{stage}": (GPT, stage, BF16 | GROUPS) for stage in (1, 3)},
    **{f"frozen-z{stage}": (GPT, stage, BF16 | GROUPS | FROZEN) for stage in (0, 2, 3)},
    **{f"tied-z{stage}": (TIED, stage, {}) for stage in (2, 3)},
    "roundrobin-z2": (GPT, 2, GROUPS | {"zero": {"stage": 2, "round_robin_gradients": True}}),
    "subgroups-z3": (GPT, 3, GROUPS | {"zero": {"stage": 3, "sub_group_size": 3000}}),
}
PIPED: Cases = {
    "gpt-fp32-z0": (GPT, 0, {}),
    "gpt-fp32-z1": (GPT, 1, GROUPS),
    "gpt-bf16-z1": (GPT, 1, BF16 | GROUPS | FROZEN),
    "bert-bf16-z1": (BERT, 1, BF16),
    "resnet-fp32-z1": (RESNET, 1, {}),
}
# Two tensor ranks, which share 261 tokens and what lies between.
DIVIDED: Cases = {
    "gpt-fp32-z0": (GPT, 0, GROUPS),
    "bert-bf16-z2": (BERT, 2, BF16 | GROUPS),
    **{f"frozen-z{stage}": (GPT, stage, BF16 | GROUPS | FROZEN) for stage in (1, 3)},
    "llama-fp32-z3": (LLAMA | {"model": LLAMA["model"] | {"num_kv_heads": 2}}, 3, GROUPS),
}
RUNS = [
    (fixture, name)
    for fixture, cases in (("plain_runs", PLAIN), ("piped_runs", PIPED), ("divided_runs", DIVIDED))
    for name in cases
]


def write_tokens(folder: Path) -> Path:
    """Some text, as tokens."""
    source = Path(os.__file__).read_text(encoding="utf-8")
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(
            source[800 * number : 800 * (number + 1)], encoding="utf-8"
        )
    prepare([str(path) for path in sorted(folder.glob("*.txt"))], str(folder / "tokens"))
    return folder / "tokens"


def train(cases: Cases, folder: Path, *, num_ranks: int, pipe: int = 1, tensor: int = 1) -> Path:
    """Train all cases in one job."""
    tokens = write_tokens(folder)
    sizes = {"pipe": pipe, "tensor": tensor}
    configs = [
        run_config(name, *case, folder, tokens, num_ranks=num_ranks, **sizes)
        for name, case in cases.items()
    ]
    file = folder / "cases.json"
    file.write_text(json.dumps([{"config": config} for config in configs]), encoding="utf-8")
    run_ranks(ROOT / "tests/jobs/save_truth.py", str(file), num_ranks=num_ranks, cwd=folder)
    assert [path.read_text(encoding="utf-8") for path in folder.glob("*.error")] == []
    return folder


def run_config(
    name: str,
    model: dict[str, Any],
    stage: int,
    sections: dict[str, Any],
    folder: Path,
    tokens: Path,
    *,
    num_ranks: int,
    pipe: int = 1,
    tensor: int = 1,
) -> dict[str, Any]:
    """Two steps of a model; `sections` replace those given here."""
    base = {
        "run": {"name": name, "output_dir": str(folder)},
        "batch": {"global_size": 8 * num_ranks // pipe, "micro_size": 4},
        "parallel": {"pipe": pipe, "tensor": tensor},
        "zero": {"stage": stage},
        "training": {"max_steps": 2},
        "evaluation": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
        "optimizer": {"kind": "adamw", "lr": 1e-3},
    } | model
    if base["data"]["kind"].startswith("text"):
        base["data"] = base["data"] | {"path": str(tokens)}
    return base | sections


def saved(run: Path) -> SavedCheckpoint:
    """The checkpoint of a run."""
    (checkpoint,) = list_checkpoints(run / "checkpoints")
    return checkpoint


def read_weights(path: str) -> LazyWeights:
    """The weights at a path, also where it leads to a checkpoint, which is verified first."""
    found = find_weights(path)
    return checkpoint_weights(found) if isinstance(found, SavedCheckpoint) else found


def truth(run: Path) -> dict[str, torch.Tensor]:
    """What the engines held, under plain names; of what several ranks hold, the first rank's. What
    was divided is put together.
    """
    manifest = saved(run).manifest
    found: dict[str, torch.Tensor] = {}
    ranks = [torch.load(path, weights_only=True) for path in sorted(run.glob("truth-rank*.pt"))]
    for rank in ranks:
        for name, tensor in rank.items():
            found.setdefault(plain_name(name, manifest.get("pipeline")), tensor)
    size = manifest["layout"]["tensor_size"]
    assert (size > 1) == ("tensor" in manifest)
    for name, (dim, sections) in manifest.get("tensor", {}).items():
        found[name] = Split(dim, tuple(sections)).whole([rank[name] for rank in ranks[:size]])
    return found


def plain_name(name: str, pipeline: dict[str, Any] | None) -> str:
    """Layers of DeepSpeed's PipelineModule bear numbers; the one tied weight of these models is the
    token embedding.
    """
    if pipeline is None:
        return name
    number, _, rest = name.partition(".")
    return (
        f"embed.{rest.partition('.')[2]}"
        if number == "tied_modules"
        else f"{pipeline['layers'][int(number)]}.{rest}"
    )
