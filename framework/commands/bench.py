"""The `bench` command: how fast variants of a run train, for real and in turn, and which
differences are more than noise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, isnan, nan
from operator import sub
from pathlib import Path
from typing import Any, Final

from deepspeed_lint.text.document import is_setting
from framework.commands.check_fix import write_file
from framework.commands.cluster_options import split_words
from framework.commands.timed_runs import INTERRUPTED, NO_TIMES, config_alone, run_alone
from framework.errors import (
    EXIT_OK,
    EXIT_TRAINING,
    ConfigError,
    Problem,
    StorageError,
    UsageError,
    counted,
)
from framework.hosts.devices import find_devices
from framework.hosts.hostfile import cluster_of, read_hostfile
from framework.launch.local import check
from framework.launch.options import LaunchOptions
from framework.load_run import load_run
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.report import page, png
from framework.report.bench_page import COLUMNS, bench_page, rows_of, speed_chart
from framework.report.chart import Chart
from framework.report.png import png_of
from framework.report.repeats import Variant, compare, windows_of
from framework.system.arguments import like, whole
from framework.system.command_parser import CommandParser
from framework.system.files import refuse_foreign, replace_bytes
from framework.system.output import visible, write

_MARKS: Final = {
    "bench.json": b'"variants": [',
    "bench.html": page.MARK,
    "bench.svg": Chart.MARK,
    "bench.png": png.MARK,
}
_MOST_BUSY: Final = 0.1  # of the cores, with other work


def bench(argv: Sequence[str]) -> int:
    """Check all variants, time them in turn, and write the results; returns the exit code. Blocks
    until all have run or Ctrl-C ends one.

    Raises:
        UsageError: the command line is wrong.
        ConfigError: a variant cannot train here; nothing has been started.
        StorageError: the results cannot be written.
    """
    arguments = _parser().parse_intermixed_args(list(argv))
    log_every, warmup_points = points_of(arguments.steps, arguments.warmup)
    variants = _checked_variants(arguments, log_every)
    out = _results_folder(arguments, variants)
    windows_of_starts = _share_windows(arguments.repeats, arguments.starts)
    environment, is_interrupted = _measure(
        arguments, variants, windows_of_starts, log_every, warmup_points
    )
    notes = list(_doubts(variants, environment))
    notes.append(
        f"Started {counted(len(windows_of_starts), 'time')} each, in turn, for "
        f"{' + '.join(map(str, windows_of_starts))} windows of {arguments.steps} steps after "
        f"{log_every * warmup_points} of warm-up; medians of samples per second, means of the "
        "rest, memory of rank 0"
    )
    results = _Results(variants, compare(variants), notes, environment)
    if out is not None:
        _write_results(out, results.as_json(), results.page(), speed_chart(variants))
    if arguments.json:
        lines = [results.as_json()]
    else:
        lines = results.lines(out)
    write(sys.stdout, "".join(f"{visible(line)}\n" for line in lines))
    if is_interrupted:
        return 130  # as a shell reports a program that Ctrl-C ended
    return _exit_code(variants)


def _exit_code(variants: Sequence[Variant]) -> int:
    if any(variant.failure for variant in variants):
        return EXIT_TRAINING
    return EXIT_OK


@dataclass(frozen=True)
class _Results:
    """What was measured of all variants.

    Attributes:
        variants: with their windows.
        comparisons: of each variant with the first.
        notes: on how it was measured, and on what makes it less certain.
        environment: of a run.
    """

    variants: Sequence[Variant]
    comparisons: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    environment: Mapping[str, Any]

    @property
    def sentences(self) -> list[str]:
        """The comparisons in words."""
        return [str(comparison["sentence"]) for comparison in self.comparisons]

    def as_json(self) -> str:
        """Return all figures."""
        results = {
            "variants": [variant.to_dict() for variant in self.variants],
            "comparisons": self.comparisons,
            "notes": self.notes,
            "environment": self.environment,
        }
        return json.dumps(results, indent=2)

    def page(self) -> str:
        """Return the page."""
        title = ", ".join(dict.fromkeys(variant.plan.config.run.name for variant in self.variants))
        return bench_page(title, self.variants, self.sentences, self.notes, self.environment)

    def lines(self, out: Path | None) -> list[str]:
        """Return the lines for the screen; `out` has the page."""
        lines = list(_table(self.variants)) + self.sentences
        lines += [f"note: {note}" for note in self.notes]
        if out is not None:
            lines.append(f"page: {out / 'bench.html'}")
        return lines


def _share_windows(num_windows: int, most_starts: int) -> list[int]:
    """Return the number of windows of each start: all of them, shared as evenly as they go."""
    num_starts = min(most_starts, num_windows)
    share, rest = divmod(num_windows, num_starts)
    windows_of_starts = []
    for number in range(num_starts):
        if number < rest:
            windows_of_starts.append(share + 1)
        else:
            windows_of_starts.append(share)
    return windows_of_starts


def _parser() -> CommandParser:
    bench = CommandParser(
        prog="dsf bench",
        allow_abbrev=False,
        description="Time variants of a run and compare them with the first: each is trained for "
        "real, in turn, with evaluation, checkpoints and sinks off.",
    )
    option = bench.add_argument
    numbers = like(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", _numbers, "{}: write numbers such as 1,2")
    from_1 = whole(1, 1_000_000, "{} is no number from 1 on")
    from_0 = whole(0, 1_000_000, "{} is no number from 0 on")
    words = "run configs, and settings for all variants"
    bench.add_argument("words", nargs="*", default=[], metavar="CONFIG key=value", help=words)
    option(
        "--variant",
        action="append",
        nargs="+",
        dest="variants",
        default=[],
        metavar=("NAME", "key=value"),
        help="what a variant of each config is called, and its own settings",
    )
    option(
        "--num_gpus",
        type=numbers,
        metavar="N[,M]",
        help="devices; several numbers: a variant with each",
    )
    bench.add_argument(
        "-H", "--hostfile", metavar="FILE", help="hosts and their devices, in DeepSpeed's format"
    )
    option("--steps", type=from_1, default=50, metavar="S", help="of a measured window; default 50")
    option(
        "--warmup",
        type=from_0,
        default=10,
        metavar="W",
        help="first steps of a start, left out; default 10",
    )
    option(
        "--repeats",
        type=from_1,
        default=5,
        metavar="R",
        help="windows of a variant, in all; default 5",
    )
    option(
        "--starts",
        type=from_1,
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
    """Return the steps of a logged point, and the points of the warm-up.

    The steps of a point are the largest number up to `warmup` that divides `steps`: a window has a
    whole number of points.
    """
    most_steps = min(steps, warmup or steps)
    log_every = max(count for count in range(1, most_steps + 1) if steps % count == 0)
    return log_every, ceil(warmup / log_every)


def _checked_variants(arguments: argparse.Namespace, log_every: int) -> list[Variant]:
    """Make a variant of every config, ``--variant`` and number of devices.

    Raises:
        UsageError: the command line is wrong.
        ConfigError: with the problems of all variants.
    """
    configs, settings = split_words(arguments.words)
    _refuse_wrong_arguments(arguments, configs)
    device_counts = arguments.num_gpus or (None,)
    variants = []
    problems: list[Problem] = []
    names = Counter[str]()
    for config, (label, *own_settings), num_devices in product(
        configs, arguments.variants or [[""]], device_counts
    ):
        name = _name_of_variant(
            config,
            label,
            num_devices,
            has_config=len(configs) > 1,
            has_devices=len(device_counts) > 1,
        )
        names[name] += 1
        if names[name] > 1:
            name += f" ({names[name]})"
        words = _with_own_settings(settings, own_settings)
        try:
            options = LaunchOptions(config, tuple(words), num_devices, hostfile=arguments.hostfile)
            variants.append(_make_variant(name, options, log_every))
        except ConfigError as error:
            problems += _with_variant_name(name, error.problems)
    if problems:
        raise ConfigError(problems)
    return variants


def _with_variant_name(name: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    for problem in problems:
        yield replace(problem, reason=f"{problem.reason} (variant {name})")


def _refuse_wrong_arguments(arguments: argparse.Namespace, configs: Sequence[str]) -> None:
    """Raise a UsageError for a command line without a config, or with arguments that do not go
    together.
    """
    _refuse_wrong_variants(arguments.variants)
    if not configs:
        raise UsageError("bench: name a run config, for example ds_configs/quickstart.yaml")
    if arguments.hostfile and arguments.num_gpus:
        raise UsageError("bench: --num_gpus and --hostfile exclude each other")


def _refuse_wrong_variants(variants: Iterable[Sequence[str]]) -> None:
    for label, *settings in variants:
        if is_setting(label) or not all(map(is_setting, settings)):
            reason = "a name and its key=value settings follow --variant; configs stand before it"
            raise UsageError(f"bench: --variant {' '.join([label, *settings])}: {reason}")


def _name_of_variant(
    config: str, label: str, num_devices: int | None, *, has_config: bool, has_devices: bool
) -> str:
    """Return the label of a variant, with its config and devices if variants differ in them."""
    parts = [label]
    if has_config or not label:
        parts.insert(0, Path(config).stem)
    if has_devices and num_devices:
        parts.append(counted(num_devices, "device"))
    return ", ".join(filter(None, parts))


def _with_own_settings(settings: Sequence[str], own_settings: Sequence[str]) -> list[str]:
    """Return the settings of all variants with a variant's own, which win over them."""
    own_keys = {word.partition("=")[0] for word in own_settings}
    words = [word for word in settings if word.partition("=")[0] not in own_keys]
    return words + list(own_settings)


