"""Every kind of problem that the framework reports, with a sentence of it, read from the source.

A kind is found where a problem is made: the argument ``kind`` of a call, the name of a rule, the
brackets that end a message, a pair (kind, reason). Values that only a run knows stand in braces.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
_KIND: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")
_IN_BRACKETS: Final = re.compile(r"\[([a-z][a-z0-9]*(?:-[a-z0-9]+)+)\]")
# Calls whose first argument looks like a kind and is none: encodings, programs, charts, verdicts of
# a report.
_NO_PROBLEMS: Final = frozenset(
    {
        "BuiltIn",
        "decode",
        "encode",
        "which",
        "Verdict",
        "cause",
        "bar_chart",
        "area_chart",
        "line_chart",
        "Check",
        "requires",
    }
    | {
        "send_header",
        "getLogger",
        "memfd_create",
        "_ask_nvidia_smi",
        "replace",
        "Loser",
        "option",
        "Header",
    }
)
_TABLES_OF_RULES: Final = {
    "deepspeed_lint": "deepspeed_lint/tables/rules.json",
    "plan": "framework/plan/rules/rules.json",
}
# Kinds whose name, or whose sentence, is put together from parts when the problem is made.
_COMPUTED: Final[dict[str, tuple[str, str]]] = {
    "auto-resolved": (
        "deepspeed_lint",
        "filled in with {value}, from Hugging Face's default; give {argument}=VALUE if yours differs",
    ),
    "auto-unknown": (
        "deepspeed_lint",
        "it follows from the number of devices; give world_size=N",
    ),
    "callback-failed": ("train", "a method of a callback raised an error; its place is named"),
    "data-model-mismatch": (
        "plan",
        "it reads tokens, and lenet, the model, reads images; set data.kind or model.kind",
    ),
    "devices-differ": (
        "doctor",
        "nodes differ in it; give every host the same number and kind of devices",
    ),
    "export-exists": ("commands", "it is there already; choose another OUT, or give --force"),
    "host-choice": ("hosts", "the hostfile has no such host; name one that it has"),
    "freeze-needs-groups": (
        "engine",
        "the optimizer makes groups of its own; return an optimizer over the groups that it is given",
    ),
    "log-not-written": (
        "engine",
        "the disk refuses lines of a rank's log; they are kept and written when there is room",
    ),
    "metric-failed": (
        "engine",
        "`Task.finish`, or a metric, raised an error; its place is named",
    ),
    "model-data-image-size": ("plan", "the digits data has 28 pixels; set model.image_size: 28"),
    "model-data-in-channels": (
        "plan",
        "the digits data has 1 channel(s); set model.in_channels: 1",
    ),
    "model-data-mismatch": (
        "plan",
        "it reads images, and text, the data, has tokens; set model.kind or data.kind",
    ),
    "not-expressible": (
        "imports",
        "a run config has no such key; remove it, or train with the JSON itself",
    ),
    "not-in-a-run": (
        "plan",
        "a run does not do what the key of DeepSpeed asks for, and the reason is named; remove it",
    ),
    "requires-grad-changed": (
        "engine",
        "the flag of a weight has changed since the start; freeze it from the start, or by training.freeze with steps",
    ),
    "secret-in-the-job": (
        "deploy",
        "everybody who may read the job would read it; put it into a Secret, or export it where sbatch is called",
    ),
    "slots-differ": (
        "doctor",
        "nodes differ in it; give every host the same number and kind of devices",
    ),
    "stages-unknown": (
        "commands",
        "the stages are not known before the model is built; the run says it when it starts",
    ),
    "task-data-mismatch": (
        "plan",
        "it reads tokens, and digits, the data, has images; set task.kind or data.kind",
    ),
    "task-model-mismatch": (
        "plan",
        "it reads tokens, and lenet, the model, reads images; set task.kind or model.kind",
    ),
    "topology-unknown": (
        "hosts",
        "nobody says how many nodes there are; give --nnodes, or set NNODES",
    ),
    "warmup-decay-peak": (
        "deepspeed_lint",
        "left out, WarmupDecayLR trains at 0.001; set scheduler.params.warmup_max_lr",
    ),
    "warmup-peak": (
        "deepspeed_lint",
        "left out, WarmupLR trains at 0.001; set scheduler.params.warmup_max_lr",
    ),
    "weight-replaced": (
        "engine",
        "the model has another weight than at the start; change its numbers in place",
    ),
    "weight-type": (
        "engine",
        "a weight has a type that DeepSpeed cannot train; convert it, or set precision.dtype",
    ),
}


@dataclass
class Kind:
    """A kind of problem.

    Attributes:
        name: stable, as in brackets at the end of a message.
        sentence: reason and fix of one of its problems; empty where neither is written down.
        room: folder of `framework/` that reports it, or `deepspeed_lint`.
        severity: error, warning or note, where the place that reports it has only one.
        source: file and function of DeepSpeed, or of another package, that shows it.
    """

    name: str
    sentence: str
    room: str
    severity: str = ""
    source: str = ""

    @property
    def cause(self) -> str:
        """The reason of the problem; a message is a reason, a semicolon and a fix."""
        return self.sentence.partition("; ")[0]

    @property
    def cure(self) -> str:
        """The fix of the problem; empty where the reason is all there is."""
        return self.sentence.partition("; ")[2]


@cache
@cache
def find_kinds() -> dict[str, Kind]:
    """Return every kind, by name; of several places the first that has a sentence."""
    found: dict[str, Kind] = {}
    for room, file in _TABLES_OF_RULES.items():
        rows = json.loads((ROOT / file).read_text(encoding="utf-8"))
        for name, row in rows.items():
            first = {**row, **row.get("cases", [{}])[0]}
            found[name] = Kind(
                name,
                _joined(first["reason"], first["fix"]),
                room,
                first.get("severity", "error"),
                first.get("source", ""),
            )
    manifests = yaml.safe_load(
        (ROOT / "framework/deploy/k8s/rules.yaml").read_text(encoding="utf-8")
    )
    found |= {
        f"k8s-{name}": Kind(f"k8s-{name}", row["guards"], "deploy", "error")
        for name, row in manifests.items()
    }
    paths = [*(ROOT / "deepspeed_lint").rglob("*.py"), *(ROOT / "framework").rglob("*.py")]
    for path in sorted(paths):
        file = path.relative_to(ROOT).as_posix()
        for kind in _Module(ast.parse(path.read_text(encoding="utf-8")), file).kinds():
            if kind.name not in found or (kind.sentence and not found[kind.name].sentence):
                found[kind.name] = kind
    found |= {name: Kind(name, sentence, room) for name, (room, sentence) in _COMPUTED.items()}
    return {name: kind for name, kind in sorted(found.items()) if " " in kind.sentence}


def _room(file: str) -> str:
    """Return the room of a file; what stands in none, and the linter's rules, count as theirs."""
    package, *folders, _ = file.split("/")
    if folders and folders[0] != "rules":
        return folders[0]
    if package == "deepspeed_lint":
        return package
    return "commands"


