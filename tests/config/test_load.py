"""What a file, a command line and Python may say, and what becomes of it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from deepspeed_lint.text import document
from deepspeed_lint.text.document import is_setting, parse_document
from framework.config.load import config_from_values, load_config
from framework.config.optimizer import SGD, AdamW
from framework.config.run_config import RunConfig
from framework.config.training import Classification
from framework.errors import ConfigError, UsageError

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.text("abcdefgh_", min_size=1, max_size=8), children, max_size=3)
    ),
    max_leaves=10,
)


def yaml_value(text: str) -> Any:
    return parse_document(f"key: {text}\n", name="x").value["key"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("5e8", 5e8),
        ("1.", 1.0),
        (".5", 0.5),
        ("-1_000", -1000),
        ("+3", 3),
        ("0", 0),
        ("1.5e+3", 1500.0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        (".inf", float("inf")),
        ("yes", "yes"),
        ("on", "on"),
        ("0x10", "0x10"),
        ("0o17", "0o17"),
        ("017", 17.0),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'120'", "120"),
        ('"1e-3"', "1e-3"),
        ("1e", "1e"),
        ("e3", "e3"),
        (".", "."),
        ("C:\\data", "C:\\data"),
        ("a:b", "a:b"),
        ("[1, a, '2']", [1, "a", "2"]),
        ("{a: 1}", {"a": 1}),
        ("null # no", None),
    ],
)
def test_scalars_read_as_yaml_1_2_does(text: str, value: Any) -> None:
    found = yaml_value(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.slow
@given(PLAIN)
def test_json_comes_back_as_it_went(value: Any) -> None:
    for indent in (None, "\t"):
        for ascii_only in (True, False):
            text = json.dumps({"key": value}, indent=indent, ensure_ascii=ascii_only)
            assert parse_document(text, name="x", is_json=True).value == {"key": value}


@pytest.mark.slow
@given(PLAIN)
def test_what_yaml_dumps_comes_back(value: Any) -> None:
    assert parse_document(yaml.safe_dump({"key": value}, allow_unicode=True), name="x").value == {
        "key": value
    }


@pytest.mark.slow
@given(st.text() | st.text("{}[]:,-&*!|>'\"%@#?\n\t ab1."))
def test_any_text_is_read_or_refused(text: str) -> None:
    for is_json in (False, True):
        with suppress(ConfigError):
            parse_document(text, name="x", is_json=is_json)


def test_the_slow_loader_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML without libyaml reads the same values and refuses the same texts."""
    monkeypatch.setattr(document, "_LOADER", yaml.SafeLoader)
    assert yaml_value("1e-3") == 1e-3
    assert yaml_value("'120'") == "120"
    for text in (
        "<<: {a: 1}",
        "a: !!int 3",
        "a: *x",
        "a: *.png",
        "a: b: c",
        "a: @",
        "a:\n\tb: 1",
        "a: 1\n---\nb: 1",
        "[" * 99,
    ):
        with pytest.raises(ConfigError):
            parse_document(text, name="x")


def test_json_and_yaml_give_the_same_run(tmp_path: Path) -> None:
    values = {
        "run": {"name": "x"},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "zero": {"stage": 1, "reduce_bucket_size": 5e8},
    }
    (tmp_path / "x.json").write_text(json.dumps(values))
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(values))
    assert (
        load_config(tmp_path / "x.json")
        == load_config(tmp_path / "x.yaml")
        == config_from_values(values)
    )


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "optimizer: {kind: adamw, lr: 1e-3, eps: 1}\nzero: {stage: 1, reduce_bucket_size: 5e8}\n"
    )
    config = load_config(path)
    assert isinstance(config.optimizer, AdamW)
    assert (config.optimizer.lr, config.optimizer.eps) == (1e-3, 1.0)
    assert config.zero.reduce_bucket_size == 500_000_000
    assert isinstance(config.zero.reduce_bucket_size, int)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("# nothing yet\n")
    assert load_config(path) == RunConfig()


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbfrun:\r\n  name: x\r\n")
    assert load_config(path).run.name == "x"


