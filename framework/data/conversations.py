"""Conversations for supervised fine-tuning: tokens, of which the assistant's alone are targets."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from framework.data.chat import (
    TEMPLATE_OF_BYTES,
    Message,
    open_tokenizer,
    pad_of,
    tokenized,
    vocab_size_of,
)
from framework.data.splits import Splits
from framework.data.text_rows import Row, dealt, questions
from framework.data.tokens import Tokens
from framework.errors import ConfigError, counted
from framework.system.host_value import HostValue, made_once_on_host

NO_TARGET: Final = -100
_ROLES: Final = {"human": "user", "gpt": "assistant", "function": "tool"}  # ShareGPT's
# what may stand in place of content
_INSTEAD: Final = ("tool_calls", "function_call", "reasoning_content")
_PARTS: Final = ("training", "evaluation")
Pair = tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]


class Conversations(torch.utils.data.Dataset[Any]):
    """Tokens (n,) int64 and their successors (n,) int64, -100 where the assistant did not write
    them.

    Batches are padded to their longest, and no token sees what pads. Packed, a sample is a row of S
    tokens, a dict of ``input_ids`` and ``position_ids`` (S,), which begin anew with each
    conversation, beside its targets (S,).
    """

    def __init__(self, held: HostValue, part: int, *, tokenizer: Any, row_size: int) -> None:
        """`held`: for each part what `_laid_out` returns; `row_size`: 0 where none is packed."""
        self._held = held
        self._part = part
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size_of(tokenizer)
        self._pad = pad_of(tokenizer)
        self._row_size = row_size
        self.tokens_per_sample = row_size or None
        if not row_size:
            self.collate_fn = self._padded

    @property
    def tokens(self) -> Tokens:
        """All of them, which tell these data from others."""
        numbers, _, starts, *_ = self._held.value[self._part]
        return Tokens(numbers, starts)

    @property
    def stated(self) -> str:
        """How many conversations there are, and what became of others."""
        return str(self._held.value[self._part][4])

    def __len__(self) -> int:
        return len(self._held.value[self._part][3]) - 1

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        index = range(len(self))[index]
        numbers, learnt, starts, rows, _ = self._held.value[self._part]
        ids = list[Any]()
        places = list[Any]()
        targets = list[Any]()
        for one in range(rows[index], rows[index + 1]):
            own = slice(starts[one], starts[one + 1])
            tokens = numbers[own].astype(np.int64)
            ids.append(tokens[:-1])
            places.append(np.arange(len(tokens) - 1))
            targets.append(np.where(learnt[own][1:], tokens[1:], NO_TARGET))
        room = max(0, self._row_size - sum(map(len, ids)))
        ids.append(np.full(room, self._pad))
        places.append(np.arange(room))  # as a conversation of its own
        targets.append(np.full(room, NO_TARGET))
        inputs, numbered, wanted = (
            torch.from_numpy(np.concatenate(part)) for part in (ids, places, targets)
        )
        return {"input_ids": inputs, "position_ids": numbered} if self._row_size else inputs, wanted

    def _padded(self, samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        both = zip(zip(*samples, strict=True), (self._pad, NO_TARGET), strict=True)
        ids, targets = (
            pad_sequence(list(part), batch_first=True, padding_value=value) for part, value in both
        )
        return ids, targets


def messages_of(row: Row) -> list[Message]:
    """The messages of a row, in any of the field's forms; a ValueError where it has none."""
    if "prompt" in row and "completion" in row:
        found = [
            *_as_messages(row["prompt"], "user"),
            *_as_messages(row["completion"], "assistant"),
        ]
    elif isinstance(turns := row.get("conversations"), list):
        named = [
            (str(one.get("from", "")), one.get("value")) for one in turns if isinstance(one, dict)
        ]
        found = [{"role": _ROLES.get(role, role), "content": text} for role, text in named]
    else:
        found = row.get("messages", ())
    if (
        not isinstance(found, list)
        or not all(isinstance(one, dict) and one.get("role") for one in found)
        or not found
    ):
        raise ValueError(
            "it has neither messages of a role each, nor prompt and completion, nor conversations"
        )
    for number, one in enumerate(found, start=1):
        if one.get("content") is None and not any(map(one.get, _INSTEAD)):
            raise ValueError(f"message {number}, of role {one['role']}, has no content")
    return found


