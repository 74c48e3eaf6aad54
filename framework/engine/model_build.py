"""Builds the model of a run, with the same weights at every ZeRO stage.

At stages 0 to 2 every rank builds the whole model: all ranks of a host at once, or one after the
other if the host's memory is too small for that; DeepSpeed gives all of them rank 0's weights. At
stage 3 its `zero.Init` takes the weights of a module away as soon as the module's own constructor
returns: what a parent's constructor then writes (a loop over `self.modules()`, `load_state_dict`,
`copy.deepcopy` of a layer) is silently lost. So a model is built whole in host memory and then
partitioned, weight by weight, from rank 0; or inside `zero.Init`, where every use of a weight that
has been taken away is found and ends that attempt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from framework.engine.distributed import barrier, device, gather
from framework.engine.initialize import refusing_scalars
from framework.engine.random_state import capture, restore
from framework.engine.step_batches import HALF
from framework.errors import ConfigError
from framework.system.limits import ranks_on_host, room

if TYPE_CHECKING:
    from framework.engine.rank_groups import RankGroups

Build = Callable[[], torch.nn.Module]
_Way = Callable[[Build, Mapping[str, Any], int | None], torch.nn.Module]

# Share of the host's free memory for weights; the rest is for what a constructor needs beside them.
_SHARE_FOR_WEIGHTS: Final = 0.8


class _NotThisWay(BaseException):
    """A model does not fit as a whole, or cannot be built in pieces; the message then has the
    reason. It is no Exception, so that no constructor catches it.
    """


def build_model(
    build: Build,
    *,
    ds_config: Mapping[str, Any],
    draws_in_pieces: bool = False,
    host_bytes: int | None = None,
    groups: RankGroups | None = None,
) -> torch.nn.Module:
    """Build a model; at ZeRO stage 3 its weights are partitioned. Collective.

    Args:
        build: called once on every rank, or up to three times if memory is short.
        ds_config: the rendered DeepSpeed JSON.
        draws_in_pieces: whether its modules are known to draw their weights in their own
            constructors, so that no rank has to hold the whole model.
        host_bytes: memory of this host that the ranks on it may take for weights; measured by
            default.
        groups: process groups, if `build` leaves each rank of a tensor group with a part of the
            weights.

    Raises:
        ConfigError: kind ``init-lost-at-stage-3``: it does not fit into host memory as a whole, and
            its constructors write to weights of other modules; kind ``scalar-weight``.
    """
    is_cut = ds_config["zero_optimization"]["stage"] == 3
    if not is_cut and ranks_on_host() == 1:
        return build()
    if host_bytes is None:
        host_bytes = _free_for_weights()
    reason = ""
    random_state = capture()
    with refusing_scalars():
        for way in _ways(is_cut=is_cut, draws_in_pieces=draws_in_pieces, groups=groups):
            restore(random_state)
            model = None
            try:
                model = way(build, ds_config, host_bytes)
            except _NotThisWay as error:
                reason = str(error) or reason
            if all(gather(model is not None)):
                assert model is not None
                if is_cut:
                    from framework.engine.stage3_build import partition

                    return partition(model, ds_config, groups)
                return model
    raise ConfigError.of(
        kind="init-lost-at-stage-3",
        key="zero.stage",
        value=3,
        reason="the model does not fit into the host memory that is free for it "
        f"({(host_bytes or 0) / 1e9:.1f} GB) and cannot be built in pieces: {reason}",
        fix="initialise weights in the constructor of their own module, or start on hosts with "
        "more memory",
    )


def _free_for_weights() -> int | None:
    """Return the bytes of this host that ranks may take for weights; None if that is not known."""
    free = room()
    if free is None:
        return None
    return int(free.num_bytes * _SHARE_FOR_WEIGHTS)


def _ways(*, is_cut: bool, draws_in_pieces: bool, groups: RankGroups | None) -> list[_Way]:
    """Return the ways to build a model, in the order in which they are tried.

    At stages 0 to 2 models are not built in pieces; nor are models of a tensor group, as parts are
    cut from whole weights. The last way is then tried however large the model is.
    """
    data_group = None
    if groups is not None:
        data_group = groups.data
    in_turn = partial(_build_in_turn, is_cut=is_cut, group=data_group)
    if not is_cut or groups is not None:
        return [_build_whole, in_turn]
    if draws_in_pieces:
        return [_build_in_pieces, _build_whole, in_turn]
    return [_build_whole, _build_in_pieces, in_turn]


def _build_whole(
    build: Build, ds_config: Mapping[str, Any], host_bytes: int | None
) -> torch.nn.Module:
    """Build on every rank of the host at once, as stages 0 to 2 do."""
    if host_bytes is not None:
        host_bytes //= ranks_on_host()
    with _limited(host_bytes):
        return build()


def _build_in_turn(
    build: Build,
    ds_config: Mapping[str, Any],
    host_bytes: int | None,
    *,
    is_cut: bool = True,
    group: Any = None,
) -> torch.nn.Module:
    """Build on one rank of a host after the other. Only rank 0 of `group` keeps its weights; the
    group is of the data-parallel ranks, or None for all ranks. Collective.

    `host_bytes` is a limit only if ZeRO-3 partitions the weights (`is_cut`). A rank with a model
    that does not fit raises `_NotThisWay`.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not is_cut:
        host_bytes = None
    model: torch.nn.Module | None = None
    for turn in reversed(range(ranks_on_host())):
        if turn == local_rank:
            with suppress(_NotThisWay), _limited(host_bytes):
                model = build()
            if model is not None and torch.distributed.get_rank(group) != 0:
                if is_cut:
                    _drop_weights(model)
                else:
                    _make_room(model, ds_config)
        barrier()
    if model is None:
        raise _NotThisWay
    return model


def _drop_weights(model: torch.nn.Module) -> None:
    """Replace weights by views of one element: shapes and types stay, the memory is free."""
    for parameter in model.parameters():
        parameter.data = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)


def _make_room(model: torch.nn.Module, ds_config: Mapping[str, Any]) -> None:
    """Replace weights by uninitialised memory on the device, in the type to which DeepSpeed will
    cast rank 0's weights before it sends them.
    """
    half: torch.dtype | None = None
    for key, dtype in HALF.items():
        if ds_config.get(key, {}).get("enabled"):
            half = dtype
            break
    for parameter in model.parameters():
        dtype = parameter.dtype
        if half is not None and parameter.is_floating_point():
            dtype = half
        parameter.data = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=dtype, device=device()
        )


def _build_in_pieces(
    build: Build, ds_config: Mapping[str, Any], host_bytes: int | None
) -> torch.nn.Module:
    """Build inside `zero.Init`; raises `_NotThisWay` if the model cannot be built there.
    Collective.
    """
    from framework.engine.stage3_build import LostWeightError, build_in_pieces

    try:
        return build_in_pieces(build, ds_config)
    except LostWeightError as error:
        raise _NotThisWay(str(error)) from error


@contextmanager
def _limited(num_bytes: int | None) -> Iterator[None]:
    """Raise `_NotThisWay` as soon as modules register more bytes of weights than this, within
    the block; None is no limit.
    """
    known: set[int] = set()
    total = 0

    def count(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal total
        if parameter is None or num_bytes is None:
            return
        if parameter.is_meta or torch.nn.parameter.is_lazy(parameter):
            return
        if id(parameter) not in known:
            known.add(id(parameter))
            total += parameter.nbytes
            if total > num_bytes:
                raise _NotThisWay

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