def test_anchors_and_aliases_are_plain_copies(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("evaluation: &often {every_epochs: 2}\ncheckpoint: *often\n")
    config = load_config(path, ["evaluation.every_epochs=5"])
    assert (config.evaluation.every_epochs, config.checkpoint.every_epochs) == (5, 2)


def test_overrides_win_in_order_and_may_replace_a_section(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("optimizer: {kind: adamw, lr: 1e-3}\ntraining:\n")
    config = load_config(
        path,
        [
            "optimizer.eps=1",
            "optimizer={kind: sgd}",
            "optimizer.lr=2e-2",
            "training.max_steps=3",
            "run.name='a'",
        ],
    )
    assert config.optimizer == SGD(lr=2e-2)
    assert config.training.max_steps == 3
    assert config.run.name == "a"


@pytest.mark.parametrize("text", ["123", "007", "2026_11_22", "1e3", "true", ".inf", "0.10"])
def test_a_number_from_the_command_line_is_text_where_text_belongs(
    text: str, tmp_path: Path
) -> None:
    """Quotes that would say so are for the shell, which takes them."""
    path = tmp_path / "x.yaml"
    path.write_text("run: {name: a}\n")
    settings = [
        f"run.name={text}",
        f"run.output_dir={text}",
        f"checkpoint.keep_best={text} # the best",
    ]
    if text == ".inf":
        settings[:1] = []
    config = load_config(path, settings)
    assert (config.run.output_dir, config.checkpoint.keep_best) == (text, text)
    assert config.run.name == ("a" if text == ".inf" else text)


def test_a_setting_that_is_given_twice_is_refused_with_both_values(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("optimizer: {kind: sgd, lr: 0.5}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml", ["optimizer.lr=1", "run.seed=3", "optimizer.lr=2"])
    assert str(caught.value.problems[0]) == (
        "command line: optimizer.lr: it is given twice, as 1 and as 2; give it once [setting-twice]"
    )


def test_an_override_under_an_empty_section_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("optimizer:\n")
    assert load_config(path, ["optimizer.kind=sgd"]).optimizer == SGD()


@pytest.mark.parametrize(
    ("word", "setting"),
    [
        ("a.b=1", True),
        ("a=1", True),
        ("=1", True),
        ("x.yaml", False),
        ("sweeps/lr=3.yaml", False),
        ("data.root=a/b", True),
    ],
)
def test_settings_and_paths_are_distinguished(word: str, setting: bool) -> None:
    assert is_setting(word) is setting


def test_what_is_no_config_is_named() -> None:
    with pytest.raises(UsageError, match="a config is a RunConfig, nested dicts or the path of a"):
        config_from_values("x.yaml")  # type: ignore[arg-type]


def test_from_python_a_wrong_dict_is_a_config_error() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_values(
            {"optimizer": {"kind": "adamw", "betas": (0.9, 0.95)}, "zero": {"stage": 7}}
        )
    assert [str(problem) for problem in caught.value.problems] == [
        "zero.stage = 7: too large; write 3 or less [wrong-value]",
        "optimizer.betas = [0.9, 0.95]: a tuple where a list belongs; write a list [wrong-type]",
    ]


def test_the_resolved_config_loads_as_the_same_run(tmp_path: Path) -> None:
    config = config_from_values(
        {"model": {"target": "a:b", "args": {"width": 3}}, "precision": {"dtype": "fp16"}}
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.to_dict()))
    assert load_config(path) == config


def test_a_resolved_config_shows_what_json_cannot() -> None:
    config = config_from_values({"model": {"target": "a:b", "args": {"norm": print}}})
    assert config.to_dict()["model"]["args"] == {"norm": "<built-in function print>"}


def test_a_default_section_is_built_when_it_is_taken() -> None:
    """A section that stands in another without a check, and that pydantic 2.11 to 2.13 cannot write
    as long as its building is deferred.
    """

    class Mine(Classification):
        """Classification."""

    config = RunConfig(task=Mine.model_construct())
    assert Mine.__pydantic_complete__
    assert config.to_dict()["task"]["kind"] == "classification"


def test_configs_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().run.name = "y"  # type: ignore[misc]


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    return [model, *(found for child in model.__subclasses__() for found in sections(child))]


def test_every_section_has_its_sentence() -> None:
    from framework.config.base import Section

    assert [section.__name__ for section in sections(Section) if not section.__doc__] == []


def test_an_override_of_a_section_that_was_left_out_changes_its_default(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("run: {name: x}\n", encoding="utf-8")
    config = load_config(path, ["optimizer.lr=0.5", "model.num_classes=7", "precision.matmul=high"])
    assert (config.optimizer.kind, config.optimizer.lr) == ("adamw", 0.5)
    assert (config.model.kind, config.model.num_classes) == ("lenet", 7)
    assert config.precision.matmul == "high"


def test_a_precision_of_ones_own_is_refused_in_words() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_values({"precision": {"target": "mine:Precision"}})
    assert (
        "precision.target = mine:Precision: this section takes no code of your own; use dtype: one of "
        in str(caught.value)
    )


def test_paths_begin_at_the_home_folder_wherever_a_config_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = config_from_values(
        {
            "run": {"output_dir": "~/runs"},
            "checkpoint": {"init_weights": "~/w.pt", "resume": "~"},
            "data": {"kind": "huggingface", "path": "~/rows/*.jsonl", "eval_path": "~/e.jsonl"},
            "training": {"lora": {"target_modules": "all-linear", "init_adapter": "~/a"}},
            "zero": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "~/nvme"}},
        }
    )
    values = config.to_dict()
    assert str(config.run.folder) == "/home/me/runs/run"
    assert "~" not in json.dumps(values)
    assert values["data"]["path"] == "/home/me/rows/*.jsonl"
    for kind in ("labelled_text", "conversations"):
        text = config_from_values({"data": {"kind": kind, "path": "~/t", "tokenizer": "~/tok"}})
        assert text.to_dict()["data"]["tokenizer"] == "/home/me/tok"
    images = config_from_values({"data": {"kind": "image_folder", "root": "~/images"}})
    assert images.to_dict()["data"]["root"] == "/home/me/images"


@pytest.mark.parametrize(
    ("sink", "key"),
    [
        ("wandb", "project"),
        ("mlflow", "experiment"),
        ("comet", "project"),
        ("trackio", "project"),
    ],
)
def test_a_sink_is_named_alone(sink: str, key: str) -> None:
    named = config_from_values({"monitors": {sink: "vision"}})
    assert named == config_from_values({"monitors": {sink: {key: "vision"}}})
    for word in ("yes", "off", ""):
        with pytest.raises(ConfigError, match=r"true or false belongs; .*\[wrong-type\]"):
            config_from_values({"monitors": {sink: word}})
