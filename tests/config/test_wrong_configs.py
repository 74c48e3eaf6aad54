"""What a person reads after a mistake: whole lines, compared word for word."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from framework.config.load import load_with_source
from framework.errors import ConfigError, UsageError
from framework.plan.plan import default_cluster, make_plan
from tests.config.bad_configs import JSON, OVERRIDES, YAML


def lines_of(path: Path, overrides: list[str] | None = None) -> list[str]:
    """The printed problems of a config, with the file's own name cut off."""

    def load_and_plan() -> None:
        config, source = load_with_source(path, overrides or [])
        make_plan(config, default_cluster(config), source=source)

    with pytest.raises(ConfigError) as caught:
        load_and_plan()
    return [line.removeprefix(str(path)) for line in str(caught.value).split("\n")]


def check(path: Path, content: str | bytes, expected: list[str]) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    started = time.process_time()
    assert lines_of(path) == expected
    assert time.process_time() - started < 5


@pytest.mark.parametrize("name", YAML)
def test_yaml(name: str, tmp_path: Path) -> None:
    check(tmp_path / "x.yaml", *YAML[name])


@pytest.mark.parametrize("name", JSON)
def test_json(name: str, tmp_path: Path) -> None:
    check(tmp_path / "x.json", *JSON[name])


@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("run: {name: x}\n")
    overrides, expected = OVERRIDES[name]
    assert lines_of(path, overrides) == [f"command line: {line}" for line in expected]


@pytest.mark.parametrize(
    "word", ["foo", "a..b=1", "=1", ".a=1", "a.=1", "model.hidden_sizes.0=3", "a b=1", ""]
)
def test_words_that_are_no_settings(word: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("")
    with pytest.raises(
        UsageError,
        match=r"not a setting; write section\.key=value, for example optimizer\.lr=0\.01",
    ):
        load_with_source(path, [word])


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    assert lines_of(tmp_path / "x.yaml") == [
        ": there is no such file; check the path [config-not-found]"
    ]
    assert lines_of(tmp_path / "dangling") == [
        ": it is a link to a file that is not there; repair the link [config-not-found]"
    ]
    assert lines_of(tmp_path) == [
        ": this is a folder; name a .yaml or .json file in it [config-unreadable]"
    ]
    (line,) = lines_of(tmp_path / "loop")
    assert line.startswith(": cannot be read (")
    assert line.endswith("); check the file [config-unreadable]")


def test_a_rule_points_at_the_line_of_the_section_that_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("run: {name: x}\nmodel: {kind: lenet}\n")
    assert lines_of(path, ["model.kind=resnet18"]) == [
        ":2: model.in_channels = 3: the digits data has 1 channel(s); set model.in_channels: 1 [model-data-in-channels]",  # noqa: E501
        ":2: model.num_classes = 1000: the digits data has 10 classes; set model.num_classes: 10 "
        "[model-data-num-classes]",
    ]


def test_a_key_of_the_kind_that_the_command_line_changed_is_reported_as_that(
    tmp_path: Path,
) -> None:
    """The file is fine and so is the setting; only the whole section can be meant."""
    path = tmp_path / "x.yaml"
    path.write_text(
        "data: {kind: digits, image_size: 28}\nmodel: {kind: lenet, image_size: 28}\n"
        "precision: {dtype: fp16, loss_scale: 2}\n"
    )
    assert lines_of(
        path, ["data.kind=fashion_mnist", "data.rot=x", "model.target=a:b", "precision.dtype=bf16"]
    ) == [
        ":1: data.image_size = 28: kind=fashion_mnist, from the command line, has no such key; replace the whole "
        "section: "
        "data='{kind: fashion_mnist}' [unknown-key]",
        *[
            f":2: model.{key}: target=a:b, from the command line, has no such key; replace the whole section: "
            "model='{target: a:b}' [unknown-key]"
            for key in ("kind = lenet", "image_size = 28")
        ],
        ":3: precision.loss_scale = 2: dtype=bf16, from the command line, has no such key; replace the whole section: "
        "precision='{dtype: bf16}' [unknown-key]",
        "command line: data.rot = x: there is no such key; did you mean 'root'? [unknown-key]",
    ]
    load_with_source(
        path, ["data={kind: fashion_mnist}", "model={target: a:b}", "precision={dtype: bf16}"]
    )


def test_what_is_no_finite_number_is_not_offered_back(tmp_path: Path) -> None:
    """YAML reads these as text, and Python's float() as numbers."""
    path = tmp_path / "x.yaml"
    for word in ("nan", "inf", "-inf", "Infinity"):
        path.write_text(f"optimizer: {{kind: sgd, lr: {word}}}\n")
        line = f"optimizer.lr = {word}: text where a number belongs; write a finite number [wrong-type]"
        assert lines_of(path) == [f":1: {line}"]
        assert lines_of(path, [f"optimizer.lr={word}"]) == [f"command line: {line}"]


def test_a_number_where_text_belongs_is_shown_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for written, kind in (
        ("007", "number with a fraction"),
        ("2026_11_22", "whole number"),
        ("1e3", "number with a fraction"),
    ):
        path.write_text(f"run: {{name: {written}}}\n")
        (line,) = lines_of(path)
        assert (
            line
            == f':1: run.name = {written}: a {kind} where text belongs; write "{written}", in quotes [wrong-type]'
        )
        assert lines_of(path, [f"run={{name: {written}}}"]) == [f"command line{line[2:]}"]


def test_a_replaced_section_has_no_line(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("optimizer:\n  kind: sgd\n  lr: 0.1\n")
    with pytest.raises(ConfigError) as caught:
        load_with_source(path, ["optimizer={kind: adamw, lr: -1}"])
    assert (
        str(caught.value)
        == "command line: optimizer.lr = -1: too small; write 0 or more [wrong-value]"
    )
