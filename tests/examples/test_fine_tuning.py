"""Examples of fine-tuning run as they are, on a rank that is forked, and leave what they
promise.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.launched import run_ranks, series
from tests.places import ROOT

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="transformers comes with the dev extra")


def run(name: str, folder: Path) -> str:
    file = ROOT / "examples" / name
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 60
    return run_ranks(file, num_ranks=1, cwd=folder)


def test_conversations_become_a_folder_for_the_hub(tmp_path: Path) -> None:
    run("sft_conversations.py", tmp_path)
    losses = [*series(tmp_path / "runs/sft", "train/loss").values()]
    assert losses[-1] < losses[0] - 0.5
    out = tmp_path / "runs/sft_for_the_hub"
    model, tokenizer = (
        getattr(transformers, name).from_pretrained(out)
        for name in ("AutoModelForCausalLM", "AutoTokenizer")
    )
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What does math.sin do?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )["input_ids"]
    with torch.no_grad():
        answer = model.generate(asked, max_new_tokens=5, do_sample=False)
    assert tokenizer.decode(answer[0]).startswith("user: What does math.sin do?\nassistant: ")


def test_texts_get_classes(tmp_path: Path) -> None:
    printed = run("classify_text.py", tmp_path)
    assert series(tmp_path / "runs/classes", "eval/accuracy")
    assert (
        len(
            [
                line
                for line in printed.splitlines()
                if line[:12].strip() in MODULES and line[12:13] == " "
            ]
        )
        == 8
    )


MODULES = ("builtins", "datetime", "math", "os", "shutil", "statistics", "string", "threading")
