"""Does a small GPT learn real text byte by byte in ten minutes, and a small BERT more than how
often each byte occurs?

    python -m benchmarks.language_models [--text FILE ...] [--only gpt | bert] [--keep FOLDER]

Takes about ten minutes on two free cores, and writes benchmarks/results/language_models.json. Both
are trained by train.py under torchrun on two CPU processes of one thread each, from
ds_configs/gpt_tiny.yaml and ds_configs/bert_tiny.yaml with the settings named below. The text is
what `prepare` makes of the given files (say, tinyshakespeare's input.txt); without any, the sources
of Python's own standard library.

Held against: for GPT, an evaluation loss of 2.0 nats per byte within ten minutes from the start of
the command, the start of all processes included. For BERT, the unigram entropy of the evaluation
text: the loss of a model that knows nothing but how often each byte occurs there, which is below
what any model of single bytes can reach. "Well below" is half a nat or more.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records import RESULTS, ROOT, launch, load_average, machine, read_metrics, write
from framework.data.text_windows import open_corpus
from framework.data.tokens import Tokens

NUM_RANKS, TIMEOUT_SECONDS = 2, 1800
GPT_TARGET_NATS, GPT_TARGET_MINUTES, BERT_TARGET_NATS_BELOW = 2.0, 10.0, 0.5
ALIKE = ("checkpoint.at_end=true", "monitors.tensorboard=false", "monitors.progress=off")
# Little text and few steps: no dropout, and for BERT short sequences, of which more fit into a
# step.
SETTINGS = {
    "gpt": (
        "model.dropout=0.0",
        "training.max_steps=800",
        "evaluation.every_steps=100",
        "evaluation.batch_size=64",
    ),
    "bert": (
        "model.dropout=0.0",
        "data.sequence_length=64",
        "batch.global_size=64",
        "training.max_steps=1000",
        "evaluation.every_steps=250",
        "evaluation.batch_size=128",
    ),
}
# The model has learnt the positions of training windows only, and those are 128 bytes long.
PROMPT, NUM_SAMPLED = "\n", 126
METRICS = {"gpt": "eval/loss", "bert": "eval/mlm_loss"}


def unigram_entropy(counts: Iterable[int]) -> float:
    """In nats, of tokens that occur so often."""
    seen = [count for count in counts if count]
    total = sum(seen)
    return -sum(count / total * math.log(count / total) for count in seen)


def curve(
    rows: Sequence[Mapping[str, float]], metric: str, *, started: float
) -> list[dict[str, float]]:
    """A metric over steps and minutes since `started`, in Unix seconds."""
    return [
        {
            "step": int(row["step"]),
            "minutes": round((row["time"] - started) / 60, 2),
            "loss": round(row[metric], 4),
        }
        for row in rows
        if metric in row
    ]


def first_below(points: Sequence[Mapping[str, float]], nats: float) -> float | None:
    """Minutes at which the loss was first measured below; None: never."""
    return next((point["minutes"] for point in points if point["loss"] < nats), None)


def entropy_of(tokens: Tokens) -> float:
    """Of the text alone: the end tokens between documents are never hidden, and easily foretold."""
    counts = np.bincount(tokens.numbers)
    ends = np.asarray(tokens.offsets[1:]) - 1
    np.subtract.at(counts, tokens.numbers[ends], 1)
    return unigram_entropy(counts.tolist())


def tokens_for(kind: str, texts: Sequence[str], folder: Path) -> str | None:
    """The token folder; None: the model reads Python's sources. BERT needs documents to draw pairs
    from.
    """
    if not texts:
        return None
    out = str(folder / f"tokens-{kind}")
    more = ["--split-at-blank-lines"] if kind == "bert" and len(texts) < 20 else []
    subprocess.run(
        [sys.executable, "-m", "framework", "prepare", *texts, out, *more], cwd=ROOT, check=True
    )
    return out


def train(kind: str, texts: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train one model and read what its run folder says."""
    path = tokens_for(kind, texts, folder)
    settings = (*SETTINGS[kind], *ALIKE)
    source = () if path is None else (f"data.path={path}",)
    before, used, started = load_average(), _processor_seconds(), time.time()
    launch(
        "train.py",
        "--config",
        f"ds_configs/{kind}_tiny.yaml",
        *settings,
        *source,
        f"run.name={kind}",
        f"run.output_dir={folder}",
        num_ranks=NUM_RANKS,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    minutes = (time.time() - started) / 60
    corpus = open_corpus(path)
    assert corpus.evaluation is not None
    points = curve(read_metrics(folder / kind), METRICS[kind], started=started)
    found = {
        "config": f"ds_configs/{kind}_tiny.yaml",
        "settings": [*SETTINGS[kind]],
        "text": [Path(text).name for text in texts] or "Python's standard library",
        "training_tokens": len(corpus.train.numbers),
        "evaluation_tokens": len(corpus.evaluation.numbers),
        "load_average": [before, load_average()],
        "minutes": round(minutes, 2),
        "processor_minutes": round((_processor_seconds() - used) / 60, 2),
        "unigram_entropy_nats": round(entropy_of(corpus.evaluation), 4),
        "metric": METRICS[kind],
        "final_loss_nats": points[-1]["loss"],
        "over_time": points,
    }
    return found | verdict(kind, found)


def verdict(kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Held against the targets."""
    if kind == "gpt":
        minutes = first_below(found["over_time"], GPT_TARGET_NATS)
        return {
            "target": f"below {GPT_TARGET_NATS} nats within {GPT_TARGET_MINUTES:g} minutes",
            "minutes_to_target": minutes,
            "reached": minutes is not None and minutes <= GPT_TARGET_MINUTES,
        }
    below = found["unigram_entropy_nats"] - found["final_loss_nats"]
    return {
        "target": f"{BERT_TARGET_NATS_BELOW} nats below the unigram entropy",
        "nats_below_unigram": round(below, 4),
        "reached": below >= BERT_TARGET_NATS_BELOW,
    }


def sample(run_folder: Path) -> str | None:
    """What the trained GPT writes; None: `generate` failed."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "framework",
            "generate",
            str(run_folder),
            "--prompt",
            PROMPT,
            "--max-new-tokens",
            str(NUM_SAMPLED),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None


def table(models: Mapping[str, Mapping[str, Any]]) -> str:
    """For the terminal."""
    lines = []
    for kind, found in models.items():
        lines.append(
            f"{kind}: {found['target']}: {'reached' if found['reached'] else 'NOT reached'}; unigram entropy "
            f"{found['unigram_entropy_nats']:.3f} nats, {found['processor_minutes']} processor minutes"
        )
        lines += [
            f"  step {point['step']:>5}  {point['minutes']:>5.2f} min  {found['metric']} {point['loss']:.4f}"
            for point in found["over_time"]
        ]
    return "\n".join(lines)


def _processor_seconds() -> float:
    """Of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Train, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--only", choices=sorted(SETTINGS))
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="leave tokens and run folders there, an empty folder",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "language_models.json", metavar="FILE"
    )
    arguments = parser.parse_args()
    texts = [str(Path(text).resolve()) for text in arguments.text]
    before = load_average()
    with tempfile.TemporaryDirectory() as name:
        folder = (arguments.keep or Path(name)).resolve()
        models = {
            kind: train(kind, texts, folder) for kind in SETTINGS if arguments.only in (None, kind)
        }
        print(table(models))
        written = sample(folder / "gpt") if "gpt" in models else None
        if written:
            print(written)
            models["gpt"]["sample"] = written
    write(
        {
            "machine": machine(),
            "load_average_before": before,
            "load_average_after": load_average(),
            "ranks": NUM_RANKS,
            "models": models,
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
