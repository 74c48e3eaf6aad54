"""Keys of the sections that DeepSpeed describes as pydantic models."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Entry = dict[str, Any]
_SIMPLE: Final[Mapping[Any, str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
    list: "array",
    tuple: "array",
    set: "array",
    dict: "object",
}
_LIMITS: Final = (
    ("ge", "minimum"),
    ("gt", "exclusive_minimum"),
    ("le", "maximum"),
    ("lt", "exclusive_maximum"),
    ("multiple_of", "multiple_of"),
)


def entries_of(model: type[BaseModel], path: str) -> Iterator[tuple[str, Entry]]:
    """Every field of a model and of the models in it, under the names that JSON uses."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        place = f"{path}.{key}" if path else key
        entry: Entry = {"reader": "pydantic", "source": _source(model, name)}
        if key != name:
            entry["aliases"] = [name]
        inner = _describe_type(field.annotation, entry)
        for limit in field.metadata:
            entry |= {
                ours: json_value(getattr(limit, theirs))
                for theirs, ours in _LIMITS
                if hasattr(limit, theirs)
            }
        if field.is_required():
            entry["required"] = True
        else:
            _note_default(field, entry)
        _note_deprecation(field, path, entry)
        yield place, entry
        if inner is not None:
            yield from entries_of(inner, place)


def _source(model: type[BaseModel], name: str) -> str:
    """``runtime/zero/config.py:DeepSpeedZeroConfig.stage``, of the class that declares the
    field.
    """
    owner = next(cls for cls in model.__mro__ if name in inspect.get_annotations(cls))
    return f"{owner.__module__.partition('deepspeed.')[2].replace('.', '/')}.py:{owner.__name__}.{name}"


def _describe_type(annotation: Any, entry: Entry) -> type[BaseModel] | None:
    """Fill in type, enum and nullable; the model in it, if there is one."""
    kinds: list[str] = []
    inner: type[BaseModel] | None = None
    for part in _members(annotation):
        origin = get_origin(part) or part
        if part is type(None):
            entry["nullable"] = True
        elif origin is Literal:
            _add_enum(entry, list(get_args(part)), kinds)
        elif isinstance(origin, type) and issubclass(origin, Enum):
            _add_enum(entry, [json_value(member) for member in origin], kinds)
        elif isinstance(origin, type) and issubclass(origin, BaseModel):
            kinds.append("object")
            inner = origin
            entry["unknown"] = "error"
        elif origin in _SIMPLE:
            kinds.append(_SIMPLE[origin])
            if origin in (list, tuple, set):
                items = [_SIMPLE[item] for item in get_args(part) if item in _SIMPLE]
                if items:
                    entry["items"] = items[0]
            if origin is dict:
                entry["unknown"] = "free"
        else:
            entry["from_python"] = True  # torch.dtype, a process group: no JSON value is one
    entry["type"] = _one_or_list(kinds or ["any"])
    return inner


def _members(annotation: Any) -> tuple[Any, ...]:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return tuple(part for member in get_args(annotation) for part in _members(member))
    if hasattr(annotation, "__metadata__"):
        return _members(get_args(annotation)[0])
    return (annotation,)


def _add_enum(entry: Entry, values: list[Any], kinds: list[str]) -> None:
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    entry["enum"] = [*entry.get("enum", []), *values]
    kinds += [names[type(value)] for value in values]


def _one_or_list(kinds: list[str]) -> str | list[str]:
    unique = list(dict.fromkeys(kinds))
    return unique[0] if len(unique) == 1 else unique


def _note_default(field: FieldInfo, entry: Entry) -> None:
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        default = {}
    entry["default"] = json_value(default)
    if entry["type"] == "number" and type(entry["default"]) is int:
        entry["default"] = float(entry["default"])


def _note_deprecation(field: FieldInfo, path: str, entry: Entry) -> None:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    if field.deprecated or extra.get("deprecated"):
        entry["status"] = "deprecated"
        new = extra.get("new_param")
        if new:
            entry["replaced_by"] = [f"{path}.{new}" if path else str(new)]


def json_value(value: Any) -> Any:
    """A default as JSON: enum members as their value, whole floats of a size or count as they are,
    the rest as text.
    """
    if isinstance(value, Enum):  # before str and int: members may be both
        return json_value(value.value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)  # pp_int
    if isinstance(value, float):
        return value
    if isinstance(value, Mapping):
        return {str(name): json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [json_value(item) for item in value]
    return str(value)


def models_in_annotation(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models that a field holds, and the models in those."""
    for part in _members(annotation):
        origin = get_origin(part) or part
        if isinstance(origin, type) and issubclass(origin, BaseModel):
            yield origin
            for field in origin.model_fields.values():
                yield from models_in_annotation(field.annotation)
