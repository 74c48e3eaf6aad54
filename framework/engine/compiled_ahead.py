"""Compiles the op of every run on processors, before the first one."""

from __future__ import annotations

from framework.engine.extensions import (
    announcing_compilers,
    refusing_what_does_not_compile,
    use_own_cache,
)


def compile_for_processors() -> None:
    """Compile the op that every run on processors loads.

    Raises:
        ConfigError: it does not compile.
    """
    use_own_cache()
    from deepspeed.accelerator import get_accelerator

    with refusing_what_does_not_compile(), announcing_compilers():
        get_accelerator().create_op_builder("ShareMemCommBuilder").load()
