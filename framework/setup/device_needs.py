"""What compiling a model, and products in fp8, need of the device and of this Python."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from framework.config.precision import fp8_of
from framework.config.run_config import RunConfig
from framework.config.training import Compile
from framework.errors import Problem
from framework.plan.cluster import Device
from framework.plan.compiled_ops import missing_compiler
from framework.plan.compiling import BY_INDUCTOR, DEEPCOMPILE
from framework.plan.rules.devices import fp8_problems, missing_fp8_package


def missing_for_device(config: RunConfig, device: Device) -> Iterator[Problem]:
    """Yield what is missing here for products in fp8, and for compiling the model."""
    yield from _fp8_problems(config, device)
    yield from _compile_problems(config.training.compile, device)


def _compile_problems(section: Compile | str | None, device: Device) -> Iterator[Problem]:
    """Yield the first problem that compiling the model would meet here; none with ``auto``."""
    if not isinstance(section, Compile):
        return
    backends = [*torch.compiler.list_backends(exclude_tags=()), DEEPCOMPILE]
    if section.backend not in backends:
        reason = "torch knows no such backend here"
        fix = f"write one of {', '.join(backends)}"
        yield Problem("unknown-backend", reason, fix, "training.compile.backend", section.backend)
        return
    if section.backend in BY_INDUCTOR:
        problem = missing_compiler(device, os.environ)
        if problem:
            yield problem


def _fp8_problems(config: RunConfig, device: Device) -> Iterator[Problem]:
    """Yield what is missing here for products in fp8: the package, or a GPU that has them."""
    section = fp8_of(config.precision)
    if section is None:
        return
    yield from missing_fp8_package(config.precision)
    if device == "cuda" and not section.emulate:
        capability = None
        if torch.version.hip is None:
            capability = torch.cuda.get_device_capability()
        yield from fp8_problems(config.precision, torch.cuda.get_device_name(), capability)
