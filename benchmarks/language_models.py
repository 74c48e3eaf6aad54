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
from framework.data.tokens import Tokens
from framework.recipes.text.windows import open_corpus

NUM_RANKS = 2
TIMEOUT_SECONDS = 1800
GPT_TARGET_NATS = 2.0
GPT_TARGET_MINUTES = 10.0
BERT_TARGET_NATS_BELOW = 0.5
COMMON_SETTINGS = ("checkpoint.at_end=true", "monitors.tensorboard=false", "monitors.progress=off")
# Little text and few steps: no dropout. For BERT short sequences, so that more fit into a step.
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
PROMPT = "\n"
NUM_SAMPLED = 126
METRICS = {"gpt": "eval/loss", "bert": "eval/mlm_loss"}


def unigram_entropy(counts: Iterable[int]) -> float:
    """Return the entropy, in nats, of tokens with these counts."""
    positive = [count for count in counts if count]
    total = sum(positive)
    return -sum(count / total * math.log(count / total) for count in positive)


def curve(
    rows: Sequence[Mapping[str, float]], metric: str, *, started: float
) -> list[dict[str, float]]:
    """Return a metric over steps and over minutes since `started`, which is in Unix seconds."""
    points: list[dict[str, float]] = []
    for row in rows:
        if metric in row:
            minutes = round((row["time"] - started) / 60, 2)
            points.append(
                {"step": int(row["step"]), "minutes": minutes, "loss": round(row[metric], 4)}
            )
    return points


def first_below(points: Sequence[Mapping[str, float]], nats: float) -> float | None:
    """Return the minutes at which the loss was first measured below `nats`, or None."""
    for point in points:
        if point["loss"] < nats:
            return point["minutes"]
    return None


def entropy_of(tokens: Tokens) -> float:
    """Return the unigram entropy of the text without the end tokens between documents, which are
    never hidden and easy to predict.
    """
    counts = np.bincount(tokens.numbers)
    ends = np.asarray(tokens.offsets[1:]) - 1
    np.subtract.at(counts, tokens.numbers[ends], 1)
    return unigram_entropy(counts.tolist())


def tokens_for(kind: str, texts: Sequence[str], folder: Path) -> str | None:
    """Write the texts as a token folder and return its path, or None without texts: the model reads
    Python's sources. BERT needs documents to draw pairs from.
    """
    if not texts:
        return None
    out = str(folder / f"tokens-{kind}")
    command = [sys.executable, "-m", "framework", "prepare"]
    command += texts
    command.append(out)
    if kind == "bert" and len(texts) < 20:
        command.append("--split-at-blank-lines")
    subprocess.run(command, cwd=ROOT, check=True)
    return out


def train(kind: str, texts: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train one model, and return the facts in its run folder."""
    path = tokens_for(kind, texts, folder)
    settings = list(SETTINGS[kind])
    settings += COMMON_SETTINGS
    if path is not None:
        settings.append(f"data.path={path}")
    settings += [f"run.name={kind}", f"run.output_dir={folder}"]
    load_before = load_average()
    processor_seconds = _processor_seconds()
    started = time.time()
    launch(
        "train.py",
        "--config",
        f"ds_configs/{kind}_tiny.yaml",
        *settings,
        num_ranks=NUM_RANKS,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    minutes = (time.time() - started) / 60
    corpus = open_corpus(path)
    assert corpus.evaluation is not None
    points = curve(read_metrics(folder / kind), METRICS[kind], started=started)
    facts = {
        "config": f"ds_configs/{kind}_tiny.yaml",
        "settings": list(SETTINGS[kind]),
        "text": [Path(text).name for text in texts] or "Python's standard library",
        "training_tokens": len(corpus.train.numbers),
        "evaluation_tokens": len(corpus.evaluation.numbers),
        "load_average": [load_before, load_average()],
        "minutes": round(minutes, 2),
        "processor_minutes": round((_processor_seconds() - processor_seconds) / 60, 2),
        "unigram_entropy_nats": round(entropy_of(corpus.evaluation), 4),
        "metric": METRICS[kind],
        "final_loss_nats": points[-1]["loss"],
        "over_time": points,
    }
    return facts | verdict(kind, facts)


def verdict(kind: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target, and whether it is reached."""
    if kind == "gpt":
        minutes = first_below(facts["over_time"], GPT_TARGET_NATS)
        return {
            "target": f"below {GPT_TARGET_NATS} nats within {GPT_TARGET_MINUTES:g} minutes",
            "minutes_to_target": minutes,
            "reached": minutes is not None and minutes <= GPT_TARGET_MINUTES,
        }
    below = facts["unigram_entropy_nats"] - facts["final_loss_nats"]
    return {
        "target": f"{BERT_TARGET_NATS_BELOW} nats below the unigram entropy",
        "nats_below_unigram": round(below, 4),
        "reached": below >= BERT_TARGET_NATS_BELOW,
    }


def sample(run_folder: Path) -> str | None:
    """Return text that the trained GPT writes, or None if `generate` failed."""
    command = [sys.executable, "-m", "framework", "generate", str(run_folder)]
    command += ["--prompt", PROMPT, "--max-new-tokens", str(NUM_SAMPLED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    return done.stdout


def table(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results as text for the terminal."""
    lines = []
    for kind, facts in models.items():
        reached = "reached" if facts["reached"] else "NOT reached"
        lines.append(
            f"{kind}: {facts['target']}: {reached}; unigram entropy "
            f"{facts['unigram_entropy_nats']:.3f} nats, "
            f"{facts['processor_minutes']} processor minutes"
        )
        for point in facts["over_time"]:
            lines.append(
                f"  step {point['step']:>5}  {point['minutes']:>5.2f} min  "
                f"{facts['metric']} {point['loss']:.4f}"
            )
    return "\n".join(lines)


def _processor_seconds() -> float:
    """Return the processor seconds of children that have ended."""
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
    load_before = load_average()
    with tempfile.TemporaryDirectory() as name:
        folder = (arguments.keep or Path(name)).resolve()
        models = {
            kind: train(kind, texts, folder) for kind in SETTINGS if arguments.only in (None, kind)
        }
        print(table(models))
        text = None
        if "gpt" in models:
            text = sample(folder / "gpt")
        if text:
            print(text)
            models["gpt"]["sample"] = text
    write(
        {
            "machine": machine(),
            "load_average_before": load_before,
            "load_average_after": load_average(),
            "ranks": NUM_RANKS,
            "models": models,
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
