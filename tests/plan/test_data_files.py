"""`check` and `plan` look at the token folder that a config names, where it is here; neither needs
torch for that.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from framework.cli import main
from framework.config.run_config import RunConfig
from framework.errors import ConfigError
from framework.hosts.devices import LocalDevices
from framework.hosts.topology import HostTopology
from framework.launch import local
from framework.launch.node import check_node
from framework.launch.options import LaunchOptions
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.recipes.text.prepare import prepare
from framework.setup.pipeline_stages import describe

CONFIG = """
run: {name: text}
model: {kind: %s, size: tiny, vocab_size: 261}
data: {kind: %s, path: tokens, sequence_length: 16}
task: {kind: %s}
batch: {global_size: 4}
training: {max_epochs: 2}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty documents of 29 bytes and their end token; four of them are for evaluation."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(b"\n\n".join(b"%028d" % number for number in range(40)))
    prepare(["a.txt"], "tokens", blank_lines_split=True)
    Path("gpt.yaml").write_text(CONFIG % ("gpt", "text", "causal_lm"))
    Path("bert.yaml").write_text(CONFIG % ("bert", "text_pairs", "masked_lm"))
    return tmp_path / "tokens"


def change(*path: str, to: object) -> None:
    meta = json.loads(Path("tokens/meta.json").read_text())
    place = meta
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    Path("tokens/meta.json").write_text(json.dumps(meta))


def truncated() -> None:
    Path("tokens/train.bin").write_bytes(Path("tokens/train.bin").read_bytes()[:100])


def without_meta() -> None:
    Path("tokens/meta.json").unlink()


def without_mask() -> None:
    for name in ("cls", "sep", "mask"):
        change("special_tokens", name, to=None)


def one_document() -> None:
    Path("tokens").rename("others")
    prepare(["a.txt"], "tokens")


