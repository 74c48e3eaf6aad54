"""Models of other libraries by import path: they train as plain PyTorch does, and come back as what
they were.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import framework
from framework.commands.export import export
from tests.engine.pipe_oracle import plain_run
from tests.jobs.families import THEIRS, TIMM, Samples, theirs
from tests.launched import series, train_cases

pytestmark = pytest.mark.slow
pytest.importorskip("transformers", reason="transformers comes with the dev extra")
pytest.importorskip("timm", reason="timm comes with the dev extra")

NUM_STEPS, RANKS, MICRO = 3, 2, 4
FAMILIES = (*TIMM, *THEIRS)
OF_CLASSES = (*TIMM, "roberta")
_SPLIT: dict[str, Any] = {
    "blocks.*.attn": {"divide": ["num_heads", "attn_dim"]},
    "blocks.*.attn.qkv": {"split": "column", "sections": 3},
    "blocks.*.attn.proj": "row",
    "blocks.*.mlp.fc1": "column",
    "blocks.*.mlp.fc2": "row",
    "head": "column_gathered",
}
# What a run has beside its ZeRO stage.
FURTHER: dict[str, dict[str, Any]] = {
    "vit-tensor": {
        "parallel": {"tensor": 2, "tensor_plan": _SPLIT},
        "batch": {"micro_size": 2 * MICRO},
    },
    "t5": {"training": {"loss_tile": 7}},
    "gemma2-tiles": {"training": {"loss_tile": 7}},
}
# At stage 3, whose hooks see how a model calls its modules, all of them; at stage 1 the others with
# --exhaustive.
RUNS = (
    *((family, 3) for family in FAMILIES),
    *((family, 1) for family in ("resnet", "t5")),
    ("vit-tensor", 3),
)
RARE = tuple((family, 1) for family in FAMILIES if (family, 1) not in RUNS)


def config(name: str, stage: int, folder: Path) -> dict[str, Any]:
    family = name.partition("-t")[0]
    classes = {"num_classes": 5}
    model = (
        {"target": "timm:create_model", "args": TIMM[family] | classes} if family in TIMM else None
    )
    made = {
        "run": {"name": f"{name}-z{stage}", "output_dir": str(folder)},
        "model": model or {"target": "tests.jobs.families:theirs", "args": {"family": family}},
        "data": {"target": "tests.jobs.families:samples", "args": {"family": family}},
        "task": {"kind": "classification" if family in OF_CLASSES else "causal_lm"},
        "batch": {"micro_size": MICRO},
        "zero": {"stage": stage},
        "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9},
        "training": {"max_steps": NUM_STEPS, "log_every": 1, "sync_batch_norm": family == "resnet"},
        "evaluation": {"at_end": False},
        "monitors": {"tensorboard": False, "csv": False, "progress": "off", "report": False},
    }
    return made | {
        key: {**made.get(key, {}), **section} for key, section in FURTHER.get(name, {}).items()
    }


@pytest.fixture(scope="module")
def trained(exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    refused = config("gemma2-tiles", 1, folder)
    listed = RUNS + RARE if exhaustive else RUNS
    train_cases(
        [*(config(*run, folder) for run in listed), refused], num_ranks=RANKS, folder=folder
    )
    return folder


_plain: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("name", "stage"),
    [*RUNS, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in RARE)],
)
def test_a_family_trains_as_in_plain_pytorch_and_comes_back(
    trained: Path, tmp_path: Path, name: str, stage: int
) -> None:
    family, values = name.partition("-t")[0], config(name, stage, trained)
    if family not in _plain:
        together = RANKS if family == "resnet" else 1
        given = values | {"batch": {"global_size": RANKS * MICRO}, "parallel": {}}
        _plain[family] = plain_run(given, micro_size=MICRO, num_steps=NUM_STEPS, together=together)
    losses, _, model = _plain[family]
    assert max(losses) - min(losses) > 1e-3, (
        "the oracle itself must change, or equality says nothing"
    )
    run = trained / f"{name}-z{stage}"
    assert [*series(run, "train/loss").values()] == pytest.approx(losses, abs=1e-5)
    export(str(run), tmp_path, trust=str(run))
    loaded = framework.load(run, trust=True)
    inputs, _ = default_collate([Samples(family)[index] for index in range(4)])
    expected, found = (logits(one.eval(), inputs) for one in (model, loaded))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    if family in THEIRS:
        theirs(family).config.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
        again = type(loaded).from_pretrained(
            tmp_path, attn_implementation=loaded.config._attn_implementation
        )  # type: ignore[attr-defined, union-attr]
    else:
        import timm
        from safetensors.torch import load_file

        again = timm.create_model(**TIMM[family], num_classes=5).eval()
        again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(again, inputs), found)


def test_logits_that_are_changed_later_have_no_tiles(trained: Path) -> None:
    assert "[loss-not-tiled]" in (trained / "gemma2-tiles-z1.error").read_text(encoding="utf-8")


@torch.no_grad()
def logits(model: Any, inputs: Any) -> torch.Tensor:
    found = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return getattr(found, "logits", found)
