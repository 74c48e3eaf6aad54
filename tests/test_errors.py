"""Problems are one line each, with any content; exit codes stay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework import errors
from framework.errors import ConfigError, Problem, in_one_line, missing_package, show_value

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


def test_a_full_problem_is_the_line_of_the_design() -> None:
    problem = Problem(
        kind="zero-with-pipeline",
        reason="pipeline engines accept stage 0 or 1",
        fix="set zero.stage: 1",
        key="zero.stage",
        value=3,
        file="ds_configs/x.yaml",
        line=14,
    )
    assert str(problem) == (
        "ds_configs/x.yaml:14: zero.stage = 3: pipeline engines accept stage 0 or 1; set zero.stage: 1 "
        "[zero-with-pipeline]"
    )


def test_parts_that_are_not_known_are_left_out() -> None:
    assert str(Problem(kind="k", reason="why")) == "why [k]"
    assert str(Problem(kind="k", reason="why", fix="do", file="f")) == "f: why; do [k]"
    assert str(Problem(kind="k", reason="why", key="a.b")) == "a.b: why [k]"
    assert str(Problem(kind="k", reason="why", key="a.b", value=None)) == "a.b = null: why [k]"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (3, "3"),
        (1e-3, "0.001"),
        (float("nan"), "nan"),
        ("word", "word"),
        ("two words", "two words"),
        ("120", '"120"'),
        ("1e-3", '"1e-3"'),
        (".5", '".5"'),
        ("true", '"true"'),
        ("NULL", '"NULL"'),
        ("", '""'),
        (" x", '" x"'),
        ("x\n", '"x\\n"'),
        ("1.2.3", "1.2.3"),
        ([1, "2", None], '[1, "2", null]'),
        ({"kind": "lenet", "a": [True]}, "{kind: lenet, a: [true]}"),
        ({"a": "x, y"}, '{a: "x, y"}'),
        ([[[[1]]]], "[[[...]]]"),
        (10**81, "a number of more than 80 digits"),
        ("x" * 200, "x" * 77 + "..."),
        ("\x1b[31mred", "\\x1b[31mred"),
    ],
)
def test_values_are_shown_as_yaml_writes_them(value: Any, shown: str) -> None:
    assert show_value(value) == shown


@pytest.mark.slow
@given(ANYTHING)
def test_any_value_is_one_short_printable_line(value: Any) -> None:
    shown = show_value(value)
    assert len(shown) <= 80
    assert shown.isprintable()


def test_a_list_that_holds_itself_is_shown() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert show_value(loop) == "[[[...]]]"


@pytest.mark.slow
@given(reason=st.text(), key=st.text(), file=st.text(), value=ANYTHING)
def test_a_problem_with_any_content_is_one_line_and_json(
    reason: str, key: str, file: str, value: Any
) -> None:
    problem = Problem(kind="k", reason=reason, fix=reason, key=key, file=file, value=value)
    assert str(problem).isprintable()
    as_json = json.dumps(problem.to_dict(), allow_nan=False)
    assert json.loads(as_json)["text"] == str(problem)


def test_a_value_that_was_left_out_is_not_in_the_json() -> None:
    assert "value" not in Problem(kind="k", reason="r").to_dict()
    assert Problem(kind="k", reason="r", value=None).to_dict()["value"] is None


@pytest.mark.slow
@given(
    value=st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False)
)
def test_a_problem_comes_through_json_as_it_was(value: Any) -> None:
    every = Problem(
        "k",
        "r",
        fix="f",
        key="a.b",
        value=value,
        file="x.yaml",
        line=3,
        column=4,
        severity="warning",
    )
    for problem in (every, Problem("k", "r")):
        assert Problem.from_dict(json.loads(json.dumps(problem.to_dict()))) == problem
    with pytest.raises(TypeError):
        Problem.from_dict({"kind": "k"})


def test_a_missing_package_is_a_matter_of_the_installation() -> None:
    error = missing_package("torch", what="export")
    assert error.exit_code == 78
    assert [problem.kind for problem in error.problems] == ["package-missing"]
    assert str(error).startswith("export needs the package torch, which ")


def test_a_strangers_error_is_one_short_line_with_its_type() -> None:
    assert in_one_line(ValueError("line one\n\n  line two\t")) == "ValueError: line one line two"
    assert in_one_line(KeyError()) == "KeyError"
    assert in_one_line(OSError("x" * 1000)) == f"OSError: {'x' * 200}"
    assert in_one_line(OSError("x" * 1000), longest=3) == "OSError: xxx"


def test_exit_codes_stay_as_published() -> None:
    assert {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")} == {
        "EXIT_OK": 0,
        "EXIT_PROBLEMS": 2,
        "EXIT_USAGE": 64,
        "EXIT_TRAINING": 70,
        "EXIT_STORAGE": 74,
        "EXIT_STOPPED": 75,
        "EXIT_PEER_LOST": 76,
        "EXIT_NO_PROGRESS": 77,
        "EXIT_CONFIG": 78,
    }
    assert [
        (error.__name__, error.exit_code) for error in errors.FrameworkError.__subclasses__()
    ] == [
        ("UsageError", 64),
        ("ConfigError", 78),
        ("TrainingError", 70),
        ("StorageError", 74),
        ("RunStopped", 75),
    ]


def test_a_config_error_prints_every_problem() -> None:
    first, second = Problem(kind="a", reason="x"), Problem(kind="b", reason="y")
    assert str(ConfigError([first, second])) == "x [a]\ny [b]"
    assert ConfigError(first).problems == (first,)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("comet.api_key", 12345, "comet.api_key = ***: "),
        ("args.hub_token", "hf_x", "args.hub_token = ***: "),
        ("db_password", ["hf_x"], "db_password = ***: "),
        (
            "monitor_config",
            {"token": "hf_x", "on": True},
            "monitor_config = {token: ***, on: true}: ",
        ),
        ("comet.api_key", "", 'comet.api_key = "": '),
        ("data.eos_token", "<eos>", "data.eos_token = <eos>: "),
    ],
)
def test_what_looks_like_a_secret_is_never_shown(key: str, value: Any, shown: str) -> None:
    """Logs and annotations of a pull request are read by more people than the file is."""
    problem = Problem("wrong-type", "not text", key=key, value=value)
    assert str(problem).startswith(shown)
    assert "hf_x" not in json.dumps(problem.to_dict())
    assert "12345" not in json.dumps(problem.to_dict())
