"""The `check` command: options, and what is printed where: for people, for tools, and for GitHub.
Exit code 0: fine, 2: problems.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from framework.commands.check_result import (
    CheckContext,
    Verdict,
    check_document,
    check_file,
    find_gpu,
)
from framework.errors import EXIT_OK, EXIT_PROBLEMS, ConfigError, Problem, StorageError, UsageError
from framework.plan.cluster import Cluster
from framework.system.arguments import add_option
from framework.system.output import visible, write
from framework.text.document import COMMAND_LINE, Document, is_setting, parse_scalar

FindCluster = Callable[[argparse.Namespace], Cluster | None]


def add_options(check: argparse.ArgumentParser) -> None:
    """Add the options that `check` takes beside the cluster."""
    option = check.add_argument
    files = "run configs or DeepSpeed JSON files, and settings that win over run configs"
    option("words", nargs="+", metavar="FILE|key=value", help=files)
    option(
        "--format", choices=("text", "json", "github"), default="text", help="who reads the output"
    )
    option(
        "--json",
        action="store_const",
        const="json",
        dest="format",
        help="the same as --format json",
    )
    change = check.add_mutually_exclusive_group()
    change.add_argument(
        "--fix", action="store_true", help="mend in place what has one safe answer, and show how"
    )
    change.add_argument(
        "--resolve",
        action="store_true",
        help='print a DeepSpeed JSON with every "auto" filled in as Hugging Face\'s Trainer would; key=value '
        "are its arguments, such as learning_rate=3e-4 hidden_size=4096",
    )
    option("-o", "--output", metavar="OUT", help="with --resolve: write there instead of printing")
    option("--deepspeed", metavar="RELEASE", help="judge against this release, for example 0.18.9")
    first = (
        "who reads DeepSpeed JSON first; left out: the Trainer of Hugging Face where the file "
        'says "auto"'
    )
    option("--for", choices=("deepspeed", "huggingface", "accelerate"), dest="reader", help=first)
    add_option(
        check,
        "--data_elsewhere",
        action="store_true",
        help="only warn of data that is not on this machine",
    )
    option("--gpu", metavar="KIND", help="judge for this GPU, for example h100-80gb")


def run_check(arguments: argparse.Namespace, *, find_cluster: FindCluster) -> int:
    """Judge every file, after mending or resolving it where that was asked for."""
    settings = [word for word in arguments.words if is_setting(word)]
    files = [word for word in arguments.words if not is_setting(word)]
    _refuse_odd_words(arguments, files)
    release = arguments.deepspeed
    elsewhere = arguments.data_elsewhere
    if release is not None:  # before a file is read, whatever is in it
        from framework.dslint.keys import load_table

        load_table(release)
    try:
        against = CheckContext(
            find_cluster(arguments), find_gpu(arguments.gpu), release, arguments.reader, elsewhere
        )
    except ConfigError as error:  # the hostfile
        return _report([Verdict("", tuple(error.problems))], arguments.format)
    if arguments.resolve:
        return _resolve(files[0], settings, against, arguments)
    failures = [
        failed
        for file in files
        if arguments.fix and (failed := _fix(file, against, arguments.format)) is not None
    ]
    verdicts = [check_file(file, settings, against) for file in files]
    code = _report(verdicts, arguments.format)
    for failure in failures:
        write(sys.stderr, f"{failure}\n")
    return failures[0].exit_code if failures else code


def _refuse_odd_words(arguments: argparse.Namespace, files: Sequence[str]) -> None:
    if not files:
        raise UsageError("check: name at least one run config or DeepSpeed JSON")
    if arguments.resolve and len(files) > 1:
        raise UsageError("check: --resolve takes one file at a time")
    if arguments.resolve and arguments.reader in ("deepspeed", "accelerate"):
        raise UsageError(
            f"check: --resolve does what the Trainer does, not --for {arguments.reader}"
        )
    if arguments.output is not None and not arguments.resolve:
        raise UsageError("check: -o goes with --resolve")
    if arguments.resolve and arguments.output is None and arguments.format != "text":
        raise UsageError(
            f"check: --resolve prints the file itself; give -o OUT with --format {arguments.format}"
        )


def _report(verdicts: Sequence[Verdict], format_: str, *, on_stdout: bool = True) -> int:
    problems = [problem for verdict in verdicts for problem in verdict.problems]
    if format_ == "json":
        print(json.dumps([problem.to_dict() for problem in problems], indent=2))
    elif format_ == "github":
        print("\n".join(map(_as_github, problems)))
    else:
        fine = [
            f"{verdict.file}: {verdict.summary}"
            for verdict in verdicts
            if verdict.is_fine and on_stdout
        ]
        for lines, stream in ((fine, sys.stdout), (list(map(_as_text, problems)), sys.stderr)):
            if lines:
                print(visible("\n".join(lines)), file=stream)
    if all(verdict.is_fine for verdict in verdicts):
        return EXIT_OK
    return EXIT_PROBLEMS


def _as_text(problem: Problem) -> str:
    """With the column, which many editors and terminals open a file at."""
    text = str(problem)
    place = f"{problem.file}:{problem.line}:"
    if problem.column and text.startswith(place):
        text = f"{place}{problem.column}:{text.removeprefix(place)}"
    if problem.severity == "error":
        return text
    return f"{problem.severity}: {text}"


def _as_github(problem: Problem) -> str:
    """A workflow command: GitHub shows it beside the line in a pull request."""

    def escaped(text: str, characters: str = "%\r\n") -> str:
        return "".join(f"%{ord(each):02X}" if each in characters else each for each in text)

    command = {"error": "error", "warning": "warning", "note": "notice"}[problem.severity]
    file, title = (escaped(text, "%\r\n:,") for text in (problem.file, problem.kind))
    place = f"file={file},line={problem.line or 1},col={problem.column or 1}"
    return f"::{command} {place},title={title}::{escaped(str(problem))}"


def _fix(file: str, against: CheckContext, format_: str) -> StorageError | None:
    """Mend one file; what cannot be read is for the check after it to tell."""
    from framework.commands.check_fix import fix_file

    try:
        diff = fix_file(file, release=against.release)
    except ConfigError:
        return None
    except StorageError as error:
        return error
    # What tools read stays what they can read.
    if diff:
        print(diff.removesuffix("\n"), file=sys.stdout if format_ == "text" else sys.stderr)
    return None


def _refuse_other_config(path: Path, document: Document) -> None:
    """Raise a StorageError where a file is there that is no DeepSpeed JSON: of another one no key
    would be the same.
    """
    from framework.text.hjson import parse_hjson

    keys: set[object] = set()
    try:
        if not path.is_file():
            return
        text = path.read_text(encoding="utf-8")
        if text.strip():
            there = parse_hjson(text, name=str(path)).value
        else:
            there = document.value
        if isinstance(there, dict):
            keys = set(there)
        else:
            keys = set()
    except OSError:  # as the writing of it will find
        return
    except (ValueError, ConfigError):
        keys = set()
    if isinstance(document.value, dict):
        written = document.value
    else:
        written = {}
    if keys.isdisjoint(written):
        reason = "a file of another origin is there, and is left alone"
        raise StorageError(
            f"{path}: cannot be written ({reason}); name another file [file-not-written]"
        )


def _resolve(
    file: str, settings: Iterable[str], against: CheckContext, arguments: argparse.Namespace
) -> int:
    from framework.commands.check_fix import write_file
    from framework.dslint.auto_values import resolve
    from framework.dslint.readers import read_deepspeed_json
    from framework.text.hjson import parse_hjson

    stated = dict(map(_stated, settings))
    try:
        document = read_deepspeed_json(Path(file), name=file)
        if document is None:
            raise UsageError(
                f'{file}: this is a run config, which knows no "auto"; --resolve takes DeepSpeed '
                "JSON"
            )
        world_size = against.cluster.world_size if against.cluster is not None else None
        found = resolve(document, stated, world_size=world_size, release=against.release)
        if found.problems:
            return _report([Verdict(file, found.problems)], arguments.format)
        # The number of devices may be said as an argument too.
        world = stated.get("world_size", stated.get("num_processes"))
        cluster = against.cluster
        if cluster is None and isinstance(world, int):
            cluster = Cluster(devices_per_host=world)
        document = parse_hjson(found.text, name=arguments.output or file)
        verdict = check_document(document, replace(against, cluster=cluster, reader="deepspeed"))
    except ConfigError as error:
        return _report([Verdict(file, tuple(error.problems))], arguments.format)
    if arguments.output is None:
        print(found.text, end="" if found.text.endswith("\n") else "\n")
    else:
        _refuse_other_config(Path(arguments.output), document)
        write_file(Path(arguments.output), found.text, name=arguments.output)
    verdict = replace(verdict, problems=(*found.notes, *verdict.problems))
    return _report([verdict], arguments.format, on_stdout=arguments.output is not None)


def _stated(word: str) -> tuple[str, Any]:
    name, _, text = word.partition("=")
    try:
        return name, parse_scalar(text, name=COMMAND_LINE)
    except ConfigError:
        return name, text
