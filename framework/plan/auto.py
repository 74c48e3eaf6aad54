"""Keys of a run config that are `auto`: chosen once, before the run, from the config, the cluster
and its devices.

The choice follows from these alone, so that every rank that makes it makes the same one. A launcher
makes it for all ranks and hands them plain settings.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from framework.config.load import Source
from framework.config.run_config import AUTO, RunConfig
from framework.errors import ConfigError, Problem, UsageError
from framework.plan.alternatives import settings_text, size_text, with_settings
from framework.plan.candidate import Candidate, fullest, judge
from framework.plan.cluster import GPU_VARIABLE, Cluster
from framework.plan.devices import Machine, find_device, tables
from framework.plan.hardware import Hardware
from framework.plan.measured import measured_rates
from framework.plan.memory import NotEstimatedError
from framework.plan.plan import make_plan
from framework.plan.search import search
from framework.plan.search_space import ACCUMULATION, EXPERT, MICRO, SIZES, Request
from framework.plan.work import ModelWork
from framework.system.limits import host_memory_bytes
from framework.system.output import write

_PROBE_SECONDS: Final = 20
# Share by which the memory that a driver reports may differ from the listed one.
_CLOSE: Final = 0.1
# Of a machine at rest the same product differs by a few percent.
MOST_SPREAD: Final = 0.25


def target_at_hand(cluster: Cluster, environment: Mapping[str, str] = os.environ) -> Hardware:
    """Return the devices of this machine, as far as they can be found without torch.

    NVIDIA's are found by their driver, which may block for 20 s, other GPUs by ``DSF_GPU``. On CPUs
    each rank gets its share of the host's memory.
    """
    ranks = cluster.devices_per_host
    host = host_memory_bytes()
    name = environment.get(GPU_VARIABLE)
    if name:
        return listed_target(name, devices_per_host=ranks, host_bytes=host)
    if cluster.device == "cpu":
        return _processors(cluster, host)
    if cluster.device == "cuda":
        return _gpus_of_driver(ranks, host)
    return Hardware()


def _processors(cluster: Cluster, host_bytes: int) -> Hardware:
    """Return the CPUs of this machine, with their rates if these were measured."""
    measured = measured_target(cluster)
    if measured is not None and measured.name == "cpu":
        return measured
    return Hardware("cpu", host_bytes // cluster.devices_per_host)


def _gpus_of_driver(ranks: int, host_bytes: int) -> Hardware:
    """Return the GPUs that NVIDIA's driver finds, with their rates if they are listed."""
    smallest = _ask_driver()
    if smallest is None:
        return Hardware()
    name, memory = smallest
    known = _listed_name(name, memory)
    if known is None:
        return Hardware(name, memory, host_bytes)
    target = listed_target(known, devices_per_host=ranks, host_bytes=host_bytes)
    return replace(target, memory_bytes=memory)


def peaks_at_hand(
    cluster: Cluster, environment: Mapping[str, str] = os.environ
) -> dict[str, float]:
    """Return the listed peaks of this machine's devices, type of numbers -> operations per second;
    empty if they are not known.
    """
    with suppress(UsageError):  # a name that is not listed
        machine = target_at_hand(cluster, environment).machine
        if machine is not None and not machine.measured:
            return dict(machine.device.flops_per_second)
    return {}


def listed_target(
    gpu: str, *, devices_per_host: int, network: str | None = None, host_bytes: int | None = None
) -> Hardware:
    """Return devices of a listed kind; raises UsageError if it, or the network, is not listed."""
    machine = Machine.listed(gpu, devices_per_host=devices_per_host, network=network)
    return Hardware(machine.device.name, machine.device.memory_bytes, host_bytes, machine)


