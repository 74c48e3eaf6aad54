"""The house: imports run one way, the light half never touches torch, and deepspeed is imported by
the engine and its files alone.

The walk reads the source, so an import inside a function counts as well; what stands under `if
TYPE_CHECKING:` does not.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from framework.commands.table import BUILT_IN
from tests.places import ROOT
from tests.plain_code import nodes, tree

PACKAGES = ("deepspeed_lint", "framework")
# Part -> the parts that it may import beside itself. A part is a room of framework/, or a half of
# one (`HALVES`).
MAY_IMPORT: dict[str, set[str]] = {
    "problems": set(),
    "text": {"problems"},
    "deepspeed_lint": {"problems", "text"},
    # ------------------------------------------------ framework
    "system": {"problems"},  # errors.py is of this floor
    "config": {"system", "text", "deepspeed_lint"},
    "token files": {"system"},
    "plan": {"system", "text", "deepspeed_lint", "config", "token files"},
    # Sections of recipes, their work and their files. Rooms of the trainer find them by name.
    "recipe kinds": {"system", "config", "plan", "token files"},
    "sections": {"system", "config", "recipe kinds"},  # public names of both
    "engine protocol": {"system"},
    "checkpoint": {"system", "config", "engine protocol"},
    "train": {"system", "text", "checkpoint", "engine protocol"},
    "imports": {"system", "text", "config", "plan", "deepspeed_lint"},
    "load_run": {"system", "config", "plan", "checkpoint", "imports"},
    "hosts": {"system", "plan"},
    "node checks": {"system", "deepspeed_lint", "config", "plan", "checkpoint", "hosts"},
    "launch": {
        "load_run",
        "system",
        "config",
        "plan",
        "checkpoint",
        "deepspeed_lint",
        "imports",
        "hosts",
        "node checks",
    },
    "deploy": {"load_run", "system", "text", "config", "plan", "launch", "hosts"},
    "report": {"system", "text", "config", "plan", "checkpoint", "engine protocol", "train"},
    "commands": {
        "hosts",
        "load_run",
        "system",
        "text",
        "config",
        "plan",
        "checkpoint",
        "train",
        "deepspeed_lint",
        "imports",
        "report",
    },
    "bench command": {
        "load_run",
        "system",
        "text",
        "plan",
        "launch",
        "hosts",
        "commands",
        "report",
    },
    "doctor command": {"system", "config", "plan", "launch", "hosts", "node checks"},
    # ------------------------------------------------ torch line
    "models": {"system", "text", "config"},
    "data": {"system", "config", "token files"},
    "tasks": {"system", "config", "models"},
    "recipes": {"system", "text", "config", "token files", "recipe kinds", "models", "data"},
    "checkpoint state": {"system", "checkpoint", "models"},
    "engine": {
        "system",
        "config",
        "plan",
        "checkpoint",
        "checkpoint state",
        "engine protocol",
        "models",
        "tasks",
        "data",
    },
    "setup": {
        "system",
        "text",
        "config",
        "token files",
        "plan",
        "deepspeed_lint",
        "imports",
        "checkpoint",
        "checkpoint state",
        "train",
        "report",
        "data",
        "models",
        "tasks",
        "engine",
        "engine protocol",
    },
    "run": {
        "system",
        "token files",
        "config",
        "plan",
        "checkpoint",
        "train",
        "report",
        "data",
        "engine",
        "engine protocol",
        "setup",
    },
    "torch commands": {
        "run",
        "commands",
        "report",
        "train",
        "system",
        "text",
        "config",
        "token files",
        "checkpoint",
        "checkpoint state",
        "models",
        "data",
        "tasks",
        "engine",
        "engine protocol",
        "setup",
        "recipe kinds",
        "recipes",
    },
    # ------------------------------------------------ on top
    "cli": {"system", "commands"},
    "script": {"load_run", "system", "plan", "hosts", "launch", "run"},  # what train.py does
    "entry": {"script", "engine"},  # train.py of an installed copy; ranks of `doctor --bench`
    "__main__": {"system", "cli"},
    "__init__": set(),  # its names are imported on first use
}
# Modules of a room that another part may import without the rest of it, and rooms that are two
# parts.
HALVES = {
    "errors": "system",
    "own_loop": "run",
    "registry": "system",
    "plug_ins": "commands",
    "recipes.image_models.kinds": "recipe kinds",
    "recipes.image_models.work": "recipe kinds",
    "recipes.image_sets.files": "recipe kinds",
    "recipes.image_sets.kinds": "recipe kinds",
    "recipes.language_models.kinds": "recipe kinds",
    "recipes.language_models.work": "recipe kinds",
    "recipes.text.files": "recipe kinds",
    "recipes.text.kinds": "recipe kinds",
    "training": "run",
    "data.token_files": "token files",
    "data.tokenizer_numbers": "token files",
    "engine_protocol": "engine protocol",
    "checkpoint.state": "checkpoint state",
    "doctor": "node checks",
    "launch.options": "hosts",
    "commands.doctor": "doctor command",
    "commands.bench": "bench command",
    "commands.evaluate": "torch commands",
    "commands.export": "torch commands",
    "commands.generate": "torch commands",
    "commands.hub_folder": "torch commands",
    "commands.inputs": "torch commands",
    "commands.machine_rates": "torch commands",
    "commands.lr_range": "torch commands",
    "commands.predict": "torch commands",
    "commands.program": "torch commands",
}
LIGHT = (
    "recipe kinds",
    "sections",
    "problems",
    "system",
    "text",
    "config",
    "token files",
    "plan",
    "engine protocol",
    "checkpoint",
    "train",
    "deepspeed_lint",
    "imports",
    "load_run",
    "hosts",
    "node checks",
    "launch",
    "deploy",
    "report",
    "commands",
    "doctor command",
    "bench command",
    "cli",
    "__main__",
    "__init__",
)
HEAVY = {"torch", "torchvision", "deepspeed", "numpy", "sklearn", "PIL"}
# What a laptop has after `pip install -e .`; the rest of train's needs is imported where it is
# used.
# typing_extensions comes with pydantic, which reads its TypedDict before Python 3.12.
BASE_INSTALL = {"pydantic", "pydantic_core", "typing_extensions", "yaml", "ruamel", "rich", "shtab"}
OF_THE_TRAIN_EXTRA = {
    "train": {"tensorboard"},
    "launch": {"psutil"},
    "node checks": {"psutil"},
    "report": {"resvg_py"},
}


def part_of(module: str) -> str:
    """Name the part that holds a module: ``framework.config.load`` -> ``config``; ``framework`` ->
    ``__init__``.
    """
    if module.split(".")[0] == "deepspeed_lint":
        return _part_of_linter(module)
    _, *path = [name for name in module.split(".") if name != "__init__"]
    for depth in range(len(path), 0, -1):
        if half := HALVES.get(".".join(path[:depth])):
            return half
    return path[0] if path else "__init__"


def _part_of_linter(module: str) -> str:
    if module.startswith("deepspeed_lint.text"):
        return "text"
    if module.startswith("deepspeed_lint.errors"):
        return "problems"
    return "deepspeed_lint"


def modules() -> dict[str, Path]:
    """Every module of the framework and of the linter by name."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Names of the modules that a file imports, wherever in it."""
    return frozenset(_imports(tree(path)))


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "relative import"
        assert node.module
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    ):
        for child in node.orelse:
            yield from _imports(child)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _imports(child)


