"""The `import` command: prints the run config that a file of DeepSpeed or of another trainer
amounts to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from framework.errors import EXIT_OK, UsageError
from framework.imports.deepspeed import Imported, import_document, run_config_text
from framework.imports.kind_of_file import read_deepspeed_json
from framework.imports.trainers import import_arguments, read_arguments
from framework.system.arguments import parse_command
from framework.system.command_parser import CommandParser
from framework.system.log import print_problem


def main(words: Sequence[str]) -> int:
    """Print the run config; returns the exit code."""
    arguments = parse_command("import", _add_arguments, words)
    imported = _import(arguments.file, release=arguments.deepspeed)
    for problem in imported.not_taken:
        print_problem(replace(problem, severity="warning"))
    print(run_config_text(imported, name=arguments.file), end="")
    return EXIT_OK


def _add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="DeepSpeed JSON, TrainingArguments, accelerate's or Lightning's config",
    )
    parser.add_argument(
        "--deepspeed", metavar="RELEASE", help="as this release reads it, for example 0.18.9"
    )


def _import(name: str, *, release: str | None) -> Imported:
    """Import a file by what it is. UsageError for a run config."""
    path = Path(name)
    trainer_arguments = read_arguments(path, name=name)
    if trainer_arguments is not None:
        return import_arguments(trainer_arguments)
    document = read_deepspeed_json(path, name=name)
    if document is None:
        takes = "DeepSpeed JSON, TrainingArguments, an accelerate config or Lightning's CLI config"
        raise UsageError(f"{name}: this is a run config already; import takes {takes}")
    return import_document(document, release=release, partly=True)
