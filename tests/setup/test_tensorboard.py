"""Samples and histograms that TensorBoard shows."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from framework.models.tiled_loss import TiledLoss
from framework.setup.tensorboard import SampleWatch, _count, png, predictions, samples
from framework.train.monitors.tensorboard_events import Histogram, Image, Shown, Text


def decoded(numbers: Sequence[int]) -> str:
    return bytes(numbers).decode()


def test_images_with_their_classes() -> None:
    images, logits = torch.rand(5, 3, 4, 6), torch.eye(5)
    predicted = predictions(logits, count=3)
    *shown, table = samples(images, torch.tensor([0, 1, 9, 3, 4]), predicted, decode=decoded)
    assert [(one.tag, one.height, one.width) for one in shown if isinstance(one, Image)] == [
        (f"samples/{number}", 4, 6) for number in range(3)
    ]
    assert isinstance(table, Text)
    assert table.text.splitlines()[2:] == ["| 0 | 0 | 0 |", "| 1 | 1 | 1 |", "| 2 | 9 | 2 |"]


def test_text_with_the_tokens_that_the_model_expects() -> None:
    tokens = torch.tensor([list(b"ab|d"), list(b"wxyz")])
    targets = torch.tensor([[*b"b|d", -100], [*b"xyz", 33]])
    logits = torch.nn.functional.one_hot(tokens, 256).float()
    tiled = TiledLoss(tokens, torch.zeros(()))
    for outputs in ({"logits": logits}, (tiled, torch.zeros(2, 2))):
        predicted = predictions(outputs, count=2)
        (table,) = samples((tokens, torch.ones(2, 4)), targets, predicted, decode=decoded)
        assert isinstance(table, Text)
        rows = table.text.splitlines()[2:]
        assert rows == ["| ab\\|d | b\\|d | ab\\|d |", "| wxyz | xyz! | wxyz |"]


def test_what_cannot_be_shown_costs_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[Sequence[Shown]] = []
    watch = SampleWatch(shown.append, tmp_path, 2)
    for _ in range(3):
        watch(torch.rand(4, 7), torch.rand(4), torch.rand(4, 1))
    assert shown == []
    assert capsys.readouterr().err == (
        "warning: monitors.tensorboard.samples: neither images with classes nor tokens with tokens ((2, 7) -> (2,)); "
        "they are not shown [monitor-failed]\n"
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_the_pixels(channels: int) -> None:
    pixels = torch.arange(channels * 6.0).reshape(channels, 2, 3)
    data = png(pixels)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">IIBB", data[16:26]) == (3, 2, 8, 0 if channels == 1 else 2)
    length = struct.unpack(">I", data[33:37])[0]
    lines = zlib.decompress(data[41 : 41 + length])
    expected = (pixels / pixels.max() * 255).byte().permute(1, 2, 0)
    assert lines == b"".join(b"\0" + bytes(line.flatten().tolist()) for line in expected)


def test_a_histogram_counts_every_finite_value_once() -> None:
    values = torch.cat(
        [torch.randn(10_001), torch.tensor([0.0, -3e9, 1e9, float("nan"), float("inf")])]
    )
    whole, finite = _count(values), values[values.isfinite()]
    assert whole.num == sum(whole.buckets.values()) == finite.numel()
    assert (whole.least, whole.largest) == (-3e9, 1e9)
    parts = [_count(part) for part in values.split(3000)]
    merged: Histogram = parts[0]
    for part in parts[1:]:
        merged = merged.plus(part)
    assert merged.buckets == whole.buckets
    for limit, below in ((0.0, 0.0), (max(edge for edge in whole.buckets if edge < 1.0),) * 2):
        counted = sum(count for edge, count in whole.buckets.items() if edge <= limit)
        assert counted == int((finite <= below).sum())
