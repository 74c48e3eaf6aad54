"""The `bench` command: how fast variants of a run train, for real and in turn, and what of it is no
noise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import ceil, nan
from operator import sub
from pathlib import Path
from typing import Any, Final

from framework.commands.check_fix import write_file
from framework.commands.timed_runs import INTERRUPTED, config_alone, run_alone
from framework.errors import EXIT_OK, EXIT_TRAINING, ConfigError, StorageError, UsageError, counted
from framework.launch.hosts.devices import find_devices
from framework.launch.hosts.hostfile import cluster_of, read_hostfile
from framework.launch.local import check
from framework.launch.options import LaunchOptions
from framework.load_run import load_run
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.report import page, png
from framework.report.bench_page import COLUMNS, bench_page, rows_of, speed_chart
from framework.report.draw import Chart
from framework.report.png import png_of
from framework.report.repeats import Variant, compare, windows_of
from framework.system.arguments import CommandParser, like, whole
from framework.system.files import refuse_foreign, replace_bytes
from framework.system.output import visible, write
from framework.text.document import is_setting

_MARKS: Final = {
    "bench.json": b'"variants": [',
    "bench.html": page.MARK,
    "bench.svg": Chart.MARK,
    "bench.png": png.MARK,
}
_MOST_BUSY: Final = 0.1  # of the cores, with other work


def bench(argv: Sequence[str]) -> int:
    """Check all variants, time them in turn, and write what was found; returns the exit code.

    Raises:
        UsageError: the command line is wrong.
        ConfigError: a variant cannot train here; nothing has been started.
        StorageError: the results cannot be written.
    """
    asked = _parser().parse_intermixed_args(list(argv))
    every, dropped = points_of(asked.steps, asked.warmup)
    variants = _checked(asked, every)
    out = _folder(asked, variants)
    num = min(asked.starts, asked.repeats)
    starts = [asked.repeats // num + (number < asked.repeats % num) for number in range(num)]
    environment, is_interrupted = _measure(asked, variants, starts, every, dropped)
    notes = [
        *_doubts(variants, environment),
        f"Started {counted(num, 'time')} each, in turn, for {' + '.join(map(str, starts))} "
        f"windows of {asked.steps} steps after {every * dropped} of warm-up; medians of samples "
        "per second, means of the rest, memory of rank 0",
    ]
    comparisons = compare(variants)
    sentences = [str(each["sentence"]) for each in comparisons]
    found = {
        "variants": [each.to_dict() for each in variants],
        "comparisons": comparisons,
        "notes": notes,
    }
    text = json.dumps(found | {"environment": environment}, indent=2)
    if asked.json:
        lines = [text]
    else:
        lines = [*_table(variants), *sentences, *(f"note: {note}" for note in notes)]
    if out is not None:
        title = ", ".join(dict.fromkeys(each.plan.config.run.name for each in variants))
        _write(
            out,
            text,
            bench_page(title, variants, sentences, notes, environment),
            speed_chart(variants),
        )
        lines += [] if asked.json else [f"page: {out / 'bench.html'}"]
    write(sys.stdout, "".join(f"{visible(line)}\n" for line in lines))
    has_failed = any(each.failure for each in variants)
    if is_interrupted:
        return 130
    if has_failed:
        return EXIT_TRAINING
    return EXIT_OK


def _parser() -> CommandParser:
    bench = CommandParser(
        prog="python -m framework bench",
        allow_abbrev=False,
        description="Time variants of a run and compare them with the first: each is trained for "
        "real, in turn, with evaluation, checkpoints and sinks off.",
    )
    option = bench.option
    numbers = like(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", _numbers, "{}: write numbers such as 1,2")
    count, steps = (
        whole(least, 1_000_000, f"{{}} is no number from {least} on") for least in (1, 0)
    )
    words = "run configs, and settings for all variants"
    bench.add_argument("words", nargs="*", default=[], metavar="CONFIG key=value", help=words)
    terms: dict[str, Any] = {"action": "append", "nargs": "+", "dest": "variants", "default": []}
    about = "what a variant of each config is called, and its own settings"
    option("--variant", **terms, metavar=("NAME", "key=value"), help=about)
    option(
        "--num_gpus",
        type=numbers,
        metavar="N[,M]",
        help="devices; several numbers: a variant with each",
    )
    bench.add_argument(
        "-H", "--hostfile", metavar="FILE", help="hosts and their devices, in DeepSpeed's format"
    )
    option("--steps", type=count, default=50, metavar="S", help="of a measured window; default 50")
    option(
        "--warmup",
        type=steps,
        default=10,
        metavar="W",
        help="first steps of a start, left out; default 10",
    )
    option(
        "--repeats",
        type=count,
        default=5,
        metavar="R",
        help="windows of a variant, in all; default 5",
    )
    option(
        "--starts",
        type=count,
        default=3,
        metavar="N",
        help="of a variant, which share its windows; default 3",
    )
    option(
        "--out",
        metavar="DIR",
        help="for page, charts, figures; default: beside the runs, or none with --json",
    )
    option("--json", action="store_true", help="print all figures as JSON")
    return bench


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def points_of(steps: int, warmup: int) -> tuple[int, int]:
    """Steps of a logged point, of which a window has a whole number, and points of the warm-up."""
    every = max(each for each in range(1, min(steps, warmup or steps) + 1) if steps % each == 0)
    return every, ceil(warmup / every)


def _checked(asked: argparse.Namespace, every: int) -> list[Variant]:
    settings, configs = (
        [word for word in asked.words if is_setting(word) is sort] for sort in (True, False)
    )
    for label, *own in asked.variants:
        if is_setting(label) or not all(map(is_setting, own)):
            reason = "a name and its key=value settings follow --variant; configs stand before it"
            raise UsageError(f"bench: --variant {' '.join([label, *own])}: {reason}")
    if not configs:
        raise UsageError("bench: name a run config, for example ds_configs/quickstart.yaml")
    if asked.hostfile and asked.num_gpus:
        raise UsageError("bench: --num_gpus and --hostfile exclude each other")
    found = []
    problems = []
    taken = Counter[str]()
    for path, (label, *own), num in product(
        configs, asked.variants or [[""]], asked.num_gpus or (None,)
    ):
        if len(configs) > 1 or not label:
            stem = Path(path).stem
        else:
            stem = ""
        if num and len(asked.num_gpus) > 1:
            devices = counted(num, "device")
        else:
            devices = ""
        name = ", ".join(filter(None, (stem, label, devices)))
        taken[name] += 1
        name += f" ({taken[name]})" if taken[name] > 1 else ""
        keys = {word.partition("=")[0] for word in own}
        words = [word for word in settings if word.partition("=")[0] not in keys] + own
        try:
            found.append(
                _variant(name, LaunchOptions(path, (*words,), num, hostfile=asked.hostfile), every)
            )
        except ConfigError as error:
            problems += [
                replace(each, reason=f"{each.reason} (variant {name})") for each in error.problems
            ]
    if problems:
        raise ConfigError(problems)
    return found


def _variant(name: str, options: LaunchOptions, every: int) -> Variant:
    """A variant with its plan, checked as its start will be."""
    if options.hostfile:
        cluster = cluster_of(read_hostfile(options.hostfile), path=options.hostfile)
        run = load_run(options.config, options.overrides).chosen(cluster, is_proposal=True)
    else:
        devices = find_devices(os.environ)
        run, ranks = check(options, devices)
        cluster = Cluster(devices_per_host=int(ranks.value), device=devices.kind)
    plan = run.plan_with_data(cluster)
    make_plan(config_alone(plan.config, steps=every, log_every=every), cluster)
    return Variant(name, " ".join(options.overrides), plan)


def _folder(asked: argparse.Namespace, variants: Sequence[Variant]) -> Path | None:
    """See that results can be written, before anything is measured."""
    if asked.json and not asked.out:
        return None
    out = Path(asked.out or variants[0].plan.config.run.output_dir)
    if asked.out:
        out = out
    else:
        out = out / time.strftime("bench-%Y%m%d-%H%M%S")
    with suppress(OSError):
        out.mkdir(parents=True, exist_ok=True)
    for name, mark in _MARKS.items():
        try:
            refuse_foreign(out / name, marks=[mark])
        except OSError as error:
            reason = f"{out / name}: cannot be written ({error.strerror})"
            raise StorageError(
                f"{reason}; name another folder with --out [file-not-written]"
            ) from error
    empty = json.dumps({"variants": []})
    write_file(out / "bench.json", f"{empty}\n", name=f"{out}/bench.json")
    return out


def _write(out: Path, text: str, page: str, chart: Chart | None) -> None:
    for name, content in (
        ("bench.json", text + "\n"),
        ("bench.html", page),
        ("bench.svg", chart and chart.file()),
    ):
        if content:
            write_file(out / name, content, name=f"{out}/{name}")
    if chart:
        try:
            replace_bytes(out / "bench.png", png_of(chart.file()))
        except (ConfigError, OSError) as error:
            write(sys.stderr, f"note: bench.png is left out: {error}\n")


def _measure(
    asked: argparse.Namespace,
    variants: Sequence[Variant],
    starts: Sequence[int],
    every: int,
    dropped: int,
) -> tuple[Mapping[str, Any], bool]:
    """Start all in turn, but what has failed; returns a run's environment, and whether Ctrl-C ended
    it, of which whole windows are kept.
    """
    environment: Mapping[str, Any] = {}
    for number, num_windows in enumerate(starts, start=1):
        for each in (each for each in variants if not each.failure):
            before = _clocks()
            steps = every * dropped + asked.steps * num_windows
            run, failure = run_alone(
                each.plan, steps=steps, log_every=every, hostfile=asked.hostfile
            )
            wall, busy, own = map(sub, _clocks(), before)
            environment = environment or run.environment
            windows = windows_of(run, dropped=dropped, size=asked.steps // every)
            if failure in ("", INTERRUPTED):
                each.rounds += [windows] if windows else []
                each.busy_cores += [max(0.0, busy - own) / (wall or 1.0)] if busy == busy else []
            else:
                each.failure = failure
            took = (
                failure
                or ", ".join(f"{window['time/step_ms']:,.1f}" for window in windows) + " ms a step"
            )
            write(sys.stderr, visible(f"start {number} of {len(starts)}: {each.name}: {took}\n"))
            if failure == INTERRUPTED:
                return environment, True
    return environment, False


def _clocks() -> tuple[float, float, float]:
    """Seconds: of the wall, of all cores' work (NaN: not known), and of that for this process and
    those it started.
    """
    times = os.times()
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split()[1:9]
        # the rest: interrupts, and what the host took
        user, nice, system, _idle, _waiting, *rest = map(int, words)
        busy = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        busy = nan
    return times.elapsed, busy, sum(times[:4])


def _doubts(variants: Sequence[Variant], environment: Mapping[str, Any]) -> Iterator[str]:
    cores = os.cpu_count() or 1
    busiest = max([0.0, *(busy for each in variants for busy in each.busy_cores)])
    if busiest > _MOST_BUSY * cores:
        yield (
            f"Other work took up to {busiest:.1f} of {cores} cores: all was slower, and is less "
            "certain"
        )
    ranks = {each.plan.cluster.devices_per_host for each in variants}
    if environment.get("device") == "cpu" and max(ranks) > cores:
        yield f"{max(ranks)} ranks shared {cores} cores"
    elif (
        environment.get("device") == "cpu"
        and len(ranks) > 1
        and "OMP_NUM_THREADS" not in os.environ
    ):
        yield "Fewer ranks had more threads each; OMP_NUM_THREADS=1 makes every device one core"
    if len({each.plan.layout.global_size for each in variants}) > 1:
        yield "Steps have different numbers of samples; samples per second are compared"


def _table(variants: Sequence[Variant]) -> Iterator[str]:
    rows = [list(COLUMNS), *(row for row in rows_of(variants) if row[2])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    yield from (f"{row[0]}: {row[1]}" for row in rows_of(variants) if not row[2])