def measured_target(cluster: Cluster) -> Hardware | None:
    """Return this machine with its measured rates; None for several hosts, or if no rates were
    measured with as many ranks.
    """
    if cluster.num_hosts > 1:
        return None
    ranks = cluster.world_size
    rates = measured_rates(ranks)
    if rates is None:
        return None
    machine = Machine.from_measured(rates, devices_per_host=ranks)
    if rates["identity"]["is_cpu"]:
        target = Hardware("cpu", host_memory_bytes() // ranks)
    else:
        target = Hardware("this machine")
    return replace(target, machine=machine, rates=conditions(rates))


def conditions(rates: Mapping[str, Any]) -> str:
    """Return the time at which rates were measured, and the load of the machine then, in words."""
    if "time_seconds" not in rates:
        return "rates measured at an unknown time"
    hours = (time.time() - rates["time_seconds"]) / 3600
    text = f"rates measured {hours:,.1f} h ago at a load of {rates['load_average']:.1f}"
    if rates["spread"] > MOST_SPREAD:
        text += f", unsteady: the same took up to {rates['spread']:.0%} longer"
    return text


def _ask_driver() -> tuple[str, int] | None:
    """Return name and bytes of memory of the smallest NVIDIA GPU here, None if nvidia-smi finds
    none; blocks for `_PROBE_SECONDS` at most.
    """
    program = shutil.which("nvidia-smi")
    if not program:
        return None
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.TimeoutExpired, ValueError):
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
        devices = []
        for line in answer.stdout.splitlines():
            if line.strip():
                name, _, mib = line.rpartition(",")
                devices.append((int(mib) * 2**20, name.strip()))
        if devices:
            memory, name = min(devices)
            return name, memory
    return None


def _listed_name(name: str, memory_bytes: int) -> str | None:
    """Return the listed device that a driver's name means, such as ``NVIDIA H100 80GB HBM3``.

    It is the longest listed name that is part of the driver's, with as much memory, to a tenth.
    """
    text = re.sub(r"[^a-z0-9]", "", name.lower())
    close = []
    for kind in tables()["devices"]:
        if kind.partition("-")[0] in text:
            listed_bytes = find_device(kind).memory_bytes or 0
            if abs(listed_bytes / memory_bytes - 1) < _CLOSE:
                close.append(kind)
    return max(close, key=lambda kind: len(kind.partition("-")[0]), default=None)


def resolve(
    config: RunConfig,
    cluster: Cluster,
    target: Hardware,
    *,
    source: Source | None = None,
    num_train_samples: int | None = None,
    saved: Mapping[str, Any] | None = None,
    is_proposal: bool = False,
    work: ModelWork | None = None,
) -> tuple[RunConfig, dict[str, Any], str]:
    """Choose what a config leaves to be chosen.

    Args:
        config: with some keys that are `auto`; others come back as they are.
        cluster: where it is to run.
        target: its devices.
        source: where the config's values came from.
        num_train_samples: size of the training data, if it is known.
        saved: manifest of the checkpoint that the run goes on from: on as many ranks its values are
            kept.
        is_proposal: nothing is started, so that the device may be unknown.
        work: of a model of the user's own.

    Returns:
        The config with plain values, these by their dotted keys, and one line for a person.

    Raises:
        ConfigError: nothing fits, the device is not known, or the model's memory is not.
    """
    source = source or Source()
    settings = _saved_settings(config, cluster, saved or {})
    if settings:
        with suppress(ConfigError):  # other changes of the config may contradict them
            kept = _config_with(config, settings, source)
            make_plan(kept, cluster)
            return kept, settings, f"auto: {settings_text(settings)}, as in the checkpoint"
    if not is_proposal:
        _refuse_unknown_device(config, cluster, target, source)
    free = set(config.auto)
    if config.batch.accumulation_steps is None:
        free.add(ACCUMULATION)
    request = Request(config, cluster, target, free, num_train_samples, work)
    settings = _chosen_settings(config, _fastest(request, source))
    chosen = _config_with(config, settings, source)
    plan = make_plan(chosen, cluster, num_train_samples=num_train_samples)
    best = judge(plan, target, work=work)
    reason = best.lacking(target)
    if reason:  # a search judges in the same way, and this would be its fault
        fix = "write the values, and report this: the search took it to fit"
        raise _refused("auto-nothing-fits", reason, fix, min(config.auto), source)
    line = f"auto: {_shown(settings)}: {choice_text(best, target)}"
    return chosen, settings, line


def _refuse_unknown_device(
    config: RunConfig, cluster: Cluster, target: Hardware, source: Source
) -> None:
    """Raise ConfigError if the memory of the devices is not known."""
    if target.memory_bytes is not None:
        return
    reason = "it cannot be chosen without knowing the device"
    fix = (
        f"write what `plan CONFIG --num_gpus {cluster.world_size} --gpu KIND` proposes, or set "
        f"{GPU_VARIABLE} to the kind"
    )
    raise _refused("auto-without-device", reason, fix, min(config.auto), source)


