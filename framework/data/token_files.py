"""Contents of a token folder by ``meta.json`` and the sizes of its files, and requirements of text
datasets on one, for `check` and `plan` on a laptop. It needs no numpy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from framework.errors import ConfigError, Problem
from framework.system.files import make_own_folder, open_own

META_FILE: Final = "meta.json"
TOKENIZER_FILE: Final = "tokenizer.json"
KEPT_TOKENIZER: Final = "tokenizer"
PartName = Literal["train", "eval"]
PART_WORDS: Final[dict[PartName, str]] = {"train": "training", "eval": "evaluation"}
PREPARE: Final = "make it again with dsf prepare"
_LARGEST_META_BYTES: Final = 1 << 20
_ITEM_BYTES: Final = {"uint16": 2, "uint32": 4}


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileFacts(_Facts):
    """Facts about one file."""

    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class PartFacts(_Facts):
    """Facts about training or evaluation."""

    num_tokens: Annotated[int, Field(ge=1, lt=2**60)]
    num_documents: Annotated[int, Field(ge=1, lt=2**60)]


class SpecialTokens(_Facts):
    """The numbers of the tokens that stand for no text; None for one that the tokenizer lacks.
    Windows of text need the first only; pairs of segments need all.
    """

    end: int
    """Ends every document."""
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    pad: int | None = None


class Meta(_Facts):
    """Content of ``meta.json``."""

    # The second is the project's former name, in folders made before it changed.
    format: Literal["dsf-tokens", "dsframework-tokens"] = "dsf-tokens"
    version: Literal[1] = 1
    tokenizer: Literal["bytes", "library"]
    vocab_size: Annotated[int, Field(ge=1, le=2**31)]
    special_tokens: SpecialTokens
    dtype: Literal["uint16", "uint32"]
    parts: dict[PartName, PartFacts]
    files: dict[str, FileFacts]

    @model_validator(mode="after")
    def _holds_together(self) -> Meta:
        if "train" not in self.parts:
            raise ValueError("there is no train among the parts")
        numbers = self.special_tokens.model_dump(exclude_none=True).values()
        if not all(0 <= number < self.vocab_size for number in numbers):
            raise ValueError("a special token lies beyond vocab_size")
        for name, part in self.parts.items():
            sizes = {
                f"{name}.bin": part.num_tokens * _ITEM_BYTES[self.dtype],
                f"{name}.idx": 8 * part.num_documents + 8,
            }
            for file, size in sizes.items():
                if file not in self.files or self.files[file].size_bytes != size:
                    raise ValueError(
                        f"{file} must have {size} bytes by the number of its tokens and documents"
                    )
        return self


def read_meta(path: str, key: str) -> tuple[Path, Meta]:
    """Return the folder at a path, and its ``meta.json``; the other files are not looked at.

    In `path` ``~`` is the home folder; errors name the path as the value of `key`.

    Raises:
        ConfigError: kinds ``text-not-found``, ``text-not-prepared``, ``text-damaged``.
    """
    folder = Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib raises for an unknown user
    if not os.path.isdir(folder):  # noqa: PTH112 - and for a name that is too long
        fix = "name one made by dsf prepare"
        raise ConfigError.of("text-not-found", f"there is no folder {folder}", fix, key, path)
    file = folder / META_FILE
    if not file.is_file():
        reason = (
            f"there is no {META_FILE} in it: it was not made by prepare, or prepare did not finish"
        )
        raise ConfigError.of("text-not-prepared", reason, PREPARE, key, path)
    try:
        with file.open("rb") as stream:
            return folder, Meta.model_validate_json(stream.read(_LARGEST_META_BYTES))
    except (OSError, ValidationError) as error:
        raise ConfigError(damaged(file, _in_one_line(error), path, key)) from error


def keep_tokenizer(path: str, to: Path) -> None:
    """Copy the tokenizer of a token folder into ``<to>/tokenizer``: checkpoints outlive the token
    folder.

    Raises:
        OSError: it cannot be written.
    """
    folder = Path(os.path.expanduser(path))  # noqa: PTH111
    kept = to / KEPT_TOKENIZER
    make_own_folder(kept)
    for name in (TOKENIZER_FILE, META_FILE):
        if (folder / name).is_file():
            with (folder / name).open("rb") as source, open_own(kept / name, "wb") as copy:
                shutil.copyfileobj(source, copy)


def size_problems(folder: Path, meta: Meta, path: str, key: str) -> list[Problem]:
    """Return a problem for every file that is missing or has another size than in `meta`."""
    problems = []
    for name, facts in meta.files.items():
        reason = _size_fault(folder, name, facts.size_bytes)
        if reason:
            problems.append(damaged(folder / name, reason, path, key))
    return problems


def num_windows(num_tokens: int, length: int) -> int:
    """Count the windows of a length in a text; the last token of the text is only a target."""
    return (num_tokens - 1) // length


def num_pairs(num_tokens: int, length: int) -> int:
    """Count the pairs of segments in an epoch: all tokens would fill this many, and at least
    one.
    """
    return max(1, num_tokens // length)


def too_short(part: PartName, *, num_tokens: int, sequence_length: int) -> Iterator[Problem]:
    """Yield a problem for a text that is shorter than a window and its last target."""
    if num_tokens <= sequence_length:
        yield Problem(
            "text-too-short",
            f"the {PART_WORDS[part]} text has {num_tokens} tokens, and a window needs one more "
            "than it is long",
            f"set data.sequence_length: {num_tokens - 1} or less, or prepare more text",
            "data.sequence_length",
            sequence_length,
        )


def one_document(part: PartName, *, num_documents: int, path: str | None) -> Iterator[Problem]:
    """Yield a problem for a text of one document: half of the pairs of segments need another."""
    if num_documents < 2:
        reason = (
            f"the {PART_WORDS[part]} text is one document, and half of the pairs need another one"
        )
        fix = "prepare more files, or with --split-at-blank-lines"
        yield Problem("text-one-document", reason, fix, "data.path", path)


def no_pair_tokens(special: SpecialTokens, *, path: str | None) -> Iterator[Problem]:
    """Yield a problem for a tokenizer without the special tokens of pairs of segments."""
    numbers = special.model_dump()
    missing = [f"[{name.upper()}]" for name in numbers if numbers[name] is None]
    if missing:
        reason = f"its tokenizer has no {', '.join(missing)}, and pairs of segments need them"
        fix = "prepare it with --tokenizer bytes, the file of a BERT, or --train-tokenizer bpe:SIZE"
        yield Problem("text-without-special-tokens", reason, fix, "data.path", path)


def damaged(file: Path, reason: str, path: str, key: str) -> Problem:
    """Return the problem of a file that has changed since `prepare` wrote it."""
    return Problem("text-damaged", f"{file}: {reason}", PREPARE, key, path)


def _in_one_line(error: OSError | ValidationError) -> str:
    if isinstance(error, OSError):
        return f"it cannot be read ({error.strerror or error})"
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    if place:
        return f"{place}: {first['msg']}"
    return first["msg"]


def _size_fault(folder: Path, name: str, num_bytes: int) -> str:
    file = folder / name
    if file.parent != folder:
        return "it lies outside the folder"
    try:
        size = file.stat().st_size
        file.open("rb").close()
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return _in_one_line(error)
    if size != num_bytes:
        return f"it has {size:,} bytes instead of {num_bytes:,}"
    return ""
