"""Builds the engine of a pipeline: the layers of this rank's stage, changed as a whole model is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from framework.checkpoint.manifest import SavedCheckpoint
from framework.config.base import Target
from framework.config.training import LoRA
from framework.engine.distributed import rank
from framework.engine.pipeline_engine import PipelineEngine, build_pipeline
from framework.engine.step_batches import HALF
from framework.engine.weights import put_layer_weights
from framework.models.layers import Layer
from framework.models.prepare_model import as_fp32
from framework.models.sync_batch_norm import with_sync_batch_norm
from framework.models.unsupported import (
    refuse_sparse_gradients,
    refuse_unsupported,
    store_in_rows,
)
from framework.setup.prepare_run import Prepared
from framework.system.log import print_line

if TYPE_CHECKING:
    from framework.engine.tensor_cut import TensorCut
    from framework.engine.tensor_plans import KnownPlan
    from framework.setup.pipeline_stages import CutModel


def assemble_stage(prepared: Prepared, cut: CutModel, *, varying_shapes: bool) -> PipelineEngine:
    """Build this rank's stage of a pipeline with its optimizer. Collective."""
    plan = prepared.plan
    parts = prepared.parts
    weights = prepared.weights
    assert not isinstance(weights, SavedCheckpoint), "they are read when the ranks have met"
    tensor_cut: TensorCut | None = None
    lora = plan.config.training.lora
    layers = cut.layers
    if lora is not None:
        layers = _adapted_stage(prepared, cut, lora)

    def adapt(module: torch.nn.Module, layer: str, grid: Any) -> torch.nn.Module:
        """Change a layer as `prepare_model` changes a whole model, and leave this rank's part."""
        nonlocal tensor_cut
        if weights is not None and lora is None:
            put_layer_weights(module, weights, layer=layer)
        for name, parameter in module.named_parameters():
            if f"{layer}.{name}" in cut.frozen:
                parameter.requires_grad_(False)
        if plan.config.precision.dtype not in HALF:  # DeepSpeed would train what it gets
            as_fp32(module)
        refuse_unsupported(module, plan.config, prefix=f"{layer}.")
        refuse_sparse_gradients(module, plan.config, prefix=f"{layer}.")
        store_in_rows(module)
        if cut.tensor_plan is not None and lora is None:
            if tensor_cut is None:
                group = grid.get_slice_parallel_group()
                tensor_cut = _stage_cut(prepared, cut.tensor_plan, group)
            tensor_cut.layer(layer, module)
        if plan.layout.expert_size > 1 and plan.config.model.is_own_code:
            from framework.engine.expert_parallel import expert_group
            from framework.engine.packed_experts import divide_packed

            divide_packed(module, expert_group(plan), prefix=f"{layer}.")
        tile = plan.config.training.mlp_tile
        if tile:
            from framework.models.tiled_perceptron import has_perceptrons, tile_perceptrons

            if has_perceptrons(module):
                tile_perceptrons(module, tile)
        if not plan.config.training.sync_batch_norm:
            return module
        return with_sync_batch_norm(module, process_group=grid.get_data_parallel_group())

    def built() -> None:
        """Look at all layers together, when every rank has its own."""
        if tensor_cut is not None:
            tensor_cut.check_stages()

    dividing: AbstractContextManager[None] = nullcontext()
    if plan.layout.expert_size > 1:
        from framework.engine.expert_parallel import building_experts

        dividing = building_experts(plan, varies=varying_shapes or plan.layout.micro_size == 1)
    with dividing:
        stage = build_pipeline(
            plan,
            ds_config=prepared.ds_config,
            layers=layers,
            bounds=cut.table.bounds,
            task=parts.task,
            make_optimizer=parts.make_optimizer,
            make_schedule=parts.make_schedule,
            adapt=adapt,
            built=built,
            around=cut.around,
            varying_shapes=varying_shapes,
        )
    if weights is not None:
        weights.let_go()  # `Prepared` would hold them to the end of the run
    if isinstance(plan.config.model, Target):  # a model that was handed over stays whole
        from framework.setup.pipeline_stages import let_go_of_others

        let_go_of_others(cut.layers, stage.module)
    return stage


def _stage_cut(prepared: Prepared, known: KnownPlan, group: Any) -> TensorCut:
    """Return what cuts the layers of this rank's stage for its tensor group."""
    from framework.engine.tensor_cut import TensorCut

    config_plan = prepared.plan.config.parallel.tensor_plan
    return TensorCut(group, config_plan, prepared.parts.task, known=known)


def _adapted_stage(prepared: Prepared, cut: CutModel, lora: LoRA) -> tuple[Layer, ...]:
    """Return the layers of a pipeline; this rank's stage has them built and with adapters."""
    from framework.setup.adapted_stages import adapted_layers

    plan = prepared.plan
    layout = plan.layout
    weights = prepared.weights
    assert not isinstance(weights, SavedCheckpoint)
    stage = layout.stage_of(rank())
    tensor_cut: TensorCut | None = None
    if cut.tensor_plan is not None:
        from framework.engine.rank_groups import make_groups

        tensor_cut = _stage_cut(prepared, cut.tensor_plan, make_groups(layout).tensor)

    def put(module: torch.nn.Module, layer: str) -> None:
        """Give a layer its first weights, and leave this rank's part; adapters change the names of
        its modules.
        """
        if plan.config.precision.dtype not in HALF:
            as_fp32(module)
        if weights is not None:
            put_layer_weights(module, weights, layer=layer)
        if tensor_cut is not None:
            tensor_cut.layer(layer, module)

    def add(model: torch.nn.Module, lora: LoRA, *, seed: int) -> torch.nn.Module:
        """Put adapters into all layers, once each is known to be cut well."""
        if tensor_cut is None:
            from framework.models.adapters import add_adapters

            return add_adapters(model, lora, seed=seed)
        from framework.engine.tensor_adapters import add_divided_adapters

        tensor_cut.check_stages()
        return add_divided_adapters(model, lora, seed=seed)

    layers, whole = adapted_layers(
        cut.layers,
        lora,
        seed=plan.config.run.seed,
        start=cut.table.bounds[stage],
        stop=cut.table.bounds[stage + 1],
        put=put,
        add=add,
    )
    if prepared.adapter is not None:
        from framework.engine.adapter_weights import put_adapter

        put_adapter(whole, prepared.adapter, lora)
        prepared.adapter.let_go()
    if lora.quantization is not None:
        from framework.engine.adapter_weights import quantize_adapted

        dtype = HALF.get(plan.config.precision.dtype, torch.float32)
        done = quantize_adapted(whole, lora.quantization, dtype=dtype)
        if rank() == 0:
            print_line(f"training.lora.quantization: in the first stage {done}")
    return layers
