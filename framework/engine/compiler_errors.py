"""Errors of the compilers of DeepSpeed's ops and of torch.compile, in the compiler's own words."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Final

from framework.errors import ConfigError, in_one_line, printable

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


def failure_of_compiler(error: BaseException) -> ConfigError | None:
    """Return a refusal (kind ``op-not-loadable``) with the compiler's last error, if torch's
    extension builder has failed; else None.
    """
    if isinstance(error, subprocess.CalledProcessError):
        return _failure_of_version(error)
    message = str(error)
    failure = _NOT_BUILT.search(message)
    if not isinstance(error, RuntimeError) or not failure:
        return None
    complaint = _last_complaint(message.splitlines()[1:])
    if not complaint:
        complaint = printable(message)[:_LONGEST_COMPLAINT]
    reason = f"it does not compile: {complaint}"
    return ConfigError.of("op-not-loadable", reason, _FIX, failure[1] or "compiler")


def _failure_of_version(error: subprocess.CalledProcessError) -> ConfigError | None:
    """Return a refusal if a compiler does not even know its own version, which torch asks for
    before it builds (torch/utils/cpp_extension.py `check_compiler_ok_for_platform`); else None.
    """
    if isinstance(error.cmd, str) or error.cmd[-1] not in ("-v", "--version"):
        return None
    command = printable(" ".join(error.cmd))
    reason = f"the compiler does not run: {command} ended with {error.returncode}"
    return ConfigError.of("op-not-loadable", reason, _FIX, "compiler", printable(error.cmd[0]))


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
