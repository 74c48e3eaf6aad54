from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from framework.data.token_files import read_meta
from framework.data.tokens import open_token_folder, verify_token_folder
from framework.errors import ConfigError
from framework.recipes.text.prepare import prepare

FIX = "make it again with dsf prepare"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty documents of ten bytes; two of them are for evaluation."""
    (tmp_path / "a.txt").write_bytes(b"\n\n".join(b"%010d" % number for number in range(20)))
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "tokens"), blank_lines_split=True)
    return tmp_path / "tokens"


def lines(read: Callable[[str], Any], folder: Path) -> list[str]:
    """What is refused; the subject, which is the same in every line, left out."""
    with pytest.raises(ConfigError) as caught:
        read(str(folder))
    key = "data.path" if read is open_token_folder else "--verify"
    found = []
    for problem in caught.value.problems:
        assert str(problem).startswith(f"{key} = ")
        assert "\n" not in str(problem)
        found.append(str(problem).partition(": ")[2])
    return found


def change_meta(folder: Path, *path: str, to: Any) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    section = meta
    for key in path[:-1]:
        section = section[key]
    if to is None:
        del section[path[-1]]
    else:
        section[path[-1]] = to
    (folder / "meta.json").write_text(json.dumps(meta))


def test_what_was_written_is_read(folder: Path) -> None:
    corpus = open_token_folder(str(folder))
    assert corpus.evaluation is not None
    assert (corpus.train.offsets[0], corpus.train.num_documents) == (0, 18)
    documents = [
        bytes(corpus.train.numbers[start : end - 1].astype(np.uint8))
        for start, end in zip(corpus.train.offsets[:-1], corpus.train.offsets[1:], strict=True)
    ]
    assert [int(document) for document in documents] == [
        number for number in range(20) if number not in (9, 19)
    ]
    assert (corpus.train.numbers[corpus.train.offsets[1:] - 1] == 256).all()
    assert corpus.evaluation.num_documents == 2
    verify_token_folder(str(folder))


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "eval.bin", "eval.idx"])
def test_a_file_of_another_size_is_named(name: str, folder: Path) -> None:
    size = (folder / name).stat().st_size
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    expected = [
        f"{folder / name}: it has {size - 1:,} bytes instead of {size:,}; {FIX} [text-damaged]"
    ]
    assert lines(open_token_folder, folder) == expected
    (folder / name).unlink()
    assert lines(open_token_folder, folder) == [
        f"{folder / name}: it is missing; {FIX} [text-damaged]"
    ]


def test_all_damaged_files_are_named_at_once(folder: Path) -> None:
    (folder / "eval.bin").unlink()
    (folder / "train.bin").write_bytes(b"")
    assert len(lines(open_token_folder, folder)) == 2


@pytest.mark.parametrize("name", ["train.bin", "eval.idx"])
def test_a_flipped_byte_is_found_by_verify(name: str, folder: Path) -> None:
    content = bytearray((folder / name).read_bytes())
    content[0] ^= 1
    (folder / name).write_bytes(content)
    expected = (
        f"{folder / name}: its checksum differs: the content has changed; {FIX} [text-damaged]"
    )
    assert expected in lines(verify_token_folder, folder)


def test_an_index_that_does_not_end_at_the_tokens(folder: Path) -> None:
    offsets = np.fromfile(folder / "train.idx", dtype="<i8")
    (offsets - 1).tofile(folder / "train.idx")
    line = f"{folder / 'train.idx'}: it does not end at the number of tokens; {FIX} [text-damaged]"
    assert lines(open_token_folder, folder) == [line]


def test_content_that_makes_no_sense_is_found_by_verify(folder: Path) -> None:
    offsets = np.fromfile(folder / "train.idx", dtype="<i8")
    offsets[3] = offsets[2]
    offsets.tofile(folder / "train.idx")
    numbers = np.fromfile(folder / "eval.bin", dtype="<u2")
    numbers[5] = 261
    numbers.tofile(folder / "eval.bin")
    found = lines(verify_token_folder, folder)
    assert (
        f"{folder / 'train.idx'}: its documents do not follow each other; {FIX} [text-damaged]"
        in found
    )
    assert (
        f"{folder / 'eval.bin'}: it holds a token beyond the vocabulary of 261; {FIX} [text-damaged]"
        in found
    )


def test_a_folder_made_under_the_former_name_of_the_project_is_read(folder: Path) -> None:
    meta = folder / "meta.json"
    meta.write_text(meta.read_text().replace('"dsf-tokens"', '"dsframework-tokens"'))
    assert read_meta(str(folder), "data.path")[1].format == "dsframework-tokens"
    verify_token_folder(str(folder))


def test_a_folder_without_its_description_was_not_finished(folder: Path) -> None:
    (folder / "meta.json").unlink()
    (line,) = lines(open_token_folder, folder)
    assert line == (
        f"there is no meta.json in it: it was not made by prepare, or prepare did not finish; {FIX} [text-not-prepared]"
    )
    (line,) = lines(open_token_folder, folder / "nowhere")
    assert line.startswith(f"there is no folder {folder}/nowhere; name one made by")


BAD_META: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "another format": (
        ("format",),
        "other",
        "format: Input should be 'dsf-tokens' or 'dsframework-tokens'",
    ),
    "a later version": (("version",), 2, "version: Input should be 1"),
    "another dtype": (("dtype",), "int64", "dtype: Input should be 'uint16' or 'uint32'"),
    "no vocabulary": (("vocab_size",), None, "vocab_size: Field required"),
    "a small vocabulary": (
        ("vocab_size",),
        100,
        "Value error, a special token lies beyond vocab_size",
    ),
    "no training": (("parts", "train"), None, "Value error, there is no train among the parts"),
    "other numbers": (
        ("parts", "train", "num_tokens"),
        5,
        "Value error, train.bin must have 10 bytes by the number",
    ),
    "no tokens": (
        ("parts", "train", "num_tokens"),
        0,
        "parts.train.num_tokens: Input should be greater than or equal to 1",
    ),
    "not listed": (
        ("files", "eval.idx"),
        None,
        "Value error, eval.idx must have 24 bytes by the number",
    ),
    "an unknown key": (("extra",), 1, "extra: Extra inputs are not permitted"),
    "a huge number": (("parts", "train", "num_documents"), 2**70, "parts.train.num_documents: "),
}


@pytest.mark.parametrize("name", BAD_META)
def test_a_description_that_contradicts_itself(name: str, folder: Path) -> None:
    path, value, expected = BAD_META[name]
    change_meta(folder, *path, to=value)
    (line,) = lines(open_token_folder, folder)
    assert line.startswith(f"{folder / 'meta.json'}: {expected}")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10_000, b"null"])
def test_a_description_that_is_none(content: bytes, folder: Path) -> None:
    (folder / "meta.json").write_bytes(content)
    (line,) = lines(open_token_folder, folder)
    assert line.startswith(f"{folder / 'meta.json'}: ")
    assert line.endswith("[text-damaged]")


@pytest.mark.parametrize("name", ["../a.txt", "/etc/passwd", "sub/x"])
def test_files_elsewhere_are_not_touched(name: str, folder: Path) -> None:
    change_meta(folder, "files", name, to={"size_bytes": 1, "sha256": "0" * 64})
    (line,) = lines(open_token_folder, folder)
    assert line == f"{folder / name}: it lies outside the folder; {FIX} [text-damaged]"
