"""Texts and their classes: batches as transformers makes them, names in order, and rows that are
wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.errors import ConfigError
from framework.recipes.text import labelled_text
from framework.recipes.text.labelled_text import LabelledText, build, inputs_of
from tests.recipes.text.chats import PLAIN, write_tokenizer

pytest.importorskip("transformers", reason="transformers comes with the dev extra")


def of(path: Path, **options: str) -> LabelledText:
    found = build(str(path), eval_fraction=0.0, **options).train  # type: ignore[arg-type]
    assert isinstance(found, LabelledText)
    return found


def test_rows_of_both_forms_give_the_same_batches(tmp_path: Path) -> None:
    rows = [("it, is", "good"), ("ñ", "bad"), ('a "long" text', "good")]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": a, "label": b}) + "\n" for a, b in rows), "utf-8"
    )
    (tmp_path / "a.csv").write_text(
        'label,text\ngood,"it, is"\nbad,ñ\ngood,"a ""long"" text"\n', "utf-8"
    )
    one, other = of(tmp_path / "a.jsonl"), of(tmp_path / "a.csv")
    assert one.rows == other.rows == [("it, is", 1), ("ñ", 0), ('a "long" text', 1)]
    assert one.classes == ["bad", "good"]
    inputs, labels = one.collate_fn([one[number] for number in range(3)])
    assert list(inputs) == ["input_ids", "token_type_ids", "attention_mask"]
    assert labels.tolist() == [1, 0, 1]
    for row, (text, _) in zip(inputs["input_ids"], rows, strict=True):
        whole = [257, *text.encode(), 258]
        assert row.tolist() == [*whole, *[260] * (len(row) - len(whole))]
    assert inputs["attention_mask"].sum(1).tolist() == [len(text.encode()) + 2 for text, _ in rows]


def test_numbers_are_the_classes_and_texts_are_cut(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sentence,y\nabcdef,03\nb,0\n", "utf-8")
    tokenizer = write_tokenizer(tmp_path / "tokenizer", PLAIN)
    found = of(tmp_path / "a.csv", text="sentence", label="y", tokenizer=tokenizer)
    assert [label for _, label in found.rows] == [3, 0]
    assert len(found.classes) == 4
    assert found.vocab_size == len(found.tokenizer)
    train = build(
        str(tmp_path / "a.csv"), eval_fraction=0.0, text="sentence", label="y", sequence_length=4
    ).train
    inputs, _ = train.collate_fn([train[0]])  # type: ignore[attr-defined]
    assert inputs["input_ids"].tolist() == [[257, *b"ab", 258]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_kept_tokens_make_the_batches_of_transformers(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is tokenized once, and a batch equals the one that the tokenizer pads by itself."""
    dataset = build(sequence_length=24).train
    assert isinstance(dataset, LabelledText)
    dataset.tokenizer.padding_side = side
    calls = Counter[str]()
    call = type(dataset.tokenizer).__call__

    def counted(tokenizer: Any, texts: list[str], **options: Any) -> Any:
        calls.update(texts)
        return call(tokenizer, texts, **options)

    monkeypatch.setattr(type(dataset.tokenizer), "__call__", counted)
    batches = [[0, 5, 9], [5, 1, 5], [9, 0, 1], [3]]
    made = []
    for batch in batches:
        made.append(dataset.collate_fn([dataset[number] for number in batch]))
    assert set(calls.values()) == {1}
    for batch, (inputs, labels) in zip(batches, made, strict=True):
        texts, numbers = zip(*(dataset[number] for number in batch), strict=True)
        expected = inputs_of(list(texts), dataset.tokenizer, 24)
        assert list(inputs) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(inputs[name], tensor), name
            assert inputs[name].dtype == tensor.dtype
        assert labels.tolist() == list(numbers)


def test_more_text_than_is_kept_is_tokenized_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelled_text, "_MOST_KNOWN_TOKENS", 60)
    dataset = build(sequence_length=24).train
    assert isinstance(dataset, LabelledText)
    for numbers in ([0, 1], [2, 3], [0, 2]):
        samples = [dataset[number] for number in numbers]
        inputs, _ = dataset.collate_fn(samples)
        expected = inputs_of([text for text, _ in samples], dataset.tokenizer, 24)
        assert torch.equal(inputs["input_ids"], expected["input_ids"])
    assert len(dataset._known) == 2


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("text,label\n,1\nx,\n", r"data\.path = .*\.csv:3: it lacks .* \[rows-not-read\]"),
        ("text,label\n", r"it has no rows; .* \[nothing-to-learn\]"),
        ("text,other\nx,1\n", r"\.csv:2: it lacks a text 'text' or a class 'label'"),
    ],
)
def test_wrong_rows_are_named(text: str, stated: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=stated):
        build(str(tmp_path / "a.csv"))
    with pytest.raises(ConfigError, match=r"none\.csv: No such file .* \[rows-not-read\]"):
        build(str(tmp_path / "none.csv"))


def test_the_documentation_of_python_has_eight_classes() -> None:
    splits = build()
    assert splits.evaluation is not None
    for part in (splits.train, splits.evaluation):
        counts = Counter(label for _, label in part.rows)  # type: ignore[attr-defined]
        assert set(counts) == set(range(8)) or part is splits.evaluation
        assert max(counts.values()) < len(part) / 2
    assert torch.is_tensor(splits.train.collate_fn([splits.train[0]])[1])  # type: ignore[attr-defined]
