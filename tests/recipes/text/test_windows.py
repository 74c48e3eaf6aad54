from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from framework.errors import ConfigError
from framework.recipes.text.prepare import prepare
from framework.recipes.text.windows import TextWindows, build
from tests.data.loader_of import train_loader
from tests.recipes.text.text_samples import SPECIAL, VOCAB_SIZE, many_documents, tokens_of


def windows_of(*documents: bytes, length: int) -> TextWindows:
    return TextWindows(
        tokens_of(*documents), sequence_length=length, vocab_size=VOCAB_SIZE, special=SPECIAL
    )


def naive(documents: list[bytes], length: int) -> list[tuple[list[int], list[int]]]:
    stream = [number for document in documents for number in [*document, 256]]
    found = []
    while len(stream) > length:
        found.append((stream[:length], stream[1 : length + 1]))
        stream = stream[length:]
    return found


@pytest.mark.parametrize("length", [1, 3, 16, 100])
def test_packing_is_that_of_a_naive_loop(length: int) -> None:
    documents = many_documents(12, longest=40)
    windows = windows_of(*documents, length=length)
    expected = naive(documents, length)
    assert len(windows) == len(expected)
    ids, targets = windows.__getitems__(range(len(windows))).fields
    assert list(zip(ids.tolist(), targets.tolist(), strict=True)) == expected
    assert windows.tokens_per_sample == length


@pytest.mark.parametrize(("num_tokens", "count"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_window_needs_its_last_target(num_tokens: int, count: int) -> None:
    assert len(windows_of(b"x" * (num_tokens - 1), length=4)) == count


def test_a_sample() -> None:
    windows = windows_of(b"abc", b"de", length=3)
    ids, targets = windows[-1]
    assert (ids.tolist(), targets.tolist()) == ([256, 100, 101], [100, 101, 256])
    assert ids.dtype == targets.dtype == torch.int64
    batch = windows.__getitems__([1, 0, 1]).fields
    assert [field.shape for field in batch] == [(3, 3), (3, 3)]
    assert all(field.is_contiguous() for field in batch)
    with pytest.raises(IndexError):
        windows[2]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_share_a_step_as_they_share_images(num_workers: int) -> None:
    windows = windows_of(*many_documents(), length=16)

    def steps(world_size: int) -> list[Any]:
        loaders = [
            train_loader(
                windows,
                global_size=8,
                micro_size=8 // world_size,
                accumulation_steps=1,
                rank=rank,
                seed=5,
                world_size=world_size,
                shuffle=True,
                num_workers=num_workers,
            ).stream()
            for rank in range(world_size)
        ]
        read = [torch.cat([next(loader)[0] for loader in loaders]).tolist() for _ in range(3)]
        for loader in loaders:
            loader.close()
        return read

    assert steps(1) == steps(2)


def test_a_folder(tmp_path: Path) -> None:
    text = bytes(range(256)) * 20
    (tmp_path / "a.bin").write_bytes(text)
    prepare([str(tmp_path / "a.bin")], str(tmp_path / "out"), eval_fraction=0.25)
    splits = build(str(tmp_path / "out"), sequence_length=32)
    assert isinstance(splits.train, TextWindows)
    assert isinstance(splits.evaluation, TextWindows)
    assert (splits.train.vocab_size, splits.train.special.end, splits.train.tokens_per_sample) == (
        261,
        256,
        32,
    )
    # 5,121 tokens in all: a quarter of them is cut off the end, and the first part gets an end
    # token of its own.
    num_eval = round(5121 / 4)
    assert (len(splits.train), len(splits.evaluation)) == (
        (5121 - num_eval + 1 - 1) // 32,
        (num_eval - 1) // 32,
    )
    assert splits.train[3][0].tolist() == list(text[96:128])
    assert splits.evaluation[0][0].tolist() == list(text[5121 - num_eval :][:32])


def test_a_worker_maps_the_files_and_is_sent_no_copy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"some text, " * 20_000)
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"))
    windows = build(str(tmp_path / "out"), sequence_length=32).train
    sent = pickle.dumps(windows)
    assert len(sent) < 2_000
    copy = pickle.loads(sent)
    assert torch.equal(copy[17][0], windows[17][0])
    assert pickle.loads(pickle.dumps(tokens_of(b"ab"))).numbers.tolist() == [97, 98, 256]


def test_text_shorter_than_a_window(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"))
    with pytest.raises(ConfigError) as caught:
        build(str(tmp_path / "out"), sequence_length=92)
    assert [str(problem) for problem in caught.value.problems] == [
        f"data.sequence_length = 92: the {name} text has {count} tokens, and a window needs one more than it is long; "
        f"set data.sequence_length: {count - 1} or less, or prepare more text [text-too-short]"
        for name, count in (("training", 92), ("evaluation", 10))
    ]
    assert len(build(str(tmp_path / "out"), sequence_length=9).train) == 10


def test_without_a_folder_it_is_pythons_own_library() -> None:
    splits = build(sequence_length=128)
    assert isinstance(splits.train, TextWindows)
    assert isinstance(splits.evaluation, TextWindows)
    assert len(splits.train) > 10_000
    assert 500 < len(splits.evaluation) < len(splits.train) / 4
    first = bytes(splits.train[0][0].tolist())
    library = Path(pickle.__file__).parent
    assert first == min(library.glob("*.py")).read_bytes()[:128]
    again = build(sequence_length=128).train
    assert np.array_equal(again.tokens.numbers, splits.train.tokens.numbers)  # type: ignore[attr-defined]
