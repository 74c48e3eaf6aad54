"""Histograms of the weights, and evaluation samples with their predictions, for TensorBoard."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from framework.checkpoint.state.weight_parts import expert_part_of, split_of
from framework.data.token_files import KEPT_TOKENIZER, TOKENIZER_FILE
from framework.data.tokenizer import ByteTokenizer, load_tokenizer
from framework.engine.distributed import gather, rank
from framework.models.split import VocabularyPart
from framework.plan.layout import Layout
from framework.plan.plan import Plan
from framework.system.log import warn
from framework.train.monitors.tensorboard_events import Histogram, Image, Shown, Text

_CHUNK: Final = 2**22  # elements at once: their buckets take 8 bytes each
_GROWTH: Final = 1.1  # ratio of an edge to the one before, as in TensorBoard's own histograms
# Edges above zero: from 1e-10 up to about 1e4.
_SMALLEST = 1e-10
_NUM_EDGES = 340
_SHOWN_TOKENS: Final = 64
_PartOfName = tuple[str, int]  # name of a weight, and number of the part


@cache
def _edges() -> Tensor:
    """Return the upper ends of all buckets but the last; its end is infinite."""
    positive = _SMALLEST * _GROWTH ** torch.arange(_NUM_EDGES, dtype=torch.float64)
    return torch.cat([-positive.flip(0), torch.zeros(1, dtype=torch.float64), positive]).float()


def weight_histograms(module: torch.nn.Module, plan: Plan) -> list[Shown]:
    """Return histograms of all weights on rank 0, and none elsewhere. Collective: each rank counts
    the weights that it alone holds.

    Waits for the device. Sends 700 counts for each weight between ranks.
    """
    histograms_of_ranks = gather(_histograms_of_rank(module, plan))
    if rank() != 0:
        return []
    return [
        histogram._replace(tag=f"weights/{name}")
        for name, histogram in _merged(histograms_of_ranks).items()
        if histogram.num
    ]


def _histograms_of_rank(module: torch.nn.Module, plan: Plan) -> dict[_PartOfName, Histogram]:
    """Return histograms of the weights, or of the shares at stage 3, that this rank counts."""
    is_spread = plan.config.zero.stage == 3
    layout = plan.layout
    place = rank() % (layout.world_size // layout.pipe_size)
    histograms: dict[_PartOfName, Histogram] = {}
    if not is_spread and layout.data_parallel_rank(rank()) >= layout.expert_size:
        return histograms  # another rank has the same weights
    for name, weight in module.named_parameters():
        if split_of(weight) is None and layout.tensor_rank(rank()):
            continue  # the first rank of a tensor group has it as well
        if is_spread:
            histograms[name, place] = _count(_rank_share(weight))
        else:
            histograms[name, _part_of(weight, layout)] = _count(weight.detach())
    return histograms


def _part_of(weight: Tensor, layout: Layout) -> int:
    """Return the number of this rank's part of a weight that a tensor or expert group divides; 0 if
    none does. Ranks with other samples or positions have the same parts.
    """
    number = 0
    if split_of(weight) is not None:
        number = layout.tensor_rank(rank()) * layout.expert_size
    experts = expert_part_of(weight)
    if experts is not None:
        number += experts.rank
    return number


def _merged(
    histograms_of_ranks: Sequence[Mapping[_PartOfName, Histogram]],
) -> dict[str, Histogram]:
    """Return the histograms of whole weights, each of its parts counted once: a pipeline's tied
    weights are on several stages.
    """
    parts: dict[_PartOfName, Histogram] = {}
    for histograms in histograms_of_ranks:
        parts = {**histograms, **parts}
    merged: dict[str, Histogram] = {}
    for (name, _), histogram in parts.items():
        if name in merged:
            merged[name] = merged[name].plus(histogram)
        else:
            merged[name] = histogram
    return merged


def _rank_share(weight: Any) -> Tensor:
    """Return this rank's part of a weight that ZeRO stage 3 has spread, without the padding at the
    end of the last part.
    """
    part: Tensor = weight.ds_tensor.detach().flatten()
    before = torch.distributed.get_rank(weight.ds_process_group) * part.numel()
    return part[: max(0, min(part.numel(), weight.ds_numel - before))]


def _count(values: Tensor) -> Histogram:
    """Count the finite values in each bucket; a bucket's key is its upper end. Waits for the
    device.
    """
    counts = torch.zeros(2 * _NUM_EDGES + 2, dtype=torch.int64)
    edges = _edges().to(values.device)
    flat = values.flatten()
    low = float("inf")
    high = float("-inf")
    total = 0.0
    squares = 0.0
    num = 0
    for first in range(0, flat.numel(), _CHUNK):
        part = flat[first : first + _CHUNK].float()
        part = part[part.isfinite()]
        if part.numel():
            counts += torch.bincount(torch.bucketize(part, edges), minlength=counts.numel()).cpu()
            low = min(low, part.min().item())
            high = max(high, part.max().item())
            num += part.numel()
            total += part.double().sum().item()
            squares += part.double().square().sum().item()
    limits = _edges().tolist()
    limits.append(1.8e308)  # stands for infinity
    filled = counts.nonzero().flatten().tolist()
    count_by_limit = {limits[bucket]: int(counts[bucket]) for bucket in filled}
    return Histogram("", low, high, num, total, squares, count_by_limit)


class SampleWatch:
    """Shows the first samples of an evaluation on rank 0. Of several evaluations at one `step` only
    the first is shown. Samples that cannot be shown cost a warning and nothing else.

    Where a tensor group divides logits, all its ranks find the predictions together.
    """

    def __init__(
        self,
        show: Callable[[Sequence[Shown]], object] | None,
        folder: Path,
        count: int,
        *,
        step: Callable[[], int] | None = None,
        vocabulary: VocabularyPart | None = None,
    ) -> None:
        """Hand `count` samples to `show`; other ranks than the first have none. The run's `folder`
        has the tokenizer. Without `step`, every call is a step of its own. `vocabulary` is this
        rank's part of the logits, where they are divided.
        """
        self._show = show
        self._folder = folder
        self._count = count
        self._step = step
        self._vocabulary = vocabulary
        self._has_failed = False
        self._shown_at = -1

    def __call__(self, inputs: Any, targets: Any, outputs: Any) -> None:
        """Show the samples of one batch, unless the step's samples are shown already. Collective in
        a tensor group that divides logits, also after a failure: other ranks may not know of it.
        """
        if self._step is None:
            step = self._shown_at + 1
        else:
            step = self._step()
        if step == self._shown_at:
            return
        self._shown_at = step
        try:
            predicted = predictions(outputs, count=self._count, vocabulary=self._vocabulary)
            if self._show is None or self._has_failed:
                return
            shown = samples(inputs, targets, predicted, decode=self._decode)
            self._show(list(shown))
        except Exception as error:
            if not self._has_failed:
                warn(f"monitors.tensorboard.samples: {error}; they are not shown [monitor-failed]")
            self._has_failed = True

    def _decode(self, numbers: Sequence[int]) -> str:
        return str(self._tokenizer().decode(numbers))

    @cache  # noqa: B019 - lives as long as the run
    def _tokenizer(self) -> Any:
        kept = self._folder / KEPT_TOKENIZER / TOKENIZER_FILE
        if kept.is_file():
            return load_tokenizer(str(kept))
        return ByteTokenizer()


def predictions(outputs: Any, *, count: int, vocabulary: VocabularyPart | None = None) -> Tensor:
    """Return what a model predicts of `count` samples: classes (samples,) of logits (batch,
    classes), or tokens (samples, length) of logits (batch, length, vocabulary). Collective where a
    `vocabulary` is divided.

    Raises:
        ValueError: the outputs hold no tensor.
    """
    logits = _first_tensor(outputs)
    if logits is None:
        raise ValueError("outputs hold no tensor")
    logits = logits[:count]
    if not logits.is_floating_point():  # of a loss in tiles: the predictions themselves
        return logits
    if vocabulary is None:
        return logits.argmax(-1)
    return vocabulary.guesses(logits.flatten(0, -2)).view(logits.shape[:-1])


def samples(
    inputs: Any, targets: Any, predicted: Tensor, *, decode: Callable[[Sequence[int]], str]
) -> Iterator[Shown]:
    """Yield images, and a table of targets and predictions.

    Args:
        inputs: of at least as many samples as are predicted, images (batch, 1 or 3, height, width)
            or tokens (batch, length).
        targets: of as many samples, classes or tokens.
        predicted: classes (samples,) or tokens (samples, length).
        decode: tokens to text.

    Raises:
        ValueError: the task's batches are of another kind.
    """
    first = _first_tensor(inputs)
    expected = _first_tensor(targets)
    if first is None or expected is None:
        raise ValueError("inputs or targets hold no tensor")
    count = len(predicted)
    first = first[:count].cpu()
    expected = expected[:count].cpu()
    predicted = predicted.cpu()
    if _are_images(first, predicted):
        for number, image in enumerate(first.float()):
            yield Image(f"samples/{number}", image.shape[1], image.shape[2], png(image))
        rows = _class_rows(expected, predicted)
    elif _are_tokens(first, predicted):
        rows = _token_rows(first, expected, predicted, decode)
    else:
        shapes = f"{tuple(first.shape)} -> {tuple(predicted.shape)}"
        raise ValueError(f"neither images with classes nor tokens with tokens ({shapes})")
    yield Text("samples/predictions", _table(("input", "target", "prediction"), rows))


def _are_images(inputs: Tensor, predicted: Tensor) -> bool:
    """Check for images (samples, 1 or 3, height, width) with classes (samples,)."""
    return inputs.ndim == 4 and inputs.shape[1] in (1, 3) and predicted.ndim == 1


def _are_tokens(inputs: Tensor, predicted: Tensor) -> bool:
    """Check for tokens (samples, length) with tokens (samples, length)."""
    return inputs.ndim == 2 and not inputs.is_floating_point() and predicted.ndim == 2


def _token_rows(
    inputs: Tensor, expected: Tensor, predicted: Tensor, decode: Callable[[Sequence[int]], str]
) -> list[tuple[str, str, str]]:
    """Return the texts of each sample's tokens, targets and predictions."""
    text = partial(_as_text, decode=decode)
    rows = []
    for tokens, target_tokens, guesses in zip(inputs, expected, predicted, strict=True):
        rows.append((text(tokens), text(target_tokens), text(guesses)))
    return rows


