"""Blanks in the paths of what inductor compiles for processors: its cache, or TMPDIR.

torch up to 2.15.0 (_inductor/cpp_builder.py, `CppBuilder`) writes a command line, and quotes in it
the folders of headers and libraries alone. Source, output and precompiled header are not: with a
blank in them every compiled run ends.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def quoting_paths() -> Iterator[None]:
    """Quote the paths of inductor's commands within the block."""
    from torch._inductor.cpp_builder import CppBuilder

    builder_class: Any = CppBuilder
    prepare = builder_class.__init__

    def prepare_quoted(
        builder: Any, name: str, sources: str | Sequence[str], *arguments: Any, **named: Any
    ) -> None:
        paths = sources
        if isinstance(sources, str):
            paths = [sources]
        prepare(builder, name, [shlex.quote(path) for path in paths], *arguments, **named)
        output = builder._target_file
        builder._output = builder._output.replace(output, shlex.quote(output))
        header = getattr(builder._build_option, "precompiled_header", None)
        if header:
            included = builder._include_dirs_args
            quoted = included.replace(f"-include {header} ", f"-include {shlex.quote(header)} ")
            builder._include_dirs_args = quoted

    builder_class.__init__ = prepare_quoted
    try:
        yield
    finally:
        builder_class.__init__ = prepare
