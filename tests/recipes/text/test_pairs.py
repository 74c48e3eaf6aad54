from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from framework.data.batches import DrawsFromSeeds, SeededSamples, WholeBatch
from framework.data.loaders import EvalLoader
from framework.data.token_files import SpecialTokens
from framework.data.tokens import Tokens
from framework.errors import ConfigError, show_value
from framework.recipes.text.pairs import TextPairs, _lowest, build
from framework.recipes.text.prepare import prepare
from tests.data.loader_of import train_loader
from tests.recipes.text.text_samples import SPECIAL, VOCAB_SIZE, many_documents, tokens_of

LENGTH = 32
DOCUMENTS = many_documents(40, longest=400)


def pairs_of(
    documents: list[bytes], *, length: int = LENGTH, mask_fraction: float = 0.15
) -> TextPairs:
    return TextPairs(
        tokens_of(*documents),
        sequence_length=length,
        vocab_size=VOCAB_SIZE,
        special=SPECIAL,
        mask_fraction=mask_fraction,
    )


def drawn(pairs: TextPairs, *, epochs: int = 20, seed: int = 3) -> list[torch.Tensor]:
    """Every sample of some epochs, field by field."""
    keys = [(epoch, index) for epoch in range(epochs) for index in range(len(pairs))]
    batch = SeededSamples(pairs, seed=seed).__getitems__(keys)
    assert isinstance(batch, WholeBatch)
    return list(batch.fields)