def _make_variant(name: str, options: LaunchOptions, log_every: int) -> Variant:
    """Plan a variant, and check it as its start will be checked. ConfigError if it cannot train
    here.
    """
    if options.hostfile:
        cluster = cluster_of(read_hostfile(options.hostfile), path=options.hostfile)
        run = load_run(options.config, options.overrides).chosen(cluster, is_proposal=True)
    else:
        devices = find_devices(os.environ)
        run, ranks = check(options, devices)
        cluster = Cluster(devices_per_host=int(ranks.value), device=devices.kind)
    plan = run.plan_with_data(cluster)
    make_plan(config_alone(plan.config, steps=log_every, log_every=log_every), cluster)
    return Variant(name, " ".join(options.overrides), plan)


def _results_folder(arguments: argparse.Namespace, variants: Sequence[Variant]) -> Path | None:
    """Return the folder for the results, or None without one.

    Raises:
        StorageError: they cannot be written there; nothing has been measured.
    """
    if arguments.out:
        out = Path(arguments.out)
    elif arguments.json:
        return None
    else:
        name = time.strftime("bench-%Y%m%d-%H%M%S")
        out = Path(variants[0].plan.config.run.output_dir) / name
    with suppress(OSError):
        out.mkdir(parents=True, exist_ok=True)
    _refuse_taken_folder(out)
    empty = json.dumps({"variants": []})
    write_file(out / "bench.json", f"{empty}\n", name=f"{out}/bench.json")
    return out


