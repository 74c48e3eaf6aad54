"""Which names of images say the same thing tomorrow as today."""

from __future__ import annotations

import re
from typing import Final

_IMAGE: Final = re.compile(
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


def what_is_wrong_with_image(image: object) -> str:
    """A reason to refuse the name of an image; empty: there is none.

    Nodes pull at different times: with a tag that moves, two pods of one job may run different code.
    """
    match = _IMAGE.fullmatch(image) if isinstance(image, str) else None
    if match is None:
        return "it is not the name of an image"
    if match["digest"]:
        return ""
    if match["tag"] is None:
        return "without a tag it means latest, which moves"
    return "latest moves: two pods may run different code" if match["tag"] == "latest" else ""
