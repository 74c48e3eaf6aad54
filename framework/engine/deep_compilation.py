"""DeepCompile: DeepSpeed's engine compiles the model, with the sums of gradients in its graph
(deepspeed/compile/init_z1_and_2.py).

DeepSpeed takes its passes up when its count of steps is the one that they are listed for, and the
first ones are listed for step 0 (compile/backend.py `launch_compile_passes`). An engine that goes
on from a checkpoint begins with a later step: without them its gradients would not be summed over
the ranks, without a word. So steps are counted here from the first one of this start.
"""

from __future__ import annotations

from collections.abc import Callable

import deepspeed

from framework.config.training import Compile


def compile_by_deepspeed(engine: deepspeed.DeepSpeedEngine, section: Compile) -> None:
    """Have DeepSpeed compile the model of an engine, at the next forward pass. The sums of
    gradients are then the graph's: nothing else may have taken their hooks.
    """
    options = {"dynamic": section.dynamic, "fullgraph": section.fullgraph}
    engine.compile(backend="inductor", compile_kwargs=options)
    engine.launch_compile_passes = _FromFirstStep(engine.launch_compile_passes)


class _FromFirstStep:
    """Stands in for `DeepSpeedEngine.launch_compile_passes`."""

    def __init__(self, launch: Callable[[int], None]) -> None:
        self._launch = launch
        self._first: int | None = None

    def __call__(self, global_steps: int) -> None:
        """Launch the passes of this step, counted from the first forward pass on."""
        if self._first is None:
            self._first = global_steps
        self._launch(global_steps - self._first)
