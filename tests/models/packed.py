"""Packed rows, and a kernel for texts of different lengths on the CPU, by its definition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from framework.engine.step_batches import DeviceBatches
from framework.models import packed_attention

Rows = Sequence[Sequence[int]]
ROWS: Rows = ((3, 5, 8), (16,), (1, 1, 14), (10, 6))


def places_of(rows: Rows) -> Tensor:
    """Places of the tokens of rows, of each of which the lengths of its texts are given."""
    return torch.tensor([[place for text in row for place in range(text)] for row in rows])


def places_on_meta(rows: Rows) -> Tensor:
    """Places on a device from which nothing can be read, with what was noted on the host."""
    places = places_of(rows)
    packed_attention.note_texts(places)
    moved: Tensor = DeviceBatches(torch.device("meta")).move(places)
    return moved


def _weights(query: Tensor, key: Tensor, scale: float | None, window: int) -> Tensor:
    """Weights of attention (heads, tokens, tokens) in one text, queries (tokens, heads, size)."""
    repeats = query.shape[1] // key.shape[1]
    keys = key.float().repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * (scale or query.shape[-1] ** -0.5)
    seen = torch.ones(len(query), len(query), dtype=torch.bool).tril()
    if window >= 0:
        seen = seen.triu(-window)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


class KernelByDefinition:
    """Forward and backward pass of torch's kernel, which has none for the CPU."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int, int]] = []
        self.dropouts: list[float] = []

    def forward(self, *given: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Compute attention of (query, key, value, starts, starts, longest, longest, is_causal,
        scale, window).
        """
        query, key, value, starts = given[:4]
        scale, window = given[8:10]
        self.calls.append((starts.tolist(), given[5], window[0]))
        mixed = torch.zeros_like(query)
        for start, end in pairwise(starts):
            text = slice(start, end)
            weights = _weights(query[text], key[text], scale, window[0])
            values = value[text].float().repeat_interleave(query.shape[1] // key.shape[1], 1)
            mixed[text] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
        sums = torch.zeros(query.shape[1], query.shape[0])
        return mixed, sums, torch.zeros(2, dtype=torch.uint64)

    def forward_with_dropout(self, *given: Any, **options: Any) -> tuple[Tensor, ...]:
        """Compute the same, without leaving anything out, of torch's operator under the kernel:
        (query, key, value, starts, starts, longest, longest, dropout, is_causal).
        """
        self.dropouts.append(given[7])
        window = [options["window_size_left"], options["window_size_right"]]
        assert given[8] == (window == [-1, 0])
        mixed, sums, state = self.forward(*given[:7], given[8], options["scale"], window)
        return mixed, sums, state, state, mixed.new_empty(0)

    def backward_with_dropout(self, *given: Any, **options: Any) -> tuple[Tensor, ...]:
        """Compute `backward`, of (gradient, query, key, value, output, sums, starts, starts,
        longest, longest, dropout, is_causal, state).
        """
        self.dropouts.append(given[10])
        window = [options["window_size_left"], options["window_size_right"]]
        return self.backward(*given[:10], given[11], given[12], options["scale"], window)

    @staticmethod
    def backward(*given: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of (query, key, value), from (gradient, query, key, value, output,
        sums, starts, starts, longest, longest, is_causal, state, scale, window).
        """
        gradient, query, key, value, mixed, _, starts = given[:7]
        scale, window = given[12:14]
        repeats = query.shape[1] // key.shape[1]
        factor = scale or query.shape[-1] ** -0.5
        made = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for start, end in pairwise(starts):
            text = slice(start, end)
            weights = _weights(query[text], key[text], scale, window[0])
            upper = gradient[text].float()
            keys, values = (
                tensor[text].float().repeat_interleave(repeats, 1) for tensor in (key, value)
            )
            of_weights = torch.einsum("qhd,khd->hqk", upper, values)
            own = (upper * mixed[text].float()).sum(-1).T[..., None]
            of_scores = weights * (of_weights - own) * factor
            shape = (end - start, -1, repeats, query.shape[-1])
            made[0][text] = torch.einsum("hqk,khd->qhd", of_scores, keys).to(query.dtype)
            for place, product in (
                (1, torch.einsum("hqk,qhd->khd", of_scores, query[text].float())),
                (2, torch.einsum("hqk,qhd->khd", weights, upper)),
            ):
                made[place][text] = product.reshape(shape).sum(2).to(query.dtype)
        return made[0], made[1], made[2]


_registered: list[KernelByDefinition] = []
_library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def kernel_on_cpu(monkeypatch: Any) -> KernelByDefinition:
    """Let attention within texts take the kernel on the CPU for the time of a test."""
    import torch.nn.attention.varlen  # registers the operators

    if not _registered:
        kernel = KernelByDefinition()
        _registered.append(kernel)
        for name, function in (
            ("_varlen_attn", lambda *a, **k: kernel.forward(*a, **k)),
            ("_varlen_attn_backward", kernel.backward),
        ):
            torch.library.register_kernel(f"torch_attn::{name}", "cpu", function)
        with_dropout: dict[str, Any] = {
            "_flash_attention_forward": kernel.forward_with_dropout,
            "_flash_attention_backward": kernel.backward_with_dropout,
        }
        for operator, pass_ in with_dropout.items():
            _library.impl(operator, pass_, "CPU")  # type: ignore[no-untyped-call]
    monkeypatch.setattr(packed_attention, "_DEVICES_WITH_KERNEL", ["cuda", "cpu"])
    _registered[0].calls.clear()
    _registered[0].dropouts.clear()
    return _registered[0]


def kernel_on_meta(monkeypatch: Any) -> None:
    """Let attention within texts take the kernel on a device that has shapes alone."""
    monkeypatch.setattr(packed_attention, "_DEVICES_WITH_KERNEL", ["meta"])
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it knows no such device
