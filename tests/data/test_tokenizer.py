from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.data.token_files import SpecialTokens
from framework.data.tokenizer import (
    SMALLEST_BPE,
    ByteTokenizer,
    LibraryTokenizer,
    load_tokenizer,
    train_bpe,
)
from framework.data.tokenizer_numbers import read_numbers
from framework.data.tokens import open_token_folder
from framework.errors import ConfigError, show_value
from framework.recipes.language_models.kinds import BERT, GPT
from framework.recipes.text import pairs as text_pairs
from framework.recipes.text.prepare import prepare

tokenizers = pytest.importorskip(
    "tokenizers", reason="the package tokenizers is not installed: pip install -e '.[text]'"
)

TEXT = (
    "The quick brown fox jumps over the lazy dog. " * 30
    + "D\u00e9j\u00e0 vu \u2014 na\u00efve \U0001f600\n"
).encode()
QUOTES = b"a <|end|> b [MASK] c"


@pytest.fixture
def word_file(tmp_path: Path) -> Path:
    """A tokenizer as BERT's files have it: special tokens, a template that adds them, truncation
    and padding.
    """
    vocabulary = {
        name: number
        for number, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert [numbers.tolist() for numbers in tokenizer.encode([b"\x00a\xff", b""])] == [
        [0, 97, 255],
        [],
    ]
    assert sorted(tokenizer.special.model_dump().values()) == list(range(256, tokenizer.vocab_size))


def test_a_trained_tokenizer_gives_the_text_back(tmp_path: Path) -> None:
    tokenizer = train_bpe([TEXT], vocab_size=300)
    (numbers,) = tokenizer.encode([TEXT])
    assert 261 < tokenizer.vocab_size <= 300
    assert len(numbers) < len(TEXT) / 2
    tokenizer.save(tmp_path)
    decoder = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert decoder.decode(numbers.tolist(), skip_special_tokens=False).encode() == TEXT
    again = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (again.special, again.vocab_size) == (tokenizer.special, tokenizer.vocab_size)
    assert again.encode([TEXT])[0].tolist() == numbers.tolist()


@pytest.mark.slow
def test_training_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from framework.data.tokenizer import train_bpe
text = Path(sys.argv[1]).read_bytes()
train_bpe([text[start:start + 5000] for start in range(0, 200_000, 5000)], vocab_size=700).save(Path(sys.argv[2]))
"""
    source = (
        Path(subprocess.__file__).read_bytes()
        + Path(json.__file__).parent.joinpath("decoder.py").read_bytes()
    )
    (tmp_path / "text").write_bytes(source.decode().encode("ascii", "ignore") * 3)
    saved = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "text"), str(tmp_path / name)], check=True
        )
        saved.append((tmp_path / name / "tokenizer.json").read_bytes())
    assert saved[0] == saved[1]
    assert len(json.loads(saved[0])["model"]["merges"]) == 700 - SMALLEST_BPE


def test_what_looks_like_a_special_token_is_text(word_file: Path) -> None:
    trained = train_bpe([TEXT, QUOTES * 5], vocab_size=400)
    for tokenizer in (trained, load_tokenizer(str(word_file))):
        (numbers,) = tokenizer.encode([QUOTES])
        assert not set(numbers.tolist()) & set(tokenizer.special.model_dump().values())
    assert len(trained.encode([b""])[0]) == 0


def test_a_file_without_an_end_token_gets_one(tmp_path: Path) -> None:
    tokenizer = LibraryTokenizer(
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "y": 1}, unk_token="x"))
    )
    assert tokenizer.special.model_dump() == {
        "end": 2,
        "cls": None,
        "sep": None,
        "mask": None,
        "pad": None,
    }
    assert tokenizer.vocab_size == 3
    tokenizer.save(tmp_path)
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert saved.token_to_id("<|end|>") == 2


def gpt2_file(folder: Path) -> Path:
    """A byte-level vocabulary of the size and the special token of GPT-2's, the last of them."""
    signs = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        sign: number
        for number, sign in enumerate([*signs, *(f"\u0120w{n}" for n in range(50_000))])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "gpt2.json"))
    return folder / "gpt2.json"


