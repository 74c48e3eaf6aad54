"""The `check` command: its options, and what it prints for people, for tools, and for GitHub.
Exit code 0: fine, 2: problems.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from deepspeed_lint.report import FORMATS, CheckResult, report
from deepspeed_lint.topology import find_gpu
from framework.commands.check_result import (
    CheckContext,
    check_file,
    check_json,
)
from framework.commands.cluster_options import (
    add_cluster_options,
    add_host_memory,
    find_cluster,
    split_words,
)
from framework.errors import ConfigError, StorageError, UsageError
from framework.system.arguments import parse_command, refuse
from framework.system.command_parser import CommandParser
from framework.system.output import write

if TYPE_CHECKING:  # a document is imported where a file is read
    from deepspeed_lint.text.document import Document


def main(words: Sequence[str]) -> int:
    """Check every file, after fixing or resolving it if the options request that; returns the exit
    code.
    """
    return _run(parse_command("check", _add_arguments, words))


def _add_arguments(check: CommandParser) -> None:
    option = check.add_argument
    files = "run configs or DeepSpeed JSON files, and settings that win over run configs"
    option("words", nargs="+", metavar="FILE|key=value", help=files)
    option("--format", choices=FORMATS, default="text", help="output format")
    option(
        "--json",
        action="store_const",
        const="json",
        dest="format",
        help="the same as --format json",
    )
    change = check.add_mutually_exclusive_group()
    change.add_argument(
        "--fix", action="store_true", help="correct in place what has one safe answer, and show how"
    )
    change.add_argument(
        "--resolve",
        action="store_true",
        help='print a DeepSpeed JSON with every "auto" filled in as Hugging Face\'s Trainer would; '
        "key=value are its arguments, such as learning_rate=3e-4 hidden_size=4096",
    )
    option("-o", "--output", metavar="OUT", help="with --resolve: write there instead of printing")
    option("--deepspeed", metavar="RELEASE", help="judge against this release, for example 0.18.9")
    first = (
        "who reads DeepSpeed JSON first; left out: the Trainer of Hugging Face where the file "
        'says "auto"'
    )
    option("--for", choices=("deepspeed", "huggingface", "accelerate"), dest="reader", help=first)
    check.add_argument(
        "--data_elsewhere",
        action="store_true",
        help="only warn of data that is not on this machine",
    )
    option("--gpu", metavar="KIND", help="judge for this GPU, for example h100-80gb")
    add_cluster_options(check)
    add_host_memory(check)


def _run(arguments: argparse.Namespace) -> int:
    files, settings = split_words(arguments.words)
    _refuse_wrong_arguments(arguments, files)
    try:
        against = _context(arguments)
    except ConfigError as error:  # the hostfile
        return report([CheckResult("", tuple(error.problems))], arguments.format)
    if arguments.resolve:
        return _resolve(files[0], settings, against, arguments)
    return _check(files, settings, against, arguments)


def _context(arguments: argparse.Namespace) -> CheckContext:
    """Return what files are judged against; ConfigError for a hostfile that cannot be used."""
    release = arguments.deepspeed
    if release is not None:  # an unknown release is refused before any file is read
        from deepspeed_lint.keys import load_table

        load_table(release)
    return CheckContext(
        cluster=find_cluster(arguments),
        gpu=find_gpu(arguments.gpu),
        host_bytes=arguments.host_memory,
        release=release,
        reader=arguments.reader,
        data_elsewhere=arguments.data_elsewhere,
    )


def _check(
    files: Sequence[str],
    settings: Sequence[str],
    against: CheckContext,
    arguments: argparse.Namespace,
) -> int:
    """Check every file, after fixing them with ``--fix``; returns the exit code."""
    failures: list[StorageError] = []
    if arguments.fix:
        failures = _fix_files(files, against, arguments.format)
    results = [check_file(file, settings, against) for file in files]
    exit_code = report(results, arguments.format)
    if exit_code and arguments.format == "text":
        _hint_at_errors(results)
    for failure in failures:
        write(sys.stderr, f"{failure}\n")
    if failures:
        return failures[0].exit_code
    return exit_code


def _hint_at_errors(results: Sequence[CheckResult]) -> None:
    """Print how the kinds of errors are explained."""
    from framework.commands.explained import write_hint

    kinds: list[str] = []
    for result in results:
        kinds += [problem.kind for problem in result.problems if problem.severity == "error"]
    write_hint(kinds)


def _refuse_wrong_arguments(arguments: argparse.Namespace, files: Sequence[str]) -> None:
    """Raise a UsageError for a command line without a file, or with options that do not go
    together.
    """
    resolves = arguments.resolve
    has_other_reader = arguments.reader in ("deepspeed", "accelerate")
    prints_twice = arguments.output is None and arguments.format != "text"
    refuse(
        "check",
        [
            (not files, "name at least one run config or DeepSpeed JSON"),
            (resolves and len(files) > 1, "--resolve takes one file at a time"),
            (
                resolves and has_other_reader,
                f"--resolve does what the Trainer does, not --for {arguments.reader}",
            ),
            (arguments.output is not None and not resolves, "-o goes with --resolve"),
            (
                resolves and prints_twice,
                f"--resolve prints the file itself; give -o OUT with --format {arguments.format}",
            ),
        ],
    )


def _fix_files(files: Sequence[str], against: CheckContext, format_: str) -> list[StorageError]:
    """Fix files in place, and print the changes; returns the errors of those that cannot be
    written. The check after it reports a file that cannot be read.
    """
    from framework.commands.check_fix import fix_file

    out = _stream_of_diffs(format_)
    failures = []
    for file in files:
        try:
            diff = fix_file(file, release=against.release)
        except ConfigError:
            continue
        except StorageError as error:
            failures.append(error)
            continue
        if diff:
            print(diff.removesuffix("\n"), file=out)
    return failures


def _stream_of_diffs(format_: str) -> TextIO:
    if format_ == "text":
        return sys.stdout
    return sys.stderr  # where stdout is for tools


def _resolve(
    file: str, settings: Iterable[str], against: CheckContext, arguments: argparse.Namespace
) -> int:
    """Print or write a DeepSpeed JSON with every "auto" filled in, and report its problems; returns
    the exit code.
    """
    from deepspeed_lint.resolve import check_resolved, parsed_setting

    trainer_arguments = dict(map(parsed_setting, settings))
    out: str | None = arguments.output
    try:
        document = _read_to_resolve(file)
        text, result = check_resolved(
            document, trainer_arguments, against.target(), name=out or file, check=check_json
        )
    except ConfigError as error:
        return report([CheckResult(file, tuple(error.problems))], arguments.format)
    if not text:
        return report([result], arguments.format)
    if out is None:
        print(text.removesuffix("\n"))
    else:
        _write_resolved(out, text, document)
    return report([result], arguments.format, on_stdout=out is not None)


def _read_to_resolve(file: str) -> Document:
    """Read a DeepSpeed JSON; UsageError for a run config."""
    from framework.imports.kind_of_file import read_deepspeed_json

    document = read_deepspeed_json(Path(file), name=file)
    if document is None:
        raise UsageError(
            f'{file}: this is a run config, which knows no "auto"; --resolve takes DeepSpeed JSON'
        )
    return document


def _write_resolved(out: str, text: str, document: Document) -> None:
    """Write the resolved text of a document, unless a file of another origin has its place."""
    from deepspeed_lint.resolve import is_of_another_origin
    from framework.commands.check_fix import write_file

    if is_of_another_origin(Path(out), document):
        reason = "a file of another origin is there, and is left alone"
        raise StorageError(
            f"{out}: cannot be written ({reason}); name another file [file-not-written]"
        )
    write_file(Path(out), text, name=out)