def unmasked(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.where(labels == -100, ids, labels)


def segments(ids: list[int], types: list[int], attention: list[int]) -> tuple[bytes, bytes]:
    """The two texts of an unmasked sample, after checking everything around them."""
    end = sum(attention)
    assert attention == [1] * end + [0] * (len(ids) - end)
    assert set(ids[end:]) <= {SPECIAL.pad}
    assert ids[0] == SPECIAL.cls
    assert ids[end - 1] == SPECIAL.sep
    middle = ids.index(SPECIAL.sep)
    assert types == [0] * (middle + 1) + [1] * (end - middle - 1) + [0] * (len(ids) - end)
    first, second = ids[1:middle], ids[middle + 1 : end - 1]
    assert max(first + second) < 256, "a special token inside a segment"
    return bytes(first), bytes(second)


@pytest.mark.parametrize("length", [8, LENGTH, 128])
def test_every_sample_is_two_segments_of_the_kind_that_its_label_states(length: int) -> None:
    pairs = pairs_of(DOCUMENTS, length=length)
    ids, types, attention, labels, nsp = drawn(pairs, epochs=3)
    assert [field.dtype for field in (ids, types, attention, labels, nsp)] == [torch.int64] * 5
    assert ids.shape == types.shape == attention.shape == labels.shape == (len(nsp), length)
    rows = zip(
        unmasked(ids, labels).tolist(),
        types.tolist(),
        attention.tolist(),
        nsp.tolist(),
        strict=True,
    )
    for row_ids, row_types, row_attention, label in rows:
        first, second = segments(row_ids, row_types, row_attention)
        assert first
        assert second
        together = any(first + second in document for document in DOCUMENTS)
        apart = any(
            first in one and second in other
            for one in DOCUMENTS
            for other in DOCUMENTS
            if one is not other
        )
        assert together if label == 0 else apart


def test_a_random_segment_is_never_of_the_same_document() -> None:
    """Every document has bytes of its own here."""
    documents = [bytes([number]) * 300 for number in range(6)]
    ids, types, _, labels, nsp = drawn(pairs_of(documents), epochs=10)
    ids = unmasked(ids, labels)
    assert {0, 1} == set(nsp.tolist())
    for row, kinds, label in zip(ids.tolist(), types.tolist(), nsp.tolist(), strict=True):
        second = {number for number, kind in zip(row, kinds, strict=True) if kind and number < 256}
        assert (second == {row[1]}) == (label == 0)


def test_sequences_are_full_where_the_document_is_long_enough() -> None:
    text = LENGTH - 3
    attention = drawn(pairs_of(many_documents(30, shortest=text, longest=90)))[2]
    assert attention.all()
    assert len(attention) > 500
    short = drawn(pairs_of(many_documents(30, shortest=2, longest=text - 1)))
    assert (short[2].sum(dim=1) < LENGTH).all()


def test_padding_does_not_show_the_labels() -> None:
    """Two samples that differ in the label only would have the same length: it is that of A's
    document.
    """
    _, _, attention, _, nsp = drawn(
        pairs_of(many_documents(60, shortest=2, longest=60)), epochs=200
    )
    sizes = attention.sum(dim=1).double()
    means = [float(sizes[nsp == label].mean()) for label in (0, 1)]
    spread = float(sizes.std()) / (len(sizes) / 4) ** 0.5
    assert abs(means[0] - means[1]) < 5 * spread


def test_the_lengths_of_the_segments_do_not_show_the_labels() -> None:
    """Documents that are often shorter than the rest of a sample: a two-sample Kolmogorov-Smirnov
    test on B's share.
    """
    _, types, attention, _, nsp = drawn(
        pairs_of(many_documents(200, shortest=2, longest=60), length=64), epochs=60
    )
    label = nsp.numpy()
    # one token of A and one of B: documents of one token have one label
    lone = (attention.sum(dim=1) == 5).numpy()
    share = ((types.sum(dim=1) - 1) / (attention.sum(dim=1) - 3)).numpy()
    one, other = (np.sort(share[(label == kind) & ~lone]) for kind in (0, 1))
    places = np.concatenate([one, other])
    distance = np.abs(
        np.searchsorted(one, places, side="right") / len(one)
        - np.searchsorted(other, places, side="right") / len(other)
    ).max()
    assert min(len(one), len(other)) > 2000
    # a chance of one in a thousand
    assert distance < 1.95 * ((len(one) + len(other)) / (len(one) * len(other))) ** 0.5


def test_labels_and_segment_lengths_are_balanced() -> None:
    _, types, _, _, nsp = drawn(pairs_of(many_documents(30, shortest=100)), epochs=60)
    count = len(nsp)
    assert abs(float(nsp.double().mean()) - 0.5) < 5 * 0.5 / count**0.5
    second = types.sum(dim=1) - 1
    text = LENGTH - 3
    assert int(second.min()) == text // 4
    assert int(second.max()) == text - text // 4
    assert abs(float(second.double().mean()) - text / 2) < 0.3


@pytest.mark.parametrize("fraction", [0.01, 0.15, 0.5, 1.0])
def test_exactly_the_share_is_predicted(fraction: float) -> None:
    _, _, attention, labels, _ = drawn(pairs_of(DOCUMENTS, mask_fraction=fraction), epochs=3)
    text = attention.sum(dim=1) - 3
    expected = [max(1, round(fraction * int(size))) for size in text]
    assert (labels != -100).sum(dim=1).tolist() == expected


def test_the_lowest_are_those_of_a_sort_with_equal_ones_too() -> None:
    """The sort of places, which is five times as slow, is the definition."""
    draw = np.random.default_rng(0)
    for most in (5, 1 << 62):
        order = draw.integers(0, most, (40, 30)).astype(np.uint64)
        counts = draw.integers(1, 30, 40)
        rank = order.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
        assert np.array_equal(_lowest(order, counts), rank < counts[:, None])


def test_only_text_is_predicted_and_every_place_alike() -> None:
    ids, _, attention, labels, _ = drawn(pairs_of(many_documents(20, shortest=100)), epochs=100)
    predicted = labels != -100
    assert (labels[predicted] < 256).all()
    assert not predicted[:, 0].any()
    assert not predicted[:, -1].any()
    # A column holds a [SEP] in some samples; of the samples where it holds text, the same share is
    # predicted in all.
    is_text = (unmasked(ids, labels) < 256) & attention.bool()
    counts, chosen = is_text.sum(dim=0)[1:-1].double(), predicted.sum(dim=0)[1:-1].double()
    share = round(0.15 * (LENGTH - 3)) / (LENGTH - 3)
    assert ((chosen / counts - share).abs() < 5 * (share * (1 - share) / counts).sqrt()).all()


def test_eighty_ten_ten() -> None:
    ids, _, _, labels, _ = drawn(pairs_of(many_documents(20, shortest=100)), epochs=100)
    found, originals = ids[labels != -100], labels[labels != -100]
    count = len(found)
    hidden, kept = (found == SPECIAL.mask), (found == originals)
    # A random token is the original itself once in 256 times.
    for share, expected in (
        (hidden, 0.8),
        (kept, 0.1 + 0.1 / 256),
        (~hidden & ~kept, 0.1 - 0.1 / 256),
    ):
        assert (
            abs(float(share.double().mean()) - expected)
            < 5 * (expected * (1 - expected) / count) ** 0.5
        )
    others = found[~hidden & ~kept]
    assert set(others.tolist()) <= set(range(256))
    assert len(set(others.tolist())) > 200


def test_a_random_token_is_never_special_wherever_those_lie() -> None:
    special = SpecialTokens(end=11, cls=3, sep=0, mask=7, pad=4)
    pairs = TextPairs(tokens_of(b"ab", b"cd"), sequence_length=8, vocab_size=12, special=special)
    numbers = Counter(pairs._ordinary(np.arange(7000, dtype=np.uint64)).tolist())
    assert numbers == dict.fromkeys([1, 2, 5, 6, 8, 9, 10], 1000)


def test_a_sample_depends_on_seed_epoch_and_index_only() -> None:
    pairs = pairs_of(DOCUMENTS)
    assert isinstance(pairs, DrawsFromSeeds)
    seeded = SeededSamples(pairs, seed=1)
    together = seeded.__getitems__([(0, 3), (0, 4), (2, 3)]).fields
    alone = seeded.__getitems__([(2, 3)]).fields
    assert all(torch.equal(one[2], other[0]) for one, other in zip(together, alone, strict=True))
    others = [seeded.__getitems__([(1, 3)]), SeededSamples(pairs, seed=2).__getitems__([(2, 3)])]
    assert all(not torch.equal(alone[0], other.fields[0]) for other in others)


def test_no_global_generator_is_used() -> None:
    state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    pairs = pairs_of(DOCUMENTS)
    pairs.__getitems__([1, 2])
    SeededSamples(pairs, seed=1).__getitems__([(0, 1)])
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_is_the_same_for_any_number_of_ranks_and_workers(num_workers: int) -> None:
    pairs = pairs_of(DOCUMENTS)
    steps_per_epoch = len(pairs) // 8

    def steps(world_size: int, workers: int, start: int) -> list[list[list[int]]]:
        loaders = [
            train_loader(
                pairs,
                global_size=8,
                micro_size=4 // world_size,
                accumulation_steps=2,
                rank=rank,
                seed=5,
                world_size=world_size,
                shuffle=True,
                random_samples=True,
                num_workers=workers,
            ).stream(start)
            for rank in range(world_size)
        ]
        read = [[next(loader) for loader in loaders for _ in range(2)] for _ in range(3)]
        for loader in loaders:
            loader.close()
        return [
            [row for batch in step for row in torch.cat([*batch[:4]], dim=1).tolist()]
            for step in read
        ]

    start = steps_per_epoch - 1  # over the end of an epoch
    assert steps(2, num_workers, start) == steps(1, 0, start)
    assert steps(1, 0, start + 1)[:2] == steps(1, 0, start)[1:]


def test_evaluation_does_not_depend_on_batch_size_and_ranks() -> None:
    pairs = pairs_of(DOCUMENTS)

    def rows(batch_size: int, world_size: int) -> list[list[int]]:
        loaders = (
            EvalLoader(pairs, batch_size=batch_size, rank=rank, world_size=world_size)
            for rank in range(world_size)
        )
        return [
            row
            for loader in loaders
            for batch, counts in loader
            if counts
            for row in batch[0].tolist()
        ]

    assert rows(7, 1) == rows(4, 3)
    assert rows(7, 1)[5] == pairs[5][0].tolist()
    assert len(rows(7, 1)) == len(pairs)


def test_documents_of_one_token() -> None:
    ids, types, attention, labels, nsp = drawn(pairs_of([b"a", b"b", b"c" * 50]), epochs=300)
    ids = unmasked(ids, labels)
    lone = ids[:, 1] < ord("c")
    assert lone.any()
    assert set(nsp[lone].tolist()) == {1}
    assert (attention[lone].sum(dim=1) == 5).all()
    for row in zip(ids.tolist(), types.tolist(), attention.tolist(), strict=True):
        segments(*row)


def test_more_tokens_than_their_product_with_the_samples_has_room_for() -> None:
    """50 billion tokens at 128 each: the number of a sample times that of the tokens is beyond
    int64.
    """
    num_tokens = 50 * 10**9
    numbers = np.broadcast_to(np.uint16(65), (num_tokens,))
    offsets = np.linspace(0, num_tokens, 1001).astype(np.int64)
    pairs = TextPairs(
        Tokens(numbers, offsets), sequence_length=128, vocab_size=VOCAB_SIZE, special=SPECIAL
    )
    indices = [0, 1, len(pairs) // 2, len(pairs) - 1]
    starts, _, _ = pairs._segments(np.array(indices), np.arange(4, dtype=np.uint64))
    # Python's integers have room for everything
    wanted = [index * num_tokens // len(pairs) for index in indices]
    assert np.abs(starts[0] - wanted).max() <= 128
    assert pairs[len(pairs) - 1][2].all()


def test_a_folder_and_its_evaluation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(
        b"\n\n".join(many_documents(60, shortest=20).__iter__()).replace(b"\0", b"0")
    )
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"), blank_lines_split=True)
    splits = build(str(tmp_path / "out"), sequence_length=16, mask_fraction=0.3)
    assert isinstance(splits.train, TextPairs)
    assert isinstance(splits.evaluation, TextPairs)
    assert (
        splits.train.tokens_per_sample,
        splits.train.mask_fraction,
        splits.train.vocab_size,
    ) == (16, 0.3, 261)
    assert splits.evaluation[0][0].shape == (16,)


def test_one_document_has_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"words " * 100)
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"))
    with pytest.raises(ConfigError) as caught:
        build(str(tmp_path / "out"))
    assert [str(problem) for problem in caught.value.problems] == [
        f"data.path = {show_value(str(tmp_path / 'out'))}: the {name} text is one document, and half of the pairs "
        "need another one; prepare more files, or with --split-at-blank-lines [text-one-document]"
        for name in ("training", "evaluation")
    ]


def test_pythons_own_library() -> None:
    splits = build(sequence_length=128)
    assert isinstance(splits.train, TextPairs)
    _, _, attention, labels, _ = splits.train.__getitems__(range(0, len(splits.train), 500)).fields
    assert attention.sum() > 0.98 * attention.numel()
    assert (labels != -100).sum(dim=1).float().mean() == pytest.approx(0.15 * 125, abs=0.6)
