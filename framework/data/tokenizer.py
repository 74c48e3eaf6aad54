"""Tokenizers, from text to token numbers: of bytes, or of Hugging Face's `tokenizers`, from a file
or trained here.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from framework.config.data import BYTE_VOCAB_SIZE
from framework.data.token_files import TOKENIZER_FILE, SpecialTokens
from framework.data.tokenizer_numbers import read_numbers
from framework.data.tokens import Corpus, EvaluationShare, Numbers, Tokens
from framework.errors import ConfigError, in_one_line

# Kind of a special token -> its names in known tokenizers, the best first, which is also its name
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


class ByteTokenizer:
    """Token numbers 0 to 255 are the bytes; five special tokens follow. Reads anything, needs no
    file.
    """

    kind: Literal["bytes", "library"] = "bytes"
    vocab_size = BYTE_VOCAB_SIZE
    special = SpecialTokens(end=256, cls=257, sep=258, mask=259, pad=260)
    needs_utf8 = False

    def encode(self, texts: Sequence[bytes]) -> list[Numbers]:
        """Return the token numbers of each text, here (len(text),) uint8 without a copy. A special
        token's name in the text is text.
        """
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text, without special tokens, and with U+FFFD for bytes that are no whole
        character.
        """
        text = bytes(number for number in numbers if number < self.special.end)
        return text.decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write the files that decoding needs: none for bytes."""


class LibraryTokenizer:
    """A tokenizer of the library `tokenizers`. If it has an end token it gets no further one, so
    that a published vocabulary keeps the size that published models have; otherwise an end token is
    added after its own tokens.
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
            # The library counts on from the number of tokens.
            if len(set(numbers.values())) < len(numbers):
                reason = (
                    "its numbers have gaps, and the end token that it lacks would get the "
                    "number of another token"
                )
                raise ValueError(reason)
        special = {kind: numbers[name] for kind, name in special_names(tokenizer).items()}
        self.special = SpecialTokens.model_validate(special)
        self.vocab_size = max(numbers.values()) + 1  # numbers may have gaps

    def encode(self, texts: Sequence[bytes]) -> list[Numbers]:
        """Return the token numbers of each text, (n,) uint32; the library uses all cores for many
        texts.
        """
        # Otherwise a text that quotes "<|end|>" would end the document.
        self._tokenizer.encode_special_tokens = True
        encodings = self._tokenizer.encode_batch_fast(
            [text.decode() for text in texts], add_special_tokens=False
        )
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, numbers: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(numbers), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / TOKENIZER_FILE), pretty=False)


Tokenizer = ByteTokenizer | LibraryTokenizer


def special_names(tokenizer: Any) -> dict[str, str]:
    """Return the special tokens that a `tokenizers.Tokenizer` has: kind -> name."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    names = {}
    for kind, aliases in _ALIASES.items():
        for name in aliases:
            if name in vocabulary:
                names[kind] = name
                break
    return names


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
    read_numbers(file, key="--tokenizer", value=path)
    try:
        return LibraryTokenizer(library.Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises bare Exceptions
        reason = f"it cannot be read as a tokenizer ({in_one_line(error)})"
        fix = "name a tokenizer.json of the library tokenizers"
        raise ConfigError.of("tokenizer-unreadable", reason, fix, "--tokenizer", path) from error


def train_bpe(texts: Iterable[bytes], *, vocab_size: int) -> LibraryTokenizer:
    """Train a byte-level BPE as GPT-2's on texts; the same texts give the same tokenizer.

    Args:
        texts: UTF-8. Memory grows with the number of different words among them.
        vocab_size: at least `SMALLEST_BPE`, the special tokens included; a small text may give
            fewer.

    Raises:
        ConfigError: kind ``package-missing``. Errors of `texts` come through.
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


# The sources of Python's standard library are text: real documents that are on every machine that
# can train. They are read into memory at each start (under 5 MB in some ten milliseconds): no cache
# that could be stale or half-written, and nothing for the ranks of a host to agree on. Another
# version of Python has other sources.
_EVAL_FRACTION: Final = 0.1
_MOST_BYTES: Final = 8 << 20


def python_sources() -> Corpus:
    """Read the modules directly in the library's folder, in alphabetical order, each as a document
    of bytes: every tenth for evaluation (see `EvaluationShare`), the others for training.

    Raises:
        ConfigError: kind ``text-not-found``: Python came without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = _texts(folder)
    if len(texts) < 20:  # too few to divide between training and evaluation
        reason = f"this Python has no sources in {folder}"
        fix = "name a folder made by dsf prepare"
        raise ConfigError.of("text-not-found", reason, fix, "data.path", None)
    share = EvaluationShare(_EVAL_FRACTION)
    training = []
    evaluation = []
    for text in texts:
        if share.takes(len(text)):
            evaluation.append(text)
        else:
            training.append(text)
    return Corpus(
        _tokens(training), _tokens(evaluation), ByteTokenizer.vocab_size, ByteTokenizer.special
    )


def _texts(folder: Path) -> list[bytes]:
    """Read the Python files of a folder, in alphabetical order, up to `_MOST_BYTES` in all; empty
    and unreadable ones are left out.
    """
    texts: list[bytes] = []
    room = _MOST_BYTES
    for path in sorted(folder.glob("*.py")):
        # _sysconfigdata has the settings that this one Python was compiled with.
        if path.name.startswith("_sysconfigdata"):
            continue
        with suppress(OSError):
            text = path.read_bytes()
            room -= len(text)
            if room < 0:
                break
            if text:
                texts.append(text)
    return texts


def _tokens(texts: list[bytes]) -> Tokens:
    """Join texts into tokens of bytes, each text ended by the end token."""
    lengths = [len(text) + 1 for text in texts]
    numbers = np.empty(sum(lengths), dtype=np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    for text, start, end in zip(texts, offsets[:-1], offsets[1:], strict=True):
        numbers[start : end - 1] = np.frombuffer(text, dtype=np.uint8)
        numbers[end - 1] = ByteTokenizer.special.end
    return Tokens(numbers, offsets)