def bert_file(folder: Path) -> Path:
    """As many word pieces as BERT's, with its special tokens where they lie there."""
    names = ["[PAD]", *(f"[unused{n}]" for n in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {
        name: number
        for number, name in enumerate([*names, *(f"w{n}" for n in range(30_522 - len(names)))])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(folder / "bert.json"))
    return folder / "bert.json"


@pytest.mark.parametrize(
    ("make", "size", "model", "special"),
    [
        (gpt2_file, 50_257, GPT.model_validate({"size": "gpt2"}), SpecialTokens(end=50_256)),
        (
            bert_file,
            30_522,
            BERT.model_validate({"size": "base"}),
            SpecialTokens(end=102, cls=101, sep=102, mask=103, pad=0),
        ),
    ],
)
def test_a_published_vocabulary_fits_the_published_models(
    tmp_path: Path,
    make: Callable[[Path], Path],
    size: int,
    model: GPT | BERT,
    special: SpecialTokens,
) -> None:
    """The tokens of a folder are all that the model of the paper's size knows: nothing is added to
    them.
    """
    (tmp_path / "a.txt").write_text("w1 w2 w3\n\n" * 40, encoding="utf-8")
    meta = prepare(
        [str(tmp_path / "a.txt")],
        str(tmp_path / "out"),
        tokenizer=str(make(tmp_path)),
        blank_lines_split=True,
    )
    assert meta.vocab_size == size == model.vocab_size
    assert open_token_folder(str(tmp_path / "out")).special == special


def test_pairs_of_segments_need_the_tokens_that_hold_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3\n\n" * 40, encoding="utf-8")
    for name, file in (("gpt2", gpt2_file(tmp_path)), ("bert", bert_file(tmp_path))):
        prepare(
            [str(tmp_path / "a.txt")],
            str(tmp_path / name),
            tokenizer=str(file),
            blank_lines_split=True,
        )
    ids, *_ = text_pairs.build(str(tmp_path / "bert"), sequence_length=8).train[0]
    assert (int(ids[0]), int(ids.max()) < 30_522) == (101, True)
    with pytest.raises(
        ConfigError,
        match=r"has no \[CLS\], \[SEP\], \[MASK\], \[PAD\].* \[text-without-special-tokens\]",
    ):
        text_pairs.build(str(tmp_path / "gpt2"), sequence_length=8)


def test_a_file_neither_adds_nor_cuts_nor_pads(word_file: Path) -> None:
    tokenizer = load_tokenizer(str(word_file))
    assert [numbers.tolist() for numbers in tokenizer.encode([b"a b a b a", b"b"])] == [
        [5, 6, 5, 6, 5],
        [6],
    ]


def test_names_of_other_families() -> None:
    model = tokenizers.models.WordLevel(
        {"<s>": 0, "</s>": 1, "<mask>": 2, "<pad>": 3, "x": 4, "<|endoftext|>": 5}, unk_token="x"
    )
    special = LibraryTokenizer(tokenizers.Tokenizer(model)).special
    assert special.model_dump() == {"end": 5, "cls": 0, "sep": 1, "mask": 2, "pad": 3}


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff", b'{"version": "1.0", "model": {"type": "BPE"}}', b"[" * 10_000]
)
def test_a_file_that_is_no_tokenizer(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(path))
    (problem,) = caught.value.problems
    assert str(problem).startswith(
        f"--tokenizer = {show_value(str(path))}: it cannot be read as a tokenizer ("
    )
    assert "\n" not in str(problem)


def test_numbers_with_gaps(tmp_path: Path) -> None:
    """The library numbers a new token by how many there are, even if that number is taken."""
    model = tokenizers.models.WordLevel({"x": 0, "y": 2}, unk_token="x")
    tokenizers.Tokenizer(model).save(str(tmp_path / "gaps.json"))
    with pytest.raises(ConfigError, match=r"its numbers have gaps, .*\[tokenizer-unreadable\]"):
        load_tokenizer(str(tmp_path / "gaps.json"))


def test_no_such_file() -> None:
    with pytest.raises(
        ConfigError,
        match=r"there is no such file; name a tokenizer.json, or bytes \[tokenizer-not-found\]",
    ):
        load_tokenizer("nowhere.json")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ConfigError,
        match=r"\./launch\.sh setup text, or pip install -e '\.\[text\]'; or use --tokenizer bytes \[package-missing\]",
    ):
        load_tokenizer("x.json")


@pytest.mark.parametrize("number", [4_000_000_000, 3_000_000, 10**30])
@pytest.mark.parametrize("place", ["vocab", "added_tokens"])
def test_numbers_far_beyond_the_count_of_tokens_are_refused_before_the_library_reads(
    tmp_path: Path, number: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 G took the library 15 GB of memory, from a file of 200 bytes."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr("tokenizers.Tokenizer.from_file", None)
    vocabulary = {"a": 0, "<eos>": 1}
    added = []
    if place == "vocab":
        vocabulary["<eos>"] = number
    else:
        added.append({"id": number, "content": "<eos>", "special": True})
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": model}))
    with pytest.raises(
        ConfigError, match=r"[23] tokens, and one .* number .*\[tokenizer-unreadable\]"
    ):
        load_tokenizer(str(path))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"model": 3}',
        '{"model": {"vocab": {"a": "x"}}}',
        '{"added_tokens": [1]}',
        "[" * 9999,
    ],
)
def test_what_is_no_tokenizer_is_left_to_the_library(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    read_numbers(path, key="k", value="v")
    read_numbers(tmp_path, key="k", value="v")
    gaps = {str(number): 2 * number for number in range(50_000)}
    path.write_text(json.dumps({"model": {"vocab": gaps}}))
    read_numbers(path, key="k", value="v")
