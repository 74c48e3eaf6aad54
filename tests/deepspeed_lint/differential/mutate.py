"""One thing wrong: every way to spoil a config that the differential test knows. Each names its
change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from deepspeed_lint.keys import KeyTable, known_releases, load_table
from tests.deepspeed_lint.rules.cases import CASES, merged

Config = dict[str, Any]
_JSON: Final[Mapping[str, tuple[Any, ...]]] = {
    "boolean": (True, False),
    "integer": (0, 1, 2, -1, 7),
    "number": (0.5, 1.5, 2.0),
    "string": ("x", "2", "false", "1e3", ""),
    "array": ([], [1], ["x"], [None]),
    "object": ({}, {"x": 1}),
    "null": (None,),
}


def places(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """List every key of every section."""
    for name, value in values.items():
        yield (*path, name)
        if isinstance(value, Mapping):
            yield from places(value, (*path, name))


def section_of(config: Config, path: tuple[str, ...]) -> Config:
    """Return the object that holds the key."""
    for name in path[:-1]:
        config = config[name]
    return config


def typo(rng: random.Random, config: Config, table: KeyTable, world: int) -> str:
    path = rng.choice(list(places(config)))
    section, name = section_of(config, path), path[-1]
    at = rng.randrange(len(name))
    wrong = rng.choice(
        (
            name[:at] + name[at + 1 :],
            name[:at] + name[at] + name[at:],
            name + "s",
            name.upper(),
            name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :],
        )
    )
    section[wrong] = section.pop(name)
    return f"{'.'.join(path)} -> {wrong}"


def wrong_type(rng: random.Random, config: Config, table: KeyTable, world: int) -> str:
    path = rng.choice(list(places(config)))
    section, name = section_of(config, path), path[-1]
    others = [kind for kind in _JSON if kind != _kind(section[name])]
    section[name] = rng.choice(_JSON[rng.choice(others)])
    return f"{'.'.join(path)} = {section[name]!r}"


def wrong_section(rng: random.Random, config: Config, table: KeyTable, world: int) -> str:
    path = rng.choice(list(places(config)))
    value = section_of(config, path).pop(path[-1])
    homes = [config, *(section for section in config.values() if isinstance(section, dict))]
    rng.choice(homes)[path[-1]] = value
    return f"{'.'.join(path)} moved"


def removed_key(rng: random.Random, config: Config, table: KeyTable, world: int) -> str:
    gone = sorted(_gone(table))
    path = rng.choice(gone).split(".")
    section = config
    for name in path[:-1]:
        inner = section.setdefault(name, {})
        if not isinstance(inner, dict):
            return "nothing"
        section = inner
    section[path[-1]] = rng.choice((True, False, {}, 1, None))
    return ".".join(path)


def _gone(table: KeyTable) -> Iterator[str]:
    """List keys that this release refuses, and keys that older ones had."""
    for path in table:
        key = table.get(path)
        if key is not None and key.status == "refused" and "[" not in path:
            yield path
    for release in known_releases()[:-1]:
        for path in load_table(release):
            if table.get(path) is None and "[" not in path and "*" not in path:
                yield path


def contradiction(rng: random.Random, config: Config, table: KeyTable, world: int) -> str:
    kind = rng.choice(sorted(CASES))
    case = rng.choice(CASES[kind][0])
    changed = merged(config, case.change)
    config.clear()
    config.update(changed)
    return kind


def arithmetic(rng: random.Random, config: Config, table: KeyTable, world: int) -> str:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    name = rng.choice(names)
    config[name] = rng.choice((0, -1, 3, 5, 6, 7, 12, 1000, 8.0, 2.5))
    for other in names:
        if other != name and rng.random() < 0.3:
            config.pop(other, None)
    return f"{name} = {config[name]}"


def out_of_range(rng: random.Random, config: Config, table: KeyTable, world: int) -> str:
    numbers = [
        path
        for path in places(config)
        if _kind(section_of(config, path)[path[-1]]) in ("integer", "number")
    ]
    texts = [path for path in places(config) if isinstance(section_of(config, path)[path[-1]], str)]
    path = rng.choice(numbers + texts)
    value = (
        rng.choice((0, -1, -0.5, 3, 4, 2, 1.5, 10**12, 10**30, 1e-30))
        if path in numbers
        else rng.choice(("zzz", "Auto", ""))
    )
    section_of(config, path)[path[-1]] = value
    return f"{'.'.join(path)} = {value}"


def auto(rng: random.Random, config: Config, table: KeyTable, world: int) -> str:
    path = rng.choice(list(places(config)))
    section_of(config, path)[path[-1]] = "auto"
    return ".".join(path)


def left_out(rng: random.Random, config: Config, table: KeyTable, world: int) -> str:
    path = rng.choice(list(places(config)))
    section_of(config, path).pop(path[-1])
    return ".".join(path)


def twice(rng: random.Random, config: Config, table: KeyTable, world: int) -> str:
    """Write a key under two of its names."""
    zero = config.setdefault("zero_optimization", {"stage": 2})
    if not isinstance(zero, dict):
        return "nothing"
    named = [
        key
        for path in table.children("zero_optimization")
        if (key := table.get(path)) and key.aliases
    ]
    key = rng.choice(named)
    zero[key.name] = zero[key.aliases[0]] = key.default
    return key.name


def dotted(rng: random.Random, config: Config, table: KeyTable, world: int) -> str:
    """Write a path, or the table's own spelling of a typed section, where a name belongs."""
    inner = [path for path in places(config) if len(path) > 1]
    if not inner:
        return "nothing"
    path = rng.choice(inner)
    depth = rng.randrange(len(path) - 1)
    value = section_of(config, path).pop(path[-1])
    name = ".".join(path[depth:])
    if path[:-1] in (("optimizer", "params"), ("scheduler", "params")) and rng.random() < 0.5:
        name = name.replace("params.", f"params[{config[path[0]].get('type')}].")
    section_of(config, path[: depth + 1])[name] = value
    return f"{'.'.join(path)} -> {name}"


def _kind(value: Any) -> str:
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    return names.get(type(value), "null")


Mutation = Callable[[random.Random, Config, KeyTable, int], str]
MUTATIONS: Final[Mapping[str, Mutation]] = {
    "typo": typo,
    "wrong type": wrong_type,
    "wrong section": wrong_section,
    "removed key": removed_key,
    "contradictory pair": contradiction,
    "bad arithmetic": arithmetic,
    "out of range": out_of_range,
    "auto": auto,
    "left out": left_out,
    "both names": twice,
    "dotted": dotted,
}
