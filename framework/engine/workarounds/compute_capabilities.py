"""Architectures with a letter, such as 9.0a, in TORCH_CUDA_ARCH_LIST, as torch's own builder and
many images have them.

DeepSpeed up to 0.19.8 (ops/op_builder/builder.py, `compute_capability_args`) reads numbers alone,
and ends with "invalid literal for int() with base 10: '0a'". Its kernels use nothing of what the
letter stands for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_NAME: Final = "TORCH_CUDA_ARCH_LIST"
_LETTER: Final = re.compile(r"(?<=\d)[a-z](?=$|[\s;+])")


@contextmanager
def naming_them_by_numbers() -> Iterator[None]:
    """Leave the letters out of TORCH_CUDA_ARCH_LIST for the time of the block."""
    before = os.environ.get(_NAME)
    if before is None:
        yield
        return
    os.environ[_NAME] = _LETTER.sub("", before)
    try:
        yield
    finally:
        os.environ[_NAME] = before
