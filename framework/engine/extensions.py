"""DeepSpeed's compiled ops: where torch keeps them, how they are compiled ahead, and what is said when they do not
compile.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from typing import Final

import torch

from framework.errors import ConfigError, Problem, printable
from framework.plan.compiled_ops import extensions_folder, path_of_compilers

_NOT_BUILT: Final = re.compile(r"Error (?:building|compiling|checking compiler)[^']*(?:'(\w+)')?")
_COMPLAINT: Final = re.compile(r"\b(fatal error|error|undefined reference|not found|No space left|Killed)\b")
_LONGEST_COMPLAINT: Final = 300
_FIX: Final = (
    "repair that on this machine (python -m framework doctor checks compiler, ninja and headers), and start again"
)


def use_own_cache() -> None:
    """Set TORCH_EXTENSIONS_DIR for this process, unless the user has, and let torch find this Python's ninja and its
    own library.

    The path of torch's library stands unquoted in the command line of the linker that torch writes (2.15): a blank
    would end it.
    """
    os.environ["PATH"] = path_of_compilers(os.environ)
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_folder(os.environ, torch_version=torch.__version__))
    if shlex.quote(torch.__path__[0]) != torch.__path__[0]:
        from torch.utils import cpp_extension  # here: nobody else needs it before DeepSpeed does

        cpp_extension.TORCH_LIB_PATH = _quoted_once(cpp_extension.TORCH_LIB_PATH)


def _quoted_once(path: str) -> str:
    return path if path.startswith("'") else shlex.quote(path)


@contextlib.contextmanager
def refusing_what_does_not_compile() -> Iterator[None]:
    """Make one line of a compiler's failure; the whole of it goes to the rank's log, as the cause.

    Raises:
        ConfigError: kind ``op-not-loadable``.
    """
    try:
        yield
    except RuntimeError as error:
        if not (problem := failure_of_compiler(error)):
            raise
        raise ConfigError(problem) from error


def failure_of_compiler(error: BaseException) -> Problem | None:
    """Return what torch's extension builder has failed with, in the compiler's own last words; None for another
    error.
    """
    text = str(error)
    found = _NOT_BUILT.search(text)
    if not isinstance(error, RuntimeError) or not found:
        return None
    lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
    complaints = (
        [line for line in lines if _COMPLAINT.search(line) and not line.startswith("ninja:")] or lines or [text]
    )
    reason = f"it does not compile: {printable(complaints[-1])[:_LONGEST_COMPLAINT]}"
    return Problem(kind="op-not-loadable", key=found[1] or "compiler", reason=reason, fix=_FIX)


def compile_for_processors() -> None:
    """Compile what every run on processors loads.

    Raises:
        ConfigError: it does not compile.
    """
    use_own_cache()
    from deepspeed.accelerator import get_accelerator

    with refusing_what_does_not_compile():
        get_accelerator().create_op_builder("ShareMemCommBuilder").load()
