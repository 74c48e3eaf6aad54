"""What the framework uses of the linter is a short list, and it is frozen here: a further name
makes the product harder to change, and is a decision.

`errors` and `text/` are a floor of both packages, and are not counted.
"""

from __future__ import annotations

import ast

from tests.places import ROOT

DOORS = {
    # to judge a JSON, to check a file, and to print what was found
    "check": {"by_place", "check_document", "parse_config", "release_note"},
    "lint": {"key_problems", "lint", "placed"},
    "report": {"CheckResult", "FORMATS", "report"},
    "templates": {"template_problem", "without_placeholders"},
    "topology": {"GpuKind", "Target", "Topology", "find_gpu", "gpu_rows"},
    "readers": {"Reader"},
    # to change one
    "fixes": {"fixed_text", "lines_to_change", "safe_edits"},
    "resolve": {"check_resolved", "is_of_another_origin", "parsed_setting"},
    # what DeepSpeed reads
    "schema": {"deepspeed_schema"},
    "keys": {"Key", "KeyTable", "load_table"},
    "key_files": {"was_off"},
    "facts": {"DEPRECATED", "Facts", "dotted", "leaves", "value_at"},
    "rules.silent": {"UNSWITCHED"},
    # what a kind of problem means
    "explain": {"explain_kind"},
    # rows of rules.json
    "rows": {"Finding", "Row", "cases_of", "filled", "findings", "is_between"},
}


def uses() -> dict[str, set[str]]:
    """List the names that modules of the framework import from the linter, by its module."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "framework").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "deepspeed_lint" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            package, _, module = node.module.partition(".")
            if package == "deepspeed_lint" and module.partition(".")[0] not in ("errors", "text"):
                found.setdefault(module, set()).update(alias.name for alias in node.names)
    return found


def test_the_framework_uses_few_names_of_the_linter() -> None:
    assert uses() == DOORS
