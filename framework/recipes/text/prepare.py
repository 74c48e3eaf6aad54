"""The command `prepare`: text files in, a token folder out. It needs numpy and no torch.

dsf prepare INPUT... OUT_DIR [--tokenizer bytes | FILE.json |
                                              --train-tokenizer bpe:VOCAB_SIZE]
dsf prepare --verify DIR
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Final, TextIO

from framework.data.token_files import PART_WORDS, Meta
from framework.data.tokenizer import (
    SMALLEST_BPE,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from framework.data.tokens import verify_token_folder
from framework.errors import EXIT_OK, ConfigError, StorageError
from framework.recipes.text.documents import (
    Format,
    ReadOptions,
    TextPiece,
    carriage_returns,
    files_in_folders,
    input_size,
    is_json_lines,
    read_documents,
)
from framework.recipes.text.token_writer import FolderWriter, made_aside
from framework.system.command_parser import CommandParser
from framework.system.stopping import ending_in_good_order

_BATCH_BYTES: Final = 1 << 20
_BATCH_PIECES: Final = 1024
_SECONDS_BETWEEN_LINES: Final = 10.0
_SECONDS_BETWEEN_UPDATES: Final = 0.2


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: an input cannot be read as text.
        StorageError: the output cannot be written.
    """
    arguments = _parse(words)
    with ending_in_good_order():
        if arguments.verify is not None:
            description = describe(verify_token_folder(arguments.verify))
            print(f"{arguments.verify}: every file is as prepare wrote it: {description}")
            return EXIT_OK
        out = arguments.words.pop()
        meta = prepare(
            arguments.words,
            out,
            tokenizer=arguments.tokenizer,
            bpe_vocab_size=arguments.train_tokenizer,
            eval_fraction=arguments.eval_fraction,
            json_field=arguments.jsonl_field,
            blank_lines_split=arguments.split_at_blank_lines,
            form=arguments.format,
            progress=Progress(sys.stderr),
        )
    windows = carriage_returns(files_in_folders(arguments.words), arguments.format)
    if windows:
        files = windows[0]
        if len(windows) > 1:
            files += f" and {len(windows) - 1} others"
        print(
            f"note: {files}: lines end with a carriage return, which is now part of "
            "the text; dos2unix takes it away [text-carriage-returns]",
            file=sys.stderr,
        )
    print(f"{out}: {describe(meta)}\nuse it with data: {{kind: text, path: {out}}}")
    return EXIT_OK


def prepare(
    inputs: Sequence[str],
    out: str,
    *,
    tokenizer: str = "bytes",
    bpe_vocab_size: int | None = None,
    eval_fraction: float = 0.1,
    json_field: str = "text",
    blank_lines_split: bool = False,
    form: Format = "auto",
    progress: Progress | None = None,
) -> Meta:
    """Turn files of text into a token folder.

    Args:
        inputs: plain files, each a document, JSON lines, and folders with their ``*.txt``; read in
            this order, and twice if a tokenizer is trained.
        out: folder to make; it must not hold anything.
        tokenizer: ``bytes`` or the path of a ``tokenizer.json``.
        bpe_vocab_size: train a byte-level BPE of this size instead.
        eval_fraction: share of the text for evaluation (see `EvaluationShare`), from 0 up to below
            1.
        json_field: the text of a JSON line.
        blank_lines_split: a blank line ends a document of a plain file.
        form: of all inputs; ``auto``: by their names.
        progress: reports the progress of reading.

    Returns:
        The content of ``meta.json``.

    Raises:
        ConfigError: an input cannot be read as text, or `out` is in use. Nothing is left behind.
        StorageError: `out` cannot be written. Nothing is left behind.
    """
    _refuse_used_folder(out)
    inputs = files_in_folders(inputs)
    progress = progress or Progress(None)
    progress.num_bytes = input_size(inputs, form)
    needs_utf8 = bpe_vocab_size is not None or tokenizer != "bytes"
    options = ReadOptions(
        utf8=needs_utf8, json_field=json_field, blank_lines_split=blank_lines_split, form=form
    )

    def pieces(label: str) -> Iterator[TextPiece]:
        return progress.over(read_documents(inputs, options), label)

    with progress:
        ready: Tokenizer
        if bpe_vocab_size is not None:
            texts = (piece.text for piece in pieces("training the tokenizer"))
            ready = train_bpe(texts, vocab_size=bpe_vocab_size)
        elif tokenizer == "bytes":
            ready = ByteTokenizer()
        else:
            ready = load_tokenizer(tokenizer)
        try:
            with (
                made_aside(Path(out).expanduser()) as folder,
                closing(FolderWriter(folder, ready, eval_fraction=eval_fraction)) as writer,
            ):
                _write(pieces("writing tokens"), ready, writer)
                if not writer.train.num_documents:
                    files = ", ".join(inputs)
                    raise ConfigError.of(
                        "text-empty", "there is no text in it", "name files with text", file=files
                    )
                return writer.finish()
        except OSError as error:
            raise StorageError(
                f"{out}: cannot be written ({error.strerror or error}) [text-not-written]"
            ) from error


def describe(meta: Meta) -> str:
    """Describe a token folder in one line."""
    parts = []
    for name, part in meta.parts.items():
        documents = "documents" if part.num_documents > 1 else "document"
        parts.append(
            f"{part.num_tokens:,} {PART_WORDS[name]} tokens in {part.num_documents:,} {documents}"
        )
    return f"{', '.join(parts)}; vocabulary {meta.vocab_size:,} ({meta.tokenizer})"


