"""DeepSpeed's compiled ops: where torch keeps them, how they are compiled ahead, messages while
their compiler runs, and its errors.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from framework.errors import ConfigError, explaining, in_one_line, printable
from framework.plan.compiled_ops import extensions_folder, path_of_compilers
from framework.system.waiting import waiting

_NOT_BUILT: Final = re.compile(r"Error (?:building|compiling|checking compiler)[^']*(?:'(\w+)')?")
_COMPLAINT: Final = re.compile(
    r"\b(fatal error|error|undefined reference|cannot find|not found|No space left|Killed)\b"
)
# Lines of the programs around a compiler, which have no reason in them.
_NO_REASON: Final = ("ninja:", "collect2:", "Set TORCHDYNAMO_VERBOSE")
_LONGEST_COMPLAINT: Final = 300
_FIX: Final = (
    "repair that on this machine (dsf doctor checks compiler, ninja and headers), and start again"
)


def use_own_cache() -> None:
    """Set TORCH_EXTENSIONS_DIR for this process, unless the user has, and let torch find this
    Python's ninja.
    """
    os.environ["PATH"] = path_of_compilers(os.environ)
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        folder = extensions_folder(os.environ, torch_version=torch.__version__)
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)


@contextmanager
def quoting_torchs_library() -> Iterator[None]:
    """Quote the path of torch's library for the time of the block: for the linker, a blank would
    end the path.

    torch 2.15 does not do so itself (utils/cpp_extension.py `_prepare_ldflags`). Its inductor does,
    for the same name (_inductor/cpp_builder.py `_get_torch_related_args`): with the quotes of both
    it would find no library.
    """
    from torch.utils import cpp_extension  # here: nothing else needs it before DeepSpeed does

    path = cpp_extension.TORCH_LIB_PATH
    cpp_extension.TORCH_LIB_PATH = shlex.quote(path)
    try:
        yield
    finally:
        cpp_extension.TORCH_LIB_PATH = path


def failure_of_compiler(error: BaseException) -> ConfigError | None:
    """Return a refusal (kind ``op-not-loadable``) with the compiler's last error, if torch's
    extension builder has failed; else None.
    """
    message = str(error)
    failure = _NOT_BUILT.search(message)
    if not isinstance(error, RuntimeError) or not failure:
        return None
    complaint = _last_complaint(message.splitlines()[1:])
    if not complaint:
        complaint = printable(message)[:_LONGEST_COMPLAINT]
    reason = f"it does not compile: {complaint}"
    return ConfigError.of("op-not-loadable", reason, _FIX, failure[1] or "compiler")


def failure_of_torch_compile(error: BaseException) -> ConfigError | None:
    """Return a refusal (kind ``compile-failed``) if the backend of torch.compile has failed, which
    is not the fault of a batch; else None.
    """
    causes = sys.modules.get("torch._dynamo.exc")  # a run that compiles nothing does not import it
    if causes is None or not isinstance(error, causes.BackendCompilerFailed):
        return None
    # torch/_inductor/exc.py `CppCompileError`: the command, which takes thousands of letters, then
    # its output.
    _, _, output = str(error).partition("\nOutput:\n")
    if output:
        complaint = _last_complaint(output.splitlines())
    else:
        complaint = in_one_line(error, longest=_LONGEST_COMPLAINT)
    reason = f"torch.compile cannot make code of the model: {complaint}"
    fix = (
        "repair that on this machine, set training.compile.backend: aot_eager, or "
        "training.compile: false"
    )
    return ConfigError.of("compile-failed", reason, fix, "training.compile")


def _last_complaint(output: Iterable[str]) -> str:
    """Return the last line of a compiler's output with an error, or else its last line."""
    lines = [line.strip() for line in output]
    lines = [line for line in lines if line and not line.startswith(_NO_REASON)]
    complaints = [line for line in lines if _COMPLAINT.search(line)]
    return printable((complaints or lines or [""])[-1])[:_LONGEST_COMPLAINT]


# The whole of a compiler's failure goes to the rank's log, as the cause.
refusing_what_does_not_compile = partial(explaining, failure_of_compiler)


@contextmanager
def announcing_compilers() -> Iterator[None]:
    """Print which of DeepSpeed's ops the run waits for within the block, while the op is compiled
    here or by another process. Within it, ops also compile with a blank in torch's path, and with
    letters in TORCH_CUDA_ARCH_LIST.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    load = OpBuilder.jit_load

    def announced_load(builder: Any, *arguments: Any, **named: Any) -> Any:
        from framework.engine.workarounds.compute_capabilities import naming_them_by_numbers

        folder = os.environ.get("TORCH_EXTENSIONS_DIR", "torch's cache")
        what = f"DeepSpeed's op {builder.name}, which is compiled once per machine into {folder}"
        with (
            waiting(what, usually="a minute or two"),
            naming_them_by_numbers(),
            quoting_torchs_library(),
        ):
            return load(builder, *arguments, **named)

    OpBuilder.jit_load = announced_load
    try:
        yield
    finally:
        OpBuilder.jit_load = load


def compile_for_processors() -> None:
    """Compile the op that every run on processors loads.

    Raises:
        ConfigError: it does not compile.
    """
    use_own_cache()
    from deepspeed.accelerator import get_accelerator

    with refusing_what_does_not_compile(), announcing_compilers():
        get_accelerator().create_op_builder("ShareMemCommBuilder").load()
