"""From text to token numbers: bytes, or a tokenizer of Hugging Face's `tokenizers`, from a file or
trained here.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from framework.config.data import BYTE_VOCAB_SIZE
from framework.data.token_files import TOKENIZER_FILE, SpecialTokens
from framework.data.tokens import Corpus, EvaluationShare, Numbers, Tokens
from framework.errors import ConfigError, counted, in_one_line

# What known tokenizers call the special tokens, the best first, which is also what they are called
# here. [SEP] and </s> may end documents too; the end of a document is learnt.
_ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "end": ("<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<sep>"),
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
}
_NAMES: Final = [aliases[0] for aliases in _ALIASES.values()]
SMALLEST_BPE: Final = 256 + len(_NAMES)
_LARGEST_TOKENIZER: Final = 1 << 30
# Published tokenizers leave some hundreds of numbers out.
_MOST_GAPS: Final = 4
_FEW_GAPS: Final = 1 << 16
_BEYOND_ALL: Final = 1 << 62


class ByteTokenizer:
    """Token numbers 0 to 255 are the bytes; five special tokens follow. Reads anything, needs no
    file.
    """

    kind: Literal["bytes", "library"] = "bytes"
    vocab_size = BYTE_VOCAB_SIZE
    special = SpecialTokens(end=256, cls=257, sep=258, mask=259, pad=260)
    needs_utf8 = False

    def encode(self, texts: Sequence[bytes]) -> list[Numbers]:
        """Token numbers of each text, without special tokens: what looks like one in the text is
        text.

        Here (len(text),) uint8 each, without a copy.
        """
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, numbers: Sequence[int]) -> str:
        """The text; special tokens are left out, and U+FFFD stands where bytes are no whole
        character.
        """
        return bytes(number for number in numbers if number < self.special.end).decode(
            errors="replace"
        )

    def save(self, folder: Path) -> None:
        """Write what is needed to turn numbers into text again: for bytes nothing."""


class LibraryTokenizer:
    """A tokenizer of the library `tokenizers`. One that can end a document gets no further token,
    so that a published vocabulary keeps its size, which is the published models'; to any other an
    end token is added behind its own.
    """

    kind: Literal["bytes", "library"] = "library"
    needs_utf8 = True

    def __init__(self, tokenizer: Any) -> None:
        """Take over a `tokenizers.Tokenizer`: it is changed.

        Raises:
            ValueError: it has no end token, and an added one would get the number of another token.
        """
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        numbers = tokenizer.get_vocab(with_added_tokens=True)
        if not any(alias in numbers for alias in _ALIASES["end"]):
            tokenizer.add_special_tokens([_NAMES[0]])
            numbers = tokenizer.get_vocab(with_added_tokens=True)
            # the library counts on from the number of tokens
            if len(set(numbers.values())) < len(numbers):
                reason = (
                    "its numbers have gaps, and the end token that it lacks would get the "
                    "number of another token"
                )
                raise ValueError(reason)
        found = {kind: numbers[name] for kind, name in special_names(tokenizer).items()}
        self.special = SpecialTokens.model_validate(found)
        self.vocab_size = max(numbers.values()) + 1  # numbers may have gaps

    def encode(self, texts: Sequence[bytes]) -> list[Numbers]:
        """(n,) uint32 each; the library uses all cores for many texts."""
        # Otherwise a text that quotes "<|end|>" would end the document.
        self._tokenizer.encode_special_tokens = True
        encoded = self._tokenizer.encode_batch_fast(
            [text.decode() for text in texts], add_special_tokens=False
        )
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, numbers: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(numbers), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / TOKENIZER_FILE), pretty=False)


Tokenizer = ByteTokenizer | LibraryTokenizer


def special_names(tokenizer: Any) -> dict[str, str]:
    """Kind of a special token -> its name in a `tokenizers.Tokenizer`, of those that it has."""
    held = tokenizer.get_vocab(with_added_tokens=True)
    found = {
        kind: next((name for name in aliases if name in held), None)
        for kind, aliases in _ALIASES.items()
    }
    return {kind: name for kind, name in found.items() if name is not None}


def load_tokenizer(path: str) -> LibraryTokenizer:
    """Read a ``tokenizer.json``.

    Raises:
        ConfigError: kinds ``package-missing``, ``tokenizer-not-found``, ``tokenizer-unreadable``.
    """
    library = _library()
    file = Path(path).expanduser()
    if not os.path.isfile(file):  # noqa: PTH113 - of a name that is too long as well
        reason = "there is no such file"
        fix = "name a tokenizer.json, or bytes"
        raise ConfigError.of("tokenizer-not-found", reason, fix, "--tokenizer", path)
    refuse_far_numbers(file, key="--tokenizer", value=path)
    try:
        return LibraryTokenizer(library.Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises bare Exceptions
        reason = f"it cannot be read as a tokenizer ({in_one_line(error)})"
        fix = "name a tokenizer.json of the library tokenizers"
        raise ConfigError.of("tokenizer-unreadable", reason, fix, "--tokenizer", path) from error


def refuse_far_numbers(file: Path, *, key: str, value: str | None) -> None:
    """See that the numbers of a ``tokenizer.json`` are near the count of its tokens, before the
    library reads it: that takes memory for each number in between, and a model has weights for
    them.

    Raises:
        ConfigError: kind ``tokenizer-unreadable``.
    """
    try:
        if file.stat().st_size > _LARGEST_TOKENIZER:
            return
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):  # as the library will find
        return
    numbers = list(_numbers_of(found))
    largest = max(numbers, default=0)
    if largest < _MOST_GAPS * len(numbers) + _FEW_GAPS:
        return
    reason = (
        f"it has {counted(len(numbers), 'token')}, and one of them has the number {largest:.6g}"
    )
    fix = "name a tokenizer.json with numbers that follow each other"
    raise ConfigError.of("tokenizer-unreadable", reason, fix, key, value)


def _numbers_of(tokenizer: Any) -> Iterator[int]:
    if isinstance(tokenizer, dict):
        model = tokenizer.get("model")
    else:
        model = None
    if isinstance(model, dict):
        vocabulary = model.get("vocab")
    else:
        vocabulary = None
    if isinstance(vocabulary, list):  # whose numbers are the places
        yield from range(len(vocabulary))
    values: list[Any] = []
    if isinstance(vocabulary, dict):
        values += vocabulary.values()
    if isinstance(tokenizer, dict):
        added = tokenizer.get("added_tokens")
    else:
        added = None
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            values.append(token.get("id"))
    for value in values:
        if isinstance(value, int):
            yield min(value, _BEYOND_ALL)


def train_bpe(texts: Iterable[bytes], *, vocab_size: int) -> LibraryTokenizer:
    """Byte-level BPE as GPT-2's, learnt from the texts; the same texts give the same tokenizer.

    Args:
        texts: UTF-8. Memory grows with the number of different words among them.
        vocab_size: at least `SMALLEST_BPE`, the special tokens included; a small text may give
            fewer.

    Raises:
        ConfigError: kind ``package-missing``; whatever `texts` raises comes through.
    """
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=_NAMES,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode() for text in texts), trainer=trainer)
    return LibraryTokenizer(tokenizer)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        reason = f"it needs the package tokenizers, which cannot be imported ({error})"
        fix = (
            "in the checkout: ./launch.sh setup text, or pip install -e '.[text]'; or use "
            "--tokenizer bytes"
        )
        raise ConfigError.of("package-missing", reason, fix, "--tokenizer") from error
    return tokenizers


# The sources of Python's standard library as text: real documents that are on every machine that
# can train. They are read into memory at each start (under 5 MB in some ten milliseconds): no cache
# that could be stale or half-written, and nothing for the ranks of a host to agree on. Another
# version of Python has other sources.
_EVAL_FRACTION: Final = 0.1
_MOST_BYTES: Final = 8 << 20


def python_sources() -> Corpus:
    """The modules directly in the library's folder, in alphabetical order, a document each, byte by
    byte.

    Returns:
        Every tenth module for evaluation (see `EvaluationShare`), the others for training.

    Raises:
        ConfigError: kind ``text-not-found``, where Python came without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = _texts(folder)
    if len(texts) < 20:  # too few to deal between training and evaluation
        reason = f"this Python has no sources in {folder}"
        fix = "name a folder made by python -m framework prepare"
        raise ConfigError.of("text-not-found", reason, fix, "data.path", None)
    share = EvaluationShare(_EVAL_FRACTION)
    dealt: dict[bool, list[bytes]] = {False: [], True: []}
    for text in texts:
        dealt[share.takes(len(text))].append(text)
    return Corpus(
        _tokens(dealt[False]), _tokens(dealt[True]), ByteTokenizer.vocab_size, ByteTokenizer.special
    )


def _texts(folder: Path) -> list[bytes]:
    texts: list[bytes] = []
    room = _MOST_BYTES
    for path in sorted(folder.glob("*.py")):
        with suppress(OSError):
            # _sysconfigdata says how this one Python was compiled.
            if path.name.startswith("_sysconfigdata"):
                text = b""
            else:
                text = path.read_bytes()
            room -= len(text)
            if room < 0:
                break
            texts += [text] if text else []
    return texts


def _tokens(texts: list[bytes]) -> Tokens:
    lengths = [len(text) + 1 for text in texts]
    numbers = np.empty(sum(lengths), dtype=np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    for text, start, end in zip(texts, offsets[:-1], offsets[1:], strict=True):
        numbers[start : end - 1] = np.frombuffer(text, dtype=np.uint8)
        numbers[end - 1] = ByteTokenizer.special.end
    return Tokens(numbers, offsets)
