"""Writes what the planner answers into the pages that show it: outputs of commands, tables, and the
chart.

python -m tools.planner_page        after the planner has changed; a test keeps the pages current

In a page, a line ``$ dsf plan ...`` in a block of code gets the command's output,
and what stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` gets a table of this file.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from math import prod
from pathlib import Path
from typing import Any, Final

from framework.cli import main
from framework.commands.paper import (
    FAILURES_PER_SECOND,
    best_interval_seconds,
    counted_hours,
    formula_bytes,
    goodput,
)
from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.plan.alternatives import settings_text, size_text
from framework.plan.auto import listed_target
from framework.plan.cluster import Cluster
from framework.plan.memory import estimate
from framework.plan.plan import make_plan
from framework.plan.search import search
from framework.plan.search_space import Request, unusual
from framework.plan.work import weights_alone

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = ("README.md", "docs/planner.md")
CHART: Final = "docs/planner.svg"
_COMMAND: Final = re.compile(r"^\$ dsf (plan .*)\n(?:(?!```|\$ ).*\n)*", re.MULTILINE)
# What is measured is another every time.
_MEASURED: Final = re.compile("--(measure|trials|explain-oom)")
_TABLE: Final = re.compile(r"(<!-- table: (\w+) -->\n)(?:.*\n)*?(<!-- end -->)")
_LLAMA: Final[Mapping[str, Mapping[str, Any]]] = {
    "8B": {},
    "70B": {
        "num_layers": 80,
        "hidden_size": 8192,
        "num_heads": 64,
        "num_kv_heads": 8,
        "mlp_size": 28672,
    },
    "405B": {
        "num_layers": 126,
        "hidden_size": 16384,
        "num_heads": 128,
        "num_kv_heads": 8,
        "mlp_size": 53248,
    },
}
# 200 billion weights: GPT-3 with more blocks.
_WALL: Final = {
    "size": "gpt2",
    "num_layers": 110,
    "hidden_size": 12288,
    "num_heads": 96,
    "max_positions": 2048,
}


def pages() -> dict[str, str]:
    """File -> its text as it should be."""
    before = {name: os.environ.get(name) for name in ("XDG_CACHE_HOME", "COLUMNS")}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(ROOT)
        # rates that were measured on this machine are not those of a page
        os.environ["XDG_CACHE_HOME"] = folder
        os.environ["COLUMNS"] = "100"
        try:
            found = {
                name: _filled((ROOT / name).read_text(encoding="utf-8"), Path(folder))
                for name in PAGES
            }
            return found | {CHART: Path(folder, Path(CHART).name).read_text(encoding="utf-8")}
        finally:
            os.chdir(here)
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _filled(text: str, folder: Path) -> str:
    def output(match: re.Match[str]) -> str:
        if _MEASURED.search(match[1]):
            return match[0]
        answer = _answer(match[1], folder)
        if match[0].endswith("\n...\n"):  # the page shows the first lines
            num_lines = match[0].count("\n") - 2
            answer = "".join(answer.splitlines(keepends=True)[:num_lines]) + "...\n"
        return f"$ dsf {match[1]}\n{answer}"

    tables: Mapping[str, Callable[[], Iterator[Sequence[str]]]] = {
        "wall": _wall,
        "scale": _scale,
        "goodput": _goodput,
    }

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}{''.join(_rows(tables[match[2]]()))}{match[3]}"

    return _TABLE.sub(table, _COMMAND.sub(output, text))


def _answer(command: str, folder: Path) -> str:
    words = [
        str(folder / Path(word).name) if word.endswith(".svg") else word
        for word in shlex.split(command)
    ]
    with redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0, command
    return out.getvalue()


def _rows(rows: Iterator[Sequence[str]]) -> Iterator[str]:
    titles = next(rows)
    yield f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}\n"
    yield from (f"| {' | '.join(row)} |\n" for row in rows)


def _gpt(model: Mapping[str, Any], *, length: int, **sections: Any) -> RunConfig:
    text = {"data": {"kind": "text", "sequence_length": length}, "task": {"kind": "causal_lm"}}
    return config_from_values(
        {"model": {"kind": "gpt", **model}, **text, "precision": {"dtype": "bf16"}, **sections}
    )


def _wall() -> Iterator[Sequence[str]]:
    """200 billion weights on 128 devices."""
    yield "by", "GiB on each device", "32 GB", "80 GB"
    training = {"max_steps": 1, "recompute_every": 1}
    found: dict[str, float] = {}
    for stage in range(4):
        zero, batch = {"stage": stage}, {"micro_size": 1}
        plan = make_plan(
            _gpt(_WALL, length=2048, zero=zero, batch=batch, training=training), Cluster(16, 8)
        )
        memory = estimate(plan)
        found[f"DeepSpeed, ZeRO {stage}, between steps"] = memory.total("between")
        found[f"DeepSpeed, ZeRO {stage}, at most, with activations"] = memory.total(memory.peak)
    work = weights_alone(plan.config.model)
    assert work is not None
    sizes = [prod(shape) for shape in work.weights.values()]
    total = sum(sizes)
    formulas = {
        "the weights in fp32, undivided": 4.0 * total,
        **formula_bytes(total, 128, largest_layer=max(sizes)),
    }
    for name, size in (formulas | found).items():
        yield (
            name,
            f"{size / 2**30:,.1f}",
            *("yes" if size <= limit * 1e9 else "no" for limit in (32, 80)),
        )


def _scale(sizes: Sequence[int] = (64, 512, 4096, 16_384)) -> Iterator[Sequence[str]]:
    """The best strategy of three models on so many GPUs."""
    yield (
        "model",
        "GPUs",
        "sequences",
        "best strategy",
        "batch",
        "at most",
        "tokens/s/GPU",
        "FLOPs used",
    )
    for name, model in _LLAMA.items():
        for gpus in sizes:
            samples = max(2048, gpus)
            config = _gpt(
                {"size": "llama-3-8b", **model}, length=8192, batch={"global_size": samples}
            )
            found = search(
                Request(
                    config, Cluster(gpus // 8, 8), listed_target("h100-80gb", devices_per_host=8)
                )
            )
            start = name, f"{gpus:,}", f"{samples:,}"
            if not found.ranked:
                yield *start, f"nothing fits: {found.block}", "", "", "", ""
                continue
            best = found.ranked[0]
            layout, tokens = best.plan.layout, best.time and best.time.tokens_per_second_per_device
            batch = (
                f"{layout.micro_size} x {layout.accumulation_steps} x {layout.data_parallel_size}"
            )
            speed = (
                (f"{tokens:,.0f}", f"{best.time.mfu:.0%}")
                if best.time and tokens
                else ("unknown", "unknown")
            )
            yield (
                *start,
                settings_text(unusual(best.settings)),
                batch,
                size_text(best.peak_bytes),
                *speed,
            )


def _goodput() -> Iterator[Sequence[str]]:
    """Goodput at the best interval of checkpoints."""
    saves = (10.0, 60.0, 300.0)
    yield "GPUs", "between failures", *(f"save of {save:g} s: interval, goodput" for save in saves)
    for gpus in (64, 512, 4096, 16_384):
        between = 1 / (FAILURES_PER_SECOND * gpus)
        cells = []
        for save in saves:
            every = best_interval_seconds(save, between)
            cells.append(f"{counted_hours(every)}, {goodput(every, save, between, 300.0):.1%}")
        yield f"{gpus:,}", counted_hours(between), *cells


if __name__ == "__main__":
    for file, text in pages().items():
        (ROOT / file).write_text(text, encoding="utf-8")
