"""What tells one text from another of the same length, without reading it all."""

from __future__ import annotations

import hashlib
from typing import Any

from framework.data.token_files import read_meta
from framework.data.tokens import Tokens


def tokens_sha256(dataset: Any) -> str | None:
    """A SHA-256 of the tokens behind a dataset, and of where their documents begin; None of what is no text.

    Of tokens in files it is made from the checksums that ``meta.json`` holds: the files are not read.

    Raises:
        ConfigError: ``meta.json`` is gone or damaged.
    """
    tokens = getattr(dataset, "tokens", None)
    if not isinstance(tokens, Tokens):
        return None
    if tokens.source is None:
        whole = hashlib.sha256(tokens.numbers.tobytes())
        whole.update(tokens.offsets.tobytes())
        return whole.hexdigest()
    place = tokens.source.numbers.parent
    _, meta = read_meta(str(place), "data.path")
    files = (meta.files[path.name].sha256 for path in (tokens.source.numbers, tokens.source.offsets))
    return hashlib.sha256(" ".join((meta.dtype, *files)).encode()).hexdigest()
