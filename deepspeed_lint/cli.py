"""The command ``deepspeed-lint``: check, fix, resolve and explain DeepSpeed's JSON.

Exit codes: 0 where no file has an error, 2 where one has, 64 for a wrong command line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from deepspeed_lint import __version__
from deepspeed_lint.check import check_document, parse_config, read_config
from deepspeed_lint.errors import (
    EXIT_OK,
    EXIT_USAGE,
    ConfigError,
    Problem,
    UsageError,
    visible,
)
from deepspeed_lint.keys import load_table
from deepspeed_lint.report import FORMATS, CheckResult, report
from deepspeed_lint.text.document import YAML_ENDINGS, Document
from deepspeed_lint.topology import Target, Topology, find_gpu


class _Parser(argparse.ArgumentParser):
    """argparse with exit code 64 for a wrong command line: 2 is that of problems."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message, and where the help is."""
        raise UsageError(f"{message}; see {self.prog} --help")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a file name may be any bytes
    try:
        arguments = _parser().parse_args(words)
        exit_code: int = arguments.run(arguments)
        # here, and not at exit, where it would be an error message if the reader has left
        sys.stdout.flush()
    except UsageError as error:
        print(visible(f"deepspeed-lint: {error}"), file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # the reader, such as `head`, has closed its end
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        return 130
    return exit_code


def _parser() -> _Parser:
    parser = _Parser(
        prog="deepspeed-lint",
        description="Check, fix, resolve and explain the JSON that DeepSpeed is configured with.",
    )
    parser.add_argument("--version", action="version", version=f"deepspeed-lint {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    check = commands.add_parser("check", help="find everything that is wrong with files")
    check.set_defaults(run=_check)
    check.add_argument("files", nargs="+", metavar="FILE", help="DeepSpeed's JSON or Hjson")
    _add_target_options(check)
    _add_reader_option(check)

    fix = commands.add_parser("fix", help="fix in place what has one safe answer, then check")
    fix.set_defaults(run=_fix)
    fix.add_argument("files", nargs="+", metavar="FILE", help="DeepSpeed's JSON or Hjson")
    fix.add_argument("--dry-run", action="store_true", help="print the changes, and write nothing")
    _add_target_options(fix)
    _add_reader_option(fix)

    resolve = commands.add_parser(
        "resolve", help='fill in every "auto" as Hugging Face\'s Trainer does'
    )
    resolve.set_defaults(run=_resolve, reader=None)
    resolve.add_argument("file", metavar="FILE", help="DeepSpeed's JSON or Hjson")
    about = "arguments of the Trainer, such as learning_rate=3e-4 hidden_size=4096"
    resolve.add_argument("arguments", nargs="*", default=[], metavar="NAME=VALUE", help=about)
    about = "write there instead of printing"
    resolve.add_argument("-o", "--output", metavar="OUT", help=about)
    _add_target_options(resolve)

    explain = commands.add_parser("explain", help="explain keys and kinds of problems")
    explain.set_defaults(run=_explain)
    explain.add_argument("words", nargs="+", metavar="KEY|KIND")
    explain.add_argument("--json", action="store_true", help="print JSON")
    _add_release_option(explain)

    schema = commands.add_parser("schema", help="print the JSON Schema, for editors")
    schema.set_defaults(run=_schema)
    _add_release_option(schema)
    return parser


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    """Add what files are judged against, and who reads the output."""
    _add_release_option(parser)
    about = "ranks that it is to run on"
    parser.add_argument("--world-size", type=_number_of_ranks, metavar="N", help=about)
    about = "judge for this GPU, for example h100-80gb"
    parser.add_argument("--gpu", metavar="KIND", help=about)
    about = "who reads the output"
    parser.add_argument("--format", choices=FORMATS, default="text", help=about)
    about = "the same as --format json"
    parser.add_argument("--json", action="store_const", const="json", dest="format", help=about)


def _add_release_option(parser: argparse.ArgumentParser) -> None:
    about = "DeepSpeed's release, for example 0.18.9; left out: the newest known"
    parser.add_argument("--deepspeed", metavar="RELEASE", help=about)


def _add_reader_option(parser: argparse.ArgumentParser) -> None:
    about = 'who reads the file first; left out: Hugging Face\'s Trainer where it has "auto"'
    readers = ("deepspeed", "huggingface", "accelerate")
    parser.add_argument("--for", choices=readers, dest="reader", help=about)


def _number_of_ranks(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks; write 1 or more")
    return int(text)


def _target(arguments: argparse.Namespace) -> Target:
    """Return what the command line names.

    Raises:
        UsageError: there is no such release, or no such GPU.
    """
    load_table(arguments.deepspeed)
    topology = Topology(world_size=arguments.world_size)
    gpu = find_gpu(arguments.gpu)
    if gpu is not None:
        topology = Topology(arguments.world_size, gpu.device, gpu)
    return Target(arguments.deepspeed, arguments.reader, topology)


def _read(file: str) -> Document:
    """Read a file.

    Raises:
        ConfigError: it cannot be read, or is YAML.
    """
    path = Path(file)
    if path.suffix.lower() in YAML_ENDINGS:
        raise ConfigError.of(
            "not-deepspeed-json",
            "DeepSpeed's config is JSON, and this is YAML",
            "a run config of dsf-trainer is checked by `dsf check`",
            file=file,
        )
    return read_config(path, name=file)


def _check(arguments: argparse.Namespace) -> int:
    target = _target(arguments)
    return report([_checked(file, target) for file in arguments.files], arguments.format)


def _checked(file: str, target: Target) -> CheckResult:
    try:
        return check_document(_read(file), target)
    except ConfigError as error:
        return CheckResult(file, tuple(error.problems))


def _fix(arguments: argparse.Namespace) -> int:
    target = _target(arguments)
    results = [_fixed(file, target, arguments) for file in arguments.files]
    return report(results, arguments.format)


def _fixed(file: str, target: Target, arguments: argparse.Namespace) -> CheckResult:
    """Fix a file, print the change as a diff, or as lines to change in Hjson, and check what it has
    become.
    """
    from deepspeed_lint.files import replace_text
    from deepspeed_lint.fixes import fixed_text, lines_to_change
    from deepspeed_lint.text.edits import unified_diff

    try:
        document = _read(file)
        text = fixed_text(document, release=target.release)
        # stdout is for tools where a tool reads the problems
        out = sys.stdout if arguments.format == "text" else sys.stderr
        for line in lines_to_change(document, release=target.release):
            print(line, file=out)
        if text != document.text:
            if not arguments.dry_run:
                replace_text(Path(file), text, name=file)
            diff = unified_diff(document.text, text, file)
            print(diff.removesuffix("\n"), file=out)
        return check_document(parse_config(text, name=file), target)
    except ConfigError as error:
        return CheckResult(file, tuple(error.problems))


def _resolve(arguments: argparse.Namespace) -> int:
    file: str = arguments.file
    out: str | None = arguments.output
    if out is None and arguments.format != "text":
        raise UsageError(
            f"resolve prints the file itself; give -o OUT with --format {arguments.format}"
        )
    try:
        text, result = _resolved(arguments)
    except ConfigError as error:
        return report([CheckResult(file, tuple(error.problems))], arguments.format)
    if text and out is None:
        print(text.removesuffix("\n"))
    return report([result], arguments.format, on_stdout=out is not None)


def _resolved(arguments: argparse.Namespace) -> tuple[str, CheckResult]:
    """Resolve a file, write it if the command line names a place for it, and check it.

    Returns:
        The text and its check; an empty text, which is not written, if it cannot be resolved.

    Raises:
        ConfigError: the file cannot be read, or its place is that of another file.
        UsageError: a word is no ``NAME=VALUE``, or names no argument.
    """
    from deepspeed_lint.files import replace_text
    from deepspeed_lint.resolve import check_resolved, is_of_another_origin, parsed_setting

    for word in arguments.arguments:
        if "=" not in word:
            raise UsageError(f"resolve: {word} is no NAME=VALUE")
    trainer_arguments = dict(map(parsed_setting, arguments.arguments))
    out: str = arguments.output or ""
    document = _read(arguments.file)
    text, result = check_resolved(
        document, trainer_arguments, _target(arguments), name=out or arguments.file
    )
    if text and out:
        if is_of_another_origin(Path(out), document):
            raise ConfigError(_refused(out))
        replace_text(Path(out), text, name=out)
    return text, result


def _refused(out: str) -> Problem:
    reason = "a file of another origin is there, and is left alone"
    return Problem("file-not-written", reason, "name another file", file=out)


def _explain(arguments: argparse.Namespace) -> int:
    from deepspeed_lint.explain import explain

    explanations = []
    for word in arguments.words:
        explanations += explain(word, release=arguments.deepspeed)
    if arguments.json:
        described: list[dict[str, Any]] = [
            {"subject": explanation.subject, **explanation.rows} for explanation in explanations
        ]
        print(json.dumps(described, indent=2))
    else:
        print("\n\n".join(map(str, explanations)))
    return EXIT_OK


def _schema(arguments: argparse.Namespace) -> int:
    from deepspeed_lint.schema import deepspeed_schema

    print(json.dumps(deepspeed_schema(arguments.deepspeed), indent=2))
    return EXIT_OK
