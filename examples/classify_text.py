"""Train a classifier of texts, and ask it.

python examples/classify_text.py                            # sentences of Python's documentation, 8 modules
python examples/classify_text.py reviews.csv                # columns text and label
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import framework
from framework.recipes.text.labelled_text import LabelledText, build


def main(path: str | None = None, output_dir: str = "runs") -> dict[str, str]:
    """Train, and return the class that the model gives to a few texts."""
    splits = build(path, sequence_length=96)
    data = splits.train
    assert isinstance(data, LabelledText)
    framework.fit(
        {
            "run": {"name": "classes", "output_dir": output_dir},
            "model": {
                "kind": "bert",
                "size": "tiny",
                "vocab_size": 261,
                "num_classes": len(data.classes),
            },
            "data": {"kind": "labelled_text", "path": path, "sequence_length": 96},
            "task": {"kind": "classification"},
            "batch": {"global_size": 32},
            "optimizer": {"kind": "adamw", "lr": 1e-3, "weight_decay": 0.01},
            "training": {"max_epochs": 2, "log_every": 10},
        }
    )
    chosen = data.rows[:: max(1, len(data.rows) // 8)][:8]  # rows stand by class
    model, asked = framework.load(Path(output_dir, "classes")), [text for text, _ in chosen]
    inputs, _ = data.collate_fn([(text, 0) for text in asked])
    with torch.no_grad():
        guesses = model(**inputs).argmax(1).tolist()
    return {text: data.classes[guess] for text, guess in zip(asked, guesses, strict=True)}


if __name__ == "__main__":
    for text, guess in main(*sys.argv[1:]).items():
        print(f"{guess:12} {text}")
