"""Batch norms that a config synchronises."""

from __future__ import annotations

from torch import nn

from framework.config.training import Training
from framework.models.prepare_model import prepare_model
from framework.models.sync_batch_norm import SyncBatchNorm
from framework.recipes.image_models.resnet import SmallResNet18


def test_batch_norms_keep_their_weights_and_names() -> None:
    model = SmallResNet18()
    before, objects = list(model.state_dict()), list(model.parameters())
    prepared = prepare_model(model.eval(), Training(sync_batch_norm=True))
    assert list(prepared.state_dict()) == before
    assert all(a is b for a, b in zip(prepared.parameters(), objects, strict=True))
    norms = [
        module
        for module in prepared.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    assert len(norms) == 20
    assert all(isinstance(norm, SyncBatchNorm) and not norm.training for norm in norms)
