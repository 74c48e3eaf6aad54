"""Write the table of every key that one DeepSpeed release reads:
deepspeed_lint/tables/<release>.json.

    DS_ACCELERATOR=cpu python -m tools.build_key_table                 # the installed release
    DS_ACCELERATOR=cpu PYTHONPATH=/tmp/ds-0.18.9 python -m tools.build_key_table
    DS_ACCELERATOR=cpu python -m tools.build_key_table --check         # exit 1 where the table no longer holds
    python -m tools.build_key_table --counts                           # of the tables that there are
    python -m tools.build_key_table --show 0.16.9 [SECTION]            # one release's table, whole

A release is installed for this with `pip install --no-deps --target /tmp/ds-0.18.9
deepspeed==0.18.9` and DS_BUILD_OPS=0. The newest release is written whole, an older one as what
differs from the next newer; neighbours are rewritten as needed. A key without a sentence in
tables/sentences.json stops the build.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any, Final

from deepspeed_lint import key_files

Entry = dict[str, Any]
Table = dict[str, Entry]

# Fields of sentences.json that only explain why a key is gone: they wait there until it is.
_FAREWELL: Final = ("replaced_by", "instead")


def main() -> int:
    """Build, or show what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", action="store_true", help="keys typed / keys read, per release")
    parser.add_argument("--show", nargs="+", metavar=("RELEASE", "SECTION"), help="print a table")
    parser.add_argument(
        "--check", action="store_true", help="compare the table with the installed release"
    )
    options = parser.parse_args()
    if options.counts:
        print("\n".join(_counts()))
    elif options.show:
        section = options.show[1] if len(options.show) > 1 else ""
        table = _entries_of(options.show[0])
        print(
            _as_text(
                {"keys": {path: entry for path, entry in table.items() if path.startswith(section)}}
            )
        )
    else:
        release, table = read_installed()
        if options.check:
            drift = _drift(release, table)
            print("\n".join(drift))
            return 1 if drift else 0
        write(release, table)
        print(f"{release}: {len(table)} keys read, {_typed(table)} typed")
    return 0


def _drift(release: str, table: Table) -> list[str]:
    """Where the installed release and its table differ, one line each."""
    if release not in key_files.known_releases():
        return [f"there is no table of {release}: run python -m tools.build_key_table"]
    kept = _entries_of(release)
    return [
        f"{path}: table {kept.get(path)}, DeepSpeed {table.get(path)}"
        for path in sorted({*kept, *table})
        if kept.get(path) != table.get(path)
    ]


def read_installed() -> tuple[str, Table]:
    """Release on the import path, and its table with the hand-written fields."""
    logging.disable(logging.WARNING)
    from tools.key_table.release import read_release

    release, raw = read_release()
    silent = [path for path in raw if key_files.sentence_entry(path) is None]
    if silent:
        raise SystemExit("\n".join(["no sentence in tables/sentences.json for", *sorted(silent)]))
    return release, {path: _with_words(path, raw[path]) for path in sorted(raw)}


def _with_words(path: str, entry: Entry) -> Entry:
    """An entry with the fields that the hand-written file overrides; they never undo a refusal."""
    words = {
        name: value
        for name, value in (key_files.sentence_entry(path) or {}).items()
        if name != "sentence"
    }
    status = (
        "refused"
        if entry.get("status") == "refused"
        else words.get("status", entry.get("status", "read"))
    )
    gone = status in ("refused", "deprecated", "inert")
    if entry.get("status") == "refused":
        words = {name: value for name, value in words.items() if name in _FAREWELL}
    kept = {name: value for name, value in words.items() if gone or name not in _FAREWELL}
    merged = {**entry, **kept, "status": status}
    if merged.get("default", 0) is None and words.get("nullable", True):
        merged["nullable"] = True
    wanted = {"number": float, "integer": int}.get(str(merged["type"]))
    if wanted and type(merged.get("default")) in (int, float):
        merged["default"] = wanted(merged["default"])
    if "object" not in merged["type"]:
        merged.pop("unknown", None)
    if not merged.get("nullable", True):
        del merged["nullable"]
    if status == "read":
        del merged["status"]
    return {name: merged[name] for name in sorted(merged)}


def write(release: str, table: Table) -> None:
    """Put one release among the tables that there are, and write those that change by it."""
    known = [*key_files.known_releases()]
    tables = {name: _entries_of(name) for name in known}
    tables[release] = table
    order = sorted(tables, key=key_files.by_number)
    for name, newer in zip(order, [*order[1:], None], strict=True):
        text = _as_text(_document(name, tables[name], newer, tables[newer] if newer else {}))
        file = key_files.TABLES / f"{name}.json"
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def _document(release: str, table: Table, newer: str | None, newer_table: Table) -> dict[str, Any]:
    return {
        "release": release,
        "differs_from": newer,
        "absent": sorted(set(newer_table) - set(table)),
        "keys": {path: entry for path, entry in table.items() if entry != newer_table.get(path)},
    }


def _as_text(document: Mapping[str, Any]) -> str:
    """JSON with one key per line, so that a diff shows one line per changed key."""
    head = [
        f"  {json.dumps(name)}: {json.dumps(value)}"
        for name, value in document.items()
        if name not in ("keys", "absent")
    ]
    absent = ",\n".join(f"    {json.dumps(path)}" for path in document.get("absent", ()))
    if "absent" in document:
        head.append(f'  "absent": [\n{absent}\n  ]' if absent else '  "absent": []')
    lines = [
        f"    {json.dumps(path)}: {json.dumps(document['keys'][path])}"
        for path in sorted(document["keys"])
    ]
    head.append('  "keys": {\n' + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(head) + "\n}\n"


def _entries_of(release: str) -> Table:
    return {path: dict(entry) for path, entry in key_files.load_entries(release).items()}


def _typed(table: Table) -> int:
    """Keys whose type is known; a refused key has none to know, a Python object is no JSON type."""
    return sum(
        entry.get("type") != "any" or "status" in entry or "from_python" in entry or "enum" in entry
        for entry in table.values()
    )


def _counts() -> list[str]:
    lines = ["release  typed / read  refused  inert"]
    for release in key_files.known_releases():
        table = _entries_of(release)
        refused, inert = (
            sum(e.get("status") == word for e in table.values()) for word in ("refused", "inert")
        )
        read = len(table) - refused
        untyped = len(table) - _typed(table)
        lines.append(f"{release:8} {read - untyped:5} / {read:<4} {refused:8} {inert:6}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