def _class_rows(expected: Tensor, predicted: Tensor) -> list[tuple[str, str, str]]:
    pairs = zip(expected.flatten().tolist(), predicted.flatten().tolist(), strict=True)
    return [
        (str(number), str(expected_class), str(predicted_class))
        for number, (expected_class, predicted_class) in enumerate(pairs)
    ]


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return None
    for part in value:
        tensor = _first_tensor(part)
        if tensor is not None:
            return tensor
    return None


def _as_text(numbers: Tensor, *, decode: Callable[[Sequence[int]], str]) -> str:
    kept = numbers[numbers >= 0][-_SHOWN_TOKENS:].tolist()  # below zero: left out of the loss
    return decode(kept)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; characters that would end a cell are escaped."""
    rule = ["---" for _ in header]
    lines = []
    for row in chain([header, rule], rows):
        cells = [" ".join(cell.replace("|", "\\|").split()) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def png(image: Tensor) -> bytes:
    """Return the PNG of floats (1 or 3, height, width), stretched from their least to their largest
    value.
    """
    low = image.min()
    high = image.max()
    pixels = ((image - low) / (high - low).clamp(min=1e-12) * 255).byte()
    # Each line begins with the number of its filter: none.
    lines = b"".join(b"\0" + bytes(line.flatten().tolist()) for line in pixels.permute(1, 2, 0))
    bit_depth = 8
    color_type = 2 if image.shape[0] == 3 else 0  # RGB or gray
    height = image.shape[1]
    width = image.shape[2]
    header = struct.pack(">IIBBBBB", width, height, bit_depth, color_type, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum
