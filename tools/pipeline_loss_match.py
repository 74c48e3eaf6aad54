"""How close pipelines come to plain PyTorch: the table of docs/pipeline.md.

    python -m tools.pipeline_loss_match

Trains cases of tests/engine/test_pipeline.py on two and on four CPU processes, each case 20 steps,
and prints the largest difference of a step's loss to a plain PyTorch loop on the same batches.
Takes about three minutes on two cores.
"""

from __future__ import annotations

import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

from framework.recipes.text.prepare import prepare
from tests.engine.pipe_oracle import plain_run
from tests.engine.test_pipeline import FOUR_RANKS, NUM_STEPS, TWO_RANKS, Case, train, values
from tests.launched import series

CASES = {
    "lenet-parameters": "LeNet, two stages",
    "lenet-zero1-clipped": "the same, ZeRO 1, gradients clipped",
    "resnet": "ResNet-18, two stages",
    "gpt": "GPT with tied embeddings, two stages",
    "gpt-zero1": "the same, ZeRO 1, gradients clipped",
    "gpt-recompute": "the same, recomputed in pairs of layers",
    "llama": "GPT in Llama's shape, two stages",
    "bert": "BERT, two stages",
    "lenet-4": "LeNet, four stages",
    "gpt-2x2": "GPT, two stages on two data-parallel ranks each, ZeRO 1",
    "gpt-4": "GPT, four stages",
    "bert-2x2": "BERT, two stages on two data-parallel ranks each",
}


def _text(folder: Path) -> Path:
    """A few real documents, as in the tests."""
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(
            source[800 * number : 800 * (number + 1)], encoding="utf-8"
        )
    prepare([str(path) for path in sorted(folder.glob("*.txt"))], str(folder / "tokens"))
    return folder / "tokens"


def _largest_difference(case: Case, folder: Path, text: Path) -> tuple[float, float]:
    losses, _, _ = plain_run(
        values(case, folder, text, global_size=16), micro_size=4, num_steps=NUM_STEPS
    )
    found = series(folder / case.name, "train/loss")
    return max(abs(found[step] - loss) for step, loss in enumerate(losses, start=1)), losses[0]


def main() -> None:
    """Train, compare, print."""
    print("| case | first loss | largest difference over 20 steps |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        text = _text(place)
        for num_ranks, known in ((2, TWO_RANKS), (4, FOUR_RANKS)):
            chosen = [replace(case, steps=NUM_STEPS) for case in known if case.name in CASES]
            folder = place / str(num_ranks)
            folder.mkdir()
            train(chosen, text, folder, num_ranks=num_ranks)
            for case in chosen:
                worst, first = _largest_difference(case, folder, text)
                print(f"| {CASES[case.name]} | {first:.4f} | {worst:.1e} |", flush=True)


if __name__ == "__main__":
    main()
