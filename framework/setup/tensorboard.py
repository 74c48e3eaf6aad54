"""What TensorBoard shows beside numbers: histograms of the weights, and evaluation samples with
their predictions.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from framework.data.token_files import KEPT_TOKENIZER, TOKENIZER_FILE
from framework.data.tokenizer import ByteTokenizer, load_tokenizer
from framework.engine.distributed import gather, rank
from framework.plan.plan import Plan
from framework.system.log import warn
from framework.train.monitors.tensorboard_events import Histogram, Image, Shown, Text

_CHUNK: Final = 2**22  # elements at once: their buckets take 8 bytes each
_GROWTH: Final = 1.1  # of an edge to the next, as TensorBoard draws them
# up to about 1e4
_SMALLEST = 1e-10
_NUM_EDGES = 340
_SHOWN_TOKENS: Final = 64


@cache
def _edges() -> Tensor:
    """Upper ends of the buckets but the last one's, which is infinite."""
    positive = _SMALLEST * _GROWTH ** torch.arange(_NUM_EDGES, dtype=torch.float64)
    return torch.cat([-positive.flip(0), torch.zeros(1, dtype=torch.float64), positive]).float()


def weight_histograms(module: torch.nn.Module, plan: Plan) -> list[Shown]:
    """Histograms of all weights, on rank 0; elsewhere none. Collective: each rank counts what it
    alone holds.

    Waits for the device. Sent between ranks: 700 counts for each weight.
    """
    is_spread = plan.config.zero.stage == 3
    counts = {}
    if is_spread or plan.layout.data_parallel_rank(rank()) < plan.layout.expert_size:
        for name, weight in module.named_parameters():
            counts[name] = _count(_own_share(weight) if is_spread else weight.detach())
    everyone = gather(counts)
    if rank() != 0:
        return []
    merged: dict[str, Histogram] = {}
    for found in everyone:
        for name, histogram in found.items():
            if name not in merged:
                merged[name] = histogram
            elif is_spread:  # of a pipeline's tied weights every stage has all
                merged[name] = merged[name].plus(histogram)
    return [
        Histogram(f"weights/{name}", *histogram[1:])
        for name, histogram in merged.items()
        if histogram.num
    ]


def _own_share(weight: Any) -> Tensor:
    """This rank's part of a weight that ZeRO stage 3 has spread, without what fills the last part
    up.
    """
    part: Tensor = weight.ds_tensor.detach().flatten()
    before = rank() * part.numel()
    return part[: max(0, min(part.numel(), weight.ds_numel - before))]


def _count(values: Tensor) -> Histogram:
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
            num = num + part.numel()
            total = total + part.double().sum().item()
            squares = squares + part.double().square().sum().item()
    limits = [*_edges().tolist(), 1.8e308]
    filled = counts.nonzero().flatten().tolist()
    return Histogram(
        "", low, high, num, total, squares, {limits[n]: int(counts[n]) for n in filled}
    )


class SampleWatch:
    """Shows the first samples of an evaluation, of several at one `step` of the first, on rank 0;
    what cannot be shown costs a warning and nothing else.
    """

    def __init__(
        self,
        show: Callable[[Sequence[Shown]], object],
        folder: Path,
        count: int,
        *,
        step: Callable[[], int] | None = None,
    ) -> None:
        self._show = show
        self._folder = folder
        self._count = count
        self._step = step
        self._has_failed = False
        self._shown_at = -1

    def __call__(self, inputs: Any, targets: Any, outputs: Any) -> None:
        """Take one batch and what the model made of it."""
        if self._step is None:
            step = self._shown_at + 1
        else:
            step = self._step()
        if self._has_failed or step == self._shown_at:
            return
        self._shown_at = step
        try:
            self._show(
                list(samples(inputs, targets, outputs, count=self._count, decode=self._decode))
            )
        except Exception as error:
            self._has_failed = True
            warn(f"monitors.tensorboard.samples: {error}; they are not shown [monitor-failed]")

    def _decode(self, numbers: Sequence[int]) -> str:
        return str(self._tokenizer().decode(numbers))

    @cache  # noqa: B019 - lives as long as the run
    def _tokenizer(self) -> Any:
        kept = self._folder / KEPT_TOKENIZER / TOKENIZER_FILE
        if kept.is_file():
            return load_tokenizer(str(kept))
        return ByteTokenizer()


def samples(
    inputs: Any, targets: Any, outputs: Any, *, count: int, decode: Callable[[Sequence[int]], str]
) -> Iterator[Shown]:
    """Images (batch, 1 or 3, height, width), and a table of targets and predictions: the class with
    the largest of logits (batch, classes), or the tokens with the largest of logits (batch, length,
    vocabulary).

    Raises:
        ValueError: the task's batches are of another kind.
    """
    first = _first_tensor(inputs)
    logits = _first_tensor(outputs)
    wanted = _first_tensor(targets)
    if first is None or logits is None or wanted is None:
        raise ValueError("inputs, targets or outputs hold no tensor")
    first = first[:count].cpu()
    wanted = wanted[:count].cpu()
    chosen = logits[:count].argmax(-1).cpu()
    if first.ndim == 4 and first.shape[1] in (1, 3) and logits.ndim == 2:
        for number, image in enumerate(first.float()):
            yield Image(f"samples/{number}", image.shape[1], image.shape[2], png(image))
        rows = [
            (str(number), str(one), str(other))
            for number, (one, other) in enumerate(_pairs(wanted, chosen))
        ]
    elif first.ndim == 2 and not first.is_floating_point() and logits.ndim == 3:
        texts = partial(_as_text, decode=decode)
        rows = [tuple(map(texts, three)) for three in zip(first, wanted, chosen, strict=True)]  # type: ignore[misc]
    else:
        shapes = f"{tuple(first.shape)} -> {tuple(logits.shape)}"
        raise ValueError(f"neither images with classes nor tokens with tokens ({shapes})")
    yield Text("samples/predictions", _table(("input", "target", "prediction"), rows))


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)


def _pairs(wanted: Tensor, chosen: Tensor) -> Iterable[tuple[int, int]]:
    return zip(wanted.flatten().tolist(), chosen.flatten().tolist(), strict=True)


def _as_text(numbers: Tensor, *, decode: Callable[[Sequence[int]], str]) -> str:
    kept = numbers[numbers >= 0][-_SHOWN_TOKENS:].tolist()  # below zero: left out of the loss
    return decode(kept)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, with nothing in a cell that would end it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |"
        for row in lines
    )


def png(image: Tensor) -> bytes:
    """PNG of floats (1 or 3, height, width), stretched from their least to their largest value."""
    low = image.min()
    high = image.max()
    whole = ((image - low) / (high - low).clamp(min=1e-12) * 255).byte()
    lines = b"".join(b"\0" + bytes(line.flatten().tolist()) for line in whole.permute(1, 2, 0))
    header = struct.pack(
        ">IIBBBBB", image.shape[2], image.shape[1], 8, 2 if image.shape[0] == 3 else 0, 0, 0, 0
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts
