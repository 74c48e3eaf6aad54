"""Builds models in pieces, inside `zero.Init`, and partitions whole ones: for ZeRO stage 3."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from deepspeed.utils import groups
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from framework.engine.distributed import device

if TYPE_CHECKING:
    from framework.engine.rank_groups import RankGroups

# Attributes that may be read of a weight that has been taken away: they are right, or used for
# nothing but a count.
_HARMLESS: Final = frozenset(
    (
        "requires_grad_",
        "requires_grad",
        "dtype",
        "device",
        "layout",
        "is_leaf",
        "grad",
        "numel",
        "nelement",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_cuda",
        "is_meta",
        "__hash__",
    )
)


# Constructors of torch's own layers, beside the base class, through which DeepSpeed goes as well.
_MODELS_OF_TORCH: Final = tuple(
    f"torch.nn.modules.{name}" for name in ("activation", "transformer", "rnn", "conv", "linear")
)


class LostWeightError(BaseException):
    """A model cannot be built in pieces, for the reason in the message. It is no Exception, so that
    no constructor catches it.
    """


def build_in_pieces(
    build: Callable[[], torch.nn.Module], ds_config: Mapping[str, Any]
) -> torch.nn.Module:
    """Build inside `zero.Init`, so that no rank ever holds all weights. Collective.

    Raises:
        LostWeightError: the model cannot be built there.
    """
    try:
        with _PiecewiseInit(tensor_overrides=[], **_arguments(ds_config)), _LostWeightWatch():
            return build()
    except Exception as error:  # the model may fail in `zero.Init` only: other ways show it
        raise LostWeightError(
            f"its constructor fails there ({type(error).__name__}: {str(error)[:200]})"
        ) from error


@torch.no_grad()
def partition(
    model: torch.nn.Module,
    ds_config: Mapping[str, Any],
    rank_groups: RankGroups | None = None,
    *,
    copies_of_experts: Any = None,
) -> torch.nn.Module:
    """Partition rank 0's weights that are not partitioned yet, one by one, and move buffers to the
    device, as the engine does at other stages. Collective.

    `copies_of_experts`: the ranks that share second copies of experts (hpZ).
    """
    whole = [parameter for parameter in model.parameters() if not is_zero_param(parameter)]
    if whole:
        arguments = _arguments(ds_config)
        # A swapper of its own would delete what the first one has swapped to NVMe.
        arguments["param_swapper"] = _swapper_of(model)
        if rank_groups is not None:
            arguments |= {"data_parallel_group": rank_groups.data, "mpu": rank_groups}
        init = deepspeed.zero.Init(module=torch.nn.Module(), **arguments)
        init_of_experts = init
        if copies_of_experts is not None:
            init_of_experts = _init_with_copies(whole, arguments, copies_of_experts)
        for parameter in whole:
            if _expert_replicas(parameter) is None:
                _partition_weight(parameter, init)
            else:
                _partition_weight(parameter, init_of_experts)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device())
    return model


def _swapper_of(model: torch.nn.Module) -> Any:
    """Return the swapper of the weights on NVMe that were partitioned before; None without any."""
    swappers = (getattr(weight, "nvme_swapper", None) for weight in model.parameters())
    return next((swapper for swapper in swappers if swapper is not None), None)


def _expert_replicas(parameter: torch.nn.Parameter) -> Any:
    """Return the ranks that hold the same experts, for a weight of divided ones; else None."""
    return getattr(parameter, "ds_zero_partition_process_group", None)


def _init_with_copies(
    parameters: Iterable[torch.nn.Parameter], arguments: Mapping[str, Any], copies: Any
) -> deepspeed.zero.Init:
    """Return a `zero.Init` for experts, with second copies in a group of their own: DeepSpeed has
    one group for all weights of a `zero.Init`.
    """
    from framework.engine.zero_plus_plus import copying_in

    replicas = [_expert_replicas(parameter) for parameter in parameters]
    group = next(group for group in replicas if group is not None)
    changed = {"data_parallel_group": group, "zero_param_parallel_group": copies}
    with copying_in(copies):
        return deepspeed.zero.Init(module=torch.nn.Module(), **{**arguments, **changed})


def _partition_weight(parameter: torch.nn.Parameter, init: deepspeed.zero.Init) -> None:
    if parameter.is_floating_point():
        parameter.data = parameter.data.to(init.dtype)
    if parameter.data.untyped_storage().nbytes() < parameter.nbytes:  # see `_drop_weights`
        parameter.data = torch.empty_like(
            parameter.data, memory_format=torch.contiguous_format, device=init.local_device
        )
    init._convert_to_zero_parameters([parameter])


def _arguments(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of every `zero.Init` of a run. Only the first one makes hpZ's group."""
    group = None
    if ds_config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1:
        group = groups._get_zero_param_intra_parallel_group()
    return {"config_dict_or_path": dict(ds_config), "zero_param_parallel_group": group}


class _PiecewiseInit(deepspeed.zero.Init):  # type: ignore[misc]
    """A `zero.Init` with the same drawn weights as stages 0 to 2: on the host, in single precision,
    rounded afterwards.
    """

    def __enter__(self) -> None:
        super().__enter__()
        apply = torch.nn.Module.apply

        def apply_and_return(
            module: torch.nn.Module, function: Callable[[torch.nn.Module], None]
        ) -> torch.nn.Module:
            apply(module, function)  # DeepSpeed's returns nothing (0.19.8, `wrapped_apply`)
            return module

        torch.nn.Module.apply = apply_and_return  # type: ignore[method-assign, assignment]

    def _post_init_method(self, module: torch.nn.Module) -> None:
        """Round the weights of a module that was built, note their names, and partition them."""
        for name, parameter in module.named_parameters(recurse=False):
            if not is_zero_param(parameter):
                place = f"{name} of a {type(module).__name__} {list(parameter.shape)}"
                vars(parameter)["weight_of"] = place
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(self.dtype)
        super()._post_init_method(module)


class _LostWeightWatch(TorchFunctionMode):
    """Raises `LostWeightError` if code other than DeepSpeed's uses a weight that has been taken
    away.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            is_gone = getattr(value, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE
            if not is_gone or _is_harmless(func):
                continue
            place = _place_in_model()
            if place is not None:
                weight = getattr(value, "weight_of", "a weight")
                raise LostWeightError(
                    f"{place} uses {weight} after its constructor has returned, when its "
                    "values are gone"
                )
        return func(*args, **(kwargs or {}))


def _is_harmless(func: Any) -> bool:
    """Check whether a function of torch reads or sets only what `_HARMLESS` names."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name in _HARMLESS


def _place_in_model() -> str | None:
    """Return ``file:line`` of the innermost frame of a model, or None if DeepSpeed's code comes
    first.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("deepspeed."):
            return None
        if not module.startswith("torch.") or module.startswith(_MODELS_OF_TORCH):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"
