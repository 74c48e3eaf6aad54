"""Keys that only the source tells: read after parsing, deep in the engine, where no recorder comes
along.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.key_table.models import Entry, json_value


def module_tree(module: str) -> tuple[ast.Module, dict[str, Any]] | None:
    """Syntax tree and names of a module, None where this release has none."""
    try:
        loaded = importlib.import_module(
            "deepspeed" if module == "__init__" else f"deepspeed.{module}"
        )
    except ModuleNotFoundError:
        return None
    return ast.parse(Path(inspect.getfile(loaded)).read_text(encoding="utf-8")), vars(loaded)


def reads_of(
    module: str, roots: Mapping[str, str], *, inside: str = ""
) -> Iterator[tuple[str, Entry]]:
    """Keys that a module reads from expressions such as ``self._config.pipeline``.

    Args:
        module: below ``deepspeed.``.
        roots: expression as the source writes it -> dotted path of the section that it holds.
        inside: name of the only function or class to look at.
    """
    found = module_tree(module)
    if found is None:
        return
    tree, names = found
    file = f"{module.replace('.', '/')}.py"
    for function, node in _functions(tree, inside):
        for candidate in ast.walk(node):
            for path, default in _path_read(candidate, roots, names):
                entry: Entry = {"reader": "source", "source": f"{file}:{function}"}
                if default:
                    entry["default"] = default[0]
                yield path, entry


def _functions(tree: ast.AST, inside: str, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every function by its qualified name; those of a class or function named `inside` only, where
    one is named.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = f"{prefix}{node.name}"
            chosen = not inside or inside in name.split(".")
            if isinstance(node, ast.FunctionDef) and chosen:
                yield name, node
            elif isinstance(node, ast.ClassDef):
                yield from _functions(node, inside, f"{name}.")


def _path_read(
    node: ast.AST, roots: Mapping[str, str], names: Mapping[str, Any]
) -> Iterator[tuple[str, list[Any]]]:
    """The path that an expression reads, with the default in a list where it shows one."""
    match node:
        case ast.Subscript(value=owner, slice=key):
            yield from ((path, []) for path in _joined(owner, key, roots, names))
        case ast.Call(func=ast.Attribute(value=owner, attr="get" | "pop"), args=[key, *rest]):
            default = [_constant(rest[0], names)] if rest else []
            yield from (
                (path, [json_value(v) for v in default])
                for path in _joined(owner, key, roots, names)
            )
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[owner]):
            if (
                isinstance(owner, ast.Call)
                and isinstance(owner.func, ast.Attribute)
                and owner.func.attr == "keys"
            ):
                owner = owner.func.value
            yield from ((path, []) for path in _joined(owner, key, roots, names))


def _joined(
    owner: ast.expr, key: ast.expr, roots: Mapping[str, str], names: Mapping[str, Any]
) -> Iterator[str]:
    place = _place(owner, roots, names)
    if place is None:
        return
    name = _constant(key, names)
    if isinstance(name, str):
        yield f"{place}.{name}" if place else name
    elif place:
        yield f"{place}.*"


def _place(owner: ast.expr, roots: Mapping[str, str], names: Mapping[str, Any]) -> str | None:
    """The dotted path of an expression, None where it starts at none of the roots; a loop variable
    becomes ``*``.
    """
    root = roots.get(ast.unparse(owner))
    if root is not None:
        return root
    if isinstance(owner, ast.Subscript):
        return next(_joined(owner.value, owner.slice, roots, names), None)
    return None


def _constant(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Value of a literal or of a module's constant; the node itself where it is neither."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return node


def listed_strings(
    module: str, functions: tuple[str, ...], constants: tuple[str, ...]
) -> list[str]:
    """Texts that stand in list or tuple literals: ``for key in ["lr", "momentum"]`` and ``KEYS =
    ("lr", "eps")``.
    """
    found = module_tree(module)
    texts: list[str] = []
    for node in ast.walk(found[0]) if found else ():
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            texts += [
                text
                for loop in ast.walk(node)
                if isinstance(loop, ast.For)
                for text in _texts(loop.iter)
            ]
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in constants
        ):
            texts += _texts(node.value)
    return list(dict.fromkeys(texts))


def _texts(node: ast.expr) -> list[str]:
    parts = node.elts if isinstance(node, (ast.List, ast.Tuple)) else []
    return [
        part.value
        for part in parts
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def signature_of(path: str, *, skip: tuple[str, ...]) -> Iterator[tuple[str, Entry]]:
    """Keyword arguments of a class as keys: ``ops.adam.fused_adam:FusedAdam``; nothing where this
    release has none.
    """
    module, _, name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(f"deepspeed.{module}"), name)
    except (ModuleNotFoundError, AttributeError):
        return
    for parameter in inspect.signature(cls.__init__).parameters.values():
        if parameter.name in ("self", *skip) or parameter.kind not in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            continue
        entry: Entry = {
            "reader": "signature",
            "source": f"{module.replace('.', '/')}.py:{name}.__init__",
        }
        if parameter.default is parameter.empty:
            entry["required"] = True
        else:
            entry["default"] = json_value(parameter.default)
        yield parameter.name, entry
