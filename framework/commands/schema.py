"""The `schema` command: prints a JSON Schema, for editors."""

from __future__ import annotations

import json
from collections.abc import Sequence

from framework.errors import EXIT_OK, UsageError
from framework.system.arguments import CommandParser, parse_command


def main(words: Sequence[str]) -> int:
    """Print the schema of run configs, or of a DeepSpeed release's JSON; returns the exit code."""
    arguments = parse_command("schema", _add_arguments, words)
    if arguments.of == "deepspeed":
        from deepspeed_lint.schema import deepspeed_schema

        print(json.dumps(deepspeed_schema(arguments.deepspeed), indent=2))
        return EXIT_OK
    if arguments.deepspeed:
        raise UsageError(
            "schema: --deepspeed goes with `schema deepspeed`; a run config has one schema"
        )
    from framework.config.schema import schema_text

    print(schema_text(), end="")
    return EXIT_OK


def _add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "of", nargs="?", choices=("run", "deepspeed"), default="run", help="what is described"
    )
    parser.add_argument(
        "--deepspeed", metavar="RELEASE", help="of this release, for example 0.18.9"
    )