def _joined(reason: str, fix: str) -> str:
    return "; ".join(filter(None, (reason, fix)))


class _Module:
    """One file of source."""

    def __init__(self, tree: ast.Module, file: str) -> None:
        self._tree, self._file = tree, file
        self._room = _room(file)
        self._nodes: list[ast.AST] = []
        # the function in which a node stands, or the module
        self._owner: dict[ast.AST, ast.AST] = {}
        # the values that a name gets there
        self._given: dict[tuple[ast.AST, str], list[ast.expr]] = {}
        self._visit(tree, tree)
        self._functions = [
            node
            for node in self._nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        self._calls = [node for node in self._nodes if isinstance(node, ast.Call)]
        self._patterns: dict[str, tuple[int, str, str]] = {}
        self._patterns = dict(self._find_patterns())

    def _visit(self, node: ast.AST, owner: ast.AST) -> None:
        self._nodes.append(node)
        self._owner[node] = owner
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for name, value in _assignments(node):
                self._given.setdefault((owner, name), []).append(value)
        inner = node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else owner
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr_context):
                self._visit(child, inner)

    def _assigned(self, node: ast.AST, name: str) -> ast.expr | None:
        """The last value before a node that a name gets in its function, or in one around it, or in
        the module.
        """
        owner = self._owner.get(node, self._tree)
        while (owner, name) not in self._given and owner is not self._tree:
            owner = self._owner[owner]
        values, line = self._given.get((owner, name), []), getattr(node, "lineno", 0)
        return next(
            (each for each in reversed(values) if each.lineno <= line),
            values[0] if values else None,
        )

    def kinds(self) -> Iterator[Kind]:
        for function in self._functions:
            yield from self._rules(function)
            arguments = function.args
            named = [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
            named += zip(arguments.args[::-1], arguments.defaults[::-1], strict=False)
            for argument, value in named:
                if (
                    argument.arg == "kind"
                    and isinstance(value, ast.Constant)
                    and _is_kind(value.value)
                ):
                    yield Kind(value.value, self._first_call(function.name), self._room)
        for node in self._nodes:
            if isinstance(node, ast.Call):
                yield from self._call(node)
            elif isinstance(node, ast.Tuple) and 2 <= len(node.elts) <= 4:
                yield from self._pair(node)
            elif isinstance(node, (ast.Constant, ast.JoinedStr)):
                yield from self._message(node)

    def _kind(self, name: str, reason: str, fix: str, severity: str = "") -> Kind:
        return Kind(name, _joined(reason, fix), self._room, severity)

    def _find_patterns(self) -> Iterator[tuple[str, tuple[int, str, str]]]:
        """Functions that put something before or behind the kind they are given: its place, and
        both.
        """
        for call in self._calls:
            function = self._owner[call]
            value = self._kind_argument(call)
            if not isinstance(value, ast.JoinedStr) or function is self._tree:
                continue
            arguments = function.args  # type: ignore[attr-defined]
            names = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
            text = self._text(value)
            name = text.partition("{")[2].partition("}")[0]
            if text.count("{") == 1 and name in names:
                head, _, tail = text.partition(f"{{{name}}}")
                yield function.name, (names.index(name), head, tail)  # type: ignore[attr-defined]

    def _kind_argument(self, call: ast.Call) -> ast.expr | None:
        by_name = [keyword.value for keyword in call.keywords if keyword.arg == "kind"]
        place = self._patterns.get(_name(call), (0, "", ""))[0]
        if by_name or place >= len(call.args):
            return by_name[0] if by_name else None
        first = call.args[place]
        known = (arg for arg in call.args if isinstance(arg, ast.Constant) and _is_kind(arg.value))
        return (
            first
            if isinstance(first, (ast.Constant, ast.JoinedStr)) or place
            else next(known, first)
        )

    def _rules(self, function: Any) -> Iterator[Kind]:
        for decorator in function.decorator_list:
            if not (isinstance(decorator, ast.Call) and _name(decorator) == "rule"):
                continue
            texts = [arg.value for arg in decorator.args if isinstance(arg, ast.Constant)]
            severity = next(
                (text for text in texts if text in ("error", "warning", "note")), "error"
            )
            severity = next(
                (k.value.value for k in decorator.keywords if k.arg == "severity"), severity
            )
            kind = next((text for text in texts if _is_kind(text)), "")
            if not kind and self._room == "deepspeed_lint":
                kind = function.name.replace("_", "-")
            yields = (node.value for node in ast.walk(function) if isinstance(node, ast.Yield))
            tuples = [
                node.elts for node in yields if isinstance(node, ast.Tuple) and len(node.elts) > 2
            ]
            if kind:
                reason, fix = [self._text(part) for part in tuples[0][1:3]] if tuples else ("", "")
                yield self._kind(kind, reason, fix, severity)

    def _call(self, call: ast.Call) -> Iterator[Kind]:
        name, value = _name(call), self._kind_argument(call)
        if name in _NO_PROBLEMS or value is None:
            return
        severity = next(
            (
                k.value.value
                for k in call.keywords
                if k.arg == "severity" and hasattr(k.value, "value")
            ),
            "",
        )
        by_name = {keyword.arg: keyword.value for keyword in call.keywords}
        rest = [arg for arg in call.args if arg is not value]
        reason = by_name.get("reason", rest[0] if rest else None)
        fix = by_name.get("fix", rest[1] if len(rest) > 1 and "reason" not in by_name else None)
        if name == "refuse" and len(rest) > 3:  # (kind, key, value, reason, fix, line)
            reason, fix = rest[2], rest[3]
        if name == "outliers":
            reason, fix = ast.Constant("nodes differ in it"), rest[2] if len(rest) > 2 else None
        _, head, tail = self._patterns.get(name, (0, "", ""))
        for text in dict.fromkeys(self._values(value, call, 0)):
            if _is_kind(whole := f"{head}{text}{tail}"):
                yield self._kind(whole, self._text(reason), self._text(fix), str(severity))

    def _pair(self, node: ast.Tuple) -> Iterator[Kind]:
        """(kind, reason) or (kind, reason, fix), and what is written as two assignments in one."""
        first, *rest = node.elts
        if (
            self._room not in ("deepspeed_lint", "imports", "plan")
            or not isinstance(first, ast.Constant)
            or not _is_kind(first.value)
        ):
            return
        texts = [self._text(each) for each in rest[:2]]
        if " " in texts[0]:
            yield self._kind(
                str(first.value), texts[0], texts[1] if len(texts) > 1 and " " in texts[1] else ""
            )

    def _message(self, node: ast.Constant | ast.JoinedStr) -> Iterator[Kind]:
        text = self._text(node)
        if "(?" in text:
            return  # a pattern
        if " " in text and not text[:1].isspace() and "\n" not in (text := text.strip()):
            for name in _IN_BRACKETS.findall(text):
                yield Kind(name, text.replace(f" [{name}]", "").strip(), self._room)

    def _values(self, value: ast.expr, call: ast.AST, depth: int) -> Iterator[str]:
        """Texts that an argument may be: a constant, the two of a choice, or what a name was
        given.
        """
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value
        elif isinstance(value, ast.IfExp):
            yield from self._values(value.body, call, depth)
            yield from self._values(value.orelse, call, depth)
        elif (
            isinstance(value, ast.Name)
            and depth < 3
            and (given := self._assigned(call, value.id)) is not None
        ):
            yield from self._values(given, call, depth + 1)

    def _first_call(self, function: str) -> str:
        for call in self._calls:
            if _name(call) == function and call.args:
                return _joined(*([self._text(part) for part in call.args[:2]] + [""])[:2])
        return ""

    def _text(self, node: ast.AST | None, depth: int = 0) -> str:
        """The text of an expression, as far as it is written down."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            parts = (
                p.value if isinstance(p, ast.Constant) else _braces(getattr(p, "value", p))
                for p in node.values
            )
            return "".join(map(str, parts))
        if depth > 4:
            return ""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._text(node.left, depth + 1) + self._text(node.right, depth + 1)
        if isinstance(node, ast.IfExp):
            return self._text(node.body, depth + 1) or self._text(node.orelse, depth + 1)
        if isinstance(node, ast.Name):
            return self._text(self._assigned(node, node.id), depth + 1)
        return ""


def _is_kind(value: object) -> bool:
    return isinstance(value, str) and _KIND.fullmatch(value) is not None


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _braces(node: ast.expr) -> str:
    """A short name of a value: ``{layout.micro_size}`` is ``{micro_size}``."""
    names = [each for each in ast.walk(node) if isinstance(each, (ast.Attribute, ast.Name))]
    last = names[0] if names else None
    name = getattr(last, "attr", None) or getattr(last, "id", None) or "..."
    return f"{{{name.strip('_')}}}"


def _assignments(node: ast.Assign | ast.AnnAssign) -> Iterator[tuple[str, ast.expr]]:
    """Names that a statement gives a value."""
    if (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.value is not None
    ):
        yield node.target.id, node.value
    for target in node.targets if isinstance(node, ast.Assign) else ():
        if isinstance(target, ast.Name):
            yield target.id, node.value
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=False)
            yield from ((each.id, value) for each, value in pairs if isinstance(each, ast.Name))
