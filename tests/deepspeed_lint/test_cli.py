"""The command deepspeed-lint: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from deepspeed_lint.cli import main
from framework.cli import main as framework_main
from tests.places import ROOT

BAD = """{
  "train_batch_size": 32,
  "gradient_clipping": "1.0",
  "zero_optimization": {"stage": 2, "reduce_bucket_sise": 5e8}
}
"""
FINE = {
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 0},
}


@pytest.fixture
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(BAD, encoding="utf-8")
    return Path("ds.json")


def write(name: str, values: object) -> None:
    Path(name).write_text(json.dumps(values), encoding="utf-8")


def test_check_prints_what_dsf_check_prints(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("fine.json", FINE)
    words = ["check", str(bad), "fine.json", "--deepspeed", "0.19.8", "--gpu", "v100-32gb"]
    assert main(words) == 2
    ours = capsys.readouterr()
    assert "[unknown-key]" in ours.err
    assert "fine.json: fine for DeepSpeed 0.19.8" in ours.out
    for more in ([], ["--json"], ["--format", "github"]):
        code = main([*words, *more])
        first = capsys.readouterr()
        assert framework_main([*words, *more]) == code
        assert capsys.readouterr() == first


def test_check_of_a_file_without_errors_is_0(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("fine.json", FINE)
    assert main(["check", "fine.json", "--json"]) == 0
    severities = {problem["severity"] for problem in json.loads(capsys.readouterr().out)}
    assert "error" not in severities
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    write("fine.json", FINE | sizes)
    assert main(["check", "fine.json", "--world-size", "4"]) == 0
    assert main(["check", "fine.json", "--world-size", "3"]) == 2
    assert "[batch-arithmetic]" in capsys.readouterr().err


def test_fix_changes_the_file_and_checks_it(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fix", str(bad), "--dry-run"]) == 0
    would = capsys.readouterr().out
    assert bad.read_text(encoding="utf-8") == BAD
    assert main(["fix", str(bad)]) == 0
    assert capsys.readouterr().out == would
    assert '+  "gradient_clipping": 1.0,' in would
    fixed = bad.read_text(encoding="utf-8")
    assert '"reduce_bucket_size": 5e8' in fixed
    assert main(["fix", str(bad)]) == 0
    assert "---" not in capsys.readouterr().out


def test_fix_names_the_lines_of_hjson_to_change(
    bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = BAD.replace("{", "{  // two slips", 1)
    bad.write_text(text, encoding="utf-8")
    assert main(["fix", str(bad)]) == 2
    printed = capsys.readouterr()
    assert "reduce_bucket_size" in printed.out
    assert printed.out.count("ds.json:") == 2
    assert "[wrong-type]" in printed.err
    assert bad.read_text(encoding="utf-8") == text


def test_fix_goes_through_a_link_and_keeps_permissions(bad: Path) -> None:
    bad.chmod(0o640)
    link = Path("link.json")
    link.symlink_to(bad)
    assert main(["fix", "link.json"]) == 0
    assert link.is_symlink()
    assert "reduce_bucket_size" in bad.read_text(encoding="utf-8")
    assert bad.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in Path().iterdir()) == ["ds.json", "link.json"]


def test_resolve_fills_in_auto(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = FINE | {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    write("auto.json", values)
    words = ["resolve", "auto.json", "per_device_train_batch_size=4"]
    assert main(words) == 2
    assert "[auto-unknown]" in capsys.readouterr().err
    assert main([*words, "--world-size", "2"]) == 0
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["train_batch_size"] == 8
    assert main([*words, "world_size=2", "-o", "out.json"]) == 0
    assert json.loads(Path("out.json").read_text(encoding="utf-8")) == resolved
    write("other.json", {"name": "a package"})
    assert main([*words, "world_size=2", "-o", "other.json"]) == 2
    assert "[file-not-written]" in capsys.readouterr().err
    assert json.loads(Path("other.json").read_text(encoding="utf-8")) == {"name": "a package"}


def test_a_file_that_cannot_be_read_is_a_problem_of_that_file(
    bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("fine.json", FINE)
    Path("run.yaml").write_text("model: {kind: lenet}\n", encoding="utf-8")
    for command in ("check", "fix"):
        assert main([command, "none.json", "run.yaml", "fine.json"]) == 2
        printed = capsys.readouterr()
        assert "[config-not-found]" in printed.err
        assert "`dsf check` [not-deepspeed-json]" in printed.err
        assert "fine.json: fine" in printed.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["lint", "x.json"], "invalid choice: 'lint'"),
        (["check"], "the following arguments are required: FILE"),
        (["check", "x.json", "--world-size", "0"], "0 is not a number of ranks"),
        (["check", "x.json", "--deepspeed", "1.0"], "no table of DeepSpeed"),
        (["check", "x.json", "--gpu", "h100-81gb"], "did you mean h100-80gb"),
        (["resolve", "x.json", "lr"], "lr is no NAME=VALUE"),
        (["resolve", "x.json", "--json"], "give -o OUT"),
        (["explain", "zero_optimisation.stage"], "did you mean zero_optimization.stage?"),
        (["explain", "batch-arithmetics"], "did you mean batch-arithmetic?"),
        (["schema", "--deepspeed", "1.0"], "no table of DeepSpeed"),
    ],
)
def test_a_wrong_command_line_is_64(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 64
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err
    assert printed.err.count("\n") == 1


def test_schema_is_that_of_dsf(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--deepspeed", "0.18.9"]) == 0
    schema = capsys.readouterr().out
    assert framework_main(["schema", "deepspeed", "--deepspeed", "0.18.9"]) == 0
    assert capsys.readouterr().out == schema


def test_the_examples_of_the_readme_are_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "deepspeed_lint/README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"`(\w+\.json)`:\n\n```json\n(.*?)```", page, re.DOTALL):
        Path(name).write_text(text, encoding="utf-8")
    examples = re.findall(r"\$ deepspeed-lint ([^\n]+)\n(.*?)(?=\n\$ |```)", page, re.DOTALL)
    assert len(examples) >= 3
    for command, printed in examples:
        main(command.split())
        captured = capsys.readouterr()
        assert (captured.out + captured.err).strip() == printed.strip(), command


def test_the_hooks_run_commands_that_there_are() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert [hook["entry"] for hook in hooks] == ["deepspeed-lint check", "deepspeed-lint fix"]
    for hook in hooks:
        assert hook["language"] == "python"
        for name in ("ds_config.json", "configs/deepspeed_zero3.json", "a/ds.hjson"):
            assert re.search(hook["files"], name)
        for name in ("package.json", "birds.json", "ds_config.yaml"):
            assert not re.search(hook["files"], name)
