"""`check --fix` and `check --resolve` as commands: what is written, what is printed where, and the
exit codes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from framework.cli import main

Capture = pytest.CaptureFixture[str]
WRONG = "# mine\nzero: {stge: 1}   # why\n"
RIGHT = "# mine\nzero: {stage: 1}  # why\n"
AUTO = (
    '{\n  "train_batch_size": "auto",\n  "train_micro_batch_size_per_gpu": 2,\n  "gradient_clipping": 0.5,\n'
    '  "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}\n}\n'
)


def test_a_run_config_is_mended_and_the_change_is_shown(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(WRONG)
    path.chmod(0o640)
    assert main(["check", str(path), "--fix"]) == 0
    out = capsys.readouterr().out
    assert "-zero: {stge: 1}   # why\n+zero: {stage: 1}  # why\n" in out
    assert "fine on 1 device" in out
    assert path.read_text() == RIGHT
    assert path.stat().st_mode & 0o777 == 0o640
    before = path.stat()
    assert main(["check", str(path), "--fix"]) == 0
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns), (
        "nothing to write"
    )
    assert "---" not in capsys.readouterr().out
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"]


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "run.yaml", tmp_path / "run.yaml"
    real.write_text(WRONG)
    link.symlink_to(real)
    assert main(["check", str(link), "--fix"]) == 0
    assert link.is_symlink()
    assert real.read_text() == RIGHT


def test_what_cannot_be_written_stays_as_it_was(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(WRONG)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert main(["check", str(path), "--fix"]) == 74
    err = capsys.readouterr().err
    assert f"{path}: cannot be written (No space left on device) [file-not-written]" in err
    assert "[unknown-key]" in err
    assert (path.read_text(), [entry.name for entry in tmp_path.iterdir()]) == (WRONG, ["run.yaml"])


def test_one_file_that_cannot_be_read_does_not_keep_the_others(
    tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(WRONG)
    assert main(["check", str(tmp_path / "nowhere.yaml"), str(path), "--fix", "--json"]) == 2
    out, err = capsys.readouterr()
    assert [problem["kind"] for problem in json.loads(out)] == ["config-not-found"]
    assert "+zero: {stage: 1}" in err
    assert path.read_text() == RIGHT


def test_resolve_prints_the_json_and_nothing_else(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "ds.json"
    path.write_text(AUTO)
    assert main(["check", str(path), "--resolve", "--num_gpus", "4", "learning_rate=3e-4"]) == 0
    out, err = capsys.readouterr()
    assert out == AUTO.replace('"train_batch_size": "auto"', '"train_batch_size": 8').replace(
        '"auto"', "0.0003"
    )
    assert err.splitlines() == [
        f"note: {path}:2:3: train_batch_size = auto: filled in with 8, from Hugging Face's default "
        "gradient_accumulation_steps=1; give gradient_accumulation_steps=VALUE if yours differs [auto-resolved]"
    ]
    assert path.read_text() == AUTO


def test_resolve_writes_to_the_given_path(tmp_path: Path, capsys: Capture) -> None:
    path, out = tmp_path / "ds.json", tmp_path / "out.json"
    path.write_text(AUTO)
    words = [
        "check",
        str(path),
        "--resolve",
        "world_size=4",
        "lr=3e-4",
        "gradient_accumulation_steps=1",
        "-o",
        str(out),
    ]
    assert main(words) == 0
    assert '"train_batch_size": 8,\n' in out.read_text()
    assert capsys.readouterr().out.startswith(f"{out}: fine for DeepSpeed ")


HJSON = """\
{
  // mine
  gradient_cliping: 1.0,   # half of it
  "fp16": {"enabled": "true"},
  "zero_optimization": {"stage": 2, "stage3_max_live_parameters": "1e6"}
}
"""


def test_hjson_is_left_to_its_author_line_by_line(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8,' + HJSON[1:])
    assert main(["check", str(path), "--fix"]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"{path}:3: gradient_cliping: 1.0 -> gradient_clipping: 1.0",
        f'{path}:4: fp16.enabled: "true" -> fp16.enabled: true',
        f'{path}:5: zero_optimization.stage3_max_live_parameters: "1e6" -> '
        "zero_optimization.stage3_max_live_parameters: 1000000",
    ]
    assert "gradient_cliping" in err
    assert path.read_text() == '{"train_batch_size": 8,' + HJSON[1:]


def test_resolved_hjson_is_json(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{train_batch_size: 8, // all\n gradient_clipping: auto\n}\n")
    assert main(["check", str(path), "--resolve", "--num_gpus", "4", "max_grad_norm=0.5"]) == 0
    assert json.loads(capsys.readouterr().out) == {"train_batch_size": 8, "gradient_clipping": 0.5}


def test_resolve_states_what_is_missing_and_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    path, out = tmp_path / "ds.json", tmp_path / "out.json"
    path.write_text(AUTO)
    assert main(["check", str(path), "--resolve", "-o", str(out)]) == 2
    printed, err = capsys.readouterr()
    assert (printed, out.exists()) == ("", False)
    assert err.splitlines() == [
        f"{path}:2:3: train_batch_size = auto: it follows from the number of devices; give "
        "world_size=N [auto-unknown]"
    ]


def test_what_is_resolved_is_judged(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "ds.json"
    path.write_text(AUTO.replace('"gradient_clipping"', '"gradient_cliping"'))
    assert main(["check", str(path), "--resolve", "world_size=4"]) == 2
    assert "did you mean gradient_clipping?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        (["run.yaml", "--resolve"], "this is a run config"),
        (["ds.json", "run.yaml", "--resolve"], "one file at a time"),
        (["ds.json", "--resolve", "--fix"], "not allowed with argument"),
        (["ds.json", "-o", "x"], "-o goes with --resolve"),
        (["ds.json", "--resolve", "--json"], "give -o OUT with --format json"),
        (["ds.json", "--resolve", "learnig_rate=1"], "did you mean learning_rate?"),
    ],
    ids=str,
)
def test_odd_words(
    words: list[str], stated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("run: {name: x}\n")
    Path("ds.json").write_text(AUTO)
    try:
        code = main(["check", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 64
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert stated in err


def test_import_reads_as_a_release_does(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "ds.json"
    # clipping left out: off then, 1.0 now
    path.write_text('{"train_batch_size": 8, "sparse_gradients": false}')
    assert main(["import", str(path)]) == 0
    out = capsys.readouterr().out
    assert "DeepSpeed 0.19.8 refuses it" in out
    assert "clip_grad_norm: 0" not in out
    assert main(["import", str(path), "--deepspeed", "0.18.9"]) == 0
    out = capsys.readouterr().out
    assert "refuses" not in out
    assert "clip_grad_norm: 0.0" in out
    assert main(["import", str(path), "--deepspeed", "9.9"]) == 64
    assert "no table of DeepSpeed" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_file_is_fine_and_reports_it(text: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert main(["check", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "fine on 1 device" in out
    assert (
        err
        == f"note: {path}: the file is empty: every default holds; write at least {{}} if that is meant "
        "[config-empty]\n"
    )
    path.write_text("{}\n")
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().err == ""


def test_an_object_cannot_come_from_a_file(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run: {sed: 1}\nmodel: {object: my.Net}\ntask: {object: my.loss}\n")
    assert main(["check", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("[")[2] for line in lines] == [
        "unknown-key]",
        "object-not-given]",
        "object-not-given]",
    ]
    assert lines[1].startswith(
        f"{path}:2:9: model.object = my.Net: it was handed over from Python and exists only there; "
    )


def test_null_where_zero_turns_off(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("training: {clip_grad_norm: null}\n")
    assert main(["check", str(path)]) == 2
    assert (
        "write 0 to turn clipping off, or leave the key out for 1.0 [wrong-type]"
        in capsys.readouterr().err
    )


def test_further_deepspeed_keys_are_mended_as_deepspeed_json_is(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    before = (
        "deepspeed:\n  wall_clock_breakdwon: true   # c\n  flops_profiler: {enabled: 'true', modul_depth: '3'}\n"
        "  gradient_cliping: 1.0\n  zero_optimization: {stag: 2, zero_hpz_partition_sise: 2}\n  my_note: x\n"
    )
    path.write_text(before)
    assert main(["check", str(path), "--fix"]) == 2
    after = (
        before.replace("breakdwon", "breakdown")
        .replace("modul_", "module_")
        .replace("'true'", "true")
        .replace("'3'", "3")
    )
    assert path.read_text() == after.replace("_sise", "_size"), (
        "what a typed section decides is the user's to move"
    )
