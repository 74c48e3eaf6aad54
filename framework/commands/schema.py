"""The `schema` command: prints a JSON Schema, for editors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from framework.errors import EXIT_OK, UsageError
from framework.system.arguments import parse_command
from framework.system.command_parser import CommandParser

_OF_PLAN: Final = Path(__file__).with_name("plan.schema.json")


def main(words: Sequence[str]) -> int:
    """Print the schema of run configs, of a DeepSpeed release's JSON, or of the output of
    ``plan --json``; returns the exit code.
    """
    arguments = parse_command("schema", _add_arguments, words)
    if arguments.of == "deepspeed":
        from deepspeed_lint.schema import deepspeed_schema

        print(json.dumps(deepspeed_schema(arguments.deepspeed), indent=2))
        return EXIT_OK
    if arguments.deepspeed:
        raise UsageError(
            "schema: --deepspeed goes with `schema deepspeed`; the others have one schema"
        )
    if arguments.of == "plan":
        print(_OF_PLAN.read_text(encoding="utf-8"), end="")
        return EXIT_OK
    from framework.config.schema import schema_text

    print(schema_text(), end="")
    return EXIT_OK


def _add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "of",
        nargs="?",
        choices=("run", "deepspeed", "plan"),
        default="run",
        help="what is described",
    )
    parser.add_argument(
        "--deepspeed", metavar="RELEASE", help="of this release, for example 0.18.9"
    )
