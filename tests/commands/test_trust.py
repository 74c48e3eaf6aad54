"""Nothing that a checkpoint's manifest names is called, whoever sealed it, but where the user
trusts its folder by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint.manifest import SavedCheckpoint, list_checkpoints, seal
from framework.checkpoint.resumable import check_resumable, describe_changes
from framework.checkpoint.resume_point import find_sound_checkpoint
from framework.cli import main
from framework.commands import generate
from framework.commands.export import hf_names
from framework.config.load import config_from_values
from framework.errors import ConfigError, FrameworkError
from framework.setup.trained import saved_config
from tests.checkpoint.small_checkpoints import write


def build(place: str) -> torch.nn.Module:
    """What a forged manifest names: leaves a file where it is called."""
    Path(place).write_text("called", encoding="utf-8")
    return Net()


class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def hf_names(self) -> dict[str, str]:
        return {"weight": "w", "bias": "b"}


def forged(run: Path, sections: dict[str, Any]) -> SavedCheckpoint:
    (run / "checkpoints").mkdir(parents=True)
    (checkpoint,) = write(run / "checkpoints", 10)
    own = {name: value for name, value in checkpoint.manifest.items() if name != "sha256"}
    text = seal(own | {"config": own["config"] | sections})
    (checkpoint.path / "manifest.json").write_text(text, encoding="utf-8")
    return list_checkpoints(run / "checkpoints")[0]


@pytest.mark.parametrize(
    "section", ["model", "gpt", "task", "data", "mixture", "optimizer", "metrics"]
)
def test_no_command_calls_what_a_manifest_names(section: str, tmp_path: Path) -> None:
    sentinel, run = tmp_path / "called", tmp_path / "run"
    target: dict[str, Any] = {
        "target": "tests.commands.test_trust:build",
        "args": {"place": str(sentinel)},
    }
    if section == "gpt":
        target["kind"] = "gpt"
    home = {"gpt": "model", "mixture": "data", "metrics": "evaluation"}.get(section, section)
    sections = {home: target}
    if section == "mixture":
        part = {"weight": 1, "data": target}
        sections = {home: {"kind": "mixture", "parts": [part, part]}}
    elif section == "metrics":
        sections = {home: {"metrics": {"f1": target}}}
        home = "evaluation.metrics.f1"
    checkpoint = forged(run, sections)
    for words in (
        ["inspect"],
        ["inspect", "--json"],
        ["export", "--hf"],
        ["export"],
        ["generate", "--tokenizer", "bytes"],
        ["predict", str(tmp_path / "in.txt"), "--out", str(tmp_path / "out.jsonl")],
        *(
            [] if section == "optimizer" else [["evaluate"], ["evaluate", f"{home}.args.more=1"]]
        ),  # which takes one of its own, and would measure
    ):
        (tmp_path / "in.txt").write_text("a")
        code = main(
            [
                words[0],
                str(run),
                *([str(tmp_path / "out")] if words[0] == "export" else []),
                *words[1:],
            ]
        )
        assert code in (0, 74, 78), words
    if section in ("model", "data", "task", "mixture"):
        with pytest.raises(ConfigError, match=r"\[target-not-trusted\]"):
            saved_config(checkpoint, "model", "data", "task")
    with pytest.raises(FrameworkError):
        hf_names(checkpoint, stored=["weight", "bias"])
    with pytest.raises(ConfigError, match=r"\[not-a-gpt\]"):
        generate._config_of(checkpoint, None)
    found, _ = find_sound_checkpoint("auto", run_checkpoints=run / "checkpoints")
    assert found is not None
    config = config_from_values({"run": {"name": "x"}}).to_dict()
    if section != "metrics":  # a run measures by its own config
        with pytest.raises(ConfigError, match=r"\[resume-config-differs\]"):
            check_resumable(found, config=config, global_size=8, steps_per_epoch=4, data={})
    describe_changes(found, config=config)
    assert not sentinel.exists()


def test_a_target_is_called_where_its_folder_is_trusted_by_name(tmp_path: Path) -> None:
    sentinel, run, other = tmp_path / "called", tmp_path / "run", tmp_path / "other"
    other.mkdir()
    checkpoint = forged(
        run,
        {"model": {"target": "tests.commands.test_trust:build", "args": {"place": str(sentinel)}}},
    )
    for trust in (None, str(other), str(tmp_path), str(checkpoint.path / "weights"), ""):
        with pytest.raises(ConfigError, match=r"\[target-not-trusted\]"):
            hf_names(checkpoint, stored=["weight", "bias"], trust=trust)
        assert not sentinel.exists()
    for folder in (run, run / "checkpoints", checkpoint.path):
        assert hf_names(checkpoint, stored=["weight", "bias"], trust=str(folder))[0] == {
            "weight": "w",
            "bias": "b",
        }
        assert sentinel.read_text(encoding="utf-8") == "called"
        sentinel.unlink()


def test_a_model_of_transformers_has_its_names_already(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = tmp_path / "run"
    checkpoint = forged(
        run, {"model": {"target": "tests.commands.test_trust:hugging_face", "args": {}}}
    )
    names, described = hf_names(checkpoint, stored=["lm_head.weight"], trust=str(run))
    assert names == {"lm_head.weight": "lm_head.weight"}
    assert (described["model_type"], described["n_embd"]) == ("gpt2", 8)


def hugging_face() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8))
