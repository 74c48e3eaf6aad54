"""The `check` command: its options, and what it prints for people, for tools, and for GitHub.
Exit code 0: fine, 2: problems.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed_lint.text.document import COMMAND_LINE, Document, is_setting, parse_scalar
from framework.commands.check_result import (
    CheckContext,
    CheckResult,
    check_document,
    check_file,
    find_gpu,
)
from framework.commands.cluster_options import add_cluster_options, find_cluster
from framework.errors import EXIT_OK, EXIT_PROBLEMS, ConfigError, Problem, StorageError, UsageError
from framework.plan.cluster import Cluster
from framework.system.arguments import CommandParser, parse_command
from framework.system.output import visible, write


def main(words: Sequence[str]) -> int:
    """Check every file, after fixing or resolving it if the options request that; returns the exit
    code.
    """
    return _run(parse_command("check", _add_arguments, words))


def _add_arguments(check: CommandParser) -> None:
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
    check.option(
        "--data_elsewhere",
        action="store_true",
        help="only warn of data that is not on this machine",
    )
    option("--gpu", metavar="KIND", help="judge for this GPU, for example h100-80gb")
    add_cluster_options(check)


def _run(arguments: argparse.Namespace) -> int:
    settings = [word for word in arguments.words if is_setting(word)]
    files = [word for word in arguments.words if not is_setting(word)]
    _refuse_odd_words(arguments, files)
    release = arguments.deepspeed
    if release is not None:  # an unknown release is refused before any file is read
        from deepspeed_lint.keys import load_table

        load_table(release)
    try:
        against = CheckContext(
            cluster=find_cluster(arguments),
            gpu=find_gpu(arguments.gpu),
            release=release,
            reader=arguments.reader,
            data_elsewhere=arguments.data_elsewhere,
        )
    except ConfigError as error:  # the hostfile
        return _report([CheckResult("", tuple(error.problems))], arguments.format)
    if arguments.resolve:
        return _resolve(files[0], settings, against, arguments)
    failures: list[StorageError] = []
    if arguments.fix:
        failures = _fix_files(files, against, arguments.format)
    results = [check_file(file, settings, against) for file in files]
    exit_code = _report(results, arguments.format)
    for failure in failures:
        write(sys.stderr, f"{failure}\n")
    if failures:
        return failures[0].exit_code
    return exit_code


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


def _report(results: Sequence[CheckResult], format_: str, *, on_stdout: bool = True) -> int:
    """Print the results in a format; returns the exit code. Without `on_stdout` only problems."""
    fine_files = [result for result in results if result.is_fine]
    problems: list[Problem] = []
    for result in results:
        problems += result.problems
    if format_ == "json":
        print(json.dumps([problem.to_dict() for problem in problems], indent=2))
    elif format_ == "github":
        print("\n".join(map(_as_github, problems)))
    else:
        if fine_files and on_stdout:
            summaries = [f"{result.file}: {result.summary}" for result in fine_files]
            print(visible("\n".join(summaries)), file=sys.stdout)
        if problems:
            print(visible("\n".join(map(_as_text, problems))), file=sys.stderr)
    if len(fine_files) == len(results):
        return EXIT_OK
    return EXIT_PROBLEMS


def _as_text(problem: Problem) -> str:
    """Return the problem's text with its column: many editors and terminals open a file there."""
    text = str(problem)
    place = f"{problem.file}:{problem.line}:"
    if problem.column and text.startswith(place):
        text = f"{place}{problem.column}:{text.removeprefix(place)}"
    if problem.severity == "error":
        return text
    return f"{problem.severity}: {text}"


def _as_github(problem: Problem) -> str:
    """Return a workflow command, which GitHub shows beside the line in a pull request."""
    command = {"error": "error", "warning": "warning", "note": "notice"}[problem.severity]
    file = _escaped(problem.file, "%\r\n:,")
    title = _escaped(problem.kind, "%\r\n:,")
    place = f"file={file},line={problem.line or 1},col={problem.column or 1}"
    message = _escaped(str(problem), "%\r\n")
    return f"::{command} {place},title={title}::{message}"


def _escaped(text: str, characters: str) -> str:
    return text.translate({ord(character): f"%{ord(character):02X}" for character in characters})


def _fix_files(files: Sequence[str], against: CheckContext, format_: str) -> list[StorageError]:
    """Fix files in place, and print the changes; returns the errors of those that cannot be
    written. The check after it reports a file that cannot be read.
    """
    from framework.commands.check_fix import fix_file

    if format_ == "text":
        out = sys.stdout
    else:  # where stdout is for tools
        out = sys.stderr
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


def _refuse_other_config(path: Path, document: Document) -> None:
    """Refuse to write a document over a file that is no DeepSpeed JSON: one with no key in common.

    Raises:
        StorageError: the path holds such a file.
    """
    from deepspeed_lint.text.hjson import parse_hjson

    present_keys: set[object] = set()
    try:
        if not path.is_file():
            return
        text = path.read_text(encoding="utf-8")
        present_value = document.value
        if text.strip():
            present_value = parse_hjson(text, name=str(path)).value
        if isinstance(present_value, dict):
            present_keys = set(present_value)
    except OSError:  # write_file meets it again, and reports it
        return
    except (ValueError, ConfigError):
        pass
    written_keys: set[object] = set()
    if isinstance(document.value, dict):
        written_keys = set(document.value)
    if present_keys.isdisjoint(written_keys):
        reason = "a file of another origin is there, and is left alone"
        raise StorageError(
            f"{path}: cannot be written ({reason}); name another file [file-not-written]"
        )


def _resolve(
    file: str, settings: Iterable[str], against: CheckContext, arguments: argparse.Namespace
) -> int:
    from deepspeed_lint.resolve import resolve
    from deepspeed_lint.text.hjson import parse_hjson
    from framework.commands.check_fix import write_file
    from framework.imports.kind_of_file import read_deepspeed_json

    trainer_arguments = dict(map(_parsed_setting, settings))
    try:
        document = read_deepspeed_json(Path(file), name=file)
        if document is None:
            raise UsageError(
                f'{file}: this is a run config, which knows no "auto"; --resolve takes DeepSpeed '
                "JSON"
            )
        cluster = against.cluster
        world_size = None
        if cluster is not None:
            world_size = cluster.world_size
        resolved = resolve(
            document, trainer_arguments, world_size=world_size, release=against.release
        )
        if resolved.problems:
            return _report([CheckResult(file, resolved.problems)], arguments.format)
        # The number of devices may be given as an argument of the Trainer too.
        given_world_size = trainer_arguments.get(
            "world_size", trainer_arguments.get("num_processes")
        )
        if cluster is None and isinstance(given_world_size, int):
            cluster = Cluster(devices_per_host=given_world_size)
        document = parse_hjson(resolved.text, name=arguments.output or file)
        result = check_document(document, replace(against, cluster=cluster, reader="deepspeed"))
    except ConfigError as error:
        return _report([CheckResult(file, tuple(error.problems))], arguments.format)
    if arguments.output is None:
        print(resolved.text.removesuffix("\n"))
    else:
        _refuse_other_config(Path(arguments.output), document)
        write_file(Path(arguments.output), resolved.text, name=arguments.output)
    result = replace(result, problems=(*resolved.notes, *result.problems))
    return _report([result], arguments.format, on_stdout=arguments.output is not None)


def _parsed_setting(word: str) -> tuple[str, Any]:
    """Split ``key=value``; a value that is no YAML stays text."""
    name, _, text = word.partition("=")
    try:
        return name, parse_scalar(text, name=COMMAND_LINE)
    except ConfigError:
        return name, text
