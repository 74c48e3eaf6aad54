"""Conversations for supervised fine-tuning: tokens, with the assistant's alone as targets."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from framework.data.batches import WholeBatch
from framework.data.splits import Splits
from framework.data.tokens import Tokens
from framework.errors import ConfigError, counted
from framework.recipes.text.chat import (
    TEMPLATE_OF_BYTES,
    Message,
    open_tokenizer,
    pad_of,
    tokenized,
    vocab_size_of,
)
from framework.recipes.text.rows import Row, dealt, questions
from framework.system.host_value import HostValue, made_once_on_host

NO_TARGET: Final = -100
_ROLES: Final = {"human": "user", "gpt": "assistant", "function": "tool"}  # ShareGPT's
# Keys that may stand in place of content.
_INSTEAD: Final = ("tool_calls", "function_call", "reasoning_content")
_PARTS: Final = ("training", "evaluation")
Pair = tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]
"""Token numbers (n,) of a conversation, and a mask (n,) of those that the assistant wrote."""


class Conversations(torch.utils.data.Dataset[Any]):
    """Tokens (n,) int64 and their successors (n,) int64, -100 for those that the assistant did not
    write.

    Batches are padded to their longest, and no token attends to padding. Packed, a sample is a row
    of S tokens, a dict of ``input_ids`` and ``position_ids`` (S,), which begin anew with each
    conversation, beside its targets (S,).
    """

    def __init__(self, laid_out: HostValue, part: int, *, tokenizer: Any, row_size: int) -> None:
        """Take the results of `_lay_out` for all parts (`laid_out`), and the number of this one.
        `row_size` is 0 if conversations are not packed.
        """
        self._laid_out = laid_out
        self._part = part
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size_of(tokenizer)
        self._pad = pad_of(tokenizer)
        self._row_size = row_size
        self.tokens_per_sample = row_size or None
        if not row_size:
            self.collate_fn = self._pad_batch

    @property
    def tokens(self) -> Tokens:
        """All tokens, for the fingerprint of the data."""
        numbers, _, starts, *_ = self._laid_out.value[self._part]
        return Tokens(numbers, starts)

    @property
    def texts_per_row(self) -> float:
        """The number of conversations of equal length in each row that would have attention compute
        as much: all pairs of a row's positions, divided by the pairs within a conversation. The
        padding at a row's end counts as one; 1 where rows are not packed.
        """
        _, _, starts, rows, _ = self._laid_out.value[self._part]
        if not self._row_size or not len(self):
            return 1.0
        lengths = np.diff(starts) - 1  # the last token is only a target
        ends = np.concatenate(([0], np.cumsum(lengths)))[rows]
        room = self._row_size - np.diff(ends)
        pairs = (lengths.astype(float) ** 2).sum() + (room.astype(float) ** 2).sum()
        return float(self._row_size**2 * len(self) / pairs)

    @property
    def stated(self) -> str:
        """The numbers of conversations, and of those that were cut or left out, as text."""
        return str(self._laid_out.value[self._part][4])

    def __len__(self) -> int:
        return len(self._laid_out.value[self._part][3]) - 1

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        index = range(len(self))[index]
        numbers, learnt, starts, rows, _ = self._laid_out.value[self._part]
        ids: list[Any] = []
        positions: list[Any] = []
        targets: list[Any] = []
        for conversation in range(rows[index], rows[index + 1]):
            part = slice(starts[conversation], starts[conversation + 1])
            tokens = numbers[part].astype(np.int64)
            ids.append(tokens[:-1])
            positions.append(np.arange(len(tokens) - 1))
            targets.append(np.where(learnt[part][1:], tokens[1:], NO_TARGET))
        room = max(0, self._row_size - sum(map(len, ids)))
        ids.append(np.full(room, self._pad))
        positions.append(np.arange(room))  # padding is a conversation of its own
        targets.append(np.full(room, NO_TARGET))
        row_ids = torch.from_numpy(np.concatenate(ids))
        row_positions = torch.from_numpy(np.concatenate(positions))
        row_targets = torch.from_numpy(np.concatenate(targets))
        if self._row_size:
            return {"input_ids": row_ids, "position_ids": row_positions}, row_targets
        return row_ids, row_targets

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Read samples: packed rows as a whole batch, which takes as many calls as one row;
        otherwise a list.
        """
        if not self._row_size:
            return [self[index] for index in indices]
        numbers, learnt, starts, rows, _ = self._laid_out.value[self._part]
        firsts = rows[np.asarray(indices)]
        ends = rows[np.asarray(indices) + 1]
        # A number for each conversation of the batch, then for each of its tokens but the last,
        # which is only a target.
        row_of = np.repeat(np.arange(len(indices)), ends - firsts)
        conversations = _ramps(ends - firsts) + firsts[row_of]
        lengths = starts[conversations + 1] - starts[conversations] - 1
        positions = _ramps(lengths)
        sources = positions + np.repeat(starts[conversations], lengths)
        row_lengths = np.bincount(row_of, weights=lengths, minlength=len(indices)).astype(np.int64)
        places = _ramps(row_lengths)
        of_tokens = np.repeat(np.arange(len(indices)), row_lengths), places
        shape = (len(indices), self._row_size)
        batch_ids = np.full(shape, self._pad, np.int64)
        batch_ids[of_tokens] = numbers[sources]
        batch_targets = np.full(shape, NO_TARGET, np.int64)
        following = numbers[sources + 1].astype(np.int64)
        batch_targets[of_tokens] = np.where(learnt[sources + 1], following, NO_TARGET)
        # Padding is a conversation of its own.
        batch_positions = np.arange(self._row_size) - row_lengths[:, None]
        batch_positions[of_tokens] = positions
        inputs = {
            "input_ids": torch.from_numpy(batch_ids),
            "position_ids": torch.from_numpy(batch_positions),
        }
        return WholeBatch((inputs, torch.from_numpy(batch_targets)))

    def _pad_batch(self, samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        ids, targets = zip(*samples, strict=True)
        return (
            pad_sequence(list(ids), batch_first=True, padding_value=self._pad),
            pad_sequence(list(targets), batch_first=True, padding_value=NO_TARGET),
        )


def _ramps(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return 0, 1, ... up to each length, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    ramps: npt.NDArray[np.int64] = np.arange(total) - np.repeat(ends - lengths, lengths)
    return ramps


def messages_of(row: Row) -> list[Message]:
    """Return the messages of a row: its ``messages``, its ``prompt`` and ``completion``, or its
    ``conversations`` (ShareGPT's form).

    Raises:
        ValueError: it has none of these, or a message without role or content.
    """
    turns = row.get("conversations")
    messages: Any
    if "prompt" in row and "completion" in row:
        messages = list(_as_messages(row["prompt"], "user"))
        messages += _as_messages(row["completion"], "assistant")
    elif isinstance(turns, list):
        messages = []
        for turn in turns:
            if isinstance(turn, dict):
                role = str(turn.get("from", ""))
                messages.append({"role": _ROLES.get(role, role), "content": turn.get("value")})
    else:
        messages = row.get("messages", ())
    if not isinstance(messages, list) or not messages or not all(map(_has_role, messages)):
        raise ValueError(
            "it has neither messages of a role each, nor prompt and completion, nor conversations"
        )
    for number, message in enumerate(messages, start=1):
        if message.get("content") is None and not any(map(message.get, _INSTEAD)):
            raise ValueError(f"message {number}, of role {message['role']}, has no content")
    return messages


def _has_role(message: Any) -> bool:
    return isinstance(message, dict) and bool(message.get("role"))


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
    """Build the conversations of training and evaluation; one rank of a host makes their tokens.

    Arguments are the keys of `config.data.Conversations`.

    Raises:
        ConfigError: a file, the tokenizer or the template cannot be used, or nothing is left to
            learn (``nothing-to-learn``).
    """
    template = chat_template or None
    if template is None and not tokenizer:
        template = TEMPLATE_OF_BYTES
    chats = open_tokenizer(tokenizer, template)

    def make(place: str, row: Row) -> Pair:
        return tokenized(chats, messages_of(row), row.get("tools"), place)

    def make_parts() -> list[Any]:
        parts = dealt((path, eval_path), eval_fraction, make, questions)
        made_parts = []
        for part, name in zip(parts, _PARTS, strict=True):
            made_parts.append(_lay_out(part, name, sequence_length, too_long, packing))
        return made_parts

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
    laid_out = made_once_on_host(f"{Path.cwd()} {subject}", make_parts)
    row_size = sequence_length if packing else 0
    training = Conversations(laid_out, 0, tokenizer=chats, row_size=row_size)
    evaluation = Conversations(laid_out, 1, tokenizer=chats, row_size=row_size)
    if len(training) == 0:
        reason = "no conversation has an answer of the assistant within sequence_length"
        fix = "look at data.path"
        raise ConfigError.of("nothing-to-learn", reason, fix, "data.path", path)
    if len(evaluation) == 0:
        return Splits(training, None)
    return Splits(training, evaluation)


def _lay_out(
    pairs: list[Pair], name: str, length: int, too_long: str, packing: bool
) -> tuple[Any, ...]:
    """Lay the conversations of part `name` end to end, in rows of at most `length` tokens.

    Returns:
        The tokens uint32, a mask of those that are targets, the starts of conversations and the
        end, the first conversation of every row and the number of all, and a description of what
        was cut or left out.
    """
    limit = length + 1  # the last token is only a target
    drops = too_long == "drop"
    fitting = []
    for ids, learnt in pairs:
        if len(ids) <= limit or not drops:
            fitting.append((ids[:limit], learnt[:limit]))
    answered = [(ids, learnt) for ids, learnt in fitting if learnt[1:].any()]
    rows = list(range(len(answered) + 1))
    if packing:
        order, rows = best_fit([len(ids) - 1 for ids, _ in answered], length)
        answered = [answered[number] for number in order]
    all_ids = [np.zeros(0, np.uint32)]
    all_learnt = [np.zeros(0, bool)]
    for ids, learnt in answered:
        all_ids.append(ids)
        all_learnt.append(learnt)
    starts = np.cumsum([len(ids) for ids in all_ids])
    ids = np.concatenate(all_ids)
    learnt = np.concatenate(all_learnt)
    facts = [f"{name}: {len(answered):,} of {counted(len(pairs), 'conversation')}"]
    facts.append(f"{int(learnt.sum()):,} of {len(ids):,} tokens are learnt")
    num_long = sum(len(ids) > limit for ids, _ in pairs)
    num_unanswered = len(fitting) - len(answered)
    facts += _describe_losses(num_long, num_unanswered, limit=limit, drops=drops)
    if packing and answered:
        num_rows = len(rows) - 1
        share = (len(ids) - len(answered)) / (length * num_rows)
        facts.append(f"packed into {counted(num_rows, 'row')}, {share:.1%} full")
    return ids, learnt, starts, np.array(rows), "; ".join(facts)


def _describe_losses(
    num_long: int, num_unanswered: int, *, limit: int, drops: bool
) -> Iterator[str]:
    """Yield how many conversations are cut after `limit` tokens, or left out if too long (`drops`),
    and how many have no answer in what is left of them.
    """
    if num_long and drops:
        yield f"{num_long} too long, left out"
    elif num_long:
        yield f"{num_long} too long, cut after {limit} tokens"
    if num_unanswered and num_long:
        yield f"{num_unanswered} without an answer there, left out"
    elif num_unanswered:
        yield f"{num_unanswered} without an answer, left out"


def best_fit(lengths: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """Pack conversations into rows of at most `size` tokens. Returns their numbers, row after row,
    and the index in these at which every row begins, and the last ends.

    The longest first, each into the row that it leaves the least room in (best-fit decreasing; Ding
    et al. 2024, "Fewer Truncations Improve Language Modeling").
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, row), in ascending order
    for number in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        best = bisect_left(rooms, (lengths[number], -1))
        if best < len(rooms):
            room, row = rooms.pop(best)
        else:
            room = size
            row = len(rows)
            rows.append([])
        rows[row].append(number)
        insort(rooms, (room - lengths[number], row))
    order: list[int] = []
    starts = [0]
    for row_numbers in rows:
        order += row_numbers
        starts.append(len(order))
    return order, starts
