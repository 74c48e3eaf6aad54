"""DeepSpeed's compiled ops: where torch keeps them, and messages while their compiler runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch

from framework.errors import FrameworkError, explaining
from framework.system.cache_folders import extensions_folder, path_of_compilers
from framework.system.waiting import waiting


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


def _explain_failed_compiler(error: Exception) -> FrameworkError | None:
    """Return the error of an op that does not compile; None for other errors."""
    from framework.engine.compiler_errors import failure_of_compiler

    return failure_of_compiler(error)


# The whole of a compiler's failure goes to the rank's log, as the cause.
refusing_what_does_not_compile = partial(explaining, _explain_failed_compiler)


@contextmanager
def announcing_compilers() -> Iterator[None]:
    """Print which of DeepSpeed's ops the run waits for within the block, while the op is compiled
    here or by another process. Within it, ops also compile with a blank in torch's path, and with
    letters in TORCH_CUDA_ARCH_LIST.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    keep_answers_about_processors()
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


def keep_answers_about_processors() -> None:
    """Ask about this machine's processors once a process. DeepSpeed 0.19.8 starts `numactl` for
    each bucket of stage 3 (cpu_accelerator.py `device_count`), and for an op of an optimizer three
    times a Python of a second (`cpuinfo`).
    """
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.utils import numa

    if hasattr(numa.get_numa_cores, "cache_clear"):
        return
    numa.get_numa_cores = cache(numa.get_numa_cores)
    architecture = OpBuilder.cpu_arch

    @wraps(architecture)
    def architecture_once(builder: Any) -> Any:
        import cpuinfo  # here: its import starts programs

        cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
        OpBuilder.cpu_arch = architecture
        return architecture(builder)

    OpBuilder.cpu_arch = architecture_once
