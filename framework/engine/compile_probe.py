"""Whether a compiled model computes what it computes as written: tried on the first micro-batch,
before the first step.

Releases of torch have compiled gradients away without an error (2.11, for functions that write
their output in place), and a compiler may be missing, fail, or be wrong. So no release is refused:
loss and gradients of the first micro-batch decide.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import deepspeed
import torch
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor, nn

from framework.config.precision import fp8_of
from framework.engine import random_state
from framework.engine.compiler_errors import failure_of_torch_compile
from framework.engine.distributed import gather, rank
from framework.engine.gradient_sketches import Sketch, sketched_gradients
from framework.errors import ConfigError, in_one_line
from framework.models.compilation import CompiledModules, noting_failures
from framework.plan.compiled_ops import missing_compiler
from framework.plan.plan import Plan
from framework.system.log import print_line

if TYPE_CHECKING:
    from framework.plan.compiling import CompileChoice

LossOf = Callable[[Any], Tensor]
"""Computes the loss of the first micro-batch, 0-d, with a model that it is given."""

# By how much, relative to its norm, the gradient of a whole model may differ between two ways to
# round. In bf16 a number is rounded to 8 bits, an error of 0.11 % on average; a model of 48 layers
# rounds about 1,200 times on the way to its first weights, and errors of either sign add up as
# their root: 4 %, and both ways have it. fp16 and TF32 have 3 bits more, an eighth of that. In fp32
# (24 bits) the longest sums have 10^5 terms: root(10^5) roundings of 2^-24 are 2e-5.
_FIX: Final = "set training.compile: auto, which then goes on as written, or false"
# fp8 rounds operands to 4 bits, 16 times as coarsely as bf16: 1.8 % on average, 400 times in 48
# layers, so 36 % where all those roundings fell otherwise; most fall the same way.
BOUNDS: Final = {"fp8": 0.3, "bf16": 0.1, "fp16": 0.0125, "tf32": 0.0125, "fp32": 1e-4}
# A single weight's gradient differs by more than the whole: it is a part of the sums.
_OF_ONE_WEIGHT: Final = 4
# The loss differs by less: it is a mean over positions or samples.
_OF_LOSS: Final = 0.25
# Gradients below this share of the others' size are rounding errors of zero, as that of the bias
# of an attention's keys.
_NOTHING: Final = 1e-6
# In fp16 the smallest gradients are 0 without it.
_FP16_SCALE: Final = 1024.0
# Work of a block, forward, below which a GPU takes less time for it than its host needs to start
# the 15 kernels of one: about 2^33 floating-point operations in 20 microseconds of an H200. The
# device then waits for the host, and fewer kernels' worth of device time gain nothing.
SMALL_BLOCK: Final = 2**33


class Pass(NamedTuple):
    """Loss and gradients of the micro-batch in one of the two ways."""

    loss: float
    gradients: Mapping[str, Sketch]


class Unhooked:
    """A DeepSpeed engine as the model in it, for passes that are none of its own: its module, with
    its autocast and without the hooks of its backward passes.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self._engine = engine

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        with autocast_if_enabled(self._engine):
            return self._engine.module(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class CompileProbe:
    """Compiles the model of an engine before its first step, if it then computes the same."""

    def __init__(
        self,
        plan: Plan,
        engine: deepspeed.DeepSpeedEngine,
        choice: CompileChoice,
        *,
        names: Mapping[Any, str],
        end_pass: Callable[[], None] | None = None,
    ) -> None:
        """Find what is compiled; nothing is before `decide`.

        Args:
            plan: the plan of the run.
            engine: with the model as written.
            choice: what is compiled, and whether it may be nothing.
            names: plain names of the model's weights.
            end_pass: ends a pass of stage 3, where ranks compare the order of modules.

        Raises:
            ConfigError: kind ``no-blocks``; not with ``auto``.
        """
        assert choice.section is not None
        self._plan = plan
        self._engine = engine
        self._is_auto = choice.is_auto
        self._names = names
        self._end_pass = end_pass
        # A rank that left such a pass for a later agreement would leave the others waiting: it
        # ends, and the launcher ends them.
        self._meets = ranks_meet_in_passes(plan)
        self.reason = ""
        """Why nothing is compiled."""
        self.compiled: CompiledModules | None = None
        """What is compiled, once `decide` has found no reason against it."""
        self._candidate: CompiledModules | None = None
        self._open = ExitStack()
        deterministic = plan.config.training.deterministic
        try:
            self._candidate = CompiledModules(
                engine.module, choice.section, deterministic=deterministic
            )
        except ConfigError:
            if not self._is_auto:
                raise
            self.reason = f"{type(engine.module).__name__} has no blocks that repeat"

    def decide(self, loss_of: LossOf) -> None:
        """Run forward and backward once as written and once compiled, and go on compiled if loss
        and gradients are the same to rounding on all ranks. Random states, buffers and gradients
        are then as before. Collective.

        Raises:
            ConfigError: kind ``compile-differs``, ``compile-failed`` or ``compiler-missing``; not
                with ``auto``.
        """
        candidate = self._candidate
        self._candidate = None
        if candidate is None:
            self._report(self.reason)
            return
        failure = self._try(candidate, loss_of)
        failures = [each for each in gather(_portable(failure)) if each]
        if not failures:
            self.compiled = candidate
            if self._is_auto:
                candidate.go_on_without()
                kind = type(candidate.modules[0]).__name__
                self._report("", f"{len(candidate.modules)} x {kind}")
            return
        candidate.stop()
        self._open.close()
        if failure is None:
            failure = _raised(failures[0])
        if not self._is_auto:
            raise failure
        self.reason = failure.problems[0].reason
        self._report(self.reason)

    def close(self) -> None:
        """Leave torch as it was."""
        if self.compiled is not None:
            self.compiled.stop()
            self.compiled = None
        self._open.close()

    def _run_as_written(
        self, candidate: CompiledModules, loss_of: LossOf
    ) -> tuple[Pass | None, str]:
        """Run the pass as written; return it, None if it failed, and what speaks against compiling
        the candidate, empty if nothing does.
        """
        try:
            with counted_operations(candidate.modules, self._is_auto) as count:
                plain = self._run(loss_of)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the first step meets it, and explains it
            if self._meets:
                raise
            return None, f"the first micro-batch fails as written: {in_one_line(error)}"
        operations = count() // len(candidate.modules)
        if not self._is_auto or operations >= SMALL_BLOCK:
            return plain, ""
        reason = (
            f"a block takes {operations / 1e9:,.3g} GFLOP of a micro-batch, and a GPU waits "
            f"for its host below {SMALL_BLOCK / 1e9:,.2g}"
        )
        return plain, reason

    def _try(self, candidate: CompiledModules, loss_of: LossOf) -> ConfigError | None:
        """Return what speaks against the compiled modules. Collective until all ranks know what
        speaks against them before they are run.
        """
        kind = "compile-failed"
        plain, reason = self._run_as_written(candidate, loss_of)
        if not reason and candidate.section.backend == "inductor":
            problem = missing_compiler(self._plan.cluster.device, os.environ)
            if problem is not None:
                kind = problem.kind
                reason = problem.reason
        # A rank that does not go on leaves the others waiting in the sums of their passes.
        for rank_kind, rank_reason in gather((kind, reason)):
            if rank_reason:
                return _refusal(rank_kind, rank_reason)
        assert plain is not None
        failure = self._compare(candidate, loss_of, plain)
        tried = gather((failure is not None, candidate.uses_tiles))
        if not any(failed for failed, _ in tried) or not any(used for _, used in tried):
            return failure
        # The tiles of the loss are compiled by themselves: without them the rest may be right.
        candidate.stop()
        candidate.tiles = False
        return self._compare(candidate, loss_of, plain)

    def _compare(
        self, candidate: CompiledModules, loss_of: LossOf, plain: Pass
    ) -> ConfigError | None:
        """Run the micro-batch compiled, and return how it differs."""
        passes = 1
        if candidate.records_graphs:
            passes = 3  # one without a graph, one that records it, one that replays it
        deepspeed.utils.nvtx.enable_nvtx = False  # its ranges would cut graphs
        if candidate.section.backend == "inductor" and candidate.tiles:
            from framework.engine.workarounds.blanks_in_inductor import quoting_paths

            self._open.enter_context(quoting_paths())
        try:
            candidate.start()
            with noting_failures() as failures:
                # All of them, before this rank returns: the others take them as well.
                compiled = [self._run(loss_of) for _ in range(passes)]
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) and not self._is_auto:
                raise
            refusal = _failed(error)
            if self._meets:
                raise refusal from error
            return refusal
        if failures:
            return _failed(failures[0])
        for each in compiled:
            difference = difference_of(plain, each, BOUNDS[self._dtype()])
            if difference:
                return ConfigError.of("compile-differs", difference, _FIX, "training.compile")
        return None

    def _run(self, loss_of: LossOf) -> Pass:
        """Run the micro-batch forward and backward; every run begins with the same state."""
        weights: dict[str, nn.Parameter] = {}
        for parameter, name in self._names.items():
            if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
                weights[name] = parameter
        scale = 1.0
        if self._dtype() == "fp16":
            scale = _FP16_SCALE
        with self._restored():
            loss = loss_of(Unhooked(self._engine))
            gradients = sketched_gradients(loss * scale, weights)
            if self._end_pass is not None:
                self._end_pass()
        return Pass(float(loss.detach()), gradients)

    def _dtype(self) -> str:
        """Return the key of `BOUNDS` that the run computes in."""
        precision = self._plan.config.precision
        if fp8_of(precision) is not None:
            return "fp8"
        dtype: str = getattr(precision, "compute_dtype", precision.dtype)
        uses_tf32 = getattr(precision, "matmul", "highest") != "highest"
        if dtype == "fp32" and uses_tf32:
            return "tf32"
        return dtype

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Restore random states and buffers at the end of the block."""
        buffers = [(buffer, buffer.clone()) for buffer in self._engine.module.buffers()]
        states = random_state.capture()
        try:
            yield
        finally:
            random_state.restore(states)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def _report(self, reason: str, what: str = "") -> None:
        """Print what ``auto`` has chosen, on one rank."""
        if not self._is_auto or rank() != 0:
            return
        if reason:
            print_line(f"training.compile: auto goes on as written: {reason}")
        else:
            print_line(
                f"training.compile: auto compiles {what}; the first micro-batch gives the same"
            )


def run_alone(engine: deepspeed.DeepSpeedEngine, loss_of: LossOf) -> None:
    """Run a loss forward and backward without hooks of DeepSpeed; no weight gets a gradient."""
    weights: dict[str, nn.Parameter] = {}
    for name, weight in engine.module.named_parameters():
        if weight.requires_grad:
            weights[name] = weight
    sketched_gradients(loss_of(Unhooked(engine)), weights)


def difference_of(plain: Pass, compiled: Pass, bound: float) -> str:
    """Describe the first difference between two passes that is none of rounding; empty if there is
    none. `bound` is the relative one of the whole gradient.
    """
    if _losses_differ(plain.loss, compiled.loss, bound):
        return f"the loss is {compiled.loss:.6g} compiled, and {plain.loss:.6g} as written"
    size, mean = _size_and_mean(plain.gradients)
    total = 0.0
    for name in sorted(plain.gradients.keys() | compiled.gradients.keys()):
        one = plain.gradients.get(name)
        other = compiled.gradients.get(name)
        if one is None or other is None:
            if _is_nothing(one or other, mean):
                continue
            way = "compiled" if other is None else "as written"
            return f"{name} has no gradient {way}"
        if not other.norm and not _is_nothing(one, mean):
            return f"the gradient of {name} is 0 compiled"
        distance = one.distance(other)
        total += distance**2
        allowed = bound * _OF_ONE_WEIGHT * (one.norm + mean * sqrt(one.numbers))
        if not distance <= allowed and isfinite(size):
            share = distance / max(one.norm, 1e-30)
            return f"the gradient of {name} differs by {share:.2g} of its norm"
    if not sqrt(total) <= bound * size and isfinite(size):
        return f"the gradients differ by {sqrt(total) / max(size, 1e-30):.2g} of their norm"
    return ""


def _losses_differ(plain: float, compiled: float, bound: float) -> bool:
    """Check whether two losses, one of them finite, differ by more than rounding."""
    if not isfinite(plain) and not isfinite(compiled):
        return False
    size = max(abs(plain), abs(compiled))
    # Not `>`: a NaN is a difference, too.
    return not abs(plain - compiled) <= bound * _OF_LOSS * size


def _size_and_mean(gradients: Mapping[str, Sketch]) -> tuple[float, float]:
    """Return the L2 norm of all gradients, and the root of the mean square of their numbers."""
    square = sum(each.norm**2 for each in gradients.values())
    numbers = sum(each.numbers for each in gradients.values())
    return sqrt(square), sqrt(square / max(numbers, 1))


def _is_nothing(gradient: Sketch | None, mean: float) -> bool:
    """Check whether a gradient is missing, or a rounding error of zero."""
    if gradient is None:
        return True
    return gradient.norm <= _NOTHING * mean * sqrt(gradient.numbers)


@contextmanager
def counted_operations(modules: list[nn.Module], counts: bool) -> Iterator[Callable[[], int]]:
    """Count floating-point operations of the modules' forward passes within the block, if `counts`.

    Yields:
        A function that returns their sum.
    """
    total = 0
    if not counts:
        yield lambda: total
        return
    from torch.utils.flop_counter import FlopCounterMode

    def counting(forward: Callable[..., Any]) -> Callable[..., Any]:
        def count(*inputs: Any, **named: Any) -> Any:
            nonlocal total
            with FlopCounterMode(display=False) as counter:
                outputs = forward(*inputs, **named)
            total += counter.get_total_flops()
            return outputs

        return count

    own = [vars(module).get("forward") for module in modules]
    for module in modules:
        vars(module)["forward"] = counting(module.forward)
    try:
        yield lambda: total
    finally:
        for module, forward in zip(modules, own, strict=True):
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


def ranks_meet_in_passes(plan: Plan) -> bool:
    """Check whether ranks wait for each other within forward and backward passes."""
    config = plan.config
    layout = plan.layout
    ranks_of_model = layout.tensor_size * layout.sequence_size * layout.expert_size
    return ranks_of_model > 1 or config.zero.stage == 3 or config.training.sync_batch_norm


def _failed(error: BaseException) -> ConfigError:
    """Return the error of compiled passes that failed."""
    refusal = failure_of_torch_compile(error)
    return refusal or _refusal("compile-failed", in_one_line(error))


def _refusal(kind: str, reason: str) -> ConfigError:
    """Return the error of a run that asks for a compiled model and goes on with no other."""
    return ConfigError.of(kind, reason, _FIX, "training.compile")


def _portable(failure: ConfigError | None) -> tuple[str, str] | None:
    """Return kind and reason of a failure for other ranks."""
    if failure is None:
        return None
    problem = failure.problems[0]
    return problem.kind, problem.reason


def _raised(failure: tuple[str, str]) -> ConfigError:
    """Return the failure of another rank."""
    kind, reason = failure
    return _refusal(kind, f"on another rank {reason}")