def _refuse_taken_folder(out: Path) -> None:
    """Refuse a folder in which a file of another kind has the name of a result."""
    for name, mark in _MARKS.items():
        try:
            refuse_foreign(out / name, marks=[mark])
        except OSError as error:
            reason = f"{out / name}: cannot be written ({error.strerror})"
            raise StorageError(
                f"{reason}; name another folder with --out [file-not-written]"
            ) from error


def _write_results(out: Path, text: str, html: str, chart: Chart | None) -> None:
    """Write figures, page and chart into `out`; the PNG is left out, with a note, if it cannot be
    drawn.
    """
    write_file(out / "bench.json", f"{text}\n", name=f"{out}/bench.json")
    write_file(out / "bench.html", html, name=f"{out}/bench.html")
    if chart:
        svg = chart.file()
        write_file(out / "bench.svg", svg, name=f"{out}/bench.svg")
        try:
            replace_bytes(out / "bench.png", png_of(svg))
        except (ConfigError, OSError) as error:
            write(sys.stderr, f"note: bench.png is left out: {error}\n")


def _measure(
    arguments: argparse.Namespace,
    variants: Sequence[Variant],
    windows_of_starts: Sequence[int],
    log_every: int,
    warmup_points: int,
) -> tuple[Mapping[str, Any], bool]:
    """Start all variants in turn, without those that have failed, and add what they measure.

    Returns:
        a run's environment, and whether Ctrl-C ended a run; its whole windows are kept.
    """
    environment: Mapping[str, Any] = {}
    num_starts = len(windows_of_starts)
    for number, num_windows in enumerate(windows_of_starts, start=1):
        steps = log_every * warmup_points + arguments.steps * num_windows
        for variant in variants:
            if variant.failure:
                continue
            before = _clocks()
            run, failure = run_alone(
                variant.plan, steps=steps, log_every=log_every, hostfile=arguments.hostfile
            )
            clocks = tuple(map(sub, _clocks(), before))
            environment = environment or run.environment
            windows = windows_of(run, dropped=warmup_points, size=arguments.steps // log_every)
            if not windows and not failure:
                failure = NO_TIMES
            _add_start(variant, windows, clocks, failure)
            outcome = _outcome(windows, failure)
            line = f"start {number} of {num_starts}: {variant.name}: {outcome}\n"
            write(sys.stderr, visible(line))
            if failure == INTERRUPTED:
                return environment, True
    return environment, False


def _outcome(windows: Sequence[Mapping[str, float]], failure: str) -> str:
    """Describe how a start went, by the times of its windows or by its failure."""
    if failure:
        return failure
    times = [f"{window['time/step_ms']:,.1f}" for window in windows]
    return f"{', '.join(times)} ms a step"


def _clocks() -> tuple[float, float, float]:
    """Return seconds of the wall clock, of all cores' work (NaN: not known), and of the work of
    this process and those it started.
    """
    times = os.times()
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split()[1:9]
        # others: interrupts, and time that the host of a virtual machine took
        user, nice, system, _idle, _waiting, *others = map(int, words)
        busy = (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        busy = nan
    return times.elapsed, busy, sum(times[:4])


def _add_start(
    variant: Variant, windows: list[dict[str, float]], clocks: Sequence[float], failure: str
) -> None:
    """Add what a start of a variant has measured, unless it failed.

    Args:
        variant: of the start.
        windows: of the start.
        clocks: what `_clocks` advanced by during the start.
        failure: why it failed; empty if it did not.
    """
    if failure not in ("", INTERRUPTED):
        variant.failure = failure
        return
    if windows:
        variant.rounds.append(windows)
    wall, busy, own = clocks
    if not isnan(busy):
        variant.busy_cores.append(max(0.0, busy - own) / (wall or 1.0))


def _doubts(variants: Sequence[Variant], environment: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note on everything that makes the results less certain."""
    cores = os.cpu_count() or 1
    busiest = max((max(variant.busy_cores, default=0.0) for variant in variants), default=0.0)
    if busiest > _MOST_BUSY * cores:
        yield (
            f"Other work took up to {busiest:.1f} of {cores} cores: all was slower, and is less "
            "certain"
        )
    if environment.get("device") == "cpu":
        yield from _doubts_of_processors(variants, cores)
    if len({variant.plan.layout.global_size for variant in variants}) > 1:
        yield "Steps have different numbers of samples; samples per second are compared"


def _doubts_of_processors(variants: Sequence[Variant], cores: int) -> Iterator[str]:
    """Yield notes on ranks that share cores, or that have different numbers of threads."""
    rank_counts = {variant.plan.cluster.devices_per_host for variant in variants}
    most_ranks = max(rank_counts)
    if most_ranks > cores:
        yield f"{most_ranks} ranks shared {cores} cores"
    elif len(rank_counts) > 1 and "OMP_NUM_THREADS" not in os.environ:
        yield "Fewer ranks had more threads each; OMP_NUM_THREADS=1 makes every device one core"


def _table(variants: Sequence[Variant]) -> Iterator[str]:
    """Yield the aligned rows of the variants that ran, then the failures of the others."""
    rows = [list(COLUMNS)]
    failures = []
    for row in rows_of(variants):
        if row[2]:
            rows.append(row)
        else:
            failures.append(f"{row[0]}: {row[1]}")
    yield from _aligned(rows)
    yield from failures


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    columns = []
    for cells in zip(*rows, strict=True):
        width = max(len(cell) for cell in cells)
        columns.append([cell.ljust(width) for cell in cells])
    for line in zip(*columns, strict=True):
        yield "  ".join(line).rstrip()