WRONG = {
    "truncated": ("gpt", truncated, (), "train.bin: it has 100 bytes instead of", "text-damaged"),
    "unfinished": ("gpt", without_meta, (), "there is no meta.json in it", "text-not-prepared"),
    "odd": (
        "gpt",
        lambda: Path("tokens/meta.json").write_text("{}"),
        (),
        "meta.json: ",
        "text-damaged",
    ),
    "vocabulary": (
        "gpt",
        lambda: None,
        ("model.vocab_size=256",),
        "the data has 261 different tokens",
        "model-data-vocab-size",
    ),
    "short": (
        "gpt",
        lambda: None,
        ("data.sequence_length=130",),
        "the evaluation text has 119 tokens",
        "text-too-short",
    ),
    "one": ("bert", one_document, (), "text is one document", "text-one-document"),
    "no mask": (
        "bert",
        without_mask,
        (),
        "has no [CLS], [SEP], [MASK]",
        "text-without-special-tokens",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_the_text_is_found_before_the_run(
    capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, spoil, settings, words, kind = WRONG[case]
    for command in ("check", "plan"):
        assert main([command, f"{name}.yaml"]) == 0, capsys.readouterr().err
    spoil()
    capsys.readouterr()
    for command, code in (("check", 2), ("plan", 78)):
        assert main([command, f"{name}.yaml", *settings]) == code
        stated = capsys.readouterr()
        assert stated.out == ""
        lines = [line for line in stated.err.splitlines() if words in line]
        assert lines
        assert all(line.endswith(f"[{kind}]") for line in lines)
        assert lines[0].startswith("command line: " if settings else f"{name}.yaml:")


def test_how_long_the_run_is_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """36 documents of 30 tokens: 67 windows of 16, or as many pairs."""
    for name in ("gpt", "bert"):
        for command in ("check", "plan"):
            assert main([command, f"{name}.yaml"]) == 0
            assert (
                "32 steps = 2 epochs of 16, 3 samples dropped per epoch" in capsys.readouterr().out
            )


@pytest.mark.parametrize("path", ["nowhere", "a\\0b", "x" * 5000])
def test_a_folder_that_is_not_here_is_an_error_unless_the_data_is_elsewhere(
    capsys: pytest.CaptureFixture[str], path: str
) -> None:
    setting = f'data.path="{path}"'
    for words in (["check", "--data_elsewhere"], ["check", "--data-elsewhere"], ["plan"]):
        assert main([*words, "gpt.yaml", setting]) == 0
        shown = capsys.readouterr()
        (line,) = shown.err.splitlines() if words[0] == "check" else shown.out.splitlines()[-1:]
        assert line.startswith("warning: command line: data.path = ")
        assert "there is no such folder here" in line
        assert line.endswith("[text-not-found]")
    assert main(["check", "gpt.yaml", setting]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("command line: data.path = ")
    assert line.endswith("where another machine has it: check --data_elsewhere [text-not-found]")


def test_folders_of_images_are_looked_for_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    Path("images.yaml").write_text(
        "model: {kind: resnet18}\ndata: {kind: image_folder, root: images}\nbatch: {global_size: 4}\n"
        "training: {max_steps: 2}\n"
    )
    for name in ("train/cats", "train/dogs", "val"):
        Path("many", name).mkdir(parents=True)
    assert main(["check", "images.yaml", "data.root=many", "model.num_classes=2"]) == 0
    assert main(["check", "images.yaml", "data.root=many", "model.num_classes=1"]) == 2
    assert "the training data has 2 classes" in capsys.readouterr().err
    for made, missing in (
        ("", ["data.root"]),
        ("images/train", ["data.eval_dir"]),
        ("images/val", []),
    ):
        Path(made).mkdir(parents=True, exist_ok=True)
        assert main(["check", "images.yaml"]) == (2 if missing else 0)
        lines = [
            line for line in capsys.readouterr().err.splitlines() if "[dataset-not-found]" in line
        ]
        assert [line.split(" = ")[0].split(": ")[-1] for line in lines] == missing
        assert main(["check", "images.yaml", "--data_elsewhere"]) == 0
        assert capsys.readouterr().err.count("warning: images.yaml:2:") == len(missing)


def test_the_numbers_of_a_tokenizer_are_held_against_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("chat.yaml").write_text(CONFIG % ("gpt", "conversations", "causal_lm"))
    tokenizer = {"model": {"vocab": {"a": 0, "b": 260}}, "added_tokens": [{"id": 261}]}
    for vocabulary, code in ((262, 0), (261, 2)):
        Path("tokens/tokenizer.json").write_text(json.dumps(tokenizer))
        words = ["data.tokenizer=tokens", f"model.vocab_size={vocabulary}"]
        assert main(["check", "chat.yaml", *words]) == code
    assert "the data has 262 different tokens" in capsys.readouterr().err
    for content in ("[]", "", '{"model": {"vocab": {"a": 9999999999}}}'):
        Path("tokens/tokenizer.json").write_text(content)
        assert main(["check", "chat.yaml", "data.tokenizer=tokens"]) == 2 * ("999" in content)
    assert "[tokenizer-unreadable]" in capsys.readouterr().err
    assert main(["check", "chat.yaml", "data.tokenizer=~nobody-here/tokens"]) == 2
    assert "[path-not-complete]" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["local", "node"])
def test_launch_reads_what_the_folder_states_before_a_rank_starts(name: str) -> None:
    def check(*settings: str) -> None:
        if name == "local":
            local.check(LaunchOptions("gpt.yaml", settings, num_gpus=2), LocalDevices("cpu", 0))
        else:
            topology = HostTopology(1, 2, 0, "127.0.0.1", 29500, {"slots": "--num_gpus"})
            check_node(LaunchOptions("gpt.yaml"), settings, topology, LocalDevices("cpu", 0))

    check()
    for setting, kind in (
        ("model.vocab_size=256", "model-data-vocab-size"),
        ("data.path=nowhere", "text-not-found"),
    ):
        with pytest.raises(ConfigError) as caught:
            check(setting)
        assert [problem.kind for problem in caught.value.problems] == [kind]


def test_the_child_of_plan_distinguishes_what_is_wrong_from_what_is_missing() -> None:
    config = RunConfig.model_validate(
        {
            "model": {"kind": "gpt"},
            "data": {"kind": "text", "path": "tokens", "sequence_length": 16},
            "task": {"kind": "causal_lm"},
            "parallel": {"pipe": 2},
            "batch": {"global_size": 4, "micro_size": 2},
        }
    )
    asked = {"config": config.to_dict(), "cluster": {"devices_per_host": 2}}
    assert make_plan(config, Cluster(devices_per_host=2)) is not None
    truncated()
    (problem,) = describe(asked)["problems"]
    assert problem["kind"] == "text-damaged"
    Path("tokens").rename("elsewhere")
    (problem,) = describe(asked)["missing"]
    assert problem["kind"] == "text-not-found"
