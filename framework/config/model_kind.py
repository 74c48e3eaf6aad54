"""What every model that is known by name can say about itself without torch."""

from __future__ import annotations

from typing import ClassVar

from framework.config.base import Kind


class ModelKind(Kind):
    """A model that the framework builds."""

    has_batch_norm: ClassVar[bool] = False
    has_convolutions: ClassVar[bool] = False

    def num_layers_in_list(self) -> int:
        """How many layers `framework.models.layers.as_layers` finds in it: what a pipeline can be cut into."""
        raise NotImplementedError