class Progress:
    """One line that is written over on a terminal; elsewhere a line now and then."""

    def __init__(
        self, stream: TextIO | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Report to a stream; not at all if it is None."""
        self._stream = stream
        self._clock = clock
        self._on_terminal = stream is not None and stream.isatty()
        self._shown_length = 0
        self.num_bytes = 0

    def over(self, pieces: Iterator[TextPiece], label: str) -> Iterator[TextPiece]:
        """Yield the pieces again and report their bytes."""
        started = self._clock()
        shown = started
        done = 0
        if self._on_terminal:
            interval = _SECONDS_BETWEEN_UPDATES
        else:
            interval = _SECONDS_BETWEEN_LINES
        for piece in pieces:
            yield piece
            done += len(piece.text)
            now = self._clock()
            if self._stream is not None and now - shown >= interval:
                shown = now
                speed = done / 1e6 / (now - started)
                self._show(
                    f"{label}: {done / 1e6:,.1f} of {self.num_bytes / 1e6:,.1f} MB, "
                    f"{speed:,.1f} MB/s"
                )

    def _show(self, line: str) -> None:
        if self._on_terminal:
            padded = f"{line:<{self._shown_length}}"
            print(f"\r{padded}", end="", file=self._stream, flush=True)
            self._shown_length = len(line)
        else:
            print(line, file=self._stream, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None and self._shown_length:
            blanks = "".ljust(self._shown_length)
            print(f"\r{blanks}\r", end="", file=self._stream, flush=True)


def _write(pieces: Iterator[TextPiece], tokenizer: Tokenizer, writer: FolderWriter) -> None:
    """Encode the pieces and hand them to the writer, many at a time: a library tokenizer spreads
    them over the cores.
    """
    batch: list[TextPiece] = []
    num_bytes = 0

    def flush() -> None:
        encoded = tokenizer.encode([piece.text for piece in batch])
        for piece, numbers in zip(batch, encoded, strict=True):
            writer.add(piece, numbers)
        batch.clear()

    for piece in pieces:
        batch.append(piece)
        num_bytes += len(piece.text)
        if num_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_PIECES:
            flush()
            num_bytes = 0
    flush()


def _refuse_used_folder(out: str) -> None:
    """Check that nothing is at the path but, perhaps, an empty folder.

    Raises:
        ConfigError: kind ``output-exists``.
        StorageError: the path cannot be read.
    """
    path = Path(out).expanduser()
    try:
        is_used = path.is_symlink()
        if not is_used and path.is_dir():
            is_used = any(path.iterdir())
        elif not is_used:
            is_used = path.exists()
    except (OSError, ValueError) as error:
        raise StorageError(f"{out!r}: cannot be read ({error}) [text-not-written]") from error
    if is_used:
        reason = "it exists and is not an empty folder"
        fix = "remove it, or name another folder"
        raise ConfigError.of("output-exists", reason, fix, file=out)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="dsf prepare",
        usage="%(prog)s [options] INPUT... OUT_DIR | --verify DIR",
        description="Turn text into numbered tokens for data: {kind: text} and {kind: text_pairs}.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="INPUT... OUT_DIR",
        help="files of text (each a document) or .jsonl, or folders of *.txt; then the folder to "
        "make",
    )
    tokenizers = parser.add_mutually_exclusive_group()
    tokenizers.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="bytes|FILE.json",
        help="bytes (the default), or a file of Hugging Face's tokenizers",
    )
    tokenizers.add_argument(
        "--train-tokenizer",
        type=_bpe,
        metavar="bpe:VOCAB_SIZE",
        help="learn a byte-level BPE from the text",
    )
    parser.add_argument(
        "--eval-fraction",
        type=_share,
        default=0.1,
        metavar="F",
        help="share kept for evaluation (0.1)",
    )
    parser.add_argument(
        "--jsonl-field",
        default="text",
        metavar="NAME",
        help="field of a JSON line that holds the text (text)",
    )
    parser.add_argument(
        "--split-at-blank-lines",
        action="store_true",
        help="a blank line ends a document of a plain file",
    )
    parser.add_argument(
        "--format",
        choices=("auto", "text", "jsonl"),
        default="auto",
        help="what the files are, whatever their names say (auto: by their names)",
    )
    parser.add_argument(
        "--verify", metavar="DIR", help="compare a folder with the checksums that it was made with"
    )
    arguments = parser.parse_intermixed_args(words)
    if arguments.verify is not None:
        num_words = 1 if words[0].startswith("--verify=") else 2
        if len(words) != num_words:
            parser.error("--verify DIR stands alone")
        return arguments
    if len(arguments.words) < 2:
        parser.error("name at least one INPUT, and OUT_DIR last")
    inputs = arguments.words[:-1]
    has_json_lines = any(is_json_lines(path, arguments.format) for path in inputs)
    if arguments.jsonl_field != "text" and not has_json_lines:
        parser.error("--jsonl-field is for .jsonl and .ndjson files, and there is none")
    return arguments


def _bpe(text: str) -> int:
    kind, _, size = text.partition(":")
    is_number = size.isascii() and size.isdecimal()
    if kind == "bpe" and is_number and SMALLEST_BPE <= int(size[:10]) <= 2**20:
        return int(size)
    raise argparse.ArgumentTypeError(
        f"'{text}' is not bpe:VOCAB_SIZE with a size from {SMALLEST_BPE} to {2**20}"
    )


def _share(text: str) -> float:
    try:
        share = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        share = -1.0
    if not 0.0 <= share < 1.0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a share from 0 up to below 1")
    return share