def test_every_part_has_its_place_in_the_house() -> None:
    assert {part_of(name) for name in modules()} == set(MAY_IMPORT)


def test_imports_run_one_way() -> None:
    wrong = []
    for name, path in modules().items():
        part = part_of(name)
        allowed = MAY_IMPORT[part] | {part, "__init__"}
        for imported in sorted(imports_of(path)):
            if imported.split(".")[0] in PACKAGES and part_of(imported) not in allowed:
                wrong.append(f"{name} ({part}) imports {imported} ({part_of(imported)})")
    assert wrong == []


def test_the_light_half_imports_what_a_laptop_has() -> None:
    wrong = []
    for name, path in modules().items():
        part = part_of(name)
        if part not in LIGHT:
            continue
        packages = {imported.split(".")[0] for imported in imports_of(path)}
        outside = packages - set(PACKAGES) - sys.stdlib_module_names
        allowed = BASE_INSTALL | OF_THE_TRAIN_EXTRA.get(part, set())
        wrong += [f"{name} imports {package}" for package in sorted(outside - allowed - HEAVY)]
        wrong += [
            f"{name} imports {package}, above the torch line" for package in sorted(outside & HEAVY)
        ]
    assert wrong == []


def test_commands_beyond_the_torch_line_are_there() -> None:
    """The walk does not see what the table imports by name."""
    for command in BUILT_IN:
        name, _, function = command.place.partition(":")
        assert (part_of(name) in LIGHT) is not command.needs_torch, command
        names = {
            node.name for node in tree(modules()[name]).body if isinstance(node, ast.FunctionDef)
        }
        assert function in names, command


