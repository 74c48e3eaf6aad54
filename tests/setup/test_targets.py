"""Every mistake in a user's module is one problem: key, value, reason, fix, and the line of
code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework.config.base import Factory
from framework.errors import ConfigError, Problem, TrainingError
from framework.setup.user_code import call_factory, check_arguments, load_target, takes
from framework.setup.user_code_errors import summary

MODULES = {
    "good.py": """
        import sys
        VALUE = 3
        class Net:
            class Inner:
                depth = 7
            @property
            def broken(self):
                raise ValueError("not yet")
            def __init__(self, width: int = 3, *, depth: int = 1) -> None:
                if width < 0:
                    raise ValueError("width must be\\n    positive")
                self.width = width
        NET = Net()
        def leave(): sys.exit(0)
        def refuse():
            from framework.errors import TrainingError
            raise TrainingError("mine")
        """,
    "syntax.py": "x = 1\ny = = 2\n",
    "indented.py": "def f():\nreturn 1\n",
    "leaves.py": "import sys\nsys.exit(0)\n",
    "raises.py": "import json\njson.loads('{')\n",
    "needs.py": "\nimport package_that_nobody_has\n",
    "imports_wrong_name.py": "from json import lods\n",
    "nameless.py": "raise ModuleNotFoundError('custom text')\n",
    "silent.py": "raise RuntimeError\n",
    "lazy.py": "def __getattr__(name):\n    raise RuntimeError(f'{name} needs a GPU')\n",
    "whole/__init__.py": "",
    "whole/part.py": "from whole.missing import x\n",
    "broken/__init__.py": "raise OSError(5, 'Input/output error')\n",
    "broken/part.py": "x = 1\n",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules, as the current one; what was imported from it is forgotten again."""
    for name, text in MODULES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        lines = text.splitlines()
        depth = 8 if lines and not lines[0].strip() and text.startswith("\n        ") else 0
        file.write_text("\n".join(line[depth:] for line in lines) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def problem_of(path: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load_target(path, key="model.target")
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("model.target", path)
    assert "\n" not in str(problem)
    return problem


def test_the_current_folder_is_searched() -> None:
    assert load_target("good:VALUE", key="k") == 3
    assert load_target("good:Net.Inner.depth", key="k") == 7
    assert load_target("os.path:join", key="k").__name__ == "join"


@pytest.mark.parametrize(
    ("path", "kind", "reason", "fix"),
    [
        (
            "nowhere:x",
            "target-not-found",
            "there is no module nowhere",
            "check the spelling, or start where nowhere can be imported",
        ),
        (
            "whole.nowhere:x",
            "target-not-found",
            "there is no module whole.nowhere",
            "check the spelling, or start where whole can be imported",
        ),
        (
            "good.deeper:x",
            "target-not-found",
            "there is no module good.deeper",
            "check the spelling, or start where good can be imported",
        ),
        ("good:Nett", "target-not-found", "good has no Nett", "did you mean 'Net'?"),
        ("good:Net.Innr", "target-not-found", "good.Net has no Innr", "did you mean 'Inner'?"),
        ("good:zzzzzz", "target-not-found", "good has no zzzzzz", "check the spelling"),
        (
            "good:NET.broken",
            "target-import-failed",
            "reading broken failed: ValueError: not yet (HERE/good.py:9)",
            "correct the module",
        ),
        (
            "lazy:Net",
            "target-import-failed",
            "reading Net failed: RuntimeError: Net needs a GPU (HERE/lazy.py:2)",
            "correct the module",
        ),
        (
            "syntax:x",
            "target-import-failed",
            "importing it failed: SyntaxError: invalid syntax (HERE/syntax.py:2)",
            "correct the module",
        ),
        (
            "leaves:x",
            "target-import-failed",
            "importing it failed: SystemExit: 0 (HERE/leaves.py:2)",
            "correct the module",
        ),
        (
            "needs:x",
            "target-import-failed",
            "importing it needs package_that_nobody_has (HERE/needs.py:2)",
            "install package_that_nobody_has, or check its spelling",
        ),
        (
            "whole.part:x",
            "target-import-failed",
            "importing it needs whole.missing (HERE/whole/part.py:1)",
            "install whole.missing, or check its spelling",
        ),
        (
            "broken.part:x",
            "target-import-failed",
            "importing it failed: OSError: [Errno 5] Input/output error (HERE/broken/__init__.py:1)",
            "correct the module",
        ),
        (
            "nameless:x",
            "target-import-failed",
            "importing it failed: ModuleNotFoundError: custom text (HERE/nameless.py:1)",
            "correct the module",
        ),
        (
            "silent:x",
            "target-import-failed",
            "importing it failed: RuntimeError (HERE/silent.py:1)",
            "correct the module",
        ),
        (".good:x", "target-import-failed", None, "correct the module"),
        ("..good:x", "target-import-failed", None, "correct the module"),
    ],
)
def test_what_cannot_be_imported(
    here: Path, path: str, kind: str, reason: str | None, fix: str
) -> None:
    problem = problem_of(path)
    assert (problem.kind, problem.fix) == (kind, fix)
    assert reason is None or problem.reason.replace(str(here), "HERE") == reason


@pytest.mark.parametrize(
    ("path", "start", "place"),
    [
        ("indented:f", "IndentationError: expected an indented block", "(HERE/indented.py:2)"),
        ("raises:x", "JSONDecodeError: ", "decoder.py:"),
        (
            "imports_wrong_name:x",
            "ImportError: cannot import name 'lods' from 'json'",
            "(HERE/imports_wrong_name.py:1)",
        ),
    ],
)
def test_the_reason_names_the_line(here: Path, path: str, start: str, place: str) -> None:
    reason = problem_of(path).reason.replace(str(here), "HERE")
    assert reason.startswith(f"importing it failed: {start}")
    assert place in reason


def call(path: str, **kwargs: Any) -> Any:
    return call_factory(Factory(path, kwargs), key="model")


def test_a_factory_is_called_with_its_arguments() -> None:
    assert call("good:Net", width=5).width == 5


@pytest.mark.parametrize(
    ("path", "kwargs", "text"),
    [
        (
            "good:Net",
            {"widht": 5},
            "model.args = {widht: 5}: got an unexpected keyword argument 'widht'; it takes (width: int = 3, *, depth: "
            "int = 1) -> None [target-args]",
        ),
        (
            "good:NET",
            {},
            "model.target = a Net: it cannot be called; name a class or a function [target-not-callable]",
        ),
        (
            "good:Net",
            {"width": -1},
            "model.target = good:Net: calling it failed: ValueError: width must be positive (HERE/good.py:12); check "
            "model.args and the code [target-failed]",
        ),
        (
            "good:leave",
            {},
            "model.target = good:leave: calling it failed: SystemExit: 0 (HERE/good.py:15); check model.args and the "
            "code [target-failed]",
        ),
    ],
)
def test_what_cannot_be_called(here: Path, path: str, kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call(path, **kwargs)
    assert str(caught.value).replace(str(here), "HERE") == text


def test_an_error_that_is_already_for_the_user_is_left_as_it_is() -> None:
    with pytest.raises(TrainingError, match=r"^mine$"):
        call("good:refuse")


def test_missing_arguments_and_positional_ones() -> None:
    def optimizer(parameters: Any, lr: float) -> None: ...

    check_arguments(optimizer, {"lr": 0.1}, key="optimizer", positional=1)
    with pytest.raises(
        ConfigError,
        match=r"missing a required argument: 'lr'; it takes \(parameters.*\[target-args\]",
    ):
        check_arguments(optimizer, {}, key="optimizer", positional=1)
    with pytest.raises(ConfigError, match="multiple values for argument 'parameters'"):
        check_arguments(optimizer, {"parameters": 1, "lr": 1}, key="optimizer", positional=1)


def test_what_has_no_signature_is_not_judged() -> None:
    check_arguments(min, {}, key="k", positional=3)
    assert takes(min, {}, positional=2)
    assert not takes(3, {})


def test_a_summary_is_one_short_line() -> None:
    text = summary(ValueError("a\n" * 5000))
    assert "\n" not in text
    assert len(text) < 330
