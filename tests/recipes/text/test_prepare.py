"""The command `prepare`, by its function where the outcome matters and as a process where signals
and streams do.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from framework.cli import main
from framework.data.tokens import Corpus, Tokens, open_token_folder, verify_token_folder
from framework.errors import ConfigError, StorageError
from framework.recipes.text import documents
from framework.recipes.text.documents import TextPiece
from framework.recipes.text.prepare import Progress, prepare
from tests.places import ROOT
from tests.recipes.text.text_samples import many_documents


def texts_of(part: Tokens | None, end: int = 256) -> list[bytes]:
    """The documents of a byte-level part; each is checked to end with the end token, and to hold no
    other.
    """
    assert part is not None
    found = []
    for first, last in zip(part.offsets[:-1].tolist(), part.offsets[1:].tolist(), strict=True):
        numbers = part.numbers[first:last].tolist()
        assert numbers[-1] == end
        assert end not in numbers[:-1]
        found.append(bytes(numbers[:-1]))
    return found


def prepared(tmp_path: Path, documents: list[bytes], **options: Any) -> Corpus:
    """Documents as files of their own."""
    names = []
    for number, document in enumerate(documents):
        (tmp_path / f"{number:04}.txt").write_bytes(document)
        names.append(str(tmp_path / f"{number:04}.txt"))
    prepare(names, str(tmp_path / "out"), **options)
    verify_token_folder(str(tmp_path / "out"))
    return open_token_folder(str(tmp_path / "out"))


def left_over(folder: Path) -> list[str]:
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name != "out" and not path.name.endswith((".txt", ".jsonl"))
    )


def test_documents_are_dealt_whole_and_in_order(tmp_path: Path) -> None:
    texts = many_documents(50, shortest=90, longest=110)
    corpus = prepared(tmp_path, texts, eval_fraction=0.2)
    assert texts_of(corpus.evaluation) == texts[4::5]
    assert texts_of(corpus.train) == [text for number, text in enumerate(texts) if number % 5 != 4]
    assert (corpus.train.numbers.dtype, corpus.vocab_size) == (np.uint16, 261)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("num_documents", [1, 2, 5])
def test_few_documents_give_up_their_end(num_documents: int, tmp_path: Path) -> None:
    texts = many_documents(num_documents, shortest=1000, longest=1200)
    corpus = prepared(tmp_path, texts)
    train, evaluation = texts_of(corpus.train), texts_of(corpus.evaluation)
    assert b"".join(train + evaluation) == b"".join(texts)
    assert sum(map(len, evaluation)) + len(evaluation) == round(
        sum(len(text) + 1 for text in texts) / 10
    )
    assert train[:-1] == texts[: len(train) - 1]


def test_a_cut_at_the_end_of_a_document_cuts_none(tmp_path: Path) -> None:
    """Nine documents of 10 tokens: evaluation's 9 are one token less than the last one, whose first
    byte stays alone.
    """
    texts = [bytes([65 + number]) * 9 for number in range(9)]
    corpus = prepared(tmp_path, texts)
    assert (texts_of(corpus.train)[-1], texts_of(corpus.evaluation)) == (b"I", [b"I" * 8])
    (tmp_path / "five").mkdir()
    whole = prepared(tmp_path / "five", texts[:5], eval_fraction=0.2)
    assert (texts_of(whole.train), texts_of(whole.evaluation)) == (texts[:4], texts[4:5])


def test_text_too_small_to_share(tmp_path: Path) -> None:
    corpus = prepared(tmp_path, [b"abc"])
    assert texts_of(corpus.train) == [b"abc"]
    assert corpus.evaluation is None
    assert not (tmp_path / "out/eval.bin").exists()


def test_no_evaluation_was_asked_for(tmp_path: Path) -> None:
    corpus = prepared(tmp_path, many_documents(20), eval_fraction=0.0)
    assert corpus.evaluation is None
    assert texts_of(corpus.train) == many_documents(20)


def test_documents_without_text_are_none(tmp_path: Path) -> None:
    corpus = prepared(tmp_path, [b"a" * 50, b"", b"b" * 50], eval_fraction=0.0)
    assert texts_of(corpus.train) == [b"a" * 50, b"b" * 50]


def test_long_documents_are_the_same_as_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [b"some words\n  and an indented line\n" * 400, b"x" * 3000]
    monkeypatch.setattr(documents, "_CHUNK_BYTES", 256)
    assert texts_of(prepared(tmp_path, texts, eval_fraction=0.0).train) == texts


def test_pieces_of_a_library_tokenizer_have_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "tokenizers", reason="the package tokenizers is not installed: pip install -e '.[text]'"
    )
    text = Path(subprocess.__file__).read_bytes()
    whole = prepared(tmp_path, [text], bpe_vocab_size=400, eval_fraction=0.0)
    monkeypatch.setattr(documents, "_CHUNK_BYTES", 512)
    (tmp_path / "again").mkdir()
    pieces = prepared(
        tmp_path / "again",
        [text],
        tokenizer=str(tmp_path / "out/tokenizer.json"),
        eval_fraction=0.0,
    )
    assert np.array_equal(whole.train.numbers, pieces.train.numbers)
    assert len(whole.train.numbers) < 0.6 * len(text)
    assert (whole.vocab_size, whole.special) == (pieces.vocab_size, pieces.special)


@pytest.mark.slow
def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    model = tokenizers.models.WordLevel(
        {f"w{number}": number for number in range(70_000)}, unk_token="w0"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    text = b"w1 w65536 w69999 none " * 30
    corpus = prepared(tmp_path, [text], tokenizer=str(tmp_path / "words.json"))
    assert corpus.train.numbers.dtype == np.uint32
    assert corpus.train.numbers[:5].tolist() == [1, 65536, 69999, 0, 1]
    assert corpus.vocab_size == 70_001


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        prepared(tmp_path / name, many_documents(30))
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name / "out").iterdir()}
        for name in ("a", "b")
    ]
    assert files[0] == files[1]
    assert len(files[0]) == 5


def run(*words: str) -> int:
    try:
        return main(["prepare", *words])
    except SystemExit as leaving:
        return int(leaving.code or 0)


def test_the_command_states_what_it_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"body": f"document {number:04}"}) for number in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    out = str(tmp_path / "out")
    assert run(str(tmp_path / "a.jsonl"), out, "--jsonl-field", "body") == 0
    written = capsys.readouterr()
    holds = "252 training tokens in 18 documents, 28 evaluation tokens in 2 documents; vocabulary 261 (bytes)"
    assert written.out == f"{out}: {holds}\nuse it with data: {{kind: text, path: {out}}}\n"
    assert written.err == ""
    assert run("--verify", out) == 0
    assert capsys.readouterr().out == f"{out}: every file is as prepare wrote it: {holds}\n"
    mode = Path(out).stat().st_mode & 0o777
    (tmp_path / "plain").mkdir()
    assert mode == (tmp_path / "plain").stat().st_mode & 0o777


def test_the_command_refuses_rows_and_reports_carriage_returns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.json", "b.txt", "c.txt"):
        (tmp_path / name).write_bytes(b'{"text": "some words"}\r\n' * 9)
    words = [str(tmp_path / "b.txt"), str(tmp_path / "c.txt"), str(tmp_path / "out")]
    assert run(str(tmp_path / "a.json"), words[-1]) == 78
    assert "[text-rows]" in capsys.readouterr().err
    assert run(*words) == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith(f"note: {words[0]} and 1 others: lines end with a carriage return")
    assert run(str(tmp_path / "a.json"), str(tmp_path / "rows"), "--format", "jsonl") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "name at least one INPUT, and OUT_DIR last"),
        (["a.txt"], "name at least one INPUT, and OUT_DIR last"),
        (["a.txt", "out", "--eval-fraction", "1"], "'1' is not a share from 0 up to below 1"),
        (["a.txt", "out", "--eval-fraction", "nan"], "'nan' is not a share from 0 up to below 1"),
        (["a.txt", "out", "--eval-fraction", "1/0"], "'1/0' is not a share from 0 up to below 1"),
        (
            ["a.txt", "out", "--train-tokenizer", "bpe:260"],
            "'bpe:260' is not bpe:VOCAB_SIZE with a size from 261 to 1048576",
        ),
        (["a.txt", "out", "--train-tokenizer", "wordpiece"], "'wordpiece' is not bpe:VOCAB_SIZE"),
        (["a.txt", "out", "--train-tokenizer", "bpe:500", "--tokenizer", "x"], "not allowed with"),
        (
            ["a.txt", "out", "--jsonl-field", "body"],
            "--jsonl-field is for .jsonl and .ndjson files, and there is none",
        ),
        (["--verify", "out", "a.txt"], "--verify DIR stands alone"),
        (["a.txt", "out", "--what"], "unrecognized arguments: --what"),
    ],
)
def test_a_wrong_command_line(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 64
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_a_folder_stands_for_its_text_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    assert run(str(folder), str(tmp_path / "out")) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"{folder}: it is a folder without a *.txt of its own; name the files in it, for example "
    )
    for name in ("b.txt", "a.txt"):
        (folder / name).write_text(f"text of {name} " * 20)
    (folder / "notes.md").write_text("no text")
    (tmp_path / "c.txt").write_text("elsewhere")
    (folder / "c.txt").symlink_to(tmp_path / "c.txt")
    assert run(str(folder), str(tmp_path / "out")) == 0
    assert run(str(folder / "a.txt"), str(folder / "b.txt"), str(tmp_path / "same")) == 0
    for name in ("train.bin", "train.idx", "eval.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()


def test_nothing_is_left_of_a_run_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' * 5000 + b"{\n")
    (tmp_path / "empty.txt").write_bytes(b"")
    out = str(tmp_path / "out")
    assert run(str(tmp_path / "a.jsonl"), out) == 78
    assert run(str(tmp_path / "empty.txt"), out) == 78
    assert run(str(tmp_path / "no.txt"), str(tmp_path / "no/such.txt"), out) == 78
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{tmp_path}/a.jsonl:5001: the line is not JSON: ")
    assert lines[1:] == [
        f"{tmp_path}/empty.txt: there is no text in it; name files with text [text-empty]",
        f"{tmp_path}/no.txt: there is no such file; name an existing one [text-not-found]",
        f"{tmp_path}/no/such.txt: there is no such file; name an existing one [text-not-found]",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "empty.txt"]


def test_a_library_tokenizer_wants_utf8_also_while_it_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(
        "tokenizers", reason="the package tokenizers is not installed: pip install -e '.[text]'"
    )
    (tmp_path / "a.txt").write_bytes(b"fine text\n" * 100 + b"\xff")
    assert run(str(tmp_path / "a.txt"), str(tmp_path / "out"), "--train-tokenizer", "bpe:300") == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}/a.txt: it is not UTF-8 text (byte 1,000 of the file); ")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_there_already_is_never_touched(kind: str, tmp_path: Path) -> None:
    source, out = tmp_path / "a.txt", tmp_path / "out"
    source.write_bytes(b"text")
    if kind == "folder":
        out.mkdir()
        (out / "precious").touch()
    elif kind == "file":
        out.touch()
    else:
        out.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        ConfigError,
        match=r"it exists and is not an empty folder; remove it, or name another folder \[output-exists\]",
    ):
        prepare([str(source)], str(out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "out").mkdir()
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"))
    assert (tmp_path / "out/meta.json").is_file()


def test_a_folder_that_was_filled_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once: the first to finish wins, the other says so and cleans up."""
    (tmp_path / "a.txt").write_bytes(b"text")
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"))
    before = (tmp_path / "out/meta.json").stat()
    monkeypatch.setattr("framework.recipes.text.prepare._refuse_used_folder", lambda out: None)
    with pytest.raises(
        StorageError, match=r"cannot be written \(.*not empty\) \[text-not-written\]"
    ):
        prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"))
    assert (tmp_path / "out/meta.json").stat() == before
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands in for it: writing fails in the middle of train.bin."""
    (tmp_path / "a.txt").write_bytes(b"text" * 100_000)
    limited = [
        "bash",
        "-c",
        'ulimit -f 300; exec "$@"',
        "-",
        sys.executable,
        "-m",
        "framework",
        "prepare",
    ]
    done = subprocess.run(
        [*limited, str(tmp_path / "a.txt"), str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (
        74,
        f"{tmp_path}/out: cannot be written (File too large) [text-not-written]\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_asked_to_end_leaves_nothing(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with (tmp_path / "a.jsonl").open("wb") as stream:
        for _ in range(200):
            stream.write(b'{"text": "many documents of a few words"}\n' * 10_000)
    command = [
        sys.executable,
        "-m",
        "framework",
        "prepare",
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "out"),
    ]
    # A shell lets its background jobs ignore SIGINT, and these tests may be one.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not any(path.stat().st_size for path in tmp_path.glob(".out.*.partial/train.bin")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    # every ten seconds
    stated = [line for line in errors.splitlines() if not line.startswith("writing tokens: ")]
    assert (process.returncode, stated) == (code, [])
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_command_without_numpy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    for name in [
        name for name in sys.modules if name.startswith(("framework.data.", "framework.recipes."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    assert run("a.txt", "out") == 78
    line = (
        f"prepare needs the package numpy, which {sys.executable} does not have; in the checkout:"
    )
    assert (
        capsys.readouterr().err
        == f"{line} ./launch.sh setup train, or pip install -e '.[train]' [package-missing]\n"
    )


def test_progress_reports_speed_and_cleans_up_after_itself() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    seconds = iter(range(0, 1000, 4))
    for stream, expected in (
        (
            Terminal(),
            "\rreading: 1.0 of 3.0 MB, 0.2 MB/s\rreading: 2.0 of 3.0 MB, 0.2 MB/s\rreading: 3.0 of 3.0 MB, 0.2 MB/s",
        ),
        (io.StringIO(), "reading: 3.0 of 3.0 MB, 0.2 MB/s\n"),
    ):
        progress = Progress(stream, clock=lambda: float(next(seconds)))
        progress.num_bytes = 3_000_000
        with progress:
            pieces = list(
                progress.over(iter([TextPiece(b"x" * 1_000_000, 1_000_000)] * 3), "reading")
            )
        assert len(pieces) == 3
        shown = stream.getvalue()
        assert shown.startswith(expected)
        assert shown[len(expected) :].strip() == ""


def test_real_text(tiny_shakespeare: Path, tmp_path: Path) -> None:
    """1,115,394 characters of 65 kinds, whose unigram entropy is 3.3 nats: what a model that knows
    no context reaches.
    """
    meta = prepare([str(tiny_shakespeare)], str(tmp_path / "out"))
    corpus = open_token_folder(str(tmp_path / "out"))
    (train,), (evaluation,) = texts_of(corpus.train), texts_of(corpus.evaluation)
    text = tiny_shakespeare.read_bytes()
    assert train + evaluation == text
    assert len(text) == 1_115_394
    assert meta.parts["eval"].num_tokens == 111_540
    counts = np.array(list(Counter(train).values()))
    assert len(set(text)) == 65
    shares = counts / counts.sum()
    assert float(-(shares * np.log(shares)).sum()) == pytest.approx(3.31, abs=0.02)
