"""Every key of the table with every odd value, one at a time: values that a draw has once in
thousands of configs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

from deepspeed_lint.keys import load_table
from tests.deepspeed_lint.differential.generate import RELEASE, Question
from tests.deepspeed_lint.rules.cases import BASE

ODD: Final[tuple[Any, ...]] = (
    True,
    False,
    0,
    1,
    2,
    -1,
    7,
    0.5,
    1.5,
    2.0,
    "x",
    "2",
    "-1",
    "0",
    "false",
    "true",
    "1e3",
    "",
    "auto",
    [],
    [1],
    ["x"],
    [None],
    {},
    {"x": 1},
    None,
)


def sweep(world: int = 1) -> Iterator[Question]:
    """Yield the plain config with one value changed. Parameters of a type and names of the user's
    choice are left to the draws.
    """
    table = load_table(RELEASE)
    for path in table:
        key = table.get(path)
        if key is None or key.status == "refused" or "[" in path or "*" in path:
            continue
        for value in ODD:
            config = copy.deepcopy(BASE)
            section = config
            *parents, name = path.split(".")
            for parent in parents:
                section = section.setdefault(parent, {})
            section[name] = copy.deepcopy(value)
            yield Question(config, world, "odd value", f"{path} = {value!r}")
