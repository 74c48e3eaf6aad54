"""What the tests of other trainers' files share: importing one, and files that disagree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from deepspeed_lint.text.document import Document, parse_document
from framework.config.load import config_from_values
from framework.errors import ConfigError, Problem
from framework.imports.deepspeed import Imported, run_config_text
from framework.imports.trainers import import_arguments


def imported(values: dict[str, Any]) -> Imported:
    found = import_arguments(Document("args.json", values))
    text = run_config_text(found, name="args.json")
    assert parse_document(text, name="run.yaml").value == found.values, (
        "the text says what the values say"
    )
    return found


def hugging_face(**values: Any) -> Any:
    return config_from_values(
        imported({"output_dir": "out/run1", "learning_rate": 1e-4} | values).values
    )


def refused(values: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(problem.key, problem.value) for problem in disagreements(values)]


def disagreements(values: dict[str, Any]) -> Sequence[Problem]:
    with pytest.raises(ConfigError) as caught:
        imported(values)
    assert {problem.kind for problem in caught.value.problems} == {"sources-disagree"}
    return caught.value.problems
