"""Break jobs of two nodes in every way and look how they end: python -m
tests.campaign.launch_faults --out docs/launch-faults.md

Each node is a host made of namespaces (tests/hosts). Of every fault it is asked: is the exit code
the published one, has every process of the job ended within 20 s, does a line name the culprit, is
no process left, and does a start afterwards with checkpoint.resume=auto end with the checkpoint of
an undisturbed run, bit for bit. Needs root.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.records import machine
from tests.campaign.fault_cases import BY_NAME, CASES, Case
from tests.campaign.fault_stage import Seen, Stage, unbroken_run
from tests.hosts.network import why_not


@dataclass(frozen=True)
class Row:
    """What one case has shown; `wrong` is empty where everything is as it must be."""

    name: str
    what: str
    expected: str
    seen: str
    seconds: float
    culprit: str
    orphans: int
    resumed: str
    wrong: list[str] = field(default_factory=list)


_HEAD = """# Faults, and how a job ends

Written by `python -m tests.campaign.launch_faults --out docs/launch-faults.md`, which runs every case. Two nodes of one rank each
(network, PID and mount namespaces, a switch between them) train for 30 steps of 0.1 s and save after every fifth.

{good} of {all} cases are as they must be:

- Exit codes are as published, nothing is left running, and the culprit is named.
- All nodes stop within 20 s of the fault, or within 60 s where it is there from the start.
- A start afterwards with `checkpoint.resume=auto` ends with the checkpoint of the undisturbed run, bit for bit.
- Cases named `again-` have `supervision.max_restarts` and must end by themselves as the undisturbed run does. Where an agent was lost,
  another one is started a second later, as a platform does.

Where a node waits for others, seconds include the waiting. Where the run must go on, they are those of the rest of the run. Measured on
{machine}; {minutes} minutes. The rows come from runs on several commits: a case is run again when what it shows is changed.

| case | fault | expected exit codes | seen | seconds | what it says | left running | resumed bit-equal |
|---|---|---|---|---|---|---|---|"""  # noqa: E501
_SECTION = "\n## "


def run_case(case: Case, folder: Path, *, unbroken: Path | None) -> Row:
    """Break one run, judge its end, and finish it if there is an unbroken one to compare it
    with.
    """
    with Stage(folder, **case.stage) as stage:
        wrong: list[str] = []
        try:
            case.act(stage)
        except AssertionError as error:
            wrong.append(f"the fault could not be brought about: {str(error)[-3000:]}")
        seen = stage.see()
        seen.stated += f"\n{stage.logged()}" if case.in_logs else ""
        wrong += judge(case, seen)
        differs = [] if unbroken is None else _finish(case, stage, unbroken)
        resumed = "not looked at" if unbroken is None else "no" if differs else "yes"
        found = re.search(f"[^\n]*(?:{case.culprit})[^\n]*", seen.stated)
        return Row(
            case.name,
            case.what,
            reported(case.codes),
            reported({host: {code} for host, code in seen.codes.items()}),
            round(seen.seconds, 1),
            found[0].partition("| ")[2] if found else "",
            len(seen.orphans),
            resumed,
            wrong + differs,
        )


def _finish(case: Case, stage: Stage, unbroken: Path) -> list[str]:
    """Start the run again, as it should be, and compare its end."""
    stage.clear()
    case.repair(stage)
    differs = stage.resume_and_compare(unbroken)
    return [stated for stated in differs if case.same_metrics or ": other metrics:" not in stated]


def judge(case: Case, seen: Seen) -> list[str]:
    """What is not as it must be."""
    wrong = []
    if seen.codes.keys() < case.codes.keys() or any(
        seen.codes[host] not in codes for host, codes in case.codes.items()
    ):
        wrong.append(f"exit codes {seen.codes}, not {case.codes}: {seen.stated[-4000:]}")
    if case.stops and seen.seconds > case.limit:
        wrong.append(f"nodes ran for {seen.seconds:.1f} s after the fault")
    if seen.orphans:
        wrong.append(f"left running: {seen.orphans}")
    if not re.search(case.culprit, seen.stated):
        wrong.append(f"nothing that was said matches {case.culprit!r}: {seen.stated[-4000:]}")
    if "Traceback" in seen.stated:
        wrong.append(f"a traceback: {seen.stated[-6000:]}")
    return wrong


def reported(codes: dict[str, set[int]]) -> str:
    return ", ".join(
        f"{host} {' or '.join(map(str, sorted(wanted)))}" for host, wanted in codes.items()
    )


def table(rows: Sequence[Row], *, seconds: float) -> str:
    """docs/launch-faults.md."""
    where = machine()
    named = f"{where['processor']}, {where['cores']} cores, DeepSpeed {where['deepspeed']}, torch {where['torch']}"
    good = sum(not row.wrong for row in rows)
    lines = [_HEAD.format(good=good, all=len(rows), minutes=round(seconds / 60), machine=named)]
    for row in rows:
        seconds_of_it, left = f"{row.seconds:.1f}", str(row.orphans)
        cells = [
            row.name,
            row.what,
            row.expected,
            row.seen,
            seconds_of_it,
            _cell(row.culprit),
            left,
            row.resumed,
        ]
        lines.append("| " + " | ".join(cells) + (" **wrong** |" if row.wrong else " |"))
    return "\n".join(lines) + "\n"


def by_hand(page: Path) -> str:
    """What stands behind the table of a page: from its first section on."""
    _, begins, text = (
        page.read_text(encoding="utf-8").partition(_SECTION) if page.exists() else ("", "", "")
    )
    return begins + text


def _cell(text: str) -> str:
    short = text if len(text) <= 180 else text[:177] + "..."
    return "`" + short.replace("|", "/").replace("`", "'") + "`" if text else "-"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=sorted(BY_NAME),
        metavar="NAME",
        help="these cases; left out: all",
    )
    parser.add_argument("--out", type=Path, help="write the table there")
    parser.add_argument(
        "--json",
        type=Path,
        help="write everything there; cases that are in it already are not run again",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        metavar="S",
        help="begin no further case after so long",
    )
    parser.add_argument("--no_resume", action="store_true", help="do not start the runs again")
    options = parser.parse_args(arguments)
    if reason := why_not(ssh=True):
        raise SystemExit(f"launch_faults: {reason}")
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    began, rows = time.monotonic(), [Row(**row) for row in known.get("rows", [])]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        unbroken = None if options.no_resume else unbroken_run(Path(folder))
        for case in CASES:
            is_wanted = not options.only or case.name in options.only
            if (
                not is_wanted
                or case.name in {row.name for row in rows}
                or time.monotonic() - began > options.seconds
            ):
                continue
            rows.append(run_case(case, Path(folder) / case.name, unbroken=unbroken))
            print(
                f"{rows[-1].name}: {rows[-1].seen}, {rows[-1].seconds} s, resumed {rows[-1].resumed}\n  "
                f"{rows[-1].culprit}"
                + "".join(f"\n  WRONG: {stated}" for stated in rows[-1].wrong),
                file=sys.stderr,
                flush=True,
            )
            seconds = known.get("seconds", 0.0) + time.monotonic() - began
            if options.json:
                options.json.write_text(
                    json.dumps(
                        {"seconds": seconds, "rows": [asdict(row) for row in rows]}, indent=1
                    )
                )
    order = list(BY_NAME)
    rows.sort(key=lambda row: order.index(row.name))
    if options.out:
        text = table(rows, seconds=known.get("seconds", 0.0) + time.monotonic() - began)
        options.out.write_text(text + by_hand(options.out), encoding="utf-8")
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
