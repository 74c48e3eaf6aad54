"""DeepSpeed's compiled ops: where torch keeps them, how they are compiled ahead, what waits for their compiler, and its
errors.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from framework.engine.workarounds.compute_capabilities import naming_them_by_numbers
from framework.errors import ConfigError, explaining, printable
from framework.plan.compiled_ops import extensions_folder, path_of_compilers
from framework.system.waiting import waiting

_NOT_BUILT: Final = re.compile(r"Error (?:building|compiling|checking compiler)[^']*(?:'(\w+)')?")
_COMPLAINT: Final = re.compile(r"\b(fatal error|error|undefined reference|not found|No space left|Killed)\b")
_LONGEST_COMPLAINT: Final = 300
_FIX: Final = (
    "repair that on this machine (python -m framework doctor checks compiler, ninja and headers), and start again"
)


def use_own_cache() -> None:
    """Set TORCH_EXTENSIONS_DIR for this process, unless the user has, and let torch find this Python's ninja and its
    own library.

    torch 2.15 does not quote that path in the linker's command line: a blank would end it.
    """
    os.environ["PATH"] = path_of_compilers(os.environ)
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_folder(os.environ, torch_version=torch.__version__))
    if shlex.quote(torch.__path__[0]) != torch.__path__[0]:
        from torch.utils import cpp_extension  # here: nobody else needs it before DeepSpeed does

        if not cpp_extension.TORCH_LIB_PATH.startswith("'"):
            cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)


def failure_of_compiler(error: BaseException) -> ConfigError | None:
    """A refusal (kind ``op-not-loadable``) in the compiler's last words where torch's extension builder has failed."""
    text = str(error)
    found = _NOT_BUILT.search(text)
    if not isinstance(error, RuntimeError) or not found:
        return None
    lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
    complaints = [line for line in lines if _COMPLAINT.search(line) and not line.startswith("ninja:")]
    reason = f"it does not compile: {printable((complaints or lines or [text])[-1])[:_LONGEST_COMPLAINT]}"
    return ConfigError.of("op-not-loadable", reason, _FIX, found[1] or "compiler")


# The whole of a compiler's failure goes to the rank's log, as the cause.
refusing_what_does_not_compile = partial(explaining, failure_of_compiler)


@contextmanager
def announcing_compilers() -> Iterator[None]:
    """Say which of DeepSpeed's ops is waited for meanwhile, where it is compiled, here or by another process."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    load = OpBuilder.jit_load

    def announced_load(builder: Any, *arguments: Any, **named: Any) -> Any:
        folder = os.environ.get("TORCH_EXTENSIONS_DIR", "torch's cache")
        what = f"DeepSpeed's op {builder.name}, which is compiled once per machine into {folder}"
        with waiting(what, usually="a minute or two"), naming_them_by_numbers():
            return load(builder, *arguments, **named)

    OpBuilder.jit_load = announced_load
    try:
        yield
    finally:
        OpBuilder.jit_load = load


def compile_for_processors() -> None:
    """Compile what every run on processors loads.

    Raises:
        ConfigError: it does not compile.
    """
    use_own_cache()
    from deepspeed.accelerator import get_accelerator

    with refusing_what_does_not_compile(), announcing_compilers():
        get_accelerator().create_op_builder("ShareMemCommBuilder").load()