def _fastest(request: Request, source: Source) -> Candidate:
    """Return the first candidate of a search; raises ConfigError if there is none."""
    key = min(request.config.auto)
    try:
        result = search(request)
    except NotEstimatedError as error:
        reason = f"the memory of this run is not known: {error}"
        fix = "let `plan CONFIG --apply` look at it and write it"
        raise _refused("auto-not-estimated", reason, fix, key, source) from None
    if not result.ranked:
        fix = "use more devices, or `plan` with --search, which may also offload and recompute"
        raise _refused("auto-nothing-fits", result.block, fix, key, source)
    return result.ranked[0]


def _chosen_settings(config: RunConfig, best: Candidate) -> dict[str, Any]:
    """Return those settings of a candidate that the config leaves to be chosen."""
    chosen = set(config.auto)
    # a pipeline's micro-batch was chosen together with their number in a step
    if best.plan.layout.pipe_size > 1 and MICRO in config.auto:
        chosen.add(ACCUMULATION)
    return {name: value for name, value in best.settings.items() if name in chosen}


def chosen_here(
    config: RunConfig,
    cluster: Cluster,
    saved_manifest: Callable[[], Mapping[str, Any]],
    *,
    source: Source,
) -> RunConfig:
    """Return the config with its `auto` keys chosen for this machine; rank 0 prints the choice to
    stderr.

    `saved_manifest`: reads the manifest of the checkpoint to go on from, empty without one; it is
    called only if a key is `auto`. Errors as in `resolve`.
    """
    if not config.auto:
        return config
    saved = saved_manifest()
    target = target_at_hand(cluster)
    config, _, line = resolve(config, cluster, target, source=source, saved=saved)
    if os.environ.get("RANK", "0") == "0":
        write(sys.stderr, f"{line}\n")
    return config


def _shown(settings: Mapping[str, Any]) -> str:
    """Write a choice in one line; sizes of 1 are left out beside others."""
    unusual = {
        key: value
        for key, value in settings.items()
        if value != 1 or not key.startswith("parallel.")
    }
    return settings_text(unusual or settings)


def choice_text(best: Candidate, target: Hardware) -> str:
    """Return memory and speed of a choice, in words that show how far they are known."""
    memory = size_text(best.peak_bytes)
    usable = target.usable_text(best.memory)
    if usable:
        memory += f" of {usable}"
    memory += f" on each rank at most ({fullest(best.memory)})"
    on_host = target.host_text(best.memory, best.plan.cluster.devices_per_host)
    if on_host:
        memory += f", {on_host}"
    if best.samples_per_second is None:
        why = "no device named"
        if target.name:
            why = f"that of {target.name} is not listed"
        return f"{memory}, estimated; speed unknown: {why}, so it is ranked as a card on PCIe"
    return (
        f"{memory}, {best.samples_per_second:,.0f} samples per second; estimated for {target.text}"
    )


def _config_with(config: RunConfig, settings: Mapping[str, Any], source: Source) -> RunConfig:
    return with_settings(config, settings, source=source).noting_auto(config.was_auto)


def _saved_settings(
    config: RunConfig, cluster: Cluster, saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that a checkpoint's manifest has for all `auto` keys; empty if it lacks one
    or is of another number of ranks.
    """
    layout = saved.get("layout")
    before = saved.get("config")
    if not isinstance(layout, Mapping) or not isinstance(before, Mapping):
        return {}
    if layout.get("world_size") != cluster.world_size:
        return {}
    values = _saved_values(layout, before)
    kept = {key: values[key] for key in sorted(config.auto) if isinstance(values.get(key), int)}
    if kept.keys() == config.auto:
        return kept
    return {}


def _saved_values(layout: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return key -> value, in a manifest's layout and config, of all keys that may be `auto`."""
    values = {MICRO: layout.get("micro_size")}
    for key in (*SIZES, EXPERT):
        values[key] = layout.get(f"{key.rpartition('.')[2]}_size", 1)
    with suppress(KeyError, TypeError):
        values["zero.stage"] = before["zero"]["stage"]
    return values


def _refused(kind: str, reason: str, fix: str, key: str, source: Source) -> ConfigError:
    return ConfigError(source.locate(Problem(kind, reason, fix, key, AUTO)))
