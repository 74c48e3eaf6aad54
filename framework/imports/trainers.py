"""`import` of other trainers' files: Hugging Face's TrainingArguments, accelerate's config,
Lightning's CLI config.

What a run config has a key for is taken over, with the defaults of the other tool written down
where ours differ. The rest is listed at the top of what is printed, with the reason
(the table of `framework.config.other_words`), unless it is what the tool does anyway
(`tables/trainer_defaults.json`). A DeepSpeed JSON that a file names or holds is imported too; where
it has "auto", the arguments beside it decide, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from deepspeed_lint.templates import template_problem
from deepspeed_lint.text.document import YAML_ENDINGS, Document, parse_document, read_text
from framework.errors import ConfigError, Problem
from framework.imports.accelerate import take_accelerate_config
from framework.imports.deepspeed import Imported
from framework.imports.foreign_arguments import MAPPINGS, ForeignArguments
from framework.imports.hugging_face import take_training_arguments
from framework.imports.kind_of_file import Tool, foreign_problem, tool_of, with_last_of_duplicates
from framework.imports.lightning import take_lightning_config
from framework.system.log import print_problem

__all__ = ["import_arguments", "read_arguments"]

_TAKERS: Final[Mapping[Tool, Callable[[ForeignArguments], None]]] = {
    "transformers.TrainingArguments": take_training_arguments,
    "accelerate": take_accelerate_config,
    "lightning.Trainer": take_lightning_config,
}


def read_arguments(path: Path, *, name: str) -> Document | None:
    """Read a file if it has the arguments of another trainer, in YAML or JSON; None if not. Prints
    a note for each duplicate key in such a file: the last one counts.

    Raises:
        ConfigError: it cannot be read, or is of a tool that `import` does not read.
    """
    is_yaml = path.suffix.lower() in YAML_ENDINGS
    document = _parsed(read_text(path, name=name), name=name, is_yaml=is_yaml)
    if document is None or tool_of(document.value):
        return document
    foreign = foreign_problem(document)
    if foreign is not None:
        raise ConfigError(foreign)
    return None


def _parsed(text: str, *, name: str, is_yaml: bool) -> Document | None:
    """Parse a file; of duplicate keys the last one counts, with a note for each. None for a file
    that is no JSON: DeepSpeed's own reader takes more.
    """
    try:
        return parse_document(text, name=name, is_json=not is_yaml)
    except ConfigError as error:
        document = with_last_of_duplicates(text, error, name=name, is_yaml=is_yaml)
        if document is not None:
            for problem in error.problems:
                print_problem(_as_note(problem))
        elif is_yaml:
            raise ConfigError(template_problem(text, file=name) or error.problems) from None
        return document


def _as_note(problem: Problem) -> Problem:
    """Turn the error of a duplicate key into a note: the other tool takes the last one."""
    reason = f"{problem.reason}; the last one counts, as there"
    return replace(problem, reason=reason, fix="", severity="note")


def import_arguments(document: Document) -> Imported:
    """Return the run config that does what the arguments of another trainer ask for.

    Raises:
        ConfigError: a value is not one that the key here takes, or a DeepSpeed JSON that the file
            names cannot be imported.
    """
    tool = tool_of(document.value)
    assert tool is not None
    arguments = ForeignArguments(tool, document)
    for name, key in MAPPINGS["moves"][tool].items():
        arguments.move(name, key)
    _TAKERS[tool](arguments)
    return arguments.imported()
