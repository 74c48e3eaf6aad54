"""torch.compile of a model, of its blocks, or of the layers that it recomputes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from framework.config.training import Compile
from framework.errors import ConfigError
from framework.models.layers import LayeredModel

if TYPE_CHECKING:
    from framework.models.tiled_loss import TileKernels

# For training and evaluation, each with fixed and with changing shapes.
_GRAPHS_PER_MODULE: Final = 4
_GRAPHS_OF_CUDA: Final = ("reduce-overhead", "max-autotune")


class CompiledModules:
    """Modules of a model that are run as written, or compiled in place: weights keep their names.

    Attributes:
        modules: what is compiled, each by itself.
        section: how.
        tiles: whether tiles of the loss are compiled as well, where they are not a part of the
            modules.
    """

    tiles = True

    def __init__(self, model: nn.Module, section: Compile, *, deterministic: bool = False) -> None:
        """Find the modules, and leave them as written.

        Of a model that recomputes its layers these are the layers: no graph holds recomputation.

        Args:
            model: the model.
            section: how it is compiled.
            deterministic: whether kernels may not be chosen by their time, which differs from run
                to run.

        Raises:
            ConfigError: kind ``no-blocks``.
        """
        self.section = section
        self._model = model
        self.modules = _modules_to_compile(model, per=section.per)
        self._deterministic = deterministic
        self._kernels: TileKernels | None = None
        self._settings: list[tuple[Any, str, Any]] = []  # of torch, as they were
        if not self.modules:
            reason = f"{type(model).__name__} has no two blocks of one class"
            fix = "set training.compile.per: model"
            raise ConfigError.of("no-blocks", reason, fix, "training.compile.per", section.per)

    @property
    def records_graphs(self) -> bool:
        """Check whether kernels are recorded as CUDA graphs, which takes two passes."""
        return self.section.mode in _GRAPHS_OF_CUDA

    @property
    def uses_tiles(self) -> bool:
        """Check whether a compiled tile of the loss was computed."""
        return self._kernels is not None and self._kernels.is_used

    def start(self) -> None:
        """Compile at the next forward pass."""
        import torch._dynamo.config as dynamo

        torch.compiler.reset()  # graphs of earlier runs count against torch's limit as well
        # torch counts graphs by the code, which blocks of one class share: a ResNet's differ in
        # width and stride, and after the limit all of them would run as written.
        least = _GRAPHS_PER_MODULE * len(self.modules)
        self._set(dynamo, "recompile_limit", max(dynamo.recompile_limit, least))
        self._keep_no_cache()
        if self.section.backend == "inductor":
            import torch._inductor.config as inductor

            # Dropout as torch draws it without: a run as written has the same losses.
            self._set(inductor, "fallback_random", True)
            if self._deterministic:
                self._set(inductor, "deterministic", True)
        if self.tiles:
            from framework.models import tiled_loss

            self._kernels = tiled_loss.TileKernels(self.section.backend)
            tiled_loss.use_kernels(self._kernels)
        for module in self.modules:
            module.compile(
                backend=self.section.backend,
                mode=self.section.mode,
                dynamic=self.section.dynamic,
                fullgraph=self.section.fullgraph,
            )

    def go_on_without(self) -> None:
        """Run as written what torch fails to compile later, as for a batch of another shape."""
        import torch._dynamo.config as dynamo

        self._set(dynamo, "suppress_errors", True)

    def stop(self) -> None:
        """Run the modules as written from now on, and free their graphs."""
        for module in self.modules:
            module._compiled_call_impl = None
        if self._kernels is not None:
            from framework.models import tiled_loss

            tiled_loss.use_kernels(None)
            self._kernels = None
        for owner, name, value in reversed(self._settings):
            setattr(owner, name, value)
        self._settings.clear()
        torch.compiler.reset()

    def _keep_no_cache(self) -> None:
        """Let transformers' models keep no keys and values for tokens to come, which training has
        none of: each layer has a cache of its own, and so would have graphs of its own.
        """
        for module in self._model.modules():
            config = getattr(module, "config", None)
            if getattr(config, "use_cache", None) is True:
                self._set(config, "use_cache", False)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        """Set torch's setting, if this release has it, until `stop`."""
        if hasattr(owner, name):
            self._settings.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)


@contextmanager
def noting_failures() -> Iterator[list[BaseException]]:
    """Run as written, within the block, what torch fails to compile, and note each failure in place
    of torch's warning of it.

    A pass goes on so: other ranks may wait in its sums. What fails is a call before any of it has
    run, and no sum is there twice.

    Yields:
        The failures so far.
    """
    import torch._dynamo.config as dynamo

    failures: list[BaseException] = []

    def note(record: logging.LogRecord) -> bool:
        """Take a warning of a failure out of the log."""
        error = record.exc_info and record.exc_info[1]
        if not error or record.levelno < logging.WARNING:
            return True
        failures.append(error)
        return False

    log = logging.getLogger("torch._dynamo.convert_frame")
    level = log.level
    suppresses = dynamo.suppress_errors
    dynamo.suppress_errors = True
    log.setLevel(logging.WARNING)
    log.addFilter(note)
    try:
        yield failures
    finally:
        log.removeFilter(note)
        log.setLevel(level)
        dynamo.suppress_errors = suppresses


def _modules_to_compile(model: nn.Module, *, per: str) -> list[nn.Module]:
    if isinstance(model, LayeredModel) and model.recompute_every:
        return [layer.build() for layer in model.layers()]
    if per == "model":
        return [model]
    return list(repeated_blocks(model))


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules with siblings of their class; torch's own classes do not
    count.
    """
    counts = Counter(map(type, model.children()))
    for child in model.children():
        is_torchs = type(child).__module__.startswith("torch.nn.")
        if counts[type(child)] > 1 and not is_torchs:
            yield child
        else:
            yield from repeated_blocks(child)
