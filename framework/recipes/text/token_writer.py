"""Writers of a token folder: aside first, ``meta.json`` last, then one rename."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

import numpy as np

from framework.data.token_files import META_FILE, FileFacts, Meta, PartFacts, PartName
from framework.data.tokenizer import Tokenizer
from framework.data.tokens import EvaluationShare, MappedFrom, Numbers, map_tokens
from framework.recipes.text.documents import TextPiece
from framework.system.files import hash_file, write_new

_BLOCK: Final = 1 << 20


class PartWriter:
    """``<name>.bin`` and ``<name>.idx``, appended to piece by piece."""

    def __init__(self, folder: Path, name: PartName, *, dtype: str, end: int) -> None:
        """Create both files; `end` is the number of the end token."""
        self.name = name
        self.source = MappedFrom(folder / f"{name}.bin", folder / f"{name}.idx", dtype)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._end = np.array([end], dtype=self._dtype)
        self._numbers = self.source.numbers.open("w+b")
        self._offsets = self.source.offsets.open("w+b")
        self.num_tokens = 0
        self.num_documents = 0
        self._start = 0  # of the current document
        self._note_start()

    def add(self, numbers: Numbers, *, ends: bool) -> None:
        """Append to the current document; one that ends without a token is left out."""
        self._write(numbers)
        if ends and self.num_tokens > self._start:
            self._write(self._end)
            self._start = self.num_tokens
            self.num_documents += 1
            self._note_start()

    def move_tail(self, to: PartWriter, num_tokens: int) -> None:
        """Move the last `num_tokens` tokens to another part. A document that this cuts becomes two,
        each ended by the end token. Nothing is moved if one of the parts would be left empty.
        """
        self.flush()
        tokens = map_tokens(self.source)
        cut = len(tokens.numbers) - num_tokens
        document = int(np.searchsorted(tokens.offsets, cut, side="right")) - 1
        start, end = tokens.offsets[document : document + 2].tolist()
        if end - cut < 2:  # only its end token would move
            cut = end
            start = end
            document += 1
        if not 0 < cut < len(tokens.numbers):
            return
        for first, last in pairwise([cut, *tokens.offsets[document + 1 :].tolist()]):
            for begin in range(first, last - 1, _BLOCK):
                to.add(tokens.numbers[begin : min(begin + _BLOCK, last - 1)], ends=False)
            to.add(self._end[:0], ends=True)  # no token, but the end of the document
        del tokens  # the files shrink under the map
        self._shrink(cut, num_documents=document, start=start)

    def flush(self) -> None:
        """Flush both files to the disk."""
        for stream in (self._numbers, self._offsets):
            stream.flush()
            os.fsync(stream.fileno())

    def close(self) -> None:
        """Close both files."""
        self._numbers.close()
        self._offsets.close()

    def _shrink(self, num_tokens: int, *, num_documents: int, start: int) -> None:
        """Keep the first tokens: whole documents, and the rest of one that starts at `start`."""
        self._numbers.truncate(num_tokens * self._dtype.itemsize)
        self._offsets.truncate(8 * (num_documents + 1))
        self._numbers.seek(0, os.SEEK_END)
        self._offsets.seek(0, os.SEEK_END)
        self.num_tokens = num_tokens
        self.num_documents = num_documents
        self._start = start
        self.add(self._end[:0], ends=True)

    def _write(self, numbers: Numbers) -> None:
        self._numbers.write(numbers.astype(self._dtype, copy=False).tobytes())
        self.num_tokens += len(numbers)

    def _note_start(self) -> None:
        self._offsets.write(np.array([self.num_tokens], dtype="<i8").tobytes())


class FolderWriter:
    """Writer of a training and an evaluation part."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, eval_fraction: float) -> None:
        """Start both parts in a folder that exists."""
        self._folder = folder
        self._tokenizer = tokenizer
        self._share = EvaluationShare(eval_fraction)
        self._dtype: Literal["uint16", "uint32"] = "uint32"
        if tokenizer.vocab_size <= 2**16:
            self._dtype = "uint16"
        end = tokenizer.special.end
        self.train = PartWriter(folder, "train", dtype=self._dtype, end=end)
        self.evaluation = PartWriter(folder, "eval", dtype=self._dtype, end=end)
        self._current = self.train

    def add(self, piece: TextPiece, numbers: Numbers) -> None:
        """Append the tokens of the next piece of a document."""
        if piece.starts:
            if self._share.takes(piece.num_bytes):
                self._current = self.evaluation
            else:
                self._current = self.train
        self._current.add(numbers, ends=piece.ends)

    def finish(self) -> Meta:
        """Complete evaluation's share, and write ``meta.json`` last, with the sizes and hashes of
        all other files.
        """
        missing = self._share.tokens_to_move(self.train.num_tokens, self.evaluation.num_tokens)
        if missing:
            self.train.move_tail(self.evaluation, missing)
        parts: dict[PartName, PartFacts] = {}
        for part in (self.train, self.evaluation):
            part.flush()
            if part.num_documents:
                parts[part.name] = PartFacts(
                    num_tokens=part.num_tokens, num_documents=part.num_documents
                )
            else:
                part.source.numbers.unlink()
                part.source.offsets.unlink()
        self.close()
        self._tokenizer.save(self._folder)
        files = {}
        for file in sorted(self._folder.iterdir()):
            record = hash_file(file)
            files[file.name] = FileFacts(size_bytes=record.num_bytes, sha256=record.sha256)
        meta = Meta(
            tokenizer=self._tokenizer.kind,
            vocab_size=self._tokenizer.vocab_size,
            special_tokens=self._tokenizer.special,
            dtype=self._dtype,
            parts=parts,
            files=files,
        )
        text = meta.model_dump_json(indent=2) + "\n"
        write_new(self._folder / META_FILE, memoryview(text.encode()))
        return meta

    def close(self) -> None:
        """Close all files."""
        self.train.close()
        self.evaluation.close()


@contextmanager
def made_aside(target: Path) -> Iterator[Path]:
    """Make a new folder beside the target, which takes the target's place at the end of the block,
    and is removed after an error.

    Raises:
        OSError: it cannot be written, or the target has come to hold something meanwhile.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:  # around the making as well: a signal may end the command right after it
        aside.mkdir(mode=0o700)
        yield aside
        umask = os.umask(0)
        os.umask(umask)
        aside.chmod(0o777 & ~umask)  # until here it was closed to other users
        aside.rename(target)  # takes the place of an empty folder, and of nothing else
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