def _as_messages(value: Any, role: str) -> list[Message]:
    if isinstance(value, list):
        return value
    return [{"role": role, "content": value}]


def build(
    path: str | None = None,
    *,
    eval_path: str | None = None,
    eval_fraction: float = 0.1,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    sequence_length: int = 512,
    packing: bool = False,
    too_long: str = "cut",
) -> Splits:
    """Conversations of training and evaluation; one rank of a host makes their tokens.

    Arguments are the keys of `config.data.Conversations`.

    Raises:
        ConfigError: a file, the tokenizer or the template cannot be used, or nothing is left to
            learn (``nothing-to-learn``).
    """
    chats = open_tokenizer(tokenizer, chat_template or (None if tokenizer else TEMPLATE_OF_BYTES))

    def make(place: str, row: Row) -> Pair:
        return tokenized(chats, messages_of(row), row.get("tools"), place)

    def make_parts() -> list[Any]:
        parts = dealt((path, eval_path), eval_fraction, make, questions)
        return [
            _laid_out(part, name, sequence_length, too_long, packing)
            for part, name in zip(parts, _PARTS, strict=True)
        ]

    subject = (
        path,
        eval_path,
        eval_fraction,
        tokenizer,
        chat_template,
        sequence_length,
        packing,
        too_long,
    )
    held = made_once_on_host(f"{Path.cwd()} {subject}", make_parts)
    row_size = sequence_length * packing
    made = partial(Conversations, held, tokenizer=chats, row_size=row_size)
    if len(made(0)) == 0:
        reason = "no conversation has an answer of the assistant within sequence_length"
        fix = "look at data.path"
        raise ConfigError.of("nothing-to-learn", reason, fix, "data.path", path)
    return Splits(made(0), made(1) if len(made(1)) else None)


def _laid_out(
    pairs: list[Pair], name: str, length: int, too_long: str, packing: bool
) -> tuple[Any, ...]:
    """Tokens uint32, which are targets, starts of conversations, the first conversation of every
    row; and what was left out, as text.
    """
    limit = length + 1
    drops = too_long == "drop"
    fitting = [
        (ids[:limit], learnt[:limit]) for ids, learnt in pairs if len(ids) <= limit or not drops
    ]
    kept = [pair for pair in fitting if pair[1][1:].any()]
    num_long = sum(len(ids) > limit for ids, _ in pairs)
    rows = list(range(len(kept) + 1))
    if packing:
        order, rows = best_fit([len(ids) - 1 for ids, _ in kept], length)
        kept = [kept[number] for number in order]
    starts = np.cumsum([0, *(len(ids) for ids, _ in kept)])
    ids = np.concatenate([np.zeros(0, np.uint32), *(ids for ids, _ in kept)])
    learnt = np.concatenate([np.zeros(0, bool), *(learnt for _, learnt in kept)])
    stated = [f"{name}: {len(kept):,} of {counted(len(pairs), 'conversation')}"]
    stated.append(f"{int(learnt.sum()):,} of {len(ids):,} tokens are learnt")
    if num_long:
        stated.append(
            f"{num_long} too long, {'left out' if drops else f'cut after {limit} tokens'}"
        )
    lost = len(fitting) - len(kept)
    if lost:
        stated.append(f"{lost} without an answer{' there' if num_long else ''}, left out")
    if packing and kept:
        share = (len(ids) - len(kept)) / (length * (len(rows) - 1))
        stated.append(f"packed into {counted(len(rows) - 1, 'row')}, {share:.1%} full")
    return ids, learnt, starts, np.array(rows), "; ".join(stated)


def best_fit(lengths: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """Numbers of conversations, row after row, and where in them every row begins and the last
    ends.

    The longest first, each into the row that it leaves the least room in (best-fit decreasing; Ding
    et al. 2024, "Fewer Truncations Improve Language Modeling"): rows hold at most `size`.
    """
    rows = list[list[int]]()
    rooms = list[tuple[int, int]]()
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        place = bisect_left(rooms, (lengths[number], -1))
        room, row = rooms.pop(place) if place < len(rooms) else (size, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        insort(rooms, (room - lengths[number], row))
    starts = np.cumsum([0, *map(len, rows)]).tolist()
    return [number for row in rows for number in row], starts