# What is reached through the table of commands alone.
WINGS = {
    "framework.deploy": ("framework/deploy/",),
    "framework.imports.trainers": ("framework/imports/command.py",),
}


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_is_named_by_the_table_of_commands_alone(wing: str) -> None:
    wrong = []
    for path in modules().values():
        place = path.relative_to(ROOT).as_posix()
        is_inside = place.startswith(WINGS[wing]) or place == "framework/commands/table.py"
        if not is_inside and wing in path.read_text(encoding="utf-8"):
            wrong.append(place)
    assert wrong == []


def test_deepspeed_is_imported_below_the_engine_alone() -> None:
    wrong = []
    for name, path in modules().items():
        packages = {imported.split(".")[0] for imported in imports_of(path)}
        if "deepspeed" in packages and part_of(name) not in ("engine", "checkpoint state"):
            wrong.append(name)
    assert wrong == []


def test_nothing_imports_itself_in_a_circle() -> None:
    names = modules()
    edges = {
        name: {found for found in imports_of(path) if found in names and found != name}
        for name, path in names.items()
    }
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"circle: {' -> '.join((*trail, name))}"
        if name in done:
            return
        for found in sorted(edges[name]):
            walk(found, (*trail, name))
        done.add(name)

    for name in names:
        walk(name, ())


def test_the_order_itself_has_no_circle() -> None:
    order: list[str] = []
    rest = dict(MAY_IMPORT)
    while rest:
        ready = [part for part, needs in rest.items() if needs <= set(order)]
        assert ready, f"circle among {sorted(rest)}"
        order += ready
        rest = {part: needs for part, needs in rest.items() if part not in ready}


def test_programs_in_shell_scripts_import_what_is_there() -> None:
    """What `launch.sh` and the image run stands in no module that a checker reads; where it fails a
    start goes on.
    """
    found = [
        (file, *match.groups())
        for file in ("launch.sh", "Dockerfile")
        for match in re.finditer(
            r"from (framework[\w.]*) import (\w+)", (ROOT / file).read_text(encoding="utf-8")
        )
    ]
    assert len([file for file, *_ in found if file == "launch.sh"]) >= 4
    assert [
        place for place in found if not hasattr(importlib.import_module(place[1]), place[2])
    ] == []


# Rooms that find recipes by their registered names alone, as they find kinds of other packages.
NAME_NO_RECIPE = {
    "config",
    "plan",
    "engine",
    "engine protocol",
    "checkpoint",
    "checkpoint state",
    "setup",
    "train",
    "run",
    "models",
    "data",
    "tasks",
}


def test_rooms_of_the_trainer_name_no_recipe() -> None:
    wrong = []
    for name, path in modules().items():
        if part_of(name) not in NAME_NO_RECIPE:
            continue
        text = path.read_text()
        if "recipes" not in text:
            continue
        for node in nodes(path):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and str(node.value).startswith("framework.recipes"):
                wrong.append(f"{name}: {node.value}")
        wrong += [
            f"{name}: {imported}"
            for imported in sorted(imports_of(path))
            if imported.startswith("framework.recipes")
        ]
    assert wrong == []


def test_rooms_stand_in_no_circle() -> None:
    """Rooms as folders, whatever halves they have: each can be read without those above it."""
    rooms: dict[str, set[str]] = {}
    for name, path in modules().items():
        _, room, *_ = [*name.split("."), "__init__"]
        names = [imported.split(".") for imported in imports_of(path)]
        imported_rooms = {parts[1] for parts in names if parts[0] == "framework" and len(parts) > 1}
        rooms.setdefault(room, set()).update(imported_rooms - {room})
    while rooms:
        bottom = {room for room, above in rooms.items() if not above & rooms.keys()}
        assert bottom, f"a circle of {', '.join(sorted(rooms))}"
        for room in bottom:
            del rooms[room]
